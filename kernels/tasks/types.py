"""Value types of the task level: tasks as tiles of an op, events between them, and the static
schedule.

A segment (a Program of ops that become one megakernel) is cut by tile.py into TaskGroups, one an
op. graph.py derives TaskEvents from region overlap; schedule.py orders tasks on SMs;
isa/encoder.py turns that into device words. All ranks of a mesh run the same graph; a group with
`all_ranks` writes and signals on every rank of its team.
"""

import math
from dataclasses import dataclass

from distmega.program.types import Op, Program


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeSplit:
    """Consecutive half-open ranges over `axes` composed row-major (outer first): range i is
    bounds[i] to bounds[i + 1].
    """

    axes: tuple[str, ...]
    bounds: tuple[int, ...]

    @property
    def num_tiles(self) -> int:
        return len(self.bounds) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGroup:
    """The tasks of one op: the grid of its splits, row-major; axes in no split run whole inside
    each task.
    """

    op: Op
    splits: tuple[RangeSplit, ...] = ()
    all_ranks: bool = False

    @property
    def num_tasks(self) -> int:
        return math.prod(split.num_tiles for split in self.splits)

    @property
    def mesh_axis(self) -> str:
        """That along which the ranks lie on which it writes; "" for its own rank alone."""
        return str(self.op.attr("mesh_axis")) if self.all_ranks else ""

    @property
    def num_ranks(self) -> int:
        """Those ranks."""
        return int(str(self.op.attr("num_ranks"))) if self.all_ranks else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEvents:
    """Events triggered by one group: event e is complete once counts[e] of its tasks have
    signalled, per rank and epoch.

    all_ranks: the instances on every rank of the producer's team trigger it, since its waiters need
    what they write. counts: triggers per event from one rank. notify: for each producer task, the
    events it signals. consumers: (group, for each of its tasks the events it waits for).
    """

    producer: int
    all_ranks: bool = False
    counts: tuple[int, ...]
    notify: tuple[tuple[int, ...], ...]
    consumers: tuple[tuple[int, tuple[tuple[int, ...], ...]], ...]

    @property
    def num_events(self) -> int:
        return len(self.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGraph:
    """Groups in program order and the events between them. `team_size`: ranks that run this graph
    together, along all mesh axes that it communicates over.
    """

    segment: Program
    groups: tuple[TaskGroup, ...]
    events: tuple[TaskEvents, ...]
    team_size: int = 1

    @property
    def num_tasks(self) -> int:
        return sum(group.num_tasks for group in self.groups)

    @property
    def num_events(self) -> int:
        return sum(event.num_events for event in self.events)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskWait:
    """Block until event `event` of this rank has `count` triggers more than before this epoch."""

    event: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSignal:
    """One trigger of event `event`, on this rank or on every rank of the team, itself included."""

    event: int
    all_ranks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledTask:
    """A task in a queue: task `task` of group `group`, with the waits that remain needed and its
    signals.
    """

    group: int
    task: int
    waits: tuple[TaskWait, ...]
    signals: tuple[TaskSignal, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One queue per SM, each a linear extension of the task graph of all ranks; the same on every
    rank.
    """

    graph: TaskGraph
    queues: tuple[tuple[ScheduledTask, ...], ...]
    num_events: int
