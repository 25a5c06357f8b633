"""Whether two ops see a tensor divided alike: decided on exact positions, never on names.

Comes in: a producer's and a consumer's loop domain with their accesses of one tensor. Goes out:
whether data must move between ranks, or between iterations of a host loop. verify.py holds the
planner's short cut (equal Shards) to these positions.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product

import numpy as np

from distmega.program.types import Index
from distmega.sharding.layout.domains import (
    Array,
    Device,
    LoopDomain,
    Merge,
    Parallel,
    Ranges,
    dim_positions,
)
from distmega.sharding.layout.mesh import DeviceMesh

Side = tuple[LoopDomain, Sequence[Index]]
"""One side of a dependency: a loop domain and how it indexes the tensor's dims."""
LoopCoordinate = Mapping[Parallel, int]
Box = tuple[Ranges, ...]
"""Positions per dim; the box is their product."""


def shardings_differ(
    shape: Sequence[int], producer: Side, consumer: Side, parallel: Parallel, mesh: DeviceMesh
) -> bool:
    """Whether a tensor must be resharded between two ops, as seen by one parallel type.

    Along Device(axis) they agree when each coordinate writes exactly the positions it reads. Where
    ranks differ and no axis tells by itself, as for parts along one axis that go round another, the
    axes that divide either side do. Along Stream they agree when, on every rank and in every dim,
    either neither side's positions depend on the stream index or every iteration touches the same
    positions.
    """
    if isinstance(parallel, Device):

        def differs(groups: Iterable[list[dict[Parallel, int]]]) -> bool:
            return any(not _same_union(shape, producer, consumer, group) for group in groups)

        if differs(_coordinates_along(mesh, parallel.axis)):
            return True
        return (
            max(side[0].extent_of(parallel) for side in (producer, consumer)) > 1
            and differs([at] for group in _coordinates_along(mesh, "") for at in group)
            and not any(differs(_coordinates_along(mesh, axis)) for axis in mesh.names)
        )
    count = max(side[0].extent_of(parallel) for side in (producer, consumer))
    return any(
        _streams_differ(shape, producer, consumer, [{**at, parallel: i} for i in range(count)])
        for loop_coordinates in _coordinates_along(mesh, "")
        for at in loop_coordinates
    )


def _coordinates_along(mesh: DeviceMesh, axis: str) -> Iterator[list[dict[Parallel, int]]]:
    """Places of all ranks, those that share their coordinate along `axis` together."""
    groups: dict[int, list[dict[Parallel, int]]] = {}
    for at in mesh.coordinates():
        coordinate: dict[Parallel, int] = {Device(a): c for a, c in at.items()}
        groups.setdefault(at.get(axis, 0), []).append(coordinate)
    yield from groups.values()


def _is_coupled(side: Side) -> bool:
    """Whether positions in one dim depend on those in another, so that they are no box."""
    domain, dims = side
    names = [name for index in dims for name in index.axes]
    return len(set(names)) < len(names) or any(isinstance(t, Merge) for t in domain.transforms)


def _box(shape: Sequence[int], side: Side, coordinate: LoopCoordinate) -> Box:
    domain, dims = side
    return tuple(dim_positions(domain, i, e, coordinate) for i, e in zip(dims, shape, strict=True))


def _points(shape: Sequence[int], side: Side, coordinate: LoopCoordinate) -> Array:
    """Positions in the flattened tensor, each once."""
    domain, dims = side
    sizes = dict(domain.roots)
    names = tuple(dict.fromkeys(name for index in dims for name in index.axes))
    values = domain.enumerate(names, coordinate)
    flat = np.zeros(len(values[names[0]]) if names else 1, dtype=np.int64)
    inside = np.ones(flat.shape, dtype=bool)
    for index, extent in zip(dims, shape, strict=True):
        position = np.zeros_like(flat)
        for name in index.axes:
            position = position * sizes[name] + values[name]
        position = position * index.stride + index.offset
        inside &= (position >= 0) & (position < extent)
        flat = flat * extent + position
    return np.unique(flat[inside])


def _same_union(
    shape: Sequence[int], producer: Side, consumer: Side, loop_coordinates: Sequence[LoopCoordinate]
) -> bool:
    """Whether both sides touch the same positions over all the places together."""
    if _is_coupled(producer) or _is_coupled(consumer):
        made, used = (
            np.unique(
                np.concatenate(
                    [_points(shape, side, coordinate) for coordinate in loop_coordinates]
                )
            )
            for side in (producer, consumer)
        )
        return np.array_equal(made, used)
    boxes = [
        [_box(shape, side, coordinate) for coordinate in loop_coordinates]
        for side in (producer, consumer)
    ]
    cuts = [
        sorted({cut for side in boxes for box in side for r in box[dim] for cut in r})
        for dim in range(len(shape))
    ]
    return np.array_equal(_cells(boxes[0], cuts), _cells(boxes[1], cuts))


def _cells(boxes: Sequence[Box], cuts: Sequence[Sequence[int]]) -> np.ndarray[tuple[int, ...]]:
    """Which cells between the cuts the boxes cover."""
    cells = np.zeros([max(len(c) - 1, 0) for c in cuts], dtype=bool)
    for box in boxes:
        for ranges in product(*box):
            where = zip(cuts, ranges, strict=True)
            cells[tuple(slice(c.index(a), c.index(b)) for c, (a, b) in where)] = True
    return cells


def _streams_differ(
    shape: Sequence[int], producer: Side, consumer: Side, loop_coordinates: Sequence[LoopCoordinate]
) -> bool:
    """loop_coordinates: those of one rank, one a stream iteration."""
    if _is_coupled(producer) or _is_coupled(consumer):
        made, used = (
            [tuple(_points(shape, side, coordinate).tolist()) for coordinate in loop_coordinates]
            for side in (producer, consumer)
        )
        return _disagree(made, used)
    boxes = [
        [_box(shape, side, coordinate) for coordinate in loop_coordinates]
        for side in (producer, consumer)
    ]
    return any(
        _disagree([box[dim] for box in boxes[0]], [box[dim] for box in boxes[1]])
        for dim in range(len(shape))
    )


def _disagree(made: Sequence[object], used: Sequence[object]) -> bool:
    """Whether positions by iteration differ, where they depend on the iteration at all."""
    constant = all(m == made[0] for m in made) and all(u == used[0] for u in used)
    return not constant and list(made) != list(used)
