"""Launch clocks: what is complete when each task of a launch starts, for all tasks at once.

In: a Schedule. Out: `Clocks`, by which schedule.py judges every pair of tasks. All ranks run the
same queues, and an event that all ranks of a team trigger is waited for from all of them, so no
rank differs from another: one rank's queues stand for all, and a task's knowledge is a row of its
own rank's queues and one of any peer's along each mesh axis. Waits are for all signals of their
event in a launch, which is checked; then a wait means that every task that signals has completed,
and any order of steps that the waits allow gives the same clocks. The steps of all queues that can
go on are taken together.

What a rank knows of its own tasks, it knows at least as well as what it knows of a peer's, since it
waits for itself wherever it waits for all; so what a peer tells about third ranks adds nothing.
Ranks that differ along two axes write nothing into each other's memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from distmega.errors import CheckError, counted
from distmega.kernels.tasks.types import Schedule, ScheduledTask

Ints = npt.NDArray[np.int64]
Clock = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Clocks:
    """Tasks numbered queue by queue. queue, position: [tasks], where each stands.

    own: [tasks, queues], how many tasks of each queue of this launch are known to be complete when
    a task starts, on its own rank. peers: likewise on any other along a mesh axis. ends: [queues],
    what a rank that has ended the launch knows of any other along an axis. number_of: for each
    group, the numbers of its tasks.
    """

    queue: Ints
    position: Ints
    own: Clock
    peers: Mapping[str, Clock]
    ends: Mapping[str, Clock]
    number_of: tuple[Ints, ...]


class StuckError(Exception):
    """Some queues can't go on: tasks wait for each other."""


def compute_clocks(schedule: Schedule) -> Clocks:
    """Runs one launch. Raises CheckError for counts that do not fit, StuckError for a deadlock."""
    tasks = [task for queue in schedule.queues for task in queue]
    axes = sorted({one.mesh_axis for one in schedule.graph.groups if one.num_ranks > 1})
    lengths = np.array([len(queue) for queue in schedule.queues], dtype=np.int64)
    first = np.concatenate(([0], np.cumsum(lengths)))
    run = _Run(
        schedule=schedule,
        waits=_padded([[wait.event for wait in t.waits] for t in tasks], schedule.num_events),
        signals=_padded(
            [[signal.event for signal in t.signals] for t in tasks], schedule.num_events
        ),
        left=_check_counts(schedule, tasks),
        team_of=_team_of(schedule, tasks, axes),
        first=first,
        num_axes=len(axes),
    )
    run.finish()
    numbers = [np.full(group.num_tasks, -1, dtype=np.int64) for group in schedule.graph.groups]
    for number, task in enumerate(tasks):
        numbers[task.group][task.task] = number
    return Clocks(
        queue=np.repeat(np.arange(len(lengths)), lengths),
        position=np.arange(len(tasks)) - np.repeat(first[:-1], lengths),
        own=run.clocks[0],
        peers=dict(zip(axes, run.clocks[1:], strict=True)),
        ends={
            axis: knows.max(axis=0, initial=0)
            for axis, knows in zip(axes, run.knows[1:], strict=True)
        },
        number_of=tuple(numbers),
    )


def _padded(rows: Sequence[Sequence[int]], filler: int) -> Ints:
    """Rows of a table as wide as the longest; `filler` is an event that nobody has to trigger."""
    table = np.full((len(rows), max(map(len, rows), default=0)), filler, dtype=np.int64)
    for number, row in enumerate(rows):
        table[number, : len(row)] = row
    return table


def _team_of(schedule: Schedule, tasks: Sequence[ScheduledTask], axes: Sequence[str]) -> Ints:
    """Who triggers each event: 0 the own rank alone, else, from 1 on, the ranks along an axis."""
    found = np.zeros(schedule.num_events + 1, dtype=np.int64)
    for task in tasks:
        group = schedule.graph.groups[task.group]
        for signal in task.signals:
            if signal.all_ranks and group.num_ranks > 1:
                found[signal.event] = 1 + axes.index(group.mesh_axis)
    return found


def _check_counts(schedule: Schedule, tasks: Sequence[ScheduledTask]) -> Ints:
    """Signals that each event gets from one rank; a wait must be for all of them."""
    counts = np.zeros(schedule.num_events + 1, dtype=np.int64)
    reach: dict[int, tuple[str, int]] = {}
    for task in tasks:
        group = schedule.graph.groups[task.group]
        for signal in task.signals:
            counts[signal.event] += 1
            team = (group.mesh_axis, group.num_ranks) if signal.all_ranks else ("", 1)
            lost = signal.all_ranks and not group.all_ranks
            if lost or reach.setdefault(signal.event, team) != team:
                raise CheckError(
                    f"event {signal.event} is signalled on one rank by some tasks, on all by "
                    f"{describe_task(schedule, task)}",
                    expected="one kind of signal for each event",
                    remedy="give each kind an event of its own",
                )
    waited = set()
    for task in tasks:
        for wait in task.waits:
            waited.add(wait.event)
            total = int(counts[wait.event]) * reach.get(wait.event, ("", 1))[1]
            if wait.count != total or not total:
                raise CheckError(
                    f"{describe_task(schedule, task)} waits for {counted(wait.count, 'signal')}"
                    f" of event {wait.event}",
                    expected=f"{total}, which is all that it gets in a launch",
                    remedy="correct the count, or add the missing signal",
                )
    for event in reach.keys() - waited:
        raise CheckError(
            f"event {event} gets {counted(counts[event], 'signal')}, and nobody waits for it",
            expected="a wait for every event",
            remedy="drop the signals",
        )
    return counts


def describe_task(schedule: Schedule, task: ScheduledTask) -> str:
    """Name and queue of a task, for messages."""
    name = schedule.graph.groups[task.group].op.name
    queue = next(at for at, queue in enumerate(schedule.queues) if task in queue)
    return f"'{name}[{task.task}]' (queue {queue})"


class _Run:
    """State of a launch: heads of queues, signals still missing, and what queues and events know.

    Of clocks, knows and heard, the first are of the own rank, the others of any peer along an axis.
    """

    def __init__(
        self,
        *,
        schedule: Schedule,
        waits: Ints,
        signals: Ints,
        left: Ints,
        team_of: Ints,
        first: Ints,
        num_axes: int,
    ) -> None:
        num_queues, num_tasks = len(schedule.queues), int(first[-1])
        self.waits, self.signals, self.left, self.first = waits, signals, left, first
        self.team_of = team_of
        self.head = np.zeros(num_queues, dtype=np.int64)

        def zeros(rows: int) -> tuple[Clock, ...]:
            return tuple(np.zeros((rows, num_queues), dtype=np.int32) for _ in range(1 + num_axes))

        self.clocks, self.knows = zeros(num_tasks), zeros(num_queues)
        self.heard = zeros(schedule.num_events + 1)

    def finish(self) -> None:
        """Runs all there is."""
        lengths = np.diff(self.first)
        while (queues := np.flatnonzero(self.head < lengths)).size:
            tasks = self.first[queues] + self.head[queues]
            able = (self.left[self.waits[tasks]] == 0).all(axis=1)
            if not able.any():
                raise StuckError
            self._step(tasks[able], queues[able])

    def _step(self, tasks: Ints, queues: Ints) -> None:
        """One task of each of some queues, all of whose waits are met."""
        for knows, heard, clocks in zip(self.knows, self.heard, self.clocks, strict=True):
            known = knows[queues]
            for events in self.waits[tasks].T:
                np.maximum(known, heard[events], out=known)
            clocks[tasks] = known
            knows[queues] = known
        self.head[queues] += 1
        self.knows[0][queues, queues] = self.head[queues]
        signalled = tuple(knows[queues] for knows in self.knows)
        for events in self.signals[tasks].T:
            self._signal(events, signalled)

    def _signal(self, events: Ints, known: Sequence[Clock]) -> None:
        """One signal of each task; known: what the tasks know, themselves included."""
        order = np.argsort(events, kind="stable")
        found, starts, counts = np.unique(events[order], return_index=True, return_counts=True)
        for axis, (heard, own_news) in enumerate(zip(self.heard, known, strict=True)):
            # peers along the axis of an event know of themselves what this rank does of itself
            by_peers = (self.team_of[events] == axis)[:, None]
            news = np.where(by_peers, known[0], own_news) if axis else own_news
            latest = np.maximum.reduceat(news[order], starts, axis=0)
            heard[found] = np.maximum(heard[found], latest)
        real = found < len(self.left) - 1
        self.left[found[real]] -= counts[real]
        for heard in self.heard:
            heard[-1] = 0
