"""Proof that queues can neither hang nor race, for every value of symbols and every routing.

Comes in: Queues. Goes out: nothing, or a CheckError that names tasks. What conflicts is found anew,
from the regions that tasks touch, in coordinates of groups and rows: two tasks share an element
there if they can for some routing, and tasks of different groups or rows can't for any.

No hang: tasks stand in program order in every queue and list, once each, drains where their ops
stand, and each awaits only events of earlier ops. So of the tasks that run, whichever these are,
the first that has not ended can go on: what it awaits has ended, for counts are of tasks that run.
A list is popped in order, so a task that is taken waits for tasks that were taken, or stand before
the drain of their queue.

No race: of two tasks that conflict the later knows the earlier (knowledge.py), whose reasoning
holds whichever tasks run; and before a guard or a count is read, what writes it is known, which no
later op overwrites. Next: interpret.py.
"""

from collections import defaultdict
from collections.abc import Iterator

from distmega.errors import CheckError
from distmega.kernels.events.arguments import require
from distmega.kernels.events.graph import EventGraph, TaskId
from distmega.kernels.events.queues.assign import Drain, Entry, Queues, starts_read
from distmega.kernels.events.queues.knowledge import Knowledge


def check_queues(queues: Queues) -> None:
    """Raises CheckError unless all tasks run once in an order that nothing can break. All ranks
    have the same queues; what a task reads of another rank, or overwrites once another has read it,
    it must await itself, since it knows nothing of that rank's order.
    """
    require(queues, Queues, "queues", "what make_queues gives")
    _check_lasting(queues.graph)
    _check_order(queues)
    knowledge = Knowledge(queues)
    graph = queues.graph
    for task, others in graph.conflicts.items():
        for other in others:
            if not knowledge.knows(task, other):
                raise _race(task, other)
    for entry in _entries(queues):
        awaited = {
            producer
            for event in (*entry.first, *entry.waits)
            if graph.sources_of[event[0]] != "own"
            for producer in graph.producers[event]
        }
        for other in graph.conflicts.get(entry.task, ()):
            crosses = frozenset((other[0], entry.task[0])) in graph.crossing
            if crosses and other not in awaited:
                raise _race(entry.task, other)
        for starts in starts_read(graph, entry.task):
            _check_starts(queues, knowledge, entry, starts)


def _check_starts(queues: Queues, knowledge: Knowledge, entry: Entry, starts: str) -> None:
    """What guards and counts are read from is there before they are read: by what the SM awaited
    whatever runs.
    """
    for writer in queues.graph.writers[starts]:
        if not knowledge.before_guards[entry.task] >> knowledge.bit[writer] & 1:
            raise CheckError(
                f"{_name(entry.task)} reads {starts!r}, which {writer[0]!r} need not have written",
                expected="a wait for it before guards and counts are read",
                remedy="await its event first",
            )


def _check_lasting(graph: EventGraph) -> None:
    """What guards and counts of tasks are read from is written by earlier ops alone: whether a task
    runs is asked at any time, of those that do not run as well.
    """
    ops = {grid.op: n for n, grid in enumerate(graph.grids)}
    for task in graph.all_tasks():
        for starts in starts_read(graph, task):
            for writer, _ in graph.writers[starts]:
                if ops[writer] >= ops[task[0]]:
                    raise CheckError(
                        f"{_name(task)} reads {starts!r}, which {writer!r} overwrites",
                        expected="starts that stay as they are once tasks are guarded by them",
                        remedy="let it write a tensor of its own",
                    )


def _check_order(queues: Queues) -> None:
    graph = queues.graph
    order = {task: n for n, task in enumerate(graph.all_tasks())}
    ops = {grid.op: n for n, grid in enumerate(graph.grids)}
    seen: dict[TaskId, int] = defaultdict(int)
    for sm, queue in enumerate(queues.sms):
        last = -1
        for entry in queue:
            if isinstance(entry, Drain):
                here = order[queues.regions[entry.region].entries[0].task]
            else:
                here = order[entry.task]
                seen[entry.task] += 1
            if here <= last:
                raise _unordered(f"SM {sm}")
            last = here
    for number, region in enumerate(queues.regions):
        positions = [order[entry.task] for entry in region.entries]
        if positions != sorted(positions):
            raise _unordered(f"the list of region {number}")
        for entry in region.entries:
            seen[entry.task] += 1
        drains = sum(isinstance(e, Drain) and e.region == number for q in queues.sms for e in q)
        if not drains:
            raise _unordered(f"region {number}, which nobody drains,")
    for task in order:
        if seen[task] != 1:
            raise CheckError(
                f"{_name(task)} stands in {seen[task]} queues and lists",
                expected="each task once",
                remedy="make the queues with make_queues",
            )
    for entry in _entries(queues):
        for event in (*entry.first, *entry.waits):
            for producer in graph.producers.get(event, ()):
                if ops[producer[0]] >= ops[entry.task[0]]:
                    raise CheckError(
                        f"{_name(entry.task)} waits for {_name(producer)}",
                        expected="waits for earlier ops only",
                        remedy="derive events with analyse_events",
                    )


def _entries(queues: Queues) -> Iterator[Entry]:
    for queue in queues.sms:
        yield from (entry for entry in queue if isinstance(entry, Entry))
    for region in queues.regions:
        yield from region.entries


def _unordered(where: str) -> CheckError:
    return CheckError(
        f"{where} is not in program order",
        expected="tasks of earlier ops first, drains where their ops stand",
        remedy="make the queues with make_queues",
    )


def _race(task: TaskId, other: TaskId) -> CheckError:
    return CheckError(
        f"race: {_name(other)} need not have ended when {_name(task)} starts",
        expected="a chain of queues and waits from the one to the other, whatever the data say",
        remedy="let the later await an event of the earlier",
    )


def _name(task: TaskId) -> str:
    return f"{task[0]}[{task[1]}]"
