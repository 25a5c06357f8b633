"""Task graph: which task waits for which, derived from the regions they touch.

In: a segment (Program) and its task groups. Out: a TaskGraph, whose events say what must come
before what. Two tasks conflict when both touch an element and one of them writes it: read after
write, write after read, write after write, also through views. Every pair of groups that
conflicts on a tensor is looked at, whatever stands between them: leaving a wait out because others
imply it is the business of schedule.py, which knows the queues. Next on the walk: schedule.py.

The consumer tasks that need the same producer tasks share one event, whichever group they are of.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from distmega.errors import VerifyError
from distmega.kernels.tasks.footprints import Bools, Footprints
from distmega.kernels.tasks.mode import Mode
from distmega.kernels.tasks.types import TaskEvents, TaskGraph, TaskGroup
from distmega.program.types import Program

TaskSet = tuple[int, ...]
Pairs = tuple[tuple[int, int], ...]
"""Footprint ids (of the earlier group, of the later group) that conflict on some tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Touch:
    """One access of a group: the group's place, the footprint id, and whether it writes."""

    group: int
    footprint: int
    write: bool


@dataclass(slots=True)
class EventMemo:
    """Events of equal patterns, so that equal layers share their tuples."""

    patterns: dict[tuple[Pairs, Mode], int] = field(default_factory=dict)
    needed: list[tuple[TaskSet, ...]] = field(default_factory=list)
    fused: dict[tuple[int, tuple[int, ...]], "Fused"] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """Events of one producer group: counts and notify as in TaskEvents, waits a consumer group."""

    counts: tuple[int, ...]
    notify: tuple[TaskSet, ...]
    waits: tuple[tuple[TaskSet, ...], ...]


def build_task_graph(
    segment: Program, groups: Sequence[TaskGroup], team_size: int = 1, mode: Mode = "overlap"
) -> TaskGraph:
    """Derives the events between the groups, given in program order.

    mode "overlap": a task waits for the tasks it conflicts with. "op": for all tasks of any op that
    it conflicts with, one event an op; a baseline, and an oracle for the results. Raises
    VerifyError if peers would overwrite what a rank still reads.
    """
    footprints = Footprints(segment)
    memo = EventMemo()
    consumers: dict[tuple[int, bool], list[tuple[int, int]]] = defaultdict(list)
    for (earlier, later, remote), pairs in _conflicts(groups, footprints).items():
        pattern = _pattern(memo, footprints, tuple(sorted(pairs)), mode)
        if any(memo.needed[pattern]):
            consumers[earlier, remote].append((later, pattern))
    events = []
    for producer, remote in sorted(consumers):
        found = consumers[producer, remote]
        fused = _fuse(memo, groups[producer].num_tasks, tuple(pattern for _, pattern in found))
        events.append(
            TaskEvents(
                producer=producer,
                all_ranks=remote,
                counts=fused.counts,
                notify=fused.notify,
                consumers=tuple(zip((later for later, _ in found), fused.waits, strict=True)),
            )
        )
    return TaskGraph(
        segment=segment, groups=tuple(groups), events=tuple(events), team_size=team_size
    )


def conflicting_touches(
    groups: Sequence[TaskGroup], footprints: Footprints
) -> Iterator[tuple[str, Touch, Touch]]:
    """Tensor and pairs of accesses to it by different groups of which at least one writes, the
    earlier group's first.
    """
    for tensor, found in _touches(groups, footprints).items():
        writes: list[Touch] = []
        before: list[Touch] = []
        for later in found:
            for earlier in before if later.write else writes:
                if earlier.group != later.group:
                    yield tensor, earlier, later
            before.append(later)
            if later.write:
                writes.append(later)


def _touches(groups: Sequence[TaskGroup], footprints: Footprints) -> dict[str, list[Touch]]:
    """All accesses to the tensors that the segment writes, by the tensor that owns the storage, in
    program order. Tensors that are only read need no order.
    """
    written = {footprints.base(access.tensor) for group in groups for access in group.op.writes}
    found: dict[str, list[Touch]] = defaultdict(list)
    for position, group in enumerate(groups):
        for accesses, write in ((group.op.reads, False), (group.op.writes, True)):
            for access in accesses:
                base = footprints.base(access.tensor)
                if base in written:
                    footprint = footprints.footprint(group, access)
                    found[base].append(Touch(group=position, footprint=footprint, write=write))
    return found


def _conflicts(
    groups: Sequence[TaskGroup], footprints: Footprints
) -> dict[tuple[int, int, bool], set[tuple[int, int]]]:
    """(Earlier group, later group, remote) -> pairs of footprints on one tensor, one of them a
    write. remote: the earlier one writes on every rank, so peers' instances count too; what an
    all_ranks group reads is its own rank's.
    """
    conflicts: dict[tuple[int, int, bool], set[tuple[int, int]]] = defaultdict(set)
    for tensor, earlier, later in conflicting_touches(groups, footprints):
        remote = groups[later.group].all_ranks and later.write
        if remote and not groups[earlier.group].all_ranks:
            raise VerifyError(
                f"op {groups[later.group].op.name!r} writes {tensor!r} on every rank after "
                f"{groups[earlier.group].op.name!r} used it",
                expected="a receive buffer that one op fills in a launch",
                remedy="give every collective a buffer of its own",
            )
        spread = groups[earlier.group].all_ranks and earlier.write
        edge = earlier.group, later.group, spread
        conflicts[edge].add((earlier.footprint, later.footprint))
    return dict(sorted(conflicts.items()))


def _pattern(memo: EventMemo, footprints: Footprints, pairs: Pairs, mode: Mode) -> int:
    """Index into memo.needed: for each later task, the earlier tasks it must wait for."""
    known = memo.patterns.get((pairs, mode))
    if known is None:
        meet = footprints.overlap(*pairs[0])
        for pair in pairs[1:]:
            meet = meet | footprints.overlap(*pair)
        if mode == "op" and meet.any():
            meet = np.ones_like(meet)
        known = memo.patterns[pairs, mode] = len(memo.needed)
        memo.needed.append(_columns(meet))
    return known


def _columns(meet: Bools) -> tuple[TaskSet, ...]:
    """For each column the rows that are set; equal columns give the same tuple."""
    known: dict[bytes, TaskSet] = {}
    sets = []
    for column in np.ascontiguousarray(meet.T):
        key = column.tobytes()
        if key not in known:
            known[key] = tuple(np.flatnonzero(column).tolist())
        sets.append(known[key])
    return tuple(sets)


def _fuse(memo: EventMemo, num_tasks: int, patterns: tuple[int, ...]) -> Fused:
    """One event for each distinct set of producer tasks that some consumer needs."""
    key = (num_tasks, patterns)
    if key not in memo.fused:
        events: dict[TaskSet, int] = {}
        waits = []
        for pattern in patterns:
            needed = memo.needed[pattern]
            waits.append(
                tuple((events.setdefault(one, len(events)),) if one else () for one in needed)
            )
        notify: list[list[int]] = [[] for _ in range(num_tasks)]
        for tasks, event in events.items():
            for task in tasks:
                notify[task].append(event)
        memo.fused[key] = Fused(
            counts=tuple(map(len, events)),
            notify=tuple(map(tuple, notify)),
            waits=tuple(waits),
        )
    return memo.fused[key]
