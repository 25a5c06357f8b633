"""Checker: proves that a Schedule can neither deadlock nor race, over ranks and launches.

In: a Schedule. Out: nothing, or a CheckError that names tasks and ranks. It trusts nothing of how
the schedule was made, neither the events of the graph nor the clocks by which waits were pruned:
it finds what conflicts anew, and asks launch_clocks.py what is complete when a task starts. All
ranks have the same queues. An event that all ranks trigger has a counter for each source rank;
launch e uses copy `e % peer_buffers` of the receive buffers. Next on the walk: encoding.py.

Why one launch is enough. A rank begins a launch when its own one before has ended, and its signals
of one counter come in the order of launches, so within a launch tasks know what they know in the
first one. Of a peer's earlier launches a task knows
- all, if it knows of any task of that peer's same launch, for that began after the others ended;
- else what its rank knew at the end of the launch before: `end` of that one, and by the same
  argument all those before that one, if `end` is of any task at all.

Why two ranks are enough. All ranks run the same tasks, so two tasks of the ranks 0 and 1 and the
memory of rank 0 stand for any. In a receive buffer ranks write one slot each, that of their number,
which is checked: so writes of different ranks never meet. As the owner may have any number, a slot
that is read may be its own, or any peer's; both must hold.
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from distmega.errors import CheckError, counted
from distmega.kernels.runtime.arena import PEER_BUFFERS
from distmega.kernels.tasks.check.launch_clocks import Clocks, StuckError, compute_clocks
from distmega.kernels.tasks.check.queues import CheckedTask, Queues, run_queues
from distmega.kernels.tasks.expand import SOURCE
from distmega.kernels.tasks.footprints import Footprints
from distmega.kernels.tasks.types import Schedule, ScheduledTask, TaskGroup
from distmega.program.types import Access, Index

MAX_RANKS = 3
"""That a deadlock is described with."""

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """How the tasks of one group on rank 0, or on a peer (rank 1), touch a tensor in the memory of
    rank 0. axis: along which the ranks lie that all write a slot each, else "".
    """

    group: int
    rank: int
    footprint: int
    write: bool
    axis: str

    def meets(self, other: "Use") -> bool:
        """Whether both may touch an element, one of them to write: not in slots of two ranks. Two
        tasks of one peer are as two of rank 0.
        """
        slots = self.axis == other.axis != "" and (self.rank or other.rank)
        return (self.write or other.write) and not slots


def check_schedule(schedule: Schedule, peer_buffers: int = PEER_BUFFERS) -> None:
    """Raises CheckError unless any number of launches on all ranks can't deadlock, and tasks that
    conflict always come in program order, a launch after the one before.

    peer_buffers: copies of each receive buffer.
    """
    try:
        clocks = compute_clocks(schedule)
    except StuckError:
        run_queues([lay_out(schedule, 0, num_ranks_to_check(schedule))])
        raise AssertionError("both checkers must see a deadlock") from None
    _check_complete(schedule, clocks)
    _Races(schedule, clocks, peer_buffers).check()


def num_ranks_to_check(schedule: Schedule) -> int:
    """Enough ranks to see a deadlock."""
    return min(schedule.graph.team_size, MAX_RANKS)


def _check_complete(schedule: Schedule, clocks: Clocks) -> None:
    """Every task of the graph stands in a queue, once."""
    for group, numbers in zip(schedule.graph.groups, clocks.number_of, strict=True):
        if (numbers < 0).any():
            raise CheckError(
                f"task {int(np.argmin(numbers))} of {group.op.name!r} stands in no queue",
                expected="every task of the graph, once",
                remedy="schedule all of them",
            )
    if sum(map(len, schedule.queues)) != schedule.graph.num_tasks:
        raise CheckError(
            f"{counted(sum(map(len, schedule.queues)), 'task')} in queues",
            expected=f"the {schedule.graph.num_tasks} of the graph, once each",
            remedy="schedule each task once",
        )


class _Races:
    """Looks for conflicting tasks that are not ordered."""

    def __init__(self, schedule: Schedule, clocks: Clocks, peer_buffers: int) -> None:
        self.groups, self.clocks, self.peer_buffers = schedule.graph.groups, clocks, peer_buffers
        self.footprints = Footprints(schedule.graph.segment)
        self.meetings: dict[tuple[int, int], tuple[Ints, Ints]] = {}
        self.knows_peers = {
            axis: clock.max(axis=1, initial=0) > 0 for axis, clock in clocks.peers.items()
        }

    def check(self) -> None:
        """Every pair of uses, in the same launch and in launches that share a copy."""
        for tensor, uses in self.uses().items():
            copies = self.peer_buffers if any(use.axis for use in uses) else 1
            for one, other in product(uses, repeat=2):
                if one.meets(other):
                    i, j = self.meeting(one.footprint, other.footprint)
                    first = self.clocks.number_of[one.group][i]
                    then = self.clocks.number_of[other.group][j]
                    self.check_pair(f"{tensor!r} of rank 0", one, other, first, then, copies)

    def check_pair(
        self, what: str, one: Use, other: Use, first: Ints, then: Ints, copies: int
    ) -> None:
        near = one.rank == other.rank
        axis = "" if near else self.axis_of(what, one, other)
        ahead = self.precedes(first, then, axis)
        if one.group == other.group:
            same = (first == then) & near
            ahead |= self.precedes(then, first, axis) | same
        if one.group <= other.group:
            self.require(ahead, what, (one, 0, first), (other, 0, then))
        if not near:
            for apart in {copies, 2 * copies}:
                known = self.knows_before(first, then, apart, axis)
                self.require(known, what, (one, 0, first), (other, apart, then))

    def axis_of(self, what: str, one: Use, other: Use) -> str:
        """The mesh axis along which two ranks differ; CheckError where they differ along two."""
        axes = {one.axis, other.axis} - {""}
        if len(axes) > 1:
            raise CheckError(
                f"{what} is written over mesh axes {sorted(axes)}",
                expected="a receive buffer of one exchange",
                remedy="give every collective a buffer of its own",
            )
        return axes.pop()

    def precedes(self, first: Ints, then: Ints, axis: str) -> Bools:
        """Whether a task has completed before its partner of the same launch starts. axis: along
        which their ranks differ, "" where they are of one rank.
        """
        clock = self.clocks.peers[axis] if axis else self.clocks.own
        known: Bools = clock[then, self.clocks.queue[first]] > self.clocks.position[first]
        return known

    def knows_before(self, first: Ints, then: Ints, apart: int, axis: str) -> Bools:
        """Whether a task has completed before its partner starts on another rank along an axis,
        `apart` launches later.
        """
        end = self.clocks.ends[axis]
        if apart == 1:
            at_end = end[self.clocks.queue[first]] > self.clocks.position[first]
        else:
            at_end = np.full(len(first), (end > 0).any())
        known: Bools = self.knows_peers[axis][then] | at_end
        return known

    def require(
        self, holds: Bools, what: str, one: tuple[Use, int, Ints], other: tuple[Use, int, Ints]
    ) -> None:
        if not holds.all():
            at = int(np.argmin(holds))
            raise CheckError(
                f"race on {what}: {self.locate(*one, at)} need not come before "
                f"{self.locate(*other, at)}",
                expected="a chain of queues, signals and waits from the one to the other",
                remedy="make the later task wait for an event of the earlier",
            )

    def locate(self, use: Use, launch: int, numbers: Ints, at: int) -> str:
        number = int(numbers[at])
        task = int(np.flatnonzero(self.clocks.number_of[use.group] == number)[0])
        name = f"{self.groups[use.group].op.name}[{task}] of launch {launch}"
        return f"{name!r} (rank {use.rank}, queue {self.clocks.queue[number]})"

    def meeting(self, one: int, other: int) -> tuple[Ints, Ints]:
        """Tasks of two footprints that share an element."""
        if (one, other) not in self.meetings:
            i, j = np.nonzero(self.footprints.overlap(one, other))
            self.meetings[one, other] = i, j
        return self.meetings[one, other]

    def uses(self) -> dict[str, list[Use]]:
        """Accesses to the memory of rank 0, by tensor, of tensors that the segment writes."""
        footprints = self.footprints
        written = {footprints.base(a.tensor) for group in self.groups for a in group.op.writes}
        found: dict[str, list[Use]] = defaultdict(list)
        for nth, group in enumerate(self.groups):
            for accesses, write in ((group.op.reads, False), (group.op.writes, True)):
                for access in accesses:
                    base = footprints.base(access.tensor)
                    if base not in written:
                        continue
                    axis = _require_slots(group, access) if write else ""
                    footprint = footprints.footprint(group, access)
                    for rank in range(min(group.num_ranks, 2) if axis else 1):
                        use = Use(group=nth, rank=rank, footprint=footprint, write=write, axis=axis)
                        found[base].append(use)
        return found


def _require_slots(group: TaskGroup, access: Access) -> str:
    """The mesh axis along which ranks write slots of a receive buffer, "" for other writes."""
    if group.mesh_axis and access.dims[:1] != (Index(axes=(SOURCE,)),):
        raise CheckError(
            f"op {group.op.name!r} writes {access} on every rank",
            expected=f"a slot for each rank: axis {SOURCE!r} in the first dim, alone",
            remedy="give the receive buffer one slot a rank",
        )
    return group.mesh_axis


def lay_out(schedule: Schedule, epoch: int, num_ranks: int) -> list[Queues]:
    """One launch: the queues of each rank with counters told apart by source rank. Ranks along
    several mesh axes are laid out as one team: what all of them wait for stays the same.
    """
    groups = schedule.graph.groups
    remote = {
        signal.event: groups[task.group].num_ranks
        for queue in schedule.queues
        for task in queue
        for signal in task.signals
        if signal.all_ranks
    }

    def waits(task: ScheduledTask) -> list[tuple[int, int]]:
        found = []
        for wait in task.waits:
            sources = num_ranks if wait.event in remote else 1
            count = wait.count // remote.get(wait.event, 1)
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

    def task_of(task: ScheduledTask, rank: int) -> CheckedTask:
        return CheckedTask(
            name=f"{groups[task.group].op.name}[{task.task}] of launch {epoch}",
            waits=tuple(waits(task)),
            signals=tuple(signals(task, rank)),
        )

    return [
        [[task_of(task, rank) for task in queue] for queue in schedule.queues]
        for rank in range(num_ranks)
    ]
