"""Rows of experts, weighted and added up in the rows that they came from, in one pass over memory.

In: rows [p, n] sorted by group, weights and positions of each row's choices, as `scatter_add` of
program/ops/experts.py takes them. Out: a new tensor [m, n], torch's to the last bit. A program has
some columns of a row and reads those of each choice in turn. What the kernel does not take, torch
does. Used by device_ops.py.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
from torch import Tensor
from triton import language as tl

from distmega.hostir.library.torch_types import dtype_name
from distmega.kernels.library.limits import GROUP_DTYPES, has_tiles
from distmega.kernels.runtime.ahead import launch
from distmega.program.ops.experts import GroupRange, scatter_values

COLUMNS = 1024
"""Of a program, at most: 16 bytes a thread of half types."""
WARPS = 4


@triton.jit
def add_choices(y, weights, slots, starts, out, n, first, stop, num_choices: tl.constexpr,
                columns: tl.constexpr):  # fmt: skip
    """Columns program_id(1) * columns and on of row program_id(0).

    y [p, n], out [m, n]: contiguous, of one type; weights f32 and slots i32 [m, num_choices]: the
    position of each choice's row in y. starts: i32, of groups; positions that groups `first` up to
    `stop` do not have count as none. All in local memory; out alone is written.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = column < n
    low = tl.load(starts + first)
    high = tl.load(starts + stop)
    total = tl.zeros([columns], tl.float32)
    for choice in tl.static_range(num_choices):
        at = row * num_choices + choice
        slot = tl.load(slots + at)
        here = (slot >= low) & (slot < high)
        term = tl.load(y + slot.to(tl.int64) * n + column, mask=inside & here, other=0.0)
        weighted = term.to(tl.float32) * tl.load(weights + at)
        total += tl.where(here, weighted, 0.0)
    tl.store(out + row * n + column, total.to(out.dtype.element_ty), mask=inside)


def add_weighted_rows(
    y: Tensor, weights: Tensor, slots: Tensor, offsets: Tensor, groups: GroupRange
) -> Tensor:
    """As scatter_values of program/ops/experts.py."""
    num_rows, num_choices = slots.shape
    n = y.shape[1]
    if not _takes(y, weights, slots, offsets):
        found: Tensor = scatter_values(y, weights, slots, offsets, groups)
        return found
    out = torch.empty(num_rows, n, dtype=y.dtype, device=y.device)
    if not out.numel():
        return out
    columns = min(COLUMNS, triton.next_power_of_2(n))
    launch(
        add_choices, (num_rows, triton.cdiv(n, columns)), y, weights, slots, offsets, out, n,
        groups.first, groups.stop, num_choices=num_choices, columns=columns, num_warps=WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _takes(y: Tensor, weights: Tensor, slots: Tensor, offsets: Tensor) -> bool:
    """Whether the kernel takes operands of these kinds."""
    numbers = slots, offsets
    return (
        has_tiles(y.device)
        and dtype_name(y.dtype) in GROUP_DTYPES
        and weights.dtype == torch.float32
        and all(x.dtype == torch.int32 for x in numbers)
        and all(x.is_contiguous() for x in (y, weights, slots, offsets))
    )
