"""What a task knows to be complete when it starts, whatever symbols and data turn out to be.

Comes in: Queues. Goes out: for each task the set of tasks that have ended, if they run at all. A
task knows those before it in its queue, and those that its waits count; of each of these that
surely runs when it does itself, it knows all that that one knew. Through a task that may be passed
over nothing is learnt but what its SM awaited before its guards. Sets are bits of ints, by place in
program order. Used by check.py, and to leave out waits that others imply.
"""

from collections.abc import Iterable
from dataclasses import replace

from distmega.kernels.events.graph import EventGraph, EventId, TaskId
from distmega.kernels.events.queues.assign import (
    Drain,
    Dynamic,
    Entry,
    Queues,
    Region,
    assign_tasks,
    starts_read,
)
from distmega.kernels.events.values import Guard


class Knowledge:
    """The sets of all tasks, in program order; with `prune`, the waits that are needed for them."""

    def __init__(self, queues: Queues, *, prune: bool = False) -> None:
        graph = queues.graph
        self.graph, self.queues, self.prune = graph, queues, prune
        self.bit = {task: n for n, task in enumerate(graph.all_tasks())}
        self.known: dict[TaskId, int] = {}
        self.before_guards: dict[TaskId, int] = {}
        self.kept: dict[TaskId | tuple[int, int], Entry | Drain] = {}
        self._drained: dict[int, int] = {}
        self._writers: dict[tuple[str, ...], int] = {}
        self._region_writers = [self._starts_writers_of(region) for region in queues.regions]
        self._queue = [_SmKnowledge() for _ in queues.sms]
        self._walk()

    def bits(self, tasks: Iterable[TaskId]) -> int:
        """A set of tasks."""
        found = 0
        for task in tasks:
            found |= 1 << self.bit[task]
        return found

    def knows(self, task: TaskId, other: TaskId) -> bool:
        """Whether `other` has ended when `task` starts, if both run."""
        return bool(self.known[task] >> self.bit[other] & 1)

    def _walk(self) -> None:
        """Every queue up to an op before any queue goes beyond it."""
        nexts = [0] * len(self.queues.sms)
        for grid in self.graph.grids:
            region = self.queues.region_of.get(grid.op)
            for sm, queue in enumerate(self.queues.sms):
                while nexts[sm] < len(queue):
                    entry = queue[nexts[sm]]
                    if isinstance(entry, Drain):
                        if entry.region != region:
                            break
                        self._drain(sm, nexts[sm], entry)
                    elif entry.task[0] == grid.op:
                        self._entry(sm, entry)
                    else:
                        break
                    nexts[sm] += 1
            if region is not None:
                for entry in self.queues.regions[region].entries:
                    if entry.task[0] == grid.op:
                        self._listed(region, entry)

    def _entry(self, sm: int, entry: Entry) -> None:
        here = self._queue[sm]
        guards = self.graph.guards.get(entry.task, ())
        base = here.always | here.done
        for other, their_guards, known in here.guarded:
            if _implied(their_guards, guards):
                base |= known | 1 << self.bit[other]
        needed = self._starts_writers(entry.task)
        first, base = self._learn(entry.first, base, (), needed)
        here.always |= self._learnt(first, ())
        self.before_guards[entry.task] = here.always | here.done
        waits, base = self._learn(entry.waits, base, guards, self._conflicting(entry.task))
        self.kept[entry.task] = Entry(entry.task, first, waits)
        self.known[entry.task] = base
        here.done |= 1 << self.bit[entry.task]
        if guards:
            here.guarded.append((entry.task, guards, base))
        else:
            here.always |= base

    def _drain(self, sm: int, position: int, entry: Drain) -> None:
        here = self._queue[sm]
        needed = self._region_writers[entry.region]
        first, _ = self._learn(entry.first, here.always | here.done, (), needed)
        here.always |= self._learnt(first, ())
        known = here.always | here.done
        self._drained[entry.region] = self._drained.get(entry.region, known) & known
        self.kept[sm, position] = Drain(entry.region, first)

    def _listed(self, region: int, entry: Entry) -> None:
        """A task that any SM may take: it knows what all of them know when they come to drain."""
        guards = self.graph.guards.get(entry.task, ())
        base = self._drained.get(region, 0)
        self.before_guards[entry.task] = base
        waits, base = self._learn(entry.waits, base, guards, self._conflicting(entry.task))
        self.kept[entry.task] = Entry(entry.task, (), waits)
        self.known[entry.task] = base

    def _starts_writers(self, task: TaskId) -> int:
        """Writers of what a task's guards and counts are read from."""
        names = starts_read(self.graph, task)
        if names not in self._writers:
            self._writers[names] = self.bits(w for name in names for w in self.graph.writers[name])
        return self._writers[names]

    def _starts_writers_of(self, region: Region) -> int:
        """Of all tasks of a region."""
        found = 0
        for entry in region.entries:
            found |= self._starts_writers(entry.task)
        return found

    def _conflicting(self, task: TaskId) -> int:
        """Tasks that trigger what a task awaits: all that it conflicts with are among them."""
        events = self.graph.waits.get(task, ())
        return self.bits(p for event in events for p in self.graph.producers[event])

    def _learn(
        self,
        events: tuple[EventId, ...],
        base: int,
        guards: tuple[Guard, ...],
        needed: int,
    ) -> tuple[tuple[EventId, ...], int]:
        """The events that are awaited, and what is known after them: of what the events tell, all
        that is needed, whichever of them have been left out.
        """
        kept = list(events)
        if self.prune:
            own = [event for event in events if self.graph.sources_of[event[0]] == "own"]
            reported = self.bits(p for event in own for p in self.graph.producers[event]) & needed
            for event in sorted(own, key=lambda e: self._latest(e)):
                others = [each for each in kept if each != event]
                if reported & ~(base | self._learnt(others, guards)) == 0:
                    kept = others
        return tuple(kept), base | self._learnt(kept, guards)

    def _latest(self, event: EventId) -> int:
        return max(self.bit[task] for task in self.graph.producers[event])

    def _learnt(self, events: Iterable[EventId], guards: tuple[Guard, ...]) -> int:
        found = 0
        for event in events:
            for task in self.graph.producers[event]:
                found |= 1 << self.bit[task]
                if task in self.known and _implied(self.graph.guards.get(task, ()), guards):
                    found |= self.known[task]
        return found


class _SmKnowledge:
    """Of an SM at some point of its queue. always: what it knows of tasks whatever happens. done:
    its own tasks so far. guarded: those of them that may have been passed over.
    """

    __slots__ = ("always", "done", "guarded")

    def __init__(self) -> None:
        self.always = self.done = 0
        self.guarded: list[tuple[TaskId, tuple[Guard, ...], int]] = []


def _implied(wanted: tuple[Guard, ...], given: tuple[Guard, ...]) -> bool:
    """Whether all wanted guards hold wherever the given ones do."""
    return all(any(one.implies(other) for one in given) for other in wanted)


def make_queues(graph: EventGraph, num_sms: int, dynamic: Dynamic = "auto") -> Queues:
    """Queues for `num_sms` SMs with the waits that are needed. dynamic: whether regions whose size
    the data decide are drained; auto: as costs say. ProgramError as of assign_tasks.
    """
    return prune_waits(assign_tasks(graph, num_sms, dynamic))


def prune_waits(queues: Queues) -> Queues:
    """The queues without waits that their order and other waits imply, for every value of symbols
    and data.
    """
    kept = Knowledge(queues, prune=True).kept
    sms = tuple(
        tuple(
            kept[sm, position] if isinstance(entry, Drain) else kept[entry.task]
            for position, entry in enumerate(queue)
        )
        for sm, queue in enumerate(queues.sms)
    )
    regions = []
    for region in queues.regions:
        found = (kept[entry.task] for entry in region.entries)
        entries = tuple(entry for entry in found if isinstance(entry, Entry))
        regions.append(replace(region, entries=entries))
    return replace(queues, sms=sms, regions=tuple(regions))
