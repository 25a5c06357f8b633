"""Rotary embedding of queries or keys on a GPU, in one pass over memory.

In: x [m, ..., d] of a float type, positions, the table of angles, as hostir/library/ops.py's rope
takes them. Out: a new contiguous tensor. A program has a row's heads, or some of them, and reads
the row's angles once. What the kernel does not take, torch does. Used by device_ops.py.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
from torch import Tensor
from triton import language as tl

from distmega.program.ops.attention import rope_values

MOST_ELEMENTS = 4096
"""Of x that a program holds."""


@triton.jit
def rotate_rows(x, positions, table, y, row_stride, head_stride, num_heads, half: tl.constexpr,
                heads: tl.constexpr):  # fmt: skip
    """Heads [num_heads, 2 * half] of row program_id(0), `heads` of them. x: strides in elements; y:
    contiguous; table: f32, cosines then sines.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * heads + tl.arange(0, heads)[:, None]
    inside = head < num_heads
    at = tl.arange(0, half)[None, :]
    angles = table + tl.load(positions + row) * (2 * half) + at
    cos = tl.load(angles)
    sin = tl.load(angles + half)
    first = x + row * row_stride + head * head_stride + at
    left = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(first + half, mask=inside, other=0.0).to(tl.float32)
    to = y + (row * num_heads + head) * (2 * half) + at
    dtype = y.dtype.element_ty
    tl.store(to, (left * cos - right * sin).to(dtype), mask=inside)
    tl.store(to + half, (right * cos + left * sin).to(dtype), mask=inside)


def rotate(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """As rope_values."""
    heads = _heads(x)
    half = x.shape[-1] // 2
    takes = heads is not None and half == triton.next_power_of_2(half) and table.is_contiguous()
    if not (takes and x.is_cuda and x.is_floating_point() and table.dtype == torch.float32):
        turned: Tensor = rope_values(x, positions, table)
        return turned
    assert heads is not None
    num_rows, num_heads, _ = heads.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    size = min(triton.next_power_of_2(num_heads), max(1, MOST_ELEMENTS // (2 * half)))
    rotate_rows[(num_rows, triton.cdiv(num_heads, size))](
        heads, positions, table, y, *heads.stride()[:2], num_heads, half=half, heads=size
    )
    return y


def _heads(x: Tensor) -> Tensor | None:
    """x as [m, heads, d] without a copy; None if that can't be, or there is nothing."""
    if x.stride(-1) != 1 or not x.numel():
        return None
    try:
        return x.view(x.shape[0], -1, x.shape[-1])
    except RuntimeError:
        return None
