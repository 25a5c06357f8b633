"""Attention of a step on a GPU: one row of each sequence, over that sequence's cache.

In: q [s, h, g, d] of sequences that are at any positions, caches, positions on the device, as
hostir/library/ops.py's attention takes them. Out: a new tensor. A program has the query heads of a
kv head, so that keys and values are read once, and a part of the sequence's positions; a second
kernel adds up the parts, in their order. How many parts there are depends on shapes alone, so that
a CUDA graph serves any positions. What the kernels don't take, torch does, over whole caches under
a mask. Used by device_ops.py and step_attention.py.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
from torch import Tensor
from triton import language as tl

from distmega.hostir.library import ops as library
from distmega.kernels.library.score_caps import cap_scores, score_factors
from distmega.kernels.runtime.ahead import launch
from distmega.kernels.runtime.gpus import num_sms

LEAST_ROWS = 16
"""Rows of a product, at least: of query heads of a kv head."""
MOST_ROWS = 64
MOST_DIM = 256
NUM_KEYS = 64
"""Positions multiplied at a time; half as many of wide heads where an SM has several programs."""
WIDE_DIM = 128
"""Of such a head, at least: its keys and values leave an SM room for two programs else."""
LEAST_KEYS = 256
"""Positions for which it pays to have a part of their own."""
LEAST_KEYS_FILLED = 4096
"""Likewise, where heads alone fill the SMs: sums of parts would cost more than an even share."""
PROGRAMS_A_SM = 4
"""Programs that keep an SM's loads under way."""
FILLED = 0.48
"""What heads are of so many programs where they fill the SMs."""
DTYPES = (torch.bfloat16, torch.float16)


@triton.jit
def attend_part(q, keys, values, out, maxima, sums, positions, sequence_stride, head_stride,
                row_stride, context, scale, window, cap, num_parts, group: tl.constexpr,
                rows: tl.constexpr, dim: tl.constexpr, padded: tl.constexpr,
                windowed: tl.constexpr, capped: tl.constexpr, alone: tl.constexpr,
                num_keys: tl.constexpr):  # fmt: skip
    """Part program_id(2) of what kv head program_id(0) of sequence program_id(1) sees.

    q: sequence_stride, head_stride and row_stride are elements between sequences, kv heads and
    query heads. keys, values: caches [sequences, kv heads, context, dim], contiguous, read.
    positions: i64 [sequences]. scale, cap: of score_factors, which has a cap where `capped`.
    window: positions that a row sees, where `windowed`. out: [sequences, kv heads, group, dim], of
    q's type, where a part is `alone`; else f32 with `num_parts` in front, as maxima and sums have
    it, f32 [num_parts, sequences, kv heads, group]. rows, padded: group and dim or the next power
    of two. num_keys: positions at a time. All in local memory; out, maxima and sums are written.
    """
    head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    kv_heads = tl.num_programs(0)
    behind = tl.load(positions + sequence).to(tl.int32) + 1
    first = 0
    if windowed:
        first = tl.maximum(behind - window, 0) // num_keys * num_keys
    end = tl.minimum(behind, context)
    blocks = tl.cdiv(tl.cdiv(end - first, num_keys), num_parts)
    start = first + part * blocks * num_keys
    stop = tl.minimum(start + blocks * num_keys, end)

    row = tl.arange(0, rows)
    column = tl.arange(0, padded)
    inside = (row < group)[:, None] & (column < dim)[None, :]
    at = q + sequence * sequence_stride + head * head_stride
    query = tl.load(at + row[:, None] * row_stride + column[None, :], mask=inside, other=0.0)
    cache = (sequence * kv_heads + head) * context * dim
    number = tl.arange(0, num_keys)
    acc = tl.zeros([rows, padded], tl.float32)
    total = tl.zeros([rows], tl.float32)
    most = tl.full([rows], float("-inf"), tl.float32)
    for block in tl.range(start, stop, num_keys):
        key = block + number
        near = key < stop
        if windowed:
            near = near & (key >= behind - window)
        spot = cache + key[:, None] * dim + column[None, :]
        there = near[:, None] & (column < dim)[None, :]
        k = tl.load(keys + spot, mask=there, other=0.0)
        scores = tl.dot(query, k.T) * scale
        if capped:
            scores = cap_scores(scores, cap)
        scores = tl.where(near[None, :], scores, float("-inf"))
        larger = tl.maximum(most, tl.max(scores, 1))
        base = tl.where(larger == float("-inf"), 0.0, larger)  # of a block before the window
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(most - base)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(values + spot, mask=there, other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None])
        most = larger
    line = (sequence * kv_heads + head) * group + row
    if alone:
        # a row that sees nothing is zero
        result = (acc / tl.where(total == 0.0, 1.0, total)[:, None]).to(out.dtype.element_ty)
        tl.store(out + line[:, None] * dim + column[None, :], result, mask=inside)
    else:
        line += part.to(tl.int64) * tl.num_programs(1) * kv_heads * group
        tl.store(out + line[:, None] * dim + column[None, :], acc, mask=inside)
        tl.store(maxima + line, most, mask=row < group)
        tl.store(sums + line, total, mask=row < group)


@triton.jit
def join_parts(parts, maxima, sums, out, num_parts, dim: tl.constexpr, padded: tl.constexpr):
    """Row program_id(0) of out [rows, dim]: the sum of its parts, f32 [num_parts, rows, dim], of
    maxima and sums f32 [num_parts, rows]. A part that saw nothing has the maximum -inf. padded: dim
    or the next power of two. All in local memory; out alone is written.
    """
    row = tl.program_id(0).to(tl.int64)
    num_rows = tl.num_programs(0)
    column = tl.arange(0, padded)
    acc = tl.zeros([padded], tl.float32)
    total = 0.0
    most = float("-inf")
    for part in tl.range(0, num_parts):
        at = part * num_rows + row
        peak = tl.load(maxima + at)
        larger = tl.maximum(most, peak)
        base = tl.where(larger == float("-inf"), 0.0, larger)
        shrink = tl.exp2(most - base)
        weight = tl.exp2(peak - base)
        x = tl.load(parts + at * dim + column, mask=column < dim, other=0.0)
        acc = acc * shrink + x * weight
        total = total * shrink + tl.load(sums + at) * weight
        most = larger
    result = (acc / tl.where(total == 0.0, 1.0, total)).to(out.dtype.element_ty)
    tl.store(out + row * dim + column, result, mask=column < dim)


def attend_each(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """As library.attention, of q [s, h, g, d], row s of which sees cache s of [s, h, t, d], or of a
    single row over [h, t, d]. Nobody asks the device for positions. out: contiguous, where the
    result goes, by default new memory.
    """
    if k_cache.dim() == 3:
        k_cache, v_cache = k_cache.unsqueeze(0), v_cache.unsqueeze(0)
    if not _takes(q, k_cache, v_cache):
        found = library.masked_attention(q, k_cache, v_cache, positions, scale, window, softcap)
        return found if out is None else out.copy_(found)
    sequences, kv_heads, group, dim = q.shape
    context = k_cache.shape[-2]
    num_parts = choose_parts(sequences * kv_heads, window or context, num_programs(q))
    alone = num_parts == 1
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    made = empty_parts(out, num_parts)
    padded = max(LEAST_ROWS, triton.next_power_of_2(dim))
    num_keys = choose_keys(dim, sequences * kv_heads * num_parts, num_programs(q))
    factor, cap = score_factors(scale, softcap)
    launch(
        attend_part, (kv_heads, sequences, num_parts),
        q, k_cache, v_cache, *made, positions.contiguous(), *q.stride()[:3],
        context, factor, window, cap, num_parts, group=group,
        rows=max(LEAST_ROWS, triton.next_power_of_2(group)), dim=dim, padded=padded,
        windowed=window > 0, capped=softcap > 0, alone=alone, num_keys=num_keys, num_warps=4,
        num_stages=3,
    )  # fmt: skip
    if not alone:
        add_parts(*made, out)
    return out


def empty_parts(out: Tensor, num_parts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where parts of results [s, h, g, d] go, f32 [num_parts, s * h * g, d], the largest scores of
    each and the sums of weights, f32 [num_parts, s * h * g]; a single part goes to `out`.
    """
    if num_parts == 1:
        return out, out, out
    rows = num_parts, out.shape[:-1].numel()
    shapes = (*rows, out.shape[-1]), rows, rows
    parts, maxima, sums = (
        torch.empty(shape, dtype=torch.float32, device=out.device) for shape in shapes
    )
    return parts, maxima, sums


def add_parts(parts: Tensor, maxima: Tensor, sums: Tensor, out: Tensor) -> None:
    """The results that parts of empty_parts make."""
    num_parts, rows, dim = parts.shape
    padded = max(LEAST_ROWS, triton.next_power_of_2(dim))
    launch(
        join_parts, (rows,), parts, maxima, sums, out, num_parts, dim=dim, padded=padded,
        num_warps=1,
    )  # fmt: skip


def choose_parts(num_heads: int, seen: int, programs: int) -> int:
    """Parts of the positions that each of num_heads kv heads of all sequences may see."""
    least = LEAST_KEYS_FILLED if num_heads >= FILLED * programs else LEAST_KEYS
    most = max(1, seen // least)
    return min(most, -(-programs // num_heads))


def choose_keys(dim: int, num: int, programs: int) -> int:
    """Positions at a time of `num` programs, where so many fill the GPU."""
    several = num > programs // 2
    return NUM_KEYS // 2 if dim >= WIDE_DIM and several else NUM_KEYS


def num_programs(q: Tensor) -> int:
    """Programs that keep a GPU's loads under way."""
    return PROGRAMS_A_SM * num_sms(q.device.index)


def _takes(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether the kernels take tensors of these kinds, of a row a cache."""
    dim = q.shape[-1]
    return (
        _on_gpu(q)
        and q.shape[0] == k_cache.shape[0]
        and q.dtype in DTYPES
        and q.stride(-1) == 1
        and q.shape[2] <= MOST_ROWS
        and all(x.dtype == q.dtype and x.is_contiguous() for x in (k_cache, v_cache))
        and v_cache.shape[-1] == dim <= MOST_DIM
        and dim % 8 == 0
    )


def _on_gpu(q: Tensor) -> bool:
    return q.is_cuda and torch.cuda.get_device_capability(q.device) >= (8, 0)
