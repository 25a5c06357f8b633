"""Products of groups of rows on a GPU, each with the matrix of its group: experts of a prompt.

In: rows [p, k] sorted by group, matrices [e, n, k], and where groups start, as
hostir/library/experts.py takes them. Out: a new tensor [p, n]. The host never learns where groups
start: programs stay on the device, one or two an SM, and find their tiles there, so that a CUDA
graph serves any routing. Two schedules, as of kernels/events: static, in which a program passes
over the tiles of its queue that have no rows, and drained, in which programs take those that have
one after the other, by an atomic head. The cost model of kernels/events chooses where nobody does.
Groups of many rows in bf16 take the matmul kernel of kernels/gemm on Hopper GPUs, unless a schedule
is asked for, and so do pairs of products that a formula makes one of. What no kernel takes, torch
does. Used by device_ops.py.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
import triton
from torch import Tensor
from triton import language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from distmega.hostir.library import experts as library
from distmega.hostir.library.torch_types import dtype_name
from distmega.kernels.events import GroupTiles, drains_groups_faster
from distmega.kernels.gemm.device.start import plain_spec
from distmega.kernels.gemm.device.start_groups import launch_groups
from distmega.kernels.gemm.times.matmul_ways import STAGES
from distmega.kernels.gemm.times.tile_times import Tiles
from distmega.kernels.library.limits import GROUP_ALIGNED, GROUP_DTYPES, has_tiles
from distmega.kernels.pipelined.api import pointwise_results
from distmega.kernels.runtime.ahead import launch
from distmega.kernels.runtime.gpus import is_hopper, num_sms
from distmega.kernels.runtime.memory import tma_rows
from distmega.program.expr import Expr
from distmega.program.ops.experts import GroupRange, keep_groups

Schedule = Literal["auto", "static", "drained"]


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """Rows, columns of the result and terms of the sum at a time; warps; slots of operands on the
    way; programs an SM.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    programs: int


TILES = {
    16: ProductTiles(rows=16, columns=64, depth=128, warps=4, stages=4, programs=2),
    64: ProductTiles(rows=64, columns=128, depth=64, warps=4, stages=4, programs=2),
    128: ProductTiles(rows=128, columns=128, depth=64, warps=8, stages=4, programs=1),
}
"""By the rows that a group has in the mean, up to the next of these."""

WIDE_TILES = ProductTiles(rows=16, columns=32, depth=32, warps=4, stages=2, programs=2)
"""Of f32, which tensor cores do not multiply exactly: more would not fit registers."""
MANY_ROWS, WIDE_ROWS, MANY_MIXED_ROWS = 32, 256, 4
"""Rows of a group in the mean above which the matmul kernel takes less time than the tiles above,
its tiles of 256 columns less than those of 128, and one with a formula less than two products
(docs/notes/experts.md).
"""
LEAST_DEPTH = 16
"""Terms that tl.dot takes at least; zeros stand behind the last."""


@triton.jit
def multiply_tile(x, w, out, top, length, group, row, column, k, n, num_rows: tl.constexpr,
                  num_columns: tl.constexpr, depth: tl.constexpr):  # fmt: skip
    """Tile (row, column) of a group whose `length` rows begin at row `top`. What it reads beyond
    them, or of the next group's matrix, is not written.
    """
    acc = tl.zeros([num_rows, num_columns], tl.float32)
    for at in tl.range(0, k, depth):
        some = x.load([top + row * num_rows, at])
        other = w.load([group * n + column * num_columns, at])
        acc = tl.dot(some, other.T, acc, input_precision="ieee")
    inner = row * num_rows + tl.arange(0, num_rows)
    position = column * num_columns + tl.arange(0, num_columns)
    to = out + (top + inner).to(tl.int64)[:, None] * n + position[None, :]
    inside = (inner < length)[:, None] & (position < n)[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def multiply_groups(x, w, out, starts, head, num_groups, all_rows, n, k, row_tiles,
                    slots: tl.constexpr, drained: tl.constexpr, num_rows: tl.constexpr,
                    num_columns: tl.constexpr, depth: tl.constexpr):  # fmt: skip
    """All products of `num_groups` groups, and zeros in the rows of no group of these.

    x: descriptor of the rows, [all_rows, k]; w: of the matrices, [num_groups * n, k]; both of tiles
    of num_rows or num_columns by depth. out [all_rows, n], contiguous. starts: i32
    [num_groups + 1]. head: i32 [1], zero before, the number of tiles taken where `drained`.
    row_tiles: of a group that has as many rows as any can. slots: num_groups or the next power of
    two. All in local memory; out and head alone are written.
    """
    me, programs = tl.program_id(0), tl.num_programs(0)
    low, high = tl.load(starts), tl.load(starts + num_groups)
    for block in tl.range(me, tl.cdiv(all_rows, num_rows), programs):
        line = block * num_rows + tl.arange(0, num_rows)
        nobody = ((line < low) | (line >= high)) & (line < all_rows)
        if tl.sum(nobody.to(tl.int32), 0) > 0:
            for first in tl.range(0, n, num_columns):
                position = first + tl.arange(0, num_columns)
                to = out + line.to(tl.int64)[:, None] * n + position[None, :]
                zeros = tl.zeros([num_rows, num_columns], out.dtype.element_ty)
                tl.store(to, zeros, mask=nobody[:, None] & (position < n)[None, :])
    columns = tl.cdiv(n, num_columns)
    if drained:
        number = tl.arange(0, slots)
        known = number < num_groups
        begin = tl.load(starts + number, mask=known, other=0)
        end = tl.load(starts + number + 1, mask=known, other=0)
        tiles = tl.cdiv(end - begin, num_rows)
        ends = tl.cumsum(tiles, 0)
        total = tl.sum(tiles, 0) * columns
        record = tl.atomic_add(head, 1, sem="relaxed")
        while record < total:
            nth = record // columns
            group = tl.sum((ends <= nth).to(tl.int32), 0)
            mine = number == group
            top = tl.sum(tl.where(mine, begin, 0), 0)
            length = tl.sum(tl.where(mine, end - begin, 0), 0)
            row = nth - tl.sum(tl.where(mine, ends - tiles, 0), 0)
            multiply_tile(x, w, out, top, length, group, row, record % columns, k, n,
                          num_rows, num_columns, depth)  # fmt: skip
            record = tl.atomic_add(head, 1, sem="relaxed")
    else:
        for task in tl.range(me, num_groups * row_tiles * columns, programs):
            group = task // (row_tiles * columns)
            row = task // columns % row_tiles
            top = tl.load(starts + group)
            length = tl.load(starts + group + 1) - top
            if row * num_rows < length:
                multiply_tile(x, w, out, top, length, group, row, task % columns, k, n,
                              num_rows, num_columns, depth)  # fmt: skip


def grouped_linear(
    x: Tensor,
    w: Tensor,
    offsets: Tensor,
    groups: GroupRange,
    most_rows: int,
    schedule: Schedule = "auto",
) -> Tensor:
    """As library.grouped_linear. most_rows: that a group can have. schedule: auto as costs say."""
    if not _takes(x, w):
        return library.grouped_linear(x, w, offsets, groups)
    out = torch.empty(x.shape[0], w.shape[1], dtype=x.dtype, device=x.device)
    here = groups.stop - groups.first
    if not x.shape[0]:
        return out
    if not here:
        return out.zero_()
    offsets = offsets.contiguous()
    # copies where TMA can't address them: torch would ask the host for rows, which breaks graphs
    rows, matrices = tma_rows(x.contiguous()), tma_rows(w.contiguous().view(-1, w.shape[2]))
    mean = mean_rows(x.shape[0], groups.num)
    if schedule == "auto" and mean > MANY_ROWS and _fits_matmul(x, offsets, w):
        spec = plain_spec(_matmul_tiles(min(STAGES) if mean <= WIDE_ROWS else max(STAGES)))
        launch_groups(rows, (matrices,), out, offsets[groups.first :], here, spec)
        return out
    is_wide = x.dtype == torch.float32
    tiles = WIDE_TILES if is_wide else choose_tiles(x.shape[0], groups.num)
    shape = GroupTiles(
        rows=most_rows, choices=max(1, x.shape[0] // most_rows), groups=groups.num,
        first=groups.first, stop=groups.stop, columns=w.shape[1], depth=w.shape[2],
        row_tile=tiles.rows, column_tile=tiles.columns, item_bytes=x.element_size(),
    )  # fmt: skip
    programs = tiles.programs * num_sms(x.device.index)
    drained = schedule == "drained" or (schedule == "auto" and chosen(shape, programs) == "drained")
    head = torch.zeros(1, dtype=torch.int32, device=x.device) if drained else offsets
    depth = min(tiles.depth, max(LEAST_DEPTH, triton.next_power_of_2(x.shape[1])))
    descriptors = (
        TensorDescriptor.from_tensor(rows, [tiles.rows, depth]),
        TensorDescriptor.from_tensor(matrices, [tiles.columns, depth]),
    )
    launch(
        multiply_groups, (programs,),
        *descriptors, out, offsets[groups.first :], head, here, x.shape[0], w.shape[1],
        w.shape[2], triton.cdiv(most_rows, tiles.rows), slots=triton.next_power_of_2(here),
        drained=drained, num_rows=tiles.rows, num_columns=tiles.columns, depth=depth,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out


def mix_groups(
    x: Tensor,
    upper: Tensor,
    lower: Tensor,
    offsets: Tensor,
    groups: GroupRange,
    most_rows: int,
    formula: Expr,
    schedule: Schedule = "auto",
) -> Tensor:
    """A formula of each row's products with the two matrices of its group, as an op of kind
    fused_groups; zeros in rows of other groups. most_rows, schedule: as of grouped_linear.
    """
    mean, here = mean_rows(x.shape[0], groups.num), groups.stop - groups.first
    fits = schedule == "auto" and mean > MANY_MIXED_ROWS and here > 0
    if not (fits and _takes(x, upper) and _fits_matmul(x, offsets, upper, lower)):
        products = [
            grouped_linear(x, w, offsets, groups, most_rows, schedule) for w in (upper, lower)
        ]
        mixed: Tensor = keep_groups(pointwise_results([formula], products)[0], offsets, groups)
        return mixed
    out = torch.empty(x.shape[0], upper.shape[1], dtype=x.dtype, device=x.device)
    spec = plain_spec(_matmul_tiles(max(STAGES)), formula, apart=True)
    matrices = [tma_rows(w.contiguous().view(-1, w.shape[2])) for w in (upper, lower)]
    starts = offsets[groups.first :].contiguous()
    launch_groups(tma_rows(x.contiguous()), matrices, out, starts, here, spec)
    return out


def _matmul_tiles(columns: int) -> Tiles:
    """The matmul kernel's, of so many columns."""
    return Tiles(tile_n=columns, stages=STAGES[columns])


def _fits_matmul(x: Tensor, offsets: Tensor, *matrices: Tensor) -> bool:
    """Whether the matmul kernel takes such operands, of which `_takes` is so."""
    return (
        is_hopper(x.device.index)
        and all(each.dtype == torch.bfloat16 for each in (x, *matrices))
        and offsets.dtype == torch.int32
        and all(w.shape[1] % GROUP_ALIGNED == 0 for w in matrices)
    )


def mean_rows(num_rows: int, num_groups: int) -> float:
    """Of a group, of so many rows in all; of no more groups than rows."""
    return num_rows / max(1, min(num_rows, num_groups))


def choose_tiles(num_rows: int, num_groups: int) -> ProductTiles:
    """Tiles for so many rows over all groups."""
    mean = mean_rows(num_rows, num_groups)
    return TILES[min((size for size in TILES if size >= mean), default=max(TILES))]


@lru_cache(maxsize=256)
def chosen(shape: GroupTiles, programs: int) -> Schedule:
    """The schedule that is expected to end first over random routings."""
    return "drained" if drains_groups_faster(shape, programs) else "static"


def _takes(x: Tensor, w: Tensor) -> bool:
    """Whether the kernel takes operands of these kinds."""
    return (
        has_tiles(x.device)
        and x.dtype == w.dtype
        and dtype_name(x.dtype) in GROUP_DTYPES
        and x.shape[1] % GROUP_ALIGNED == 0
    )
