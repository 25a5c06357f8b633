"""Tiling: how each op of a segment is cut into tasks.

In: a segment, the number of workers (SMs), and the machine. Out: one TaskGroup an op, views
excepted, in program order. A linear is cut into ranges of weight rows that give every worker the
same bytes; one of many rows into tiles of rows and columns, of the size that is done first, and
formulas of its elements likewise; attention of rows that see the same keys into heads and rows.
Everything else is small where rows are few: it is cut only into as many tasks as are worth
starting, each one box of the iteration space. Reduced, scattered and looked-up axes stay whole
inside a task. Next on the walk: graph.py.
"""

import math
from collections.abc import Sequence
from itertools import product

import numpy as np
import numpy.typing as npt

from distmega.errors import VerifyError
from distmega.kernels.tasks.follow import TiledGroup, followed_splits
from distmega.kernels.tasks.footprints import Footprints
from distmega.kernels.tasks.types import RangeSplit, TaskGroup
from distmega.program.dtypes import HALVES, item_bytes
from distmega.program.kinds import kind_of
from distmega.program.ops.norms import NORMS, SCAN_VALUES
from distmega.program.types import Access, Op, Program, Role, Tensor, accesses, contracts

ROW_MULTIPLE = 8
"""Boundaries between tasks fall on multiples of this along the cut axes."""

MIN_TASK_BYTES = 16 * 1024
"""Tasks that touch less than this are merged: half a microsecond of one SM of an H200, where a
dependency between SMs costs two."""

TILE_ROWS = 64, 128
TILE_COLUMNS = 32, 64, 128, 256
"""Sizes of the tiles that products are cut into."""
LEAST_TILED = 64
"""Rows and columns of a product that is cut into tiles, at least."""
MULTIPLIES = 1536
"""Products of half types that an SM of an H200 adds up in a clock."""
LOADS_ELEMENTS = 20
"""Elements of them that it gets from the L2 cache meanwhile, while all SMs read."""
CLOCK_BYTES = 18
"""That an SM reads in a clock of its share of an H200's memory."""
FILL = 32
"""What starting and storing a tile costs, in elements of a sum or keys of an attention."""

ROLES: tuple[Role, ...] = ("input", "weight", "state", "temp")

ATTENDED_ROWS = 16, 128
"""Queries of the tiles that attention of half types is cut into."""
EXPONENTIALS = 16
"""Of f32, that an SM of an H200 takes in a clock."""

_ATTENTION = "attention", "biased_attention", "attend"
_WHOLE_HEADS = {
    **dict.fromkeys((*NORMS, *SCAN_VALUES, "rope", "kv_append"), ("d",)),
    **dict.fromkeys(_ATTENTION, ("g", "e")),
}  # fmt: skip
"""Kind -> parallel axes that stay whole, since cutting them repeats work of the other tile."""


def tile_segment(
    segment: Program,
    num_sms: int,
    *,
    min_task_bytes: int = MIN_TASK_BYTES,
    row_multiple: int = ROW_MULTIPLE,
) -> tuple[TaskGroup, ...]:
    """Task groups of all ops but views, at most about `num_sms` tasks each, products and attention
    of many rows excepted.
    """
    tensors = segment.tensor_map()
    footprints = Footprints(segment)
    groups = []
    tiled: dict[str, TiledGroup] = {}
    for position, op in enumerate(segment.ops):
        wanted = min(num_sms, max(1, accessed_bytes(op, tensors) // min_task_bytes))
        followed = followed_splits(op, tiled)
        if not op.is_view and _is_inplace(op, footprints):
            wanted, followed = 1, ()
        tiles = _tiles(op, num_sms) or _queries(op, wanted, num_sms, tensors) or followed
        if tiles:
            tiled[op.writes[0].tensor] = TiledGroup(position, TaskGroup(op=op, splits=tiles))
        if not op.is_view:
            splits = tiles or _splits(op, wanted, row_multiple)
            groups.append(TaskGroup(op=op, splits=splits, all_ranks=kind_of(op).writes_peers))
    return tuple(groups)


def verify_groups(segment: Program, groups: Sequence[TaskGroup]) -> None:
    """Raises VerifyError unless tasks of each group are independent of each other and together
    write what the op writes, each element once.
    """
    footprints = Footprints(segment)
    for group in groups:
        _verify_splits(group)
        whole = TaskGroup(op=group.op)
        for write in group.op.writes:
            ours = footprints.footprint(group, write)
            num_elements = footprints.num_elements(footprints.footprint(whole, write))
            if not footprints.covers_once(ours, num_elements):
                raise _illegal(
                    group, f"tasks that write {write.tensor!r} unevenly", "one task an element"
                )
        if disturbed := find_disturbed(group, footprints):
            raise _illegal(group, f"tasks that read {disturbed!r} of others", "independent tasks")


def find_disturbed(group: TaskGroup, footprints: Footprints) -> str:
    """A tensor of which one task of a group reads what another writes; empty if there is none."""
    for write in group.op.writes:
        for read in group.op.reads:
            if footprints.base(read.tensor) != footprints.base(write.tensor):
                continue
            meet = footprints.overlap(
                footprints.footprint(group, read), footprints.footprint(group, write)
            )
            if meet[~np.eye(len(meet), dtype=np.bool_)].any():
                return read.tensor
    return ""


def accessed_bytes(op: Op, tensors: dict[str, Tensor]) -> int:
    """Bytes of all accesses of an op; of a looked-up axis only one value."""
    return sum(_access_bytes(op, access, tensors) for access in accesses(op))


def task_bytes(
    group: TaskGroup, tensors: dict[str, Tensor], roles: Sequence[Role] = ROLES
) -> npt.NDArray[np.float64]:
    """Bytes that each task touches of tensors of some roles: of every operand, the part its splits
    cut out.
    """
    total = np.zeros(group.num_tasks)
    for access in accesses(group.op):
        if tensors[access.tensor].role not in roles:
            continue
        used = {name for index in access.dims for name in index.axes}
        part = np.array([float(_access_bytes(group.op, access, tensors))])
        for split in group.splits:
            share = np.diff(split.bounds) / split.bounds[-1]
            if not used.intersection(split.axes):
                share = np.ones(split.num_tiles)
            part = (part[:, None] * share[None, :]).ravel()
        total += part
    return total


def _access_bytes(op: Op, access: Access, tensors: dict[str, Tensor]) -> int:
    tensor = tensors[access.tensor]
    used = {name for index in access.dims for name in index.axes}
    points = math.prod(a.extent for a in op.axes if a.name in used and not a.lookup)
    return min(points, tensor.num_elements) * item_bytes(tensor.dtype)


def _is_inplace(op: Op, footprints: Footprints) -> bool:
    """Whether an op writes storage that it reads; its tasks might disturb each other."""
    written = {footprints.base(access.tensor) for access in op.writes}
    return any(footprints.base(access.tensor) in written for access in op.reads)


def _splits(op: Op, wanted: int, row_multiple: int) -> tuple[RangeSplit, ...]:
    parallel = [axis for axis in op.axes if axis.role == "parallel" and not axis.lookup]
    extents = {axis.name: axis.extent for axis in parallel}
    if contracts(op):
        rows = tuple(n for index in op.reads[1].dims for n in index.axes if n in extents)
        if rows:
            cut = _cut(rows, math.prod(extents[n] for n in rows), wanted, row_multiple)
            others = tuple(n for n in extents if n not in rows)
            left = wanted // math.prod(split.num_tiles for split in cut)
            return cut + _cut(others, math.prod(extents[n] for n in others), left, row_multiple)
    free = [n for n in extents if n not in _WHOLE_HEADS.get(op.kind, ())]
    multiples = dict.fromkeys(free, 1) | dict.fromkeys(_contiguous(op), row_multiple)
    for name in free:
        if math.ceil(extents[name] / multiples[name]) >= wanted:
            return _cut((name,), extents[name], wanted, multiples[name])
    splits: tuple[RangeSplit, ...] = ()
    for name in free:
        cut = _cut((name,), extents[name], wanted, multiples[name])
        splits += cut
        wanted = math.ceil(wanted / math.prod(split.num_tiles for split in cut))
    return splits


def tile_bytes(group: TaskGroup) -> float:
    """What the longest task of a product by tiles of rows and columns costs, in bytes that an SM
    could have read meanwhile; 0 for other groups.
    """
    sides = _sides(group.op)
    if not sides:
        return 0.0
    extents = group.op.extents
    sizes = {split.axes: int(np.diff(split.bounds).max()) for split in group.splits}
    rows, columns = (sizes.get(side, math.prod(extents[n] for n in side)) for side in sides)
    return _tile_clocks(rows, columns, group.op.num_reduced) * CLOCK_BYTES


def _tiles(op: Op, num_sms: int) -> tuple[RangeSplit, ...]:
    """Tiles of rows and columns of a product that has enough of both; none for other ops."""
    sides = _sides(op)
    if not sides:
        return ()
    extents = op.extents
    num_m, num_n = (math.prod(extents[n] for n in side) for side in sides)
    depth = op.num_reduced

    def cost(tile: tuple[int, int]) -> float:
        m, n = tile
        turns = math.ceil(math.ceil(num_m / m) * math.ceil(num_n / n) / num_sms)
        return turns * _tile_clocks(m, n, depth)

    best = min(product(TILE_ROWS, TILE_COLUMNS), key=cost)
    return tuple(
        RangeSplit(axes=side, bounds=(*range(0, extent, size), extent))
        for side, extent, size in zip(sides, (num_m, num_n), best, strict=True)
        if extent > size
    )


def _sides(op: Op) -> tuple[tuple[str, ...], ...]:
    """Axes of the rows and of the columns of a product that has enough of both; () for others."""
    if not contracts(op):
        return ()
    extents = {a.name: a.extent for a in op.axes if a.role == "parallel" and not a.lookup}
    x, w = ([n for i in read.dims for n in i.axes if n in extents] for read in op.reads[:2])
    if set(x) & set(w):
        return ()
    num_m, num_n = (math.prod(extents[n] for n in side) for side in (x, w))
    return (tuple(x), tuple(w)) if min(num_m, num_n) >= LEAST_TILED else ()


def _tile_clocks(rows: int, columns: int, depth: int) -> float:
    """Clocks that an SM of an H200 takes for a tile."""
    multiplies, loads = rows * columns / MULTIPLIES, (rows + columns) / LOADS_ELEMENTS
    return (depth + FILL) * max(multiplies, loads)


def _queries(
    op: Op, wanted: int, num_sms: int, tensors: dict[str, Tensor]
) -> tuple[RangeSplit, ...]:
    """Heads and rows of an attention of half types whose rows see the same keys, which each task
    reads but once for a tile; none for other ops, of one row, or where one task is enough.
    """
    num_m = op.extents.get("m", 1)
    if op.kind not in _ATTENTION or num_m == 1 or wanted == 1:
        return ()
    keys = {name for index in op.reads[1].dims for name in index.axes}
    if keys & {"m", "s"} or tensors[op.reads[1].tensor].dtype not in HALVES:
        return ()
    heads = [name for name in ("b", "h") if name in op.extents]
    cuts: tuple[RangeSplit, ...] = ()
    for name in heads:
        left = math.ceil(wanted / math.prod(cut.num_tiles for cut in cuts))
        cuts += _cut((name,), op.extents[name], left, 1)
    tasks = math.prod(cut.num_tiles for cut in cuts)
    each = math.ceil(math.prod(op.extents[name] for name in heads) / tasks)
    num_d, num_e, num_t, group = (op.extents[name] for name in "detg")

    def pieces(rows: int) -> int:
        return math.ceil(num_m / max(1, rows // group))

    def cost(rows: int) -> float:
        turns = each * math.ceil(tasks * pieces(rows) / num_sms)
        products = (num_d + num_e) * max(rows / MULTIPLIES, 1 / LOADS_ELEMENTS)
        return turns * (num_t + FILL) * (products + rows / EXPONENTIALS)

    return cuts + _cut(("m",), num_m, pieces(min(ATTENDED_ROWS, key=cost)), 1)


def _contiguous(op: Op) -> set[str]:
    """The axis along which elements lie side by side, both read and written; at most one."""
    ends = [
        set(access.dims[-1].axes[-1:]) if access.dims else set()
        for access in (*op.reads[:1], *op.writes[:1])
    ]
    return set.intersection(*ends)


def _cut(axes: tuple[str, ...], extent: int, wanted: int, multiple: int) -> tuple[RangeSplit, ...]:
    """At most `wanted` ranges whose sizes differ by one multiple at most."""
    units = math.ceil(extent / multiple)
    num = min(units, wanted)
    if num == 1:
        return ()
    bounds = [min(extent, units * i // num * multiple) for i in range(num + 1)]
    return (RangeSplit(axes=axes, bounds=tuple(bounds)),)


def _verify_splits(group: TaskGroup) -> None:
    seen: set[str] = set()
    for split in group.splits:
        for name in split.axes:
            axis = group.op.axis(name)
            if axis.role != "parallel" or axis.lookup or name in seen:
                raise _illegal(
                    group, f"a split of axis {name!r} ({axis.role})", "parallel axes, each once"
                )
            seen.add(name)
        extent = math.prod(group.op.axis(name).extent for name in split.axes)
        rising = all(a < b for a, b in zip(split.bounds, split.bounds[1:], strict=False))
        if not rising or split.bounds[0] != 0 or split.bounds[-1] != extent:
            raise _illegal(group, f"bounds {split.bounds}", f"rising bounds from 0 to {extent}")


def _illegal(group: TaskGroup, found: str, expected: str) -> VerifyError:
    return VerifyError(
        f"op {group.op.name!r} ({group.op.kind}) has {found}",
        expected=expected,
        remedy="cut other axes, or leave the op one task",
    )
