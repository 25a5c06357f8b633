"""Exact regions: which elements of a tensor an access touches, as unions of strided boxes.

In: an Access, and the tile of the iteration space that a task covers. Out: a Region, and whether
two Regions share an element. A flat interval over axes composed row-major splits into a few boxes
of axis digits; an Index maps a box to ranges of tensor positions. Nothing here is a bounding box:
ranges keep their stride, and two strided ranges meet only if a number lies in both. Next on the
walk: footprints.py, all tiles of a task group at once.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import product

from distmega.errors import ProgramError
from distmega.kernels.tasks.types import TaskGroup
from distmega.program.types import Access, Index, Op

Box = tuple[range, ...]
"""One strided half-open range a dim (or axis): all combinations."""

Region = tuple[Box, ...]
"""A union of boxes of one tensor; boxes of a written region are disjoint."""

Tile = Mapping[str, range]
"""A box of the iteration space: the range of each axis."""


def tile_intervals(group: TaskGroup, task: int) -> tuple[tuple[int, int], ...]:
    """For each split of the group, the flat half-open interval that `task` covers."""
    intervals = []
    for split in reversed(group.splits):
        task, tile = divmod(task, split.num_tiles)
        intervals.append((split.bounds[tile], split.bounds[tile + 1]))
    return tuple(reversed(intervals))


def task_tiles(group: TaskGroup, task: int) -> tuple[Tile, ...]:
    """The boxes of axis values that one task covers; axes in no split run whole."""
    extents = group.op.extents
    whole = {name: range(extent) for name, extent in extents.items()}
    parts = []
    intervals = tile_intervals(group, task)
    for split, (start, stop) in zip(group.splits, intervals, strict=True):
        boxes = split_digits(range(start, stop), [extents[name] for name in split.axes])
        parts.append([dict(zip(split.axes, box, strict=True)) for box in boxes])
    return tuple(
        whole | {name: values for part in choice for name, values in part.items()}
        for choice in product(*parts)
    )


def split_digits(values: range, extents: Sequence[int]) -> tuple[Box, ...]:
    """The disjoint boxes of mixed-radix digits, outer first, of all numbers in `values`.

    `values` has a positive step and lies in 0 to the product of `extents`.
    """
    if not values:
        return ()
    if not extents:
        return ((),)
    if len(extents) == 1:
        return ((values,),)
    inner = math.prod(extents[1:])
    return tuple(
        (rows, *rest)
        for rows, part in _split_rows(values, inner)
        for rest in split_digits(part, extents[1:])
    )


def _split_rows(values: range, inner: int) -> list[tuple[range, range]]:
    """`values` as disjoint products of a range of rows and a range within rows of `inner`."""
    first, last = values[0] // inner, values[-1] // inner
    offset, step = values[0] % inner, values.step
    if step % inner == 0:
        return [(range(first, last + 1, step // inner), range(offset, offset + 1))]
    rows = [range(row, row + 1) for row in range(first, last + 1)]
    if inner % step == 0 and last - first > 1:
        rows[1:-1] = [range(first + 1, last)]
    parts: list[tuple[range, range]] = []
    for row in rows:
        start = row.start * inner
        part = _clip(values, start, start + inner)
        if not part:
            continue
        part = range(part[0] - start, part[-1] - start + 1, step)
        if inner % step == 0 and parts and parts[-1][1] == part:
            row = range(parts.pop()[0].start, row.stop)
        parts.append((row, part))
    return parts


def _clip(values: range, start: int, stop: int) -> range:
    """The numbers of an increasing range that are at least `start` and below `stop`."""
    skipped = max(0, -((values.start - start) // values.step))
    return range(values.start + skipped * values.step, min(values.stop, stop), values.step)


def index_ranges(
    index: Index, tile: Tile, extents: Mapping[str, int], dim_extent: int
) -> tuple[range, ...]:
    """Disjoint ranges of positions 0 to `dim_extent` that an Index reaches from a box of axes."""
    start, radix = index.offset, index.stride
    terms: list[tuple[int, int]] = []
    for name in reversed(index.axes):
        values = tile[name]
        if not values:
            return ()
        start += radix * values[0]
        if len(values) > 1:
            stride, num = radix * values.step, len(values)
            if terms and stride == terms[-1][0] * terms[-1][1]:
                stride, inner = terms.pop()
                num *= inner
            terms.append((stride, num))
        radix *= extents[name]
    if not terms:
        return (range(start, start + 1),) if 0 <= start < dim_extent else ()
    terms.sort(key=lambda term: term[1])
    step, num = terms.pop()
    starts = [start]
    for stride, repeats in terms:
        starts = [one + stride * i for one in starts for i in range(repeats)]
    clipped = (
        _clip(range(one, one + step * (num - 1) + 1, step), 0, dim_extent) for one in sorted(starts)
    )
    return tuple(values for values in clipped if values)


def access_boxes(
    access: Access, tiles: Iterable[Tile], extents: Mapping[str, int], shape: Sequence[int]
) -> Region:
    """The region that an access touches over `tiles`, clipped to a tensor of `shape`."""
    boxes: dict[Box, None] = {}
    for tile in tiles:
        dims = [
            index_ranges(index, tile, extents, extent)
            for index, extent in zip(access.dims, shape, strict=True)
        ]
        boxes.update(dict.fromkeys(product(*dims)))
    return tuple(boxes)


def view_source(region: Region, view: Op, shape: Sequence[int]) -> Region:
    """The region of a view's source (of `shape`) that holds `region` of the view."""
    extents = view.extents
    whole = {name: range(extent) for name, extent in extents.items()}
    tiles: list[Tile] = []
    for box in region:
        parts = []
        for index, values in zip(view.writes[0].dims, box, strict=True):
            if index.offset or index.stride != 1:
                raise ProgramError(
                    f"view {view.name!r} writes {view.writes[0]}",
                    expected="an output indexed by plain axes",
                    remedy="build views with ProgramBuilder",
                )
            digits = split_digits(values, [extents[name] for name in index.axes])
            parts.append([dict(zip(index.axes, digit, strict=True)) for digit in digits])
        for choice in product(*parts):
            tiles.append(whole | {name: r for part in choice for name, r in part.items()})
    return access_boxes(view.reads[0], tiles, extents, shape)


def ranges_meet(a: range, b: range) -> bool:
    """Whether two increasing ranges share a number (Chinese remainders, exact)."""
    if not a or not b:
        return False
    common = math.gcd(a.step, b.step)
    gap = b.start - a.start
    if gap % common:
        return False
    modulus = b.step // common
    steps = gap // common * pow(a.step // common, -1, modulus) % modulus
    meeting = a.start + a.step * steps
    low = max(a.start, b.start)
    period = a.step * modulus
    return low + (meeting - low) % period <= min(a[-1], b[-1])


def regions_meet(a: Region, b: Region) -> bool:
    """Whether two regions of one tensor share an element."""
    return any(all(map(ranges_meet, one, other)) for one in a for other in b)
