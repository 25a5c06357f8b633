"""Matmuls beside collectives in a plan: pairs found, ways chosen, chunks and rings made host loops.

Comes in: a RankSchedule, the chunks that a user asked for, an Overlap. Goes out: the schedule in
its final order, its StreamPlan, an OverlapChoice for each pair. Next: finalize.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from distmega.errors import PlanError
from distmega.program.types import Program
from distmega.sharding.layout.placements import REPLICATE, Chunks
from distmega.sharding.local_ops import LocalOps
from distmega.sharding.overlap.pairs import (
    CHEAPEST,
    OverlapChoice,
    OverlapRequest,
    Pair,
    choose_overlaps,
    find_pairs,
    fused_pairs,
)
from distmega.sharding.resolve.resolve import RankSchedule, Reshard
from distmega.sharding.search.cost import Machine
from distmega.sharding.streams.host_loops import StreamPlan
from distmega.sharding.streams.stream_plan import plan_streams

BY_LOOPS = ("chunks", "ring")
"""Ways that host loops make."""


def plan_overlaps(
    program: Program,
    local: LocalOps,
    machine: Machine,
    schedule: RankSchedule,
    streams: Mapping[str, Chunks],
    asked: OverlapRequest = CHEAPEST,
) -> tuple[RankSchedule, StreamPlan, tuple[OverlapChoice, ...]]:
    """The schedule in its final order. What a user's chunks put into a loop is in no pair.

    What is multiplied before a collective stays whole, so that only the pair runs in its loop.
    PlanError where what was asked for is impossible; where it was not asked for, a pair that can't
    run in loops takes the best of the other ways.
    """
    ordered, stream_plan = plan_streams(program, local, schedule, streams)
    if not any(isinstance(step, Reshard) for step in schedule.steps):
        choose_overlaps((), machine, asked)
        return ordered, stream_plan, ()
    looped = {name for loop in stream_plan.loops for name, _ in loop.splits}
    pairs = _pairs(program, local, ordered, looped)
    choices = choose_overlaps(pairs, machine, asked)
    whole = {
        choice.pair.operand for choice in choices if choice.pair.operand != choice.pair.between
    }
    added = {schedule.locals[name][0]: Chunks(0, 1) for name in whole}
    added |= {schedule.locals[choice.pair.result][0]: _chunks(choice) for choice in choices}
    if not any(choice.way in BY_LOOPS for choice in choices):
        return ordered, stream_plan, tuple(choices)
    try:
        found = plan_streams(program, local, schedule, {**added, **streams})
        _stay_whole(choices, found[1])
    except PlanError as error:
        if any(choice.forced for choice in choices if choice.way in BY_LOOPS):
            raise
        why = str(error).partition(";")[0]
        return ordered, stream_plan, tuple(_without_loops(choice, why) for choice in choices)
    return *found, tuple(choices)


def _stay_whole(choices: Sequence[OverlapChoice], stream_plan: StreamPlan) -> None:
    """PlanError if the chunks of one pair spread to another that is to be one kernel."""
    looped = {name for loop in stream_plan.loops for name, _ in loop.splits}
    for pair in fused_pairs(choices):
        if also := {pair.first, pair.second} & looped:
            raise PlanError(
                f"{sorted(also)} runs in the chunks of another op",
                expected="one kernel",
                remedy="ask for no chunks or rings beside it",
            )


def _pairs(
    program: Program, local: LocalOps, schedule: RankSchedule, looped: set[str]
) -> list[Pair]:
    """Pairs among the ops of one rank outside of loops."""
    tensors = {name: local.tensor(name) for name in schedule.locals}
    ops = [local.op(step) for step in schedule.steps]

    def is_whole(name: str, axis: str) -> bool:
        return schedule.locals[name][1].at(axis) == REPLICATE

    found = find_pairs(ops, tensors, is_whole, local.mesh, program.outputs)
    return [pair for pair in found if not {pair.first, pair.second} & looped]


def _chunks(choice: OverlapChoice) -> Chunks:
    """The chunks in which a pair runs; one where it stays whole."""
    pair = choice.pair
    if choice.way not in BY_LOOPS:
        return Chunks(0, 1)
    if choice.way == "ring":
        return Chunks(0, choice.num_chunks, pair.mesh_axis)
    dim = pair.num_rows if pair.kind == "matmul_reduce_scatter" else 0
    return Chunks(dim, choice.num_chunks)


def _without_loops(choice: OverlapChoice, why: str) -> OverlapChoice:
    """The best of a pair's other ways."""
    if choice.way not in BY_LOOPS:
        return choice
    left = [(way, time) for way, time in choice.times_us if way.partition(" ")[0] not in BY_LOOPS]
    way = min(left, key=lambda item: item[1])[0]
    return replace(
        choice,
        way=way,  # type: ignore[arg-type]
        num_chunks=0,
        times_us=tuple(left),
        refused=(*choice.refused, (choice.way, why)),
    )
