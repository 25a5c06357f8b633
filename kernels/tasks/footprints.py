"""Footprints: the regions of all tasks of a group at once, and which tasks of two groups meet.

In: task groups of a segment, and their accesses. Out: boolean matrices, tasks by tasks. Accesses to
views resolve to the tensor that owns the storage. Equal tilings and access maps share one footprint
and one matrix, so that equal layers of a model are analysed once. Used by tile.py, graph.py
and check/schedule.py; the next file on the walk is graph.py.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from distmega.kernels.tasks.regions import (
    Box,
    Region,
    Tile,
    access_boxes,
    split_digits,
    task_tiles,
    view_source,
)
from distmega.kernels.tasks.types import TaskGroup
from distmega.program.types import Access, Op, Program, storage_behind

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

MAX_MATRIX = 1 << 22
"""Box pairs compared at once; larger products are cut by rows."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Footprint:
    """Boxes of one access of every task. Tasks that differ only in axes the access does not use
    share a tile: task t touches the boxes b with owner[b] == tile_of_task[t].

    first, last, step: [boxes, dims], inclusive ends.
    """

    tile_of_task: Ints
    num_tiles: int
    owner: Ints
    first: Ints
    last: Ints
    step: Ints

    @property
    def num_elements(self) -> int:
        """Elements over all tiles, if the boxes are disjoint."""
        return int(((self.last - self.first) // self.step + 1).prod(axis=1).sum())


class Footprints:
    """Memo of footprints and overlaps of one segment's groups; ids are small integers."""

    def __init__(self, segment: Program) -> None:
        self._shapes = {tensor.name: tensor.shape for tensor in segment.tensors}
        self._views = {op.writes[0].tensor: op for op in segment.ops if op.is_view}
        self._ids: dict[Hashable, int] = {}
        self._group_ids: dict[int, tuple[TaskGroup, int]] = {}
        self._footprints: dict[int, Footprint] = {}
        self._overlaps: dict[tuple[int, int], Bools] = {}

    def base(self, tensor: str) -> str:
        """The tensor that owns the storage: follows views to their source."""
        return storage_behind(tensor, self._views)

    def base_shape(self, tensor: str) -> tuple[int, ...]:
        """Shape of the tensor that owns the storage."""
        return self._shapes[self.base(tensor)]

    def region(self, access: Access, group: TaskGroup, task: int) -> Region:
        """The region of the base tensor that one task touches."""
        return self._resolve(access, group.op, task_tiles(group, task))

    def footprint(self, group: TaskGroup, access: Access) -> int:
        """Id of an access's footprint over all tasks."""
        key = (self._group_id(group), access.dims, self._storage(access.tensor))
        known = self._intern(key)
        if known not in self._footprints:
            self._footprints[known] = self._build(group, access)
        return known

    def overlap(self, earlier: int, later: int) -> Bools:
        """Matrix [tasks of `earlier`, tasks of `later`]: whether the two share an element."""
        key = (earlier, later)
        if key not in self._overlaps:
            self._overlaps[key] = _overlap(self._footprints[earlier], self._footprints[later])
        return self._overlaps[key]

    def num_elements(self, footprint: int) -> int:
        """Elements of a footprint over all tasks, if none is touched twice."""
        return self._footprints[footprint].num_elements

    def covers_once(self, footprint: int, num_elements: int) -> bool:
        """Whether the tasks of a footprint touch `num_elements` elements, none of them twice."""
        found = self._footprints[footprint]
        boxes = np.arange(len(found.owner))
        each = Footprint(
            tile_of_task=boxes,
            num_tiles=len(boxes),
            owner=boxes,
            first=found.first,
            last=found.last,
            step=found.step,
        )
        num_meetings = int(_overlap(each, each).sum())
        one_task_a_tile = len(found.tile_of_task) == found.num_tiles
        return one_task_a_tile and num_meetings == len(boxes) and found.num_elements == num_elements

    def _intern(self, key: Hashable) -> int:
        return self._ids.setdefault(key, len(self._ids))

    def _group_id(self, group: TaskGroup) -> int:
        known = self._group_ids.get(id(group))
        if known is None:
            axes = tuple((axis.name, axis.extent) for axis in group.op.axes)
            known = (group, self._intern((axes, group.splits)))
            self._group_ids[id(group)] = known
        return known[1]

    def _storage(self, tensor: str) -> int:
        chain: list[Hashable] = [self._shapes[tensor]]
        while tensor in self._views:
            view = self._views[tensor]
            tensor = view.reads[0].tensor
            chain += [view.axes, view.reads[0].dims, view.writes[0].dims, self._shapes[tensor]]
        return self._intern(tuple(chain))

    def _resolve(self, access: Access, op: Op, tiles: Sequence[Tile]) -> Region:
        extents = op.extents
        region = access_boxes(access, tiles, extents, self._shapes[access.tensor])
        tensor = access.tensor
        while tensor in self._views:
            view = self._views[tensor]
            tensor = view.reads[0].tensor
            region = view_source(region, view, self._shapes[tensor])
        return region

    def _build(self, group: TaskGroup, access: Access) -> Footprint:
        used = {name for index in access.dims for name in index.axes}
        extents = group.op.extents
        whole = {name: range(extent) for name, extent in extents.items()}
        choices: list[list[list[Tile]]] = []
        tile_of_task = np.zeros(1, dtype=np.int64)
        for split in group.splits:
            tiles = np.zeros(split.num_tiles, dtype=np.int64)
            if used.intersection(split.axes):
                sizes = [extents[name] for name in split.axes]
                ends = zip(split.bounds, split.bounds[1:], strict=False)
                boxes = [split_digits(range(start, stop), sizes) for start, stop in ends]
                choices.append(
                    [[dict(zip(split.axes, b, strict=True)) for b in bs] for bs in boxes]
                )
                tiles = np.arange(split.num_tiles)
                tile_of_task = tile_of_task * split.num_tiles
            tile_of_task = (tile_of_task[:, None] + tiles[None, :]).ravel()
        regions = []
        for choice in product(*choices):
            tiles_of_choice = [_merge(whole, parts) for parts in product(*choice)]
            regions.append(self._resolve(access, group.op, tiles_of_choice))
        return _pack(regions, tile_of_task, len(self.base_shape(access.tensor)))


def _merge(whole: Tile, parts: Sequence[Tile]) -> Tile:
    merged = dict(whole)
    for part in parts:
        merged.update(part)
    return merged


def _pack(regions: Sequence[Region], tile_of_task: Ints, num_dims: int) -> Footprint:
    boxes: list[Box] = [box for region in regions for box in region]
    owner = [tile for tile, region in enumerate(regions) for _ in region]
    ends = [[(r[0], r[-1], r.step if len(r) > 1 else 1) for r in box] for box in boxes]
    array = np.array(ends, dtype=np.int64).reshape(len(boxes), num_dims, 3)
    return Footprint(
        tile_of_task=tile_of_task,
        num_tiles=len(regions),
        owner=np.array(owner, dtype=np.int64),
        first=array[:, :, 0],
        last=array[:, :, 1],
        step=array[:, :, 2],
    )


def _overlap(a: Footprint, b: Footprint) -> Bools:
    tiles = np.zeros((a.num_tiles, b.num_tiles), dtype=np.bool_)
    rows = max(1, MAX_MATRIX // max(1, len(b.owner)))
    for start in range(0, len(a.owner), rows):
        chunk = slice(start, start + rows)
        meet = np.ones((len(a.owner[chunk]), len(b.owner)), dtype=np.bool_)
        for dim in range(a.first.shape[1]):
            meet &= _ranges_meet(_column(a, dim, chunk), _column(b, dim, slice(None)))
        i, j = np.nonzero(meet)
        tiles[a.owner[chunk][i], b.owner[j]] = True
    return tiles[a.tile_of_task][:, b.tile_of_task]


def _column(footprint: Footprint, dim: int, rows: slice) -> tuple[Ints, Ints, Ints]:
    return footprint.first[rows, dim], footprint.last[rows, dim], footprint.step[rows, dim]


def _ranges_meet(a: tuple[Ints, Ints, Ints], b: tuple[Ints, Ints, Ints]) -> Bools:
    """regions.ranges_meet for all pairs: solves the congruences once a pair of steps."""
    (first_a, last_a, step_a), (first_b, last_b, step_b) = a, b
    low = np.maximum(first_a[:, None], first_b[None, :])
    high = np.minimum(last_a[:, None], last_b[None, :])
    meet: Bools = low <= high
    for one in np.unique(step_a):
        for other in np.unique(step_b):
            if one == 1 and other == 1:
                continue
            at = np.ix_(np.flatnonzero(step_a == one), np.flatnonzero(step_b == other))
            common = math.gcd(int(one), int(other))
            modulus = int(other) // common
            inverse = pow(int(one) // common, -1, modulus)
            start = np.broadcast_to(first_a[:, None], low.shape)[at]
            gap = np.broadcast_to(first_b[None, :], low.shape)[at] - start
            meeting = start + one * (gap // common * inverse % modulus)
            earliest = low[at] + (meeting - low[at]) % (one * modulus)
            meet[at] &= (gap % common == 0) & (earliest <= high[at])
    return meet
