"""From one layout of a tensor to another: the table of collectives, and the cheapest way.

Comes in: two layouts of one tensor. Goes out: Moves, one collective each, with bytes and time. Two
placements need no move exactly when they are equal, because a Shard states its index map (dim and
positions per coordinate). Next: search.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations, product

from distmega.errors import PlanError
from distmega.sharding.cost import Machine, collective_bytes, collective_time_us, copy_time_us
from distmega.sharding.mesh import DeviceMesh
from distmega.sharding.placements import (
    REPLICATE,
    Layout,
    Partial,
    Placement,
    Replicate,
    Shard,
    local_shape,
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


def find_moves(
    shape: Sequence[int],
    item_bytes: int,
    source: Layout,
    target: Layout,
    mesh: DeviceMesh,
    machine: Machine,
) -> tuple[Move, ...]:
    """The cheapest sequence of collectives from one layout to another, one mesh axis at a time.

    PlanError if there is none: nothing becomes a part of a combination by moving.
    """
    changed = [axis for axis in mesh.names if source.at(axis) != target.at(axis)]
    used = [axis for axis in mesh.names if axis in dict(source.placements + target.placements)]
    ends = source, target
    best: tuple[Move, ...] | None = None
    nested = any(len(end.shards_of(dim)) > 1 for end in ends for dim in range(len(shape)))
    for axes in (changed, used) if nested else (changed,):
        firsts = [part for num in range(len(axes) + 1) for part in permutations(axes, num)]
        for order, first in product(permutations(axes), firsts):
            moves = _walk(shape, item_bytes, source, target, order, first, mesh, machine)
            if moves is not None and (best is None or _time(moves) < _time(best)):
                best = moves
    if best is None:
        raise PlanError(
            f"no collective leads from layout [{source}] to [{target}]",
            expected="a target that is sharded or replicated",
            remedy="annotate the tensor with shard or replicate",
        )
    return best


def _time(moves: Sequence[Move]) -> float:
    return sum(move.time_us for move in moves)


def _walk(
    shape: Sequence[int],
    item_bytes: int,
    source: Layout,
    target: Layout,
    order: Sequence[str],
    first: Sequence[str],
    mesh: DeviceMesh,
    machine: Machine,
) -> tuple[Move, ...] | None:
    """Moves in one order of mesh axes; None where they would gather or divide a dim within what
    another axis divides further.

    first: axes that are made whole before, in that order.
    """
    legs = [(axis, REPLICATE) for axis in first] + [(axis, target.at(axis)) for axis in order]
    moves: list[Move] = []
    here = source
    for axis, placement in legs:
        steps = table(here.at(axis), placement)
        if steps is None:
            return None
        for kind, after in steps:
            there = here.moved(axis, after)
            if not (here.is_innermost(axis) and there.is_innermost(axis)):
                return None
            seen = local_shape(shape, here.moved(axis, REPLICATE))
            cost = step_cost(kind, here.at(axis), after, seen, item_bytes, mesh.size(axis), machine)
            moves.append(
                Move(
                    kind=kind,
                    axis=axis,
                    source=here,
                    target=there,
                    num_bytes=cost[0],
                    time_us=cost[1],
                    layout_copy=cost[2],
                )
            )
            here = there
    return tuple(moves)
