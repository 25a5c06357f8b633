"""EventGraph: the tasks of a program as grids, the event tensors between them, and which run when.

Comes in: grids and event tensors, from analyse.py or text.py. Goes out: for what is known at run
time, the tasks that run, the events that these trigger and await, and how many triggers complete
each. Next: verify.py.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from distmega.errors import ProgramError
from distmega.hostir.ir.uses import storage_of
from distmega.kernels.events.arguments import MOST, require, require_count
from distmega.kernels.events.fit import Grid, grid_coordinates
from distmega.kernels.events.symbols import AxisSymbols, spread_symbols
from distmega.kernels.events.values import (
    Coordinates,
    EventTensor,
    Guard,
    RowsGuard,
    RunTime,
    SymbolGuard,
)
from distmega.kernels.tasks.footprints import Footprints
from distmega.kernels.tasks.graph import conflicting_touches
from distmega.kernels.tasks.types import RangeSplit, TaskGroup
from distmega.program.kinds import kind_of
from distmega.program.types import Program, accesses
from distmega.sharding.resolve.collectives import RANK_AXIS

TaskId = tuple[str, int]
"""Op and number of the task in its grid, row-major."""
EventId = tuple[str, Coordinates]
"""Event tensor and coordinates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GridDim:
    """An axis in tiles of `size`, the last maybe shorter. symbol: of how much of it is in use."""

    axis: str
    extent: int
    size: int
    symbol: str = ""

    @property
    def num_tiles(self) -> int:
        return -(-self.extent // self.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRows:
    """An op runs over groups of rows: the vector of their starts, how many groups a rank has, the
    names of its axes of groups and rows, and the mesh axis whose ranks share the groups out.
    """

    starts: str
    num_groups: int
    group_axis: str
    row_axis: str
    mesh_axis: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGrid:
    """The tasks of one op."""

    op: str
    dims: tuple[GridDim, ...] = ()
    rows: GroupRows | None = None

    @property
    def shape(self) -> Grid:
        return tuple(dim.num_tiles for dim in self.dims)

    @property
    def num_tasks(self) -> int:
        return math.prod(self.shape)

    @property
    def starts(self) -> str:
        """The vector that says where groups of rows start, of an op over these; "" of any other."""
        return self.rows.starts if self.rows is not None else ""

    def guards(self, task: Coordinates) -> tuple[Guard, ...]:
        """What must hold for a task to run."""
        found: list[Guard] = [
            SymbolGuard(symbol=dim.symbol, first=at * dim.size)
            for dim, at in zip(self.dims, task, strict=True)
            if dim.symbol
        ]
        if self.rows is None:
            return tuple(found)
        groups, first_row, cut = range(self.rows.num_groups), 0, False
        for dim, at in zip(self.dims, task, strict=True):
            if dim.axis == self.rows.group_axis:
                cut = True
                groups = groups[at * dim.size : (at + 1) * dim.size]
            elif dim.axis == self.rows.row_axis:
                cut, first_row = True, at * dim.size
        if cut:
            guard = RowsGuard(
                starts=self.rows.starts,
                first_group=groups.start,
                stop_group=groups.stop,
                first_row=first_row,
                mesh_axis=self.rows.mesh_axis,
                chunk=self.rows.num_groups if self.rows.mesh_axis else 0,
            )
            found.append(guard)
        return tuple(found)

    def splits(self) -> tuple[RangeSplit, ...]:
        """The dims as splits of a TaskGroup."""
        return tuple(
            RangeSplit(axes=(d.axis,), bounds=(*range(0, d.extent, d.size), d.extent))
            for d in self.dims
        )


@dataclass(frozen=True, kw_only=True)
class EventGraph:
    """program: as given; tasks: as its ops see groups and rows. grids: one an op, in order.
    symbols: with their upper bounds. symbol_dims: of each the tensor and dim whose extent it is.
    """

    program: Program
    tasks: Program
    grids: tuple[TaskGrid, ...]
    events: tuple[EventTensor, ...]
    symbols: Mapping[str, int]
    symbol_dims: Mapping[str, tuple[str, int]]

    @cached_property
    def axis_symbols(self) -> AxisSymbols:
        """Op -> axis -> symbol, of axes in no split as well."""
        return spread_symbols(self.program, self.symbol_dims)

    @cached_property
    def grid_of(self) -> dict[str, TaskGrid]:
        """Grids by op."""
        return {grid.op: grid for grid in self.grids}

    @cached_property
    def coordinates(self) -> dict[str, list[Coordinates]]:
        """Of each task of each op."""
        return {grid.op: list(grid_coordinates(grid.shape)) for grid in self.grids}

    @cached_property
    def guards(self) -> dict[TaskId, tuple[Guard, ...]]:
        """What must hold for each task to run; tasks that always run are absent."""
        found = {
            (grid.op, number): grid.guards(task)
            for grid in self.grids
            for number, task in enumerate(self.coordinates[grid.op])
        }
        return {task: guards for task, guards in found.items() if guards}

    @cached_property
    def triggers(self) -> dict[TaskId, tuple[EventId, ...]]:
        """Events that each task signals; tasks without any are absent."""
        found: dict[TaskId, list[EventId]] = {}
        for event in self.events:
            for number, task in enumerate(self.coordinates[event.producer]):
                for position in event.notify.events(number, task):
                    found.setdefault((event.producer, number), []).append((event.name, position))
        return {task: tuple(events) for task, events in found.items()}

    @cached_property
    def waits(self) -> dict[TaskId, tuple[EventId, ...]]:
        """Events that each task awaits; tasks without any are absent."""
        found: dict[TaskId, list[EventId]] = {}
        for event in self.events:
            for consumer, positions in event.waits:
                for number, task in enumerate(self.coordinates[consumer]):
                    for position in positions.events(number, task):
                        found.setdefault((consumer, number), []).append((event.name, position))
        return {task: tuple(events) for task, events in found.items()}

    @cached_property
    def producers(self) -> dict[EventId, tuple[TaskId, ...]]:
        """Tasks that signal each event."""
        found: dict[EventId, list[TaskId]] = {}
        for task, events in self.triggers.items():
            for event in events:
                found.setdefault(event, []).append(task)
        return {event: tuple(tasks) for event, tasks in found.items()}

    @cached_property
    def shown(self) -> dict[str, str]:
        """Views, and what each is one of."""
        return view_sources(self.program)

    @cached_property
    def writers(self) -> dict[str, tuple[TaskId, ...]]:
        """Tensor -> tasks that write its storage, through whichever views of it."""
        found: dict[str, dict[TaskId, None]] = {}
        for op in self.program.ops:
            if not op.is_view:
                tasks = [(op.name, n) for n in range(self.grid_of[op.name].num_tasks)]
                for access in op.writes:
                    found.setdefault(storage_of(access.tensor, self.shown), {}).update(
                        dict.fromkeys(tasks)
                    )
        return {
            tensor.name: tuple(found.get(storage_of(tensor.name, self.shown), ()))
            for tensor in self.program.tensors
        }

    @cached_property
    def _event_ids(self) -> frozenset[EventId]:
        awaited = (event for events in self.waits.values() for event in events)
        return frozenset((*self.producers, *awaited))

    def _has(self, event: object) -> bool:
        try:
            return event in self._event_ids
        except TypeError:  # no hash
            return False

    @cached_property
    def sources_of(self) -> dict[str, str]:
        """Event tensor -> whose tasks trigger it."""
        return {event.name: event.sources for event in self.events}

    @cached_property
    def ranks_of(self) -> dict[str, int]:
        """Event tensor -> ranks whose tasks count."""
        return {event.name: event.ranks for event in self.events}

    @cached_property
    def conflicts(self) -> dict[TaskId, list[TaskId]]:
        """Task -> tasks of earlier ops that touch what it touches, one of the two writing. Found
        from the regions of tasks, not from events.
        """
        groups = [task_group(self, grid.op) for grid in self.grids]
        footprints = Footprints(self.tasks)
        found: dict[TaskId, dict[TaskId, None]] = {}
        for _, earlier, later in conflicting_touches(groups, footprints):
            meet = footprints.overlap(earlier.footprint, later.footprint)
            names = self.grids[earlier.group].op, self.grids[later.group].op
            for i, j in zip(*np.nonzero(meet), strict=True):
                found.setdefault((names[1], int(j)), {})[names[0], int(i)] = None
        return {task: list(others) for task, others in found.items()}

    @cached_property
    def crossing(self) -> frozenset[frozenset[str]]:
        """Pairs of ops of which one is a collective and the other writes what that reads of all
        ranks: tasks of theirs that conflict do so on different ranks, too.
        """
        return frozenset(
            frozenset((op.name, writer))
            for op in self.program.ops
            if kind_of(op).communicates
            for read in op.reads
            for writer, _ in self.writers[read.tensor]
        )

    def all_tasks(self) -> list[TaskId]:
        """All tasks, in program order."""
        return [(grid.op, n) for grid in self.grids for n in range(grid.num_tasks)]

    def runs(self, task: TaskId, known: RunTime) -> bool:
        """Whether a task runs."""
        return all(guard.holds(known) for guard in self.guards.get(task, ()))

    def running(self, known: RunTime, op: str = "") -> list[TaskId]:
        """The tasks that run, of one op or of all, in program order. ProgramError for a symbol
        outside its bounds, for one or an op that there isn't, and for starts of other groups.
        """
        self._require(known, self.symbols)
        if op != "":
            self._grid(op)
        return [task for task in self.all_tasks() if op in ("", task[0]) and self.runs(task, known)]

    def _grid(self, op: object) -> TaskGrid:
        """The tasks of an op; ProgramError where there is none of that name."""
        if not isinstance(op, str) or op not in self.grid_of:
            raise ProgramError(
                f"tasks of {op!r:.60}",
                expected=f"ops of program {self.program.name!r} that are no views",
                remedy="name one of its ops",
            )
        return self.grid_of[op]

    def _require(self, known: RunTime, needed: Iterable[str] = ()) -> None:
        """ProgramError for what doesn't fit the graph, or is needed and not given."""
        require(known, RunTime, "known", "a RunTime")
        for name, given in known.symbols.items():
            if name not in self.symbols:
                raise ProgramError(
                    f"symbol {name!r} is {given!r}",
                    expected=f"symbols among {', '.join(self.symbols) or 'none'}",
                    remedy="leave it out, or compile with it",
                )
        for name in {**known.symbols, **dict.fromkeys(needed)}:
            value, most = known.symbols.get(name), self.symbols[name]
            if type(value) is not int or not 0 <= value <= most:
                raise ProgramError(
                    f"symbol {name!r} is {value!r}",
                    expected=f"0 to {most}, its bound when this was compiled",
                    remedy="give it a value, or compile for a larger one",
                )
        self._require_groups(known)

    def _require_groups(self, known: RunTime) -> None:
        for name in self._group_limits.keys() & {*known.starts}:
            bounds = known.bounds(name)
            rows = [stop - start for start, stop in pairwise(bounds)]
            groups, most_rows, num_rows = self._group_limits[name]
            fits = len(rows) == groups and all(0 <= num <= most_rows for num in rows)
            if not fits or bounds[0] < 0 or bounds[-1] > num_rows:
                raise ProgramError(
                    f"starts {name!r} {bounds}",
                    expected=f"{groups + 1} numbers from 0 to {num_rows} that do not fall, nor rise"
                    f" by more than {most_rows}",
                    remedy="give the start of each group, and the end of the last",
                )

    @cached_property
    def _group_limits(self) -> dict[str, tuple[int, int, int]]:
        """Of starts of groups by name: how many groups there are, rows that one has at most, and
        positions of all.
        """
        tensors = self.program.tensor_map()
        limits = dict[str, tuple[int, int, int]]()
        for op in self.program.ops:
            for access in accesses(op):
                for extent, index in zip(tensors[access.tensor].shape, access.dims, strict=True):
                    if index.is_grouped:
                        name = op.reads[index.starts].tensor
                        groups = tensors[name].shape[0] - 1
                        rows = op.extents[index.axes[1]]
                        _, most_rows, stop = limits.get(name, (groups, rows, extent))
                        limits[name] = groups, min(rows, most_rows), min(extent, stop)
        return limits

    def count(self, event: EventId, known: RunTime) -> int:
        """Triggers that complete an event: those of tasks that run, on all ranks that count, each
        of which has groups of its own where ranks share these out. ProgramError for what is no
        event of the graph.
        """
        if not self._has(event):
            raise ProgramError(
                f"event {event!r:.60}",
                expected=f"events of {', '.join(self.sources_of)}, each with its coordinates",
                remedy="take one of `waits` or `triggers`",
            )
        self._require(known)
        return self.num_triggers(event, known)

    def num_triggers(self, event: EventId, known: RunTime) -> int:
        """As count, of what is known to fit: it is asked for at each look at an event."""
        tasks, ranks = self.producers.get(event, ()), self.ranks_of[event[0]]
        each = [known] if ranks == 1 else [self.on_rank(known, rank) for rank in range(ranks)]
        return sum(self.runs(task, there) for there in each for task in tasks)

    def on_rank(self, known: RunTime, rank: int) -> RunTime:
        """The same seen from a rank of the team, which has one mesh axis."""
        axes = {grid.rows.mesh_axis for grid in self.grids if grid.rows} - {""}
        return replace(known, at=dict(known.at) | dict.fromkeys(axes, rank))

    def own_first(self, op: str, rank: int) -> list[tuple[TaskId, tuple[EventId, ...]]]:
        """Tasks of an op in the order in which a rank best runs them, and what each awaits there.
        ProgramError for an op or a rank that there isn't.

        A rank's own part of what an all-gather brings is read where it is, unless somebody
        overwrites it: for it a task awaits only what made it, and such tasks come first; the others
        follow as their sources do, counted from the rank on.
        """
        grid = self._grid(op)
        require_count(rank, "rank", self._num_ranks - 1, least=0)
        found: list[tuple[int, int, TaskId, tuple[EventId, ...]]] = []
        for number in range(grid.num_tasks):
            waits: dict[EventId, None] = {}
            distance = 0
            for event in self.waits.get((op, number), ()):
                away = {self._distance(task, rank) for task in self.producers[event]}
                own = away == {0} and self.sources_of[event[0]] == "own"
                if own and self._reads_own_part(op, self.producers[event][0][0]):
                    made = (self.waits.get(task, ()) for task in self.producers[event])
                    waits |= dict.fromkeys(each for events in made for each in events)
                else:
                    waits[event] = None
                    distance = max(distance, *away)
            found.append((distance, number, (op, number), tuple(waits)))
        return [(task, waits) for _, _, task, waits in sorted(found)]

    @cached_property
    def _num_ranks(self) -> int:
        """Of the team whose collectives these are; without any, whatever it is."""
        teams = [o for o in self.program.ops if kind_of(o).communicates]
        return max((int(str(o.attr("num_ranks"))) for o in teams), default=MOST)

    @cached_property
    def _op_order(self) -> dict[str, int]:
        """Where each op stands in the program."""
        return {stated.name: number for number, stated in enumerate(self.program.ops)}

    def _reads_own_part(self, op: str, gather: str) -> bool:
        """Whether an op can read a rank's part of what is gathered where the gather finds it: it
        does not write what is brought, and nobody overwrites the part behind the gather.
        """
        order = self._op_order
        stated = self.program.ops[order[gather]]
        brought, part = (
            {writer for writer, _ in self.writers[access.tensor]}
            for access in (stated.writes[0], stated.reads[0])
        )
        return op not in brought and all(order[writer] < order[gather] for writer in part)

    def _distance(self, task: TaskId, rank: int) -> int:
        """Ranks from `rank` on to the last source of what a task brings, 0 where all of it is the
        rank's own; -1 if it brings nothing.
        """
        grid, stated = self.grid_of[task[0]], self.program.ops[self._op_order[task[0]]]
        rank_dims = [n for n, dim in enumerate(grid.dims) if dim.axis == RANK_AXIS]
        if not kind_of(stated).gathers_all or not rank_dims:
            return -1
        dim, at = grid.dims[rank_dims[0]], self.coordinates[task[0]][task[1]][rank_dims[0]]
        sources = range(at * dim.size, min((at + 1) * dim.size, dim.extent))
        return max((source - rank) % dim.extent for source in sources)

    def tiles(self, known: RunTime, op: str) -> list[int]:
        """Of an op over groups, the tiles of rows that run, by group; the first tile of others."""
        grid = self._grid(op)
        if grid.rows is None:
            raise ProgramError(
                f"tiles by group of op {op!r}", expected="an op over groups", remedy="name one"
            )
        names = [dim.axis for dim in grid.dims]
        group, row = (
            names.index(axis) if axis in names else -1
            for axis in (grid.rows.group_axis, grid.rows.row_axis)
        )
        found = [set[int]() for _ in range(grid.shape[group] if group >= 0 else 1)]
        for _, number in self.running(known, op):
            task = self.coordinates[op][number]
            found[task[group] if group >= 0 else 0].add(task[row] if row >= 0 else 0)
        return list(map(len, found))


def view_sources(program: Program) -> dict[str, str]:
    """Views of a program, and what each is one of."""
    return {op.writes[0].tensor: op.reads[0].tensor for op in program.ops if op.is_view}


def task_group(graph: EventGraph, op: str) -> TaskGroup:
    """The tasks of an op as kernels/tasks sees them."""
    (found,) = (each for each in graph.tasks.ops if each.name == op)
    return TaskGroup(op=found, splits=graph.grid_of[op].splits())
