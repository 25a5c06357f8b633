"""Static schedule: which SM runs which tasks in which order, and the waits that are left.

In: a TaskGraph. Out: a Schedule. Tasks are placed in program order, each on the SM where it ends
earliest, costs counted in bytes. A task only ever waits for tasks of earlier groups, on its own
rank or on others, so program order is a linear extension of the graph of all ranks, every queue is
a part of it, and no set of queues can wait in a circle.

Then waits are pruned. A task knows what has completed before it: its queue's tasks so far and all
that they and its waits know (vector clocks). A wait stays only if some task it waits for is not
known already, so each remaining wait is needed. All ranks have equal queues, hence few clocks
describe a task's knowledge: of its own rank's queues, and of any peer's along a mesh axis. Events
that nobody waits for any more are dropped. check/schedule.py proves the result by other means. Next
on the walk: encoding.py.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from distmega.errors import VerifyError
from distmega.kernels.tasks.tile import task_bytes, tile_bytes
from distmega.kernels.tasks.types import (
    Schedule,
    ScheduledTask,
    TaskEvents,
    TaskGraph,
    TaskSignal,
    TaskWait,
)

TASK_BYTES = 16 * 1024
"""What starting a task costs, in bytes one SM could have read meanwhile."""

HOP_BYTES = 64 * 1024
"""What a dependency between two SMs costs, likewise: 2 us at 31 KB/us of an H200's SM."""

Clock = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatGraph:
    """A graph's tasks and events numbered through, in program order."""

    first_task: tuple[int, ...]
    groups: tuple[int, ...]
    waits: tuple[tuple[int, ...], ...]
    triggers: tuple[tuple[int, ...], ...]
    counts: tuple[int, ...]
    all_ranks: tuple[bool, ...]
    teams: tuple[tuple[str, int], ...]
    """Of each event: the mesh axis and the number of the ranks that trigger it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """SM and place in its queue of each task."""

    sm: tuple[int, ...]
    position: tuple[int, ...]
    num_sms: int


@dataclass(slots=True)
class _Finish:
    """When the tasks that an event waits for end: the last of all, its SM (-1 for those of several
    ranks), and the last on other SMs.
    """

    last: float = 0.0
    sm: int = -1
    elsewhere: float = 0.0

    def add(self, finish: float, sm: int) -> None:
        """One more task."""
        if sm == self.sm:
            self.last = max(self.last, finish)
        elif finish > self.last:
            self.last, self.sm, self.elsewhere = finish, sm, self.last
        else:
            self.elsewhere = max(self.elsewhere, finish)

    def heard_by(self, sm: int, hop: float) -> float:
        """When an SM knows of the event; hop: what it takes from another one."""
        if sm != self.sm or sm < 0:
            return self.last + hop
        return max(self.last, self.elsewhere + hop) if self.elsewhere else self.last


def schedule_graph(graph: TaskGraph, num_sms: int, *, hop_bytes: int = HOP_BYTES) -> Schedule:
    """Queues for `num_sms` SMs, the same on every rank."""
    flat = flatten_graph(graph)
    placement = _assign_tasks(graph, flat, num_sms, hop_bytes)
    waits = _prune_waits(flat, placement)
    return _assemble(graph, flat, placement, waits)


def flatten_graph(graph: TaskGraph) -> FlatGraph:
    """Numbers tasks and events; raises VerifyError if a group waits for a later one."""
    first_task = [0]
    for group in graph.groups:
        first_task.append(first_task[-1] + group.num_tasks)
    owners = [nth for nth, group in enumerate(graph.groups) for _ in range(group.num_tasks)]
    waits: list[list[int]] = [[] for _ in owners]
    triggers: list[tuple[int, ...]] = [()] * len(owners)
    counts: list[int] = []
    remote: list[bool] = []
    teams: list[tuple[str, int]] = []
    for event in graph.events:
        _verify_order(event)
        base = len(counts)
        start = first_task[event.producer]
        for task, notify in enumerate(event.notify):
            triggers[start + task] += tuple(base + one for one in notify)
        for consumer, needed in event.consumers:
            for task, events in enumerate(needed, start=first_task[consumer]):
                waits[task] += [base + one for one in events]
        counts += event.counts
        remote += [event.all_ranks] * event.num_events
        group = graph.groups[event.producer]
        team = (group.mesh_axis, group.num_ranks) if event.all_ranks else ("", 1)
        teams += [team] * event.num_events
    return FlatGraph(
        first_task=tuple(first_task),
        groups=tuple(owners),
        waits=tuple(map(tuple, waits)),
        triggers=tuple(triggers),
        counts=tuple(counts),
        all_ranks=tuple(remote),
        teams=tuple(teams),
    )


def _verify_order(event: TaskEvents) -> None:
    for consumer, _ in event.consumers:
        if consumer <= event.producer:
            raise VerifyError(
                f"group {consumer} waits for group {event.producer}",
                expected="waits for earlier groups only",
                remedy="list groups in program order",
            )


def _assign_tasks(graph: TaskGraph, flat: FlatGraph, num_sms: int, hop_bytes: int) -> Placement:
    """Each task goes where it ends first: the SM that is free first, or the one of its latest
    producer, which spares a hop. Weights load while the task still waits.
    """
    tensors = graph.segment.tensor_map()
    weights, costs = [], []
    for group in graph.groups:
        if tile := tile_bytes(group):  # the L2 cache has its weights, as all that it reads
            weights += [0.0] * group.num_tasks
            costs += [tile] * group.num_tasks
        else:
            weights += task_bytes(group, tensors, ("weight",)).tolist()
            costs += task_bytes(group, tensors).tolist()
    free = [0.0] * num_sms
    heap = [(0.0, sm) for sm in range(num_sms)]
    known = [_Finish() for _ in flat.counts]
    num_queued = [0] * num_sms
    sms, positions = [], []
    for task, (cost, weight) in enumerate(zip(costs, weights, strict=True)):
        while heap[0][0] != free[heap[0][1]]:
            heapq.heappop(heap)
        candidates = {heap[0][1]: None}
        events = [known[event] for event in flat.waits[task]]
        if events:
            candidates[max(events, key=lambda event: event.last).sm] = None
        best, start = -1, float("inf")
        for sm in candidates:
            heard = (event.heard_by(sm, hop_bytes) for event in events)
            ready = max((free[sm] + weight, *heard))
            if ready < start:
                best, start = sm, ready
        free[best] = finish = start + cost - weight + TASK_BYTES
        heapq.heappush(heap, (finish, best))
        sms.append(best)
        positions.append(num_queued[best])
        num_queued[best] += 1
        for event in flat.triggers[task]:
            known[event].add(finish, -1 if flat.all_ranks[event] else best)
    return Placement(sm=tuple(sms), position=tuple(positions), num_sms=num_sms)


class _Knowledge:
    """What a wait for an event tells: which tasks it waits for, and what these knew."""

    __slots__ = ("clocks", "needed")

    def __init__(self, num_clocks: int, num_sms: int) -> None:
        self.needed: Clock = np.zeros(num_sms, dtype=np.int32)
        self.clocks: Clock = np.zeros((num_clocks, num_sms), dtype=np.int32)


def _prune_waits(flat: FlatGraph, placement: Placement) -> list[tuple[int, ...]]:
    """For each task the events it still has to wait for.

    A clock holds, for each queue, the number of its tasks known to be complete: the first of the
    own rank, then one for the peers along each mesh axis.
    """
    axes = sorted({axis for axis, num_ranks in flat.teams if num_ranks > 1})
    clock_of = [1 + axes.index(axis) if size > 1 else 0 for axis, size in flat.teams]
    num_sms = placement.num_sms
    clocks = np.zeros((num_sms, 1 + len(axes), num_sms), dtype=np.int32)
    events: dict[int, _Knowledge] = {}
    kept = []
    for task, sm in enumerate(placement.sm):
        known = clocks[sm]
        waits = _needed_waits(flat, task, known, events, clock_of)
        for event in waits:
            np.maximum(known, events[event].clocks, out=known)
        kept.append(waits)
        known[0, sm] = placement.position[task] + 1
        for event in flat.triggers[task]:
            heard = events.get(event)
            if heard is None:
                heard = events[event] = _Knowledge(1 + len(axes), num_sms)
            heard.needed[sm] = known[0, sm]
            np.maximum(heard.clocks, known, out=heard.clocks)
            # peers along that axis have triggered it as well
            signalled = heard.clocks[clock_of[event]]
            np.maximum(signalled, known[0], out=signalled)
    return kept


def _needed_waits(
    flat: FlatGraph,
    task: int,
    known: Clock,
    events: dict[int, _Knowledge],
    clock_of: Sequence[int],
) -> tuple[int, ...]:
    """The waits of a task that neither its queue nor its other waits make superfluous. clock_of:
    of each event, the clock of those who trigger it.
    """

    def implied(event: int, clocks: Clock) -> bool:
        needed, peers = events[event].needed, clock_of[event]
        return bool((clocks[0] >= needed).all()) and (
            not peers or bool((clocks[peers] >= needed).all())
        )

    kept: list[int] = []
    clocks = known.copy()
    for event in sorted(set(flat.waits[task]), reverse=True):
        if not implied(event, clocks):
            kept.append(event)
            np.maximum(clocks, events[event].clocks, out=clocks)
    for event in tuple(kept) if len(kept) > 1 else ():
        rest = known.copy()
        for other in kept:
            if other != event:
                np.maximum(rest, events[other].clocks, out=rest)
        if implied(event, rest):
            kept.remove(event)
    return tuple(sorted(kept))


def _assemble(
    graph: TaskGraph, flat: FlatGraph, placement: Placement, waits: Sequence[tuple[int, ...]]
) -> Schedule:
    """Queues with dense event numbers; signals nobody waits for are dropped."""
    used = sorted({event for events in waits for event in events})
    number = {event: i for i, event in enumerate(used)}
    targets = [flat.counts[event] * flat.teams[event][1] for event in used]
    all_waits = [TaskWait(event=i, count=count) for i, count in enumerate(targets)]
    signals = [TaskSignal(event=i, all_ranks=flat.all_ranks[event]) for i, event in enumerate(used)]
    queues: list[list[ScheduledTask]] = [[] for _ in range(placement.num_sms)]
    for task, (group, sm) in enumerate(zip(flat.groups, placement.sm, strict=True)):
        queues[sm].append(
            ScheduledTask(
                group=group,
                task=task - flat.first_task[group],
                waits=tuple(all_waits[number[event]] for event in waits[task]),
                signals=tuple(signals[number[e]] for e in flat.triggers[task] if e in number),
            )
        )
    return Schedule(graph=graph, queues=tuple(map(tuple, queues)), num_events=len(used))
