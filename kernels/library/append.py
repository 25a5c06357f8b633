"""Appends rows of keys or values to caches on a GPU, in one pass over memory.

In: x [m, h, d], which may be columns of something wider, caches, and where each row goes, as
hostir/library/ops.py's kv_append takes them. What the kernel does not take, torch does. Used by
device_ops.py.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
from torch import Tensor
from triton import language as tl

from distmega.program.ops.attention import append_values

MOST_ELEMENTS = 4096
"""Of x that a program holds."""


@triton.jit
def append_rows(x, cache, positions, sequences, row_stride, head_stride, num_heads, sequence_stride,
                context, dim: tl.constexpr, padded: tl.constexpr, heads: tl.constexpr,
                several: tl.constexpr):  # fmt: skip
    """Heads [num_heads, dim] of row program_id(0), `heads` of them, into cache [sequences,
    num_heads, context, dim]. Strides in elements; several: sequences says which cache.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * heads + tl.arange(0, heads)[:, None]
    at = tl.arange(0, padded)[None, :]
    inside = (head < num_heads) & (at < dim)
    found = tl.load(x + row * row_stride + head * head_stride + at, mask=inside, other=0.0)
    to = cache + (head * context + tl.load(positions + row)) * dim + at
    if several:
        to += tl.load(sequences + row) * sequence_stride
    tl.store(to, found, mask=inside)


def append(cache: Tensor, x: Tensor, positions: Tensor, sequences: Tensor | None = None) -> Tensor:
    """As append_values."""
    own = cache.dim() == 4 and sequences is None
    takes = not own and x.is_cuda and x.dtype == cache.dtype and cache.is_contiguous()
    if not (takes and x.stride(-1) == 1 and x.numel()):
        done: Tensor = append_values(cache, x, positions, sequences)
        return done
    num_rows, num_heads, dim = x.shape
    padded = triton.next_power_of_2(dim)
    heads = min(triton.next_power_of_2(num_heads), max(1, MOST_ELEMENTS // padded))
    append_rows[(num_rows, triton.cdiv(num_heads, heads))](
        x, cache, positions, positions if sequences is None else sequences, *x.stride()[:2],
        num_heads, cache.stride(0), cache.shape[-2], dim=dim, padded=padded, heads=heads,
        several=sequences is not None,
    )  # fmt: skip
    return cache
