"""Checker: proves that a Schedule can neither deadlock nor race, over ranks and launches.

In: a Schedule. Out: nothing, or a CheckError that names tasks and ranks. It trusts nothing of how
the schedule was made, neither the events of the graph nor the clocks by which waits were pruned:
it finds what conflicts anew, and lays the queues out rank by rank for queue_checker.py. All ranks
have the same queues. An event that all ranks trigger has a counter for each source rank; launch e
uses copy `e % peer_buffers` of the receive buffers. Next on the walk: encoding.py.

Why a few ranks and launches are enough. A race has two tasks and an owner of memory, so three
ranks at most; among more ranks these three wait for each other just the same, and for others
besides. All ranks are alike, so the memory of rank 0 stands for any. Launches meet in a receive
buffer when they are a multiple of `peer_buffers` apart. If a task is ordered with those of a launch
`peer_buffers` later, it is ordered with those of still later launches of the same rank.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from distmega.kernels.arena import PEER_BUFFERS
from distmega.kernels.collectives import SOURCE
from distmega.kernels.footprints import Footprints
from distmega.kernels.queue_checker import (
    Queues,
    Run,
    Task,
    check_before,
    check_ordered,
    run_queues,
)
from distmega.kernels.tasks import Schedule, ScheduledTask, TaskGroup

MAX_RANKS = 3

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """How the tasks of one group on one rank touch a tensor in the memory of rank 0."""

    group: int
    rank: int
    footprint: int
    write: bool
    by_all: bool


def check_schedule(
    schedule: Schedule, num_epochs: int | None = None, peer_buffers: int = PEER_BUFFERS
) -> None:
    """Raises CheckError unless `num_epochs` launches on all ranks can't deadlock, and tasks that
    conflict always come in program order, a launch after the one before.

    num_epochs: by default one more than `peer_buffers`, the copies of each receive buffer.
    """
    num_epochs = num_epochs or peer_buffers + 1
    num_ranks = min(schedule.graph.team_size, MAX_RANKS)
    launches = [_lay_out(schedule, epoch, num_ranks) for epoch in range(num_epochs)]
    run = run_queues(launches)
    _check_races(schedule, run, num_epochs, num_ranks, peer_buffers)


def _lay_out(schedule: Schedule, epoch: int, num_ranks: int) -> list[Queues]:
    """One launch: the queues of each rank with counters told apart by source rank."""
    team, groups = schedule.graph.team_size, schedule.graph.groups
    remote = {s.event for queue in schedule.queues for t in queue for s in t.signals if s.all_ranks}

    def waits(task: ScheduledTask) -> list[tuple[int, int]]:
        found = []
        for wait in task.waits:
            sources = num_ranks if wait.event in remote else 1
            count = wait.count // team if wait.event in remote else wait.count
            for source in range(sources):
                found.append((wait.event * num_ranks + source, count * (epoch + 1)))
        return found

    def signals(task: ScheduledTask, rank: int) -> list[tuple[int, int]]:
        found = []
        for signal in task.signals:
            targets = range(num_ranks) if signal.all_ranks else (rank,)
            event = signal.event * num_ranks + (rank if signal.all_ranks else 0)
            found += [(target, event) for target in targets]
        return found

    def task_of(task: ScheduledTask, rank: int) -> Task:
        return Task(
            name=f"{groups[task.group].op.name}[{task.task}] of launch {epoch}",
            waits=tuple(waits(task)),
            signals=tuple(signals(task, rank)),
        )

    return [
        [[task_of(task, rank) for task in queue] for queue in schedule.queues]
        for rank in range(num_ranks)
    ]


def _check_races(
    schedule: Schedule, run: Run, num_epochs: int, num_ranks: int, peer_buffers: int
) -> None:
    groups = schedule.graph.groups
    footprints = Footprints(schedule.graph.segment)
    numbers = _numbers(schedule, num_epochs, num_ranks)
    for tensor, uses in _uses(groups, footprints, num_ranks).items():
        copies = peer_buffers if any(use.by_all for use in uses) else 1
        what = f"{tensor!r} of rank 0"
        for one, other in product(uses, repeat=2):
            if not (one.write or other.write):
                continue
            i, j = np.nonzero(footprints.overlap(one.footprint, other.footprint))
            for apart in range(0, num_epochs, copies):
                first = [numbers[e, one.rank][one.group][i] for e in range(num_epochs - apart)]
                then = [numbers[e, other.rank][other.group][j] for e in range(apart, num_epochs)]
                a, b = np.concatenate(first), np.concatenate(then)
                if apart > 0 or one.group < other.group:
                    check_before(run, a, b, what)
                elif one.group == other.group:
                    check_ordered(run, a[a != b], b[a != b], what)


def _uses(
    groups: Sequence[TaskGroup], footprints: Footprints, num_ranks: int
) -> dict[str, list[Use]]:
    """Accesses to the memory of rank 0, by tensor, of tensors that the segment writes."""
    written = {footprints.base(access.tensor) for group in groups for access in group.op.writes}
    found: dict[str, list[Use]] = defaultdict(list)
    for place, group in enumerate(groups):
        for accesses, write in ((group.op.reads, False), (group.op.writes, True)):
            for access in accesses:
                base = footprints.base(access.tensor)
                if base not in written:
                    continue
                by_all = write and group.all_ranks
                for rank in range(num_ranks if by_all else 1):
                    footprint = footprints.footprint(
                        group, access, (SOURCE, rank) if by_all else None
                    )
                    found[base].append(
                        Use(
                            group=place,
                            rank=rank,
                            footprint=footprint,
                            write=write,
                            by_all=by_all,
                        )
                    )
    return found


def _numbers(
    schedule: Schedule, num_epochs: int, num_ranks: int
) -> dict[tuple[int, int], list[Ints]]:
    """(Launch, rank) -> for each group, the checker's number of each of its tasks."""
    found = {}
    number = 0
    for epoch in range(num_epochs):
        for rank in range(num_ranks):
            tasks = [np.zeros(g.num_tasks, dtype=np.int64) for g in schedule.graph.groups]
            for queue in schedule.queues:
                for task in queue:
                    tasks[task.group][task.task] = number
                    number += 1
            found[epoch, rank] = tasks
    return found
