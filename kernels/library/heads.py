"""What is done to heads before attention, on a GPU, in one pass over memory: norms, rotations,
appends to caches.

In: up to three tensors [m, ..., d] of a float type and any strides between heads, as parts of a
matmul's result have them; where they go; positions, the table of angles. A program has a row's
heads of one tensor, or some of them, and holds them in fp32 until they leave. What the kernel does
not take, torch does. Used by device_ops.py.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton import language as tl

from distmega.hostir.library import heads as library
from distmega.hostir.library.heads import Heads
from distmega.hostir.passes.fuse_heads import MAX_PARTS
from distmega.kernels.runtime.ahead import launch

MOST_ELEMENTS = 4096
"""Of x that a program holds."""
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class PartSpec:
    """What the kernel does with a part. heads: of a program, dim: of a head, half of it padded to
    `half`, a power of two; normed, rotated; appended: to a cache.
    """

    heads: int
    dim: int
    half: int
    normed: bool
    rotated: bool
    appended: bool


@triton.jit
def move_part(block, x, weight, out, positions, table, sequences, row_stride, head_stride,
              num_heads, sequence_stride, num_sequences, context, num_angles, eps,
              several: tl.constexpr, own: tl.constexpr, parts: tl.constexpr,
              i: tl.constexpr):  # fmt: skip
    """Heads block * part.heads and on of row program_id(0), of part i."""
    part: tl.constexpr = parts[i]
    row = tl.program_id(0).to(tl.int64)
    middle: tl.constexpr = part.dim // 2
    head = block * part.heads + tl.arange(0, part.heads)[:, None]
    at = tl.arange(0, part.half)[None, :]
    known = at < middle
    inside = (head < num_heads) & known
    first = x + row * row_stride + head * head_stride + at
    left = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(first + middle, mask=inside, other=0.0).to(tl.float32)
    if part.normed:
        squares = tl.sum(left * left + right * right, 1, keep_dims=True)
        scale = tl.rsqrt(squares / part.dim + eps)
        left *= scale * tl.load(weight + at, mask=known, other=0.0).to(tl.float32)
        right *= scale * tl.load(weight + middle + at, mask=known, other=0.0).to(tl.float32)
    if part.rotated or part.appended:
        position = tl.load(positions + row)
    if part.rotated:
        has_angles = known & (position >= 0) & (position < num_angles)
        angles = table + position * part.dim + at
        cos = tl.load(angles, mask=has_angles, other=float("nan"))
        sin = tl.load(angles + middle, mask=has_angles, other=float("nan"))
        turned = left * cos - right * sin
        right = right * cos + left * sin
        left = turned
    if part.appended:
        to = out + (head * context + position) * part.dim + at
        inside &= (position >= 0) & (position < context)
        if own:
            to += row * sequence_stride
        elif several:
            sequence = tl.load(sequences + row)
            inside &= (sequence >= 0) & (sequence < num_sequences)
            to += sequence * sequence_stride
    else:
        to = out + (row * num_heads + head) * part.dim + at
    dtype = out.dtype.element_ty
    tl.store(to, left.to(dtype), mask=inside)
    tl.store(to + middle, right.to(dtype), mask=inside)


@triton.jit
def move_rows(xs, weights, outs, row_strides, head_strides, num_heads, sequence_strides,
              sequence_counts, contexts, positions, table, num_angles, sequences, eps,
              several: tl.constexpr, own: tl.constexpr, parts: tl.constexpr):  # fmt: skip
    """Row program_id(0) of each part; the programs of a part's heads come after those of the part
    before along program_id(1). Tuples have an element a part.

    xs [m, num_heads, dim], weights [dim], read: row_strides, head_strides of xs in elements, the
    last stride 1. outs, written: [m, num_heads, dim], contiguous, or a cache [num_heads, context,
    dim] of `contexts` positions, sequence_strides from one to the next if there are `several`, of
    which a row has its `own` or the one of sequence_counts that `sequences` says. positions,
    sequences: int64 [m]. table: f32 [num_angles, dim], cosines, then sines. All in local memory.
    eps: of norms. parts: PartSpec. A row at a place that its cache does not have appends nothing;
    one at a position without angles becomes NaN.
    """
    block = tl.program_id(1)
    start = 0
    for i in tl.static_range(len(parts)):
        blocks = tl.cdiv(num_heads[i], parts[i].heads)
        if (block >= start) & (block < start + blocks):
            move_part(block - start, xs[i], weights[i], outs[i], positions, table, sequences,
                      row_strides[i], head_strides[i], num_heads[i], sequence_strides[i],
                      sequence_counts[i], contexts[i], num_angles, eps, several, own, parts,
                      i)  # fmt: skip
        start += blocks


def move_heads(
    parts: Sequence[Heads],
    positions: Tensor,
    table: Tensor | None,
    sequences: Tensor | None,
    eps: float,
) -> None:
    """As library.move_heads."""
    xs = [_heads(part.x) for part in parts]
    known = [x for x in xs if x is not None]
    own = sequences is None and any(p.appends and p.out.dim() == 4 for p in parts)
    fits = all(map(_takes, parts, xs)) and len(parts) <= MAX_PARTS
    if not fits or not (table is None or _takes_angles(table)):
        library.move_heads(parts, positions, table, sequences, eps)
        return
    specs = tuple(_spec(part, x.shape[1], x.shape[2]) for part, x in zip(parts, known, strict=True))
    positions = nothing = positions.contiguous()
    blocks = sum(triton.cdiv(x.shape[1], s.heads) for x, s in zip(known, specs, strict=True))
    launch(
        move_rows,
        (len(positions), blocks),
        tuple(known),
        tuple(nothing if part.weight is None else part.weight for part in parts),
        tuple(part.out for part in parts),
        tuple(x.stride(0) for x in known),
        tuple(x.stride(1) for x in known),
        tuple(x.shape[1] for x in known),
        tuple(part.out.stride(0) if part.appends else 0 for part in parts),
        tuple(part.out.shape[0] if part.appends else 0 for part in parts),
        tuple(part.out.shape[-2] if part.appends else 0 for part in parts),
        positions,
        nothing if table is None else table,
        0 if table is None else len(table),
        nothing if sequences is None else sequences.contiguous(),
        eps,
        several=sequences is not None,
        own=own,
        parts=specs,
    )


def rotate(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """As rope_values."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    part = Heads(x=x, weight=None, out=out, rotates=True, appends=False)
    move_heads([part], positions, table, None, 0.0)
    return out


def append(cache: Tensor, x: Tensor, positions: Tensor, sequences: Tensor | None = None) -> Tensor:
    """As append_values."""
    part = Heads(x=x, weight=None, out=cache, rotates=False, appends=True)
    move_heads([part], positions, None, sequences, 0.0)
    return cache


def heads_at_once(num_heads: int, half: int) -> int:
    """Of a tensor's heads, those that a program has."""
    return min(int(triton.next_power_of_2(num_heads)), max(1, MOST_ELEMENTS // (2 * half)))


def _spec(part: Heads, num_heads: int, dim: int) -> PartSpec:
    half = triton.next_power_of_2(dim // 2)
    return PartSpec(
        heads=heads_at_once(num_heads, half),
        dim=dim,
        half=half,
        normed=part.weight is not None,
        rotated=part.rotates,
        appended=part.appends,
    )


def _takes(part: Heads, heads: Tensor | None) -> bool:
    """Whether the kernel takes a part, whose x is `heads` [m, heads, d]."""
    return (
        heads is not None
        and _on_gpu(heads)
        and heads.dtype in FLOATS
        and heads.shape[-1] % 2 == 0
        and part.out.dtype == heads.dtype
        and part.out.is_contiguous()
        and (part.weight is None or part.weight.is_contiguous())
    )


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _takes_angles(table: Tensor) -> bool:
    return table.dtype == torch.float32 and table.is_contiguous()


def _heads(x: Tensor) -> Tensor | None:
    """x as [m, heads, d] without a copy; None if that can't be, or there is nothing."""
    if x.stride(-1) != 1 or not x.numel():
        return None
    try:
        return x.view(x.shape[0], -1, x.shape[-1])
    except RuntimeError:
        return None
