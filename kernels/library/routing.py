"""Which experts each row goes to, and its rows sorted by expert, on a GPU: torch sorts rows of
scores and then all pairs (row, choice), in many small kernels.

In: operands of top_k, route and gather_rows of program/ops/experts.py. Out: new tensors, with the
whole numbers and rows that torch gives, and its weights but for rounding. top_k: a program has a
few rows of scores as keys, in the order of elements and, of equal ones, backwards in that of
columns, and takes the largest again and again. route: a sort by counting, of one launch for few
pairs and else of two; no result depends on which program is first. The host reads nothing. What the
kernels do not take, torch does. Used by device_ops.py.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from collections.abc import Mapping, Sequence

import torch
import triton
from torch import Tensor
from triton import language as tl

from distmega.hostir.library.pointwise import OpFunction
from distmega.hostir.library.torch_types import dtype_name
from distmega.kernels.library.limits import GROUP_DTYPES, has_tiles
from distmega.kernels.library.row_maxima import HIGHEST, LOW_WORD, key_of
from distmega.kernels.runtime.ahead import launch
from distmega.program.kinds import local_base
from distmega.program.ops.experts import group_range
from distmega.program.types import Op

MOST_COLUMNS, MOST_CHOICES = 512, 16
"""Of rows of scores, and of those chosen."""
WARP_COLUMNS, SCORES = 128, 512
"""Columns that a warp has at a time; scores of a program of several rows. Of longer rows a program
is a warp and has one, so that warps never wait for each other.
"""
MOST_GROUPS = 512
LEAST_BINS = 32
"""Counts of groups of a block, some of no group where there are fewer."""
MOST_PAIRS = 1 << 19
"""More would have every program read much of what others counted."""
LEAST_BLOCK, MOST_ALONE = 64, 512
"""Pairs of one program, in the only launch: it compares all with each other."""
BLOCKS = {1 << 14: 256, 1 << 17: 512, MOST_PAIRS: 1024}
"""Pairs of a program by those of all, up to each: more blocks count less each, and read more."""
COMPARED = 16
"""Pairs at a time that those of a block are compared with."""
COPIED_ROWS, COPIED_BYTES = 4, 2048
"""Of a program of copy_rows: rows, and bytes of each, 16 a thread."""
WARPS = 4
NUMBERS = (torch.int32, torch.int64)
LOW_HALF = tl.constexpr(0xFFFF)
HIGHEST_HALF = tl.constexpr(0x7FFF)


@triton.jit
def keys_of(x, column):
    """Keys of elements that are in `column` each, no two of a row the same, none the least of its
    type. NaN is the largest, zeros are equal. i64 of f32; of half types i32, quicker to compare.
    """
    wide = x.to(tl.float32)
    if x.dtype == tl.float32:
        return key_of(wide, column)
    else:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32)
        order = tl.where(wide == 0.0, 0, bits ^ ((bits >> 15) & HIGHEST_HALF))
        order = tl.where(wide == wide, order, HIGHEST_HALF)
        return (order << 16) | (column ^ LOW_HALF)


@triton.jit
def column_of(key):
    """Of a key of keys_of."""
    if key.dtype == tl.int64:
        return ((key & LOW_WORD) ^ HIGHEST).to(tl.int32)
    else:
        return (key & LOW_HALF) ^ LOW_HALF


@triton.jit(do_not_specialize=["num_rows"])
def choose_columns(x, weights, chosen, num_rows, row_stride, extent: tl.constexpr,
                   num: tl.constexpr, weighing: tl.constexpr, rows: tl.constexpr,
                   columns: tl.constexpr, choices: tl.constexpr):  # fmt: skip
    """Rows program_id(0) * rows and on: the `num` largest of `extent` columns and what they weigh.

    x: [num_rows, extent], rows row_stride elements apart, read. weights: f32, chosen: i32, both
    [num_rows, num], contiguous, written. weighing: as of top_k. columns, choices: extent and num or
    the next powers of two. All in local memory.
    """
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    column = tl.arange(0, columns)[None, :]
    choice = tl.arange(0, choices)[None, :]
    valid = (row < num_rows)[:, None]
    known = valid & (column < extent)
    scores = x + row.to(tl.int64)[:, None] * row_stride
    found = tl.load(scores + column, mask=known, other=float("-inf"))
    keys = keys_of(found, column)
    if keys.dtype == tl.int64:
        least = tl.full([1, 1], -0x7FFFFFFFFFFFFFFF, tl.int64)
    else:
        least = tl.full([1, 1], -0x7FFFFFFF, tl.int32)
    keys = tl.where(known, keys, least)
    picked = tl.zeros([rows, choices], tl.int32)
    for n in tl.static_range(num):
        best = tl.max(keys, 1)[:, None]
        picked = tl.where(choice == n, column_of(best), picked)
        keys = tl.where(keys == best, least, keys)
    inside = valid & (choice < num)
    weight = tl.load(scores + picked, mask=inside, other=float("-inf")).to(tl.float32)
    if weighing != "values":
        shared = found.to(tl.float32) if weighing == "softmax" else weight
        top = tl.max(shared, 1)[:, None]
        weight = tl.exp(weight - top) / tl.sum(tl.exp(shared - top), 1)[:, None]
    at = row.to(tl.int64)[:, None] * num + choice
    tl.store(weights + at, weight, mask=inside)
    tl.store(chosen + at, picked, mask=inside)


@triton.jit
def pairs_in_use(num_rows, num_pairs, num_choices):
    """Pairs of the first num_rows [1] rows; all where it is None."""
    if num_rows is None:
        return num_pairs
    else:
        in_use = tl.load(num_rows).to(tl.int64) * num_choices
        return tl.minimum(tl.maximum(in_use, 0), num_pairs).to(tl.int32)


@triton.jit
def groups_of(ids, pair, in_use, num_groups):
    """i32 groups of pairs; num_groups for those not in use, and for ids of no group."""
    found = tl.load(ids + pair, mask=pair < in_use, other=-1)
    return tl.where((found >= 0) & (found < num_groups), found, num_groups).to(tl.int32)


@triton.jit
def count_groups(group, num_groups, bins: tl.constexpr):
    """How many of these there are of each group."""
    known = group < num_groups
    return tl.histogram(tl.where(known, group, 0), bins, mask=known)


@triton.jit(do_not_specialize=["num_pairs"])
def count_pairs(ids, num_rows, parts, num_pairs, num_choices: tl.constexpr,
                num_groups: tl.constexpr, block: tl.constexpr, bins: tl.constexpr):  # fmt: skip
    """parts [blocks, bins]: how many pairs of block program_id(0) each group has.

    ids: i32 or i64 [num_pairs], num_choices of a row. num_rows: i32 or i64 [1], the rows in use, or
    None; both are read. parts: i32, contiguous, written. bins: a power of two, num_groups or more.
    All in local memory.
    """
    me = tl.program_id(0)
    in_use = pairs_in_use(num_rows, num_pairs, num_choices)
    group = groups_of(ids, me * block + tl.arange(0, block), in_use, num_groups)
    at = parts + me * bins + tl.arange(0, bins)
    tl.store(at, count_groups(group, num_groups, bins))


@triton.jit(do_not_specialize=["num_pairs", "num_parts"])
def sort_pairs(ids, num_rows, parts, counts, offsets, order, slots, num_pairs, num_parts,
               num_choices: tl.constexpr, num_groups: tl.constexpr, block: tl.constexpr,
               bins: tl.constexpr, compared: tl.constexpr, height: tl.constexpr):  # fmt: skip
    """The positions of the pairs of block program_id(0); program 0 has the groups' too.

    ids, num_rows, num_choices, num_groups, bins: as of count_pairs. parts: what it wrote,
    [num_parts, bins]; None where this program is alone. counts [num_groups], offsets
    [num_groups + 1], order and slots [num_pairs]: i32, contiguous, written. compared: pairs,
    height: rows of parts at a time. All in local memory.
    """
    me = tl.program_id(0)
    in_use = pairs_in_use(num_rows, num_pairs, num_choices)
    inner = tl.arange(0, block)
    pair = me * block + inner
    group = groups_of(ids, pair, in_use, num_groups)
    # no two keys are the same, and those of pairs that are not there are the largest
    key = group * block + inner
    smaller = tl.zeros([block, compared], tl.int32)
    for first in tl.range(0, block, compared, loop_unroll_factor=4):
        other = first + tl.arange(0, compared)
        named = groups_of(ids, me * block + other, in_use, num_groups)
        smaller += ((named * block + other)[None, :] < key[:, None]).to(tl.int32)
    slot = tl.sum(smaller, 1)
    number = tl.arange(0, bins)
    if parts is None:
        total = count_groups(group, num_groups, bins)
        ends = tl.cumsum(total, 0)
    else:
        every = tl.zeros([height, bins], tl.int32)
        earlier = tl.zeros([height, bins], tl.int32)
        for first in tl.range(0, num_parts, height):
            part = first + tl.arange(0, height)[:, None]
            some = tl.load(parts + part * bins + number[None, :], mask=part < num_parts, other=0)
            every += some
            earlier += tl.where(part < me, some, 0)
        total = tl.sum(every, 0)
        before = tl.sum(earlier, 0)
        ends = tl.cumsum(total, 0)
        mine = tl.load(parts + me * bins + number)
        # from where a group begins among the block's own pairs to where its share of all begins
        shift = ends - total + before - (tl.cumsum(mine, 0) - mine)
        last = tl.sum(total, 0) - tl.sum(mine, 0) + me * block - tl.sum(before, 0)
        known = group < num_groups
        shared = tl.gather(shift, tl.where(known, group, 0), 0)
        slot += tl.where(known, shared, last)
    there = pair < num_pairs
    tl.store(order + slot, pair, mask=there)
    tl.store(slots + pair, slot, mask=there)
    if me == 0:
        tl.store(counts + number, total, mask=number < num_groups)
        tl.store(offsets + 1 + number, ends, mask=number < num_groups)
        tl.store(offsets, 0)


@triton.jit(do_not_specialize=["num_pairs", "num_rows"])
def copy_rows(x, order, out, num_pairs, num_rows, n, num_choices: tl.constexpr,
              rows: tl.constexpr, columns: tl.constexpr):  # fmt: skip
    """Columns program_id(1) * columns and on of rows program_id(0) * rows and on: those of the rows
    that the pairs come from.

    x [num_rows, n], out [num_pairs, n]: contiguous, of one type. order: i32 or i64 [num_pairs],
    each row * num_choices and its choice; rows that x does not have count as zeros. All in local
    memory; out alone is written.
    """
    pair = tl.program_id(0) * rows + tl.arange(0, rows)
    column = (tl.program_id(1) * columns + tl.arange(0, columns))[None, :]
    there = pair < num_pairs
    row = tl.load(order + pair, mask=there, other=-1).to(tl.int64)
    known = (row >= 0) & (row < num_rows.to(tl.int64) * num_choices)
    from_row = x + (row // num_choices)[:, None] * n
    found = tl.load(from_row + column, mask=known[:, None] & (column < n), other=0.0)
    to = out + pair.to(tl.int64)[:, None] * n
    tl.store(to + column, found, mask=there[:, None] & (column < n))


def compile_top_k(op: Op, otherwise: OpFunction) -> OpFunction:
    """An op of kind top_k, by the kernel; else by `otherwise`."""
    num, weighing = op.extents["c"], str(op.attr("weights"))

    def run(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        x = operands[0]
        return choose(x, num, weighing) if takes_scores(x, num) else otherwise(operands)

    return run


def compile_route(op: Op, otherwise: OpFunction) -> OpFunction:
    """An op of kind route, by the kernels; else by `otherwise`."""
    num_groups = op.extents["g"]

    def run(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        ids, num_rows = operands[0], operands[1] if len(operands) > 1 else None
        if not takes_ids(ids, num_groups, num_rows):
            return otherwise(operands)
        return sort_by_group(ids, num_groups, num_rows)

    return run


def compile_gather(op: Op, coordinate: Mapping[str, int], otherwise: OpFunction) -> OpFunction:
    """An op of kind gather_rows, by the kernel where a rank has all rows and groups; else by
    `otherwise`.
    """
    whole = int(str(op.get("extent", op.extents["m"])))
    num_choices = op.extents["p"] // whole
    if local_base(op, coordinate) or not group_range(op, coordinate).is_all:
        return otherwise

    def run(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        x, order = operands[:2]
        if len(x) != whole or not takes_rows(x, order):
            return otherwise(operands)
        return (gather(x, order, num_choices),)

    return run


def takes_scores(x: Tensor, num: int) -> bool:
    """Whether the kernel chooses `num` of each row of x."""
    return (
        has_tiles(x.device)
        and dtype_name(x.dtype) in GROUP_DTYPES
        and x.shape[1] <= MOST_COLUMNS
        and num <= MOST_CHOICES
        and x.stride(1) == 1
        and len(x) > 0
    )


def takes_ids(ids: Tensor, num_groups: int, num_rows: Tensor | None) -> bool:
    """Whether the kernels sort the pairs of ids."""
    return (
        has_tiles(ids.device)
        and all(each.dtype in NUMBERS for each in (ids, num_rows) if each is not None)
        and num_groups <= MOST_GROUPS
        and 0 < ids.numel() <= MOST_PAIRS
    )


def takes_rows(x: Tensor, order: Tensor) -> bool:
    """Whether the kernel copies rows of x."""
    return (
        has_tiles(x.device)
        and dtype_name(x.dtype) in GROUP_DTYPES
        and order.dtype in NUMBERS
        and x.is_contiguous()
        and order.is_contiguous()
        and x.numel() > 0
    )


def choose(x: Tensor, num: int, weighing: str) -> tuple[Tensor, Tensor]:
    """As top_k_values of program/ops/experts.py: weights and columns [m, num]."""
    num_rows, extent = x.shape
    weights = torch.empty(num_rows, num, dtype=torch.float32, device=x.device)
    chosen = torch.empty(num_rows, num, dtype=torch.int32, device=x.device)
    columns = triton.next_power_of_2(extent)
    rows, warps = rows_of(columns)
    launch(
        choose_columns, (triton.cdiv(num_rows, rows),), x, weights, chosen, num_rows, x.stride(0),
        extent=extent, num=num, weighing=weighing, rows=rows, columns=columns,
        choices=triton.next_power_of_2(num), num_warps=warps,
    )  # fmt: skip
    return weights, chosen


def rows_of(columns: int) -> tuple[int, int]:
    """How many rows of so many columns a program chooses of, and its warps."""
    return (SCORES // columns, WARPS) if columns <= WARP_COLUMNS else (1, 1)


def block_of(num_pairs: int) -> int:
    """How many pairs a program has of so many; all where it is alone."""
    if num_pairs <= MOST_ALONE:
        whole: int = triton.next_power_of_2(num_pairs)
        return max(LEAST_BLOCK, whole)
    return next(block for most, block in BLOCKS.items() if num_pairs <= most)


def sort_by_group(
    ids: Tensor, num_groups: int, num_rows: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As route_values of program/ops/experts.py: counts, offsets, order and slots. Ids of no group
    count as those of rows that are not in use.
    """
    device, num_pairs = ids.device, ids.numel()
    counts, offsets, order = (
        torch.empty(num, dtype=torch.int32, device=device)
        for num in (num_groups, num_groups + 1, num_pairs)
    )
    slots = torch.empty(ids.shape, dtype=torch.int32, device=device)
    bins, block = max(LEAST_BINS, triton.next_power_of_2(num_groups)), block_of(num_pairs)
    num_parts = triton.cdiv(num_pairs, block)
    flat, parts = ids.contiguous(), None
    sizes = {"num_choices": ids.shape[1], "num_groups": num_groups, "block": block, "bins": bins}
    warps = block // 32
    if num_parts > 1:
        parts = torch.empty(num_parts, bins, dtype=torch.int32, device=device)
        launch(
            count_pairs, (num_parts,), flat, num_rows, parts, num_pairs, **sizes, num_warps=warps
        )
    launch(
        sort_pairs, (num_parts,), flat, num_rows, parts, counts, offsets, order, slots, num_pairs,
        num_parts, **sizes, compared=COMPARED, height=height_of(block, bins), num_warps=warps,
    )  # fmt: skip
    return counts, offsets, order, slots


def height_of(block: int, bins: int) -> int:
    """Rows of counts that a program reads at a time: 16 counts a thread."""
    return max(1, 16 * block // bins)


def gather(x: Tensor, order: Tensor, num_choices: int) -> Tensor:
    """Rows order // num_choices of x [m, ...]."""
    num_pairs, n = len(order), x.shape[1:].numel()
    out = torch.empty(num_pairs, *x.shape[1:], dtype=x.dtype, device=x.device)
    columns = min(COPIED_BYTES // x.element_size(), triton.next_power_of_2(n))
    grid = triton.cdiv(num_pairs, COPIED_ROWS), triton.cdiv(n, columns)
    launch(
        copy_rows, grid, x, order, out, num_pairs, len(x), n, num_choices=num_choices,
        rows=COPIED_ROWS, columns=columns, num_warps=WARPS,
    )  # fmt: skip
    return out
