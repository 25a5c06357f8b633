"""Queues of virtual SMs: static ones, and regions that are drained because the data decide their
size.

Comes in: an EventGraph and a number of SMs. Goes out: Queues. All tasks stand in program order, in
one queue each, and those whose guard does not hold are passed over; or the ops of a region leave
their tasks to a list that the routing task writes once it has run, from which every SM takes the
next one (an atomic head) when it comes to the region. Program order is a linear extension of the
graph, whatever subset of tasks runs, so no set of queues waits in a circle. Waits that others
imply, for every value of what is unknown, are left out (knowledge.py). Next: check.py.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Literal, get_args

from distmega.errors import ProgramError
from distmega.kernels.events.arguments import require, require_count
from distmega.kernels.events.graph import EventGraph, EventId, TaskGrid, TaskId
from distmega.kernels.events.queues.cost import drains_faster, total_rows

Dynamic = Literal["auto", "never", "always"]
"""Whether regions that the data size are drained; auto: where that is expected to take less."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A task in a queue. first: events awaited before its guards are looked at, for they complete
    what these read; waits: events awaited after, by tasks that run.
    """

    task: TaskId
    first: tuple[EventId, ...] = ()
    waits: tuple[EventId, ...] = ()


@dataclass(frozen=True, slots=True)
class Drain:
    """Take tasks of a region off its list until none is left, once `first` are complete."""

    region: int
    first: tuple[EventId, ...] = ()


@dataclass(frozen=True, slots=True)
class Region:
    """Consecutive ops whose tasks the data pick, by one vector of starts. entries: all tasks that
    may run, in program order; the list holds those that do. capacity: the most that can.
    """

    ops: tuple[str, ...]
    starts: str
    entries: tuple[Entry, ...]
    capacity: int


@dataclass(frozen=True)
class Queues:
    """What each SM does, and the regions that are drained."""

    graph: EventGraph
    sms: tuple[tuple[Entry | Drain, ...], ...]
    regions: tuple[Region, ...] = ()

    @cached_property
    def region_of(self) -> dict[str, int]:
        """Op -> its region."""
        return {op: n for n, region in enumerate(self.regions) for op in region.ops}

    def num_waits(self) -> int:
        """Waits that are left, those of drains included."""
        entries = [entry for sm in self.sms for entry in sm]
        entries += [entry for region in self.regions for entry in region.entries]
        return sum(len(e.first) + (len(e.waits) if isinstance(e, Entry) else 0) for e in entries)


def assign_tasks(graph: EventGraph, num_sms: int, dynamic: Dynamic = "auto") -> Queues:
    """Queues for `num_sms` SMs, with all waits. ProgramError for fewer than one, for another word
    than those of Dynamic, or for regions to be drained across ranks, where each would have to know
    what the others took.
    """
    require(graph, EventGraph, "graph", "what analyse_events gives")
    require_count(num_sms, "num_sms")
    if dynamic not in get_args(Dynamic):
        raise ProgramError(
            f"dynamic {dynamic!r}",
            expected=f"one of {', '.join(get_args(Dynamic))}",
            remedy="choose one of these",
        )
    across = any(event.sources != "own" for event in graph.events)
    regions = [] if dynamic == "never" or across else _regions(graph)
    if dynamic == "always" and across:
        raise ProgramError(
            "a dynamic schedule of tasks that wait for other ranks",
            expected="regions within a rank",
            remedy="leave dynamic at auto or never",
        )
    if dynamic == "auto":
        regions = [grids for grids in regions if drains_faster(graph, grids, num_sms)]
    drained = {grid.op: n for n, grids in enumerate(regions) for grid in grids}
    sms: list[list[Entry | Drain]] = [[] for _ in range(num_sms)]
    entered: set[int] = set()
    position = 0
    for grid in graph.grids:
        region = drained.get(grid.op)
        if region is None:
            for number in range(grid.num_tasks):
                sms[position % num_sms].append(Entry((grid.op, number)))
                position += 1
        elif region not in entered:
            entered.add(region)
            for queue in sms:
                queue.append(Drain(region))
    listed = tuple(
        Region(
            ops=tuple(grid.op for grid in grids),
            starts=grids[0].starts,
            entries=tuple(Entry((g.op, n)) for g in grids for n in range(g.num_tasks)),
            capacity=sum(_capacity(graph, grid) for grid in grids),
        )
        for grids in regions
    )
    return with_waits(Queues(graph=graph, sms=tuple(map(tuple, sms)), regions=listed))


def with_waits(queues: Queues) -> Queues:
    """Queues with every wait that their order needs: on each event of a task, and before a guard or
    a count is read on what writes it.
    """
    graph = queues.graph
    reported = {
        producer: event
        for event, producers in graph.producers.items()
        for producer in producers
        if graph.sources_of[event[0]] == "own"
    }

    def first_waits(task: TaskId) -> tuple[EventId, ...]:
        writers = [each for name in starts_read(graph, task) for each in graph.writers[name]]
        ops = {op for op, _ in writers}
        waits = [e for e in graph.waits.get(task, ()) if _producer(graph, e) in ops]
        awaited = {_producer(graph, e) for e in waits}
        # what a task counts by, and does not read itself
        others = [reported[each] for each in writers if each[0] not in awaited and each in reported]
        return tuple(dict.fromkeys(waits + others))

    def filled(entry: Entry) -> Entry:
        first = first_waits(entry.task)
        rest = tuple(e for e in graph.waits.get(entry.task, ()) if e not in first)
        return Entry(entry.task, first, rest)

    drains = [
        Drain(
            number, tuple(dict.fromkeys(e for one in region.entries for e in first_waits(one.task)))
        )
        for number, region in enumerate(queues.regions)
    ]
    sms = tuple(
        tuple(drains[e.region] if isinstance(e, Drain) else filled(e) for e in queue)
        for queue in queues.sms
    )
    regions = tuple(
        replace(region, entries=tuple(replace(filled(e), first=()) for e in region.entries))
        for region in queues.regions
    )
    return replace(queues, sms=sms, regions=regions)


def starts_read(graph: EventGraph, task: TaskId) -> tuple[str, ...]:
    """Vectors of starts that a task's guards, or the counts of what it awaits, are read from."""
    names = [g.starts for g in graph.guards.get(task, ()) if hasattr(g, "starts")]
    counts = {event.name: event.count.starts for event in graph.events}
    names += [counts[name] for name, _ in graph.waits.get(task, ()) if counts[name]]
    return tuple(dict.fromkeys(names))


def _producer(graph: EventGraph, event: EventId) -> str:
    return next(each.producer for each in graph.events if each.name == event[0])


def _regions(graph: EventGraph) -> list[list[TaskGrid]]:
    """Runs of consecutive ops all of whose tasks are guarded by rows of the same groups."""

    def key(grid: TaskGrid) -> str:
        guarded = all((grid.op, n) in graph.guards for n in range(grid.num_tasks))
        return grid.starts if guarded else ""

    return [list(grids) for starts, grids in groupby(graph.grids, key) if starts]


def _capacity(graph: EventGraph, grid: TaskGrid) -> int:
    """The most tasks of an op that can run: each group has a last tile that need not be full, and
    all groups together no more rows than the tensor that holds them.
    """
    assert grid.rows is not None
    sizes = {dim.axis: dim for dim in grid.dims}
    row, group = sizes.get(grid.rows.row_axis), sizes.get(grid.rows.group_axis)
    if row is None or group is None or group.size > 1:
        return grid.num_tasks
    rows = total_rows(graph, grid.op)
    most_groups = min(group.extent, rows)
    tiles = min((rows + most_groups * (row.size - 1)) // row.size, group.extent * row.num_tiles)
    return tiles * (grid.num_tasks // (group.num_tiles * row.num_tiles))
