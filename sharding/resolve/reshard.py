"""From one layout of a tensor to another: the table of collectives, and the cheapest way.

Comes in: two layouts of one tensor. Goes out: Moves, one collective each, with bytes and time. Two
placements need no move exactly when they are equal, because a Shard states its index map (dim and
positions per coordinate). Next: search.py.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from distmega.errors import PlanError
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import (
    REPLICATE,
    Layout,
    Partial,
    Placement,
    Replicate,
    Shard,
    local_shape,
)
from distmega.sharding.search.cost import (
    Machine,
    collective_bytes,
    collective_time_us,
    copy_time_us,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One collective along one mesh axis.

    layout_copy: the gathered or scattered dim isn't outermost, so the buffer the collective works
    on (that dim outermost) is a copy in another stride order. num_bytes: what one rank sends.
    """

    kind: str
    axis: str
    source: Layout
    target: Layout
    num_bytes: int
    time_us: float
    layout_copy: bool


def table(source: Placement, target: Placement) -> tuple[tuple[str, Placement], ...] | None:
    """Collectives (kind, placement after it) along one mesh axis; None if there is no way."""
    if source == target:
        return ()
    match source, target:
        case _, Partial():
            return None
        case Replicate(), _:
            return (("take_shard", target),)
        case Partial(), Replicate():
            return (("all_reduce", target),)
        case Partial("sum"), _:
            return (("reduce_scatter", target),)
        case Partial(), _:
            return (("all_reduce", REPLICATE), ("take_shard", target))
        case _, Replicate():
            return (("all_gather", target),)
        case Shard(dim=a), Shard(dim=b) if a != b:
            return (("all_to_all", target),)
    return (("all_gather", REPLICATE), ("take_shard", target))


def is_strided(kind: str, source: Placement, target: Placement, shape: Sequence[int]) -> bool:
    """Whether a collective on a tensor of this shape needs a copy in another stride order."""
    if kind in ("all_reduce", "take_shard"):
        return False
    dims = [p.dim for p in (source, target) if isinstance(p, Shard)]
    return any(math.prod(shape[:dim]) > 1 for dim in dims)


def step_cost(
    kind: str,
    source: Placement,
    target: Placement,
    shape: Sequence[int],
    item_bytes: int,
    num_ranks: int,
    machine: Machine,
) -> tuple[int, float, bool]:
    """Bytes sent, time and layout copy of one collective.

    shape: the tensor's extents on a rank, as if it were whole along this mesh axis.
    """
    total = math.prod(shape) * item_bytes
    strided = is_strided(kind, source, target, shape)
    time = collective_time_us(kind, total, num_ranks, machine)
    if strided:
        time += machine.launch_us + copy_time_us(total, machine)
    return collective_bytes(kind, total, num_ranks), time, strided


def find_movements(
    shape: Sequence[int],
    item_bytes: int,
    source: Layout,
    target: Layout,
    mesh: DeviceMesh,
    machine: Machine,
) -> tuple[Move, ...]:
    """The cheapest sequence of collectives from one layout to another, one mesh axis at a time.

    On the way a mesh axis is as in the source, whole, or as in the target. PlanError if there is no
    way: nothing becomes a part of a combination by moving.
    """
    found: list[tuple[float, int, Layout, tuple[Move, ...]]] = [(0.0, 0, source, ())]
    done: set[Layout] = set()
    number = 0
    while found:
        time, _, here, movements = heappop(found)
        if here == target:
            return movements
        if here in done:
            continue
        done.add(here)
        for move in _next_movements(shape, item_bytes, here, source, target, mesh, machine):
            number += 1
            heappush(found, (time + move.time_us, number, move.target, (*movements, move)))
    raise PlanError(
        f"no collective leads from layout [{source}] to [{target}]",
        expected="a target that is sharded or replicated",
        remedy="annotate the tensor with shard or replicate",
    )


def _next_movements(
    shape: Sequence[int],
    item_bytes: int,
    here: Layout,
    source: Layout,
    target: Layout,
    mesh: DeviceMesh,
    machine: Machine,
) -> Iterator[Move]:
    """Single collectives out of a layout, none of which gathers or divides a dim within what
    another axis divides further.
    """
    axes = {axis for end in (source, target) for axis, _ in end.placements}
    for axis in (name for name in mesh.names if name in axes and here.is_innermost(name)):
        before, whole = here.at(axis), here.moved(axis, REPLICATE)
        for after in dict.fromkeys((target.at(axis), REPLICATE)):
            steps = table(before, after)
            there = here.moved(axis, after)
            if steps is None or len(steps) != 1 or not there.is_innermost(axis):
                continue
            seen, size = local_shape(shape, whole), mesh.size(axis)
            if isinstance(after, Shard) and after.chunk * size < seen[after.dim]:
                continue
            kind = steps[0][0]
            cost = step_cost(kind, before, after, seen, item_bytes, size, machine)
            yield Move(
                kind=kind,
                axis=axis,
                source=here,
                target=there,
                num_bytes=cost[0],
                time_us=cost[1],
                layout_copy=cost[2],
            )
