"""What a program's structure says of its tasks and events, and the check of a graph against it.

Comes in: an op and the extents of its tiles, or an event's producer and consumers. Goes out: a
TaskGrid; whose tasks trigger an event, how long its dims are, what its counts follow from.
analyse.py makes graphs of these; verify_events holds graphs that somebody wrote to the same. That
waits are enough is for queues/check.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from distmega.errors import ProgramError, VerifyError, counted
from distmega.hostir.ir.uses import storage_of
from distmega.kernels.events.fit import grid_coordinates
from distmega.kernels.events.graph import EventGraph, GridDim, GroupRows, TaskGrid
from distmega.kernels.events.grouped import starts_of
from distmega.kernels.events.symbols import AxisSymbols, spread_symbols
from distmega.kernels.events.values import (
    Coordinates,
    Count,
    EventMap,
    EventTensor,
    Extent,
    Sources,
)
from distmega.program.kinds import kind_of
from distmega.program.types import Op, grouped_index
from distmega.sharding.resolve.collectives import RANK_AXIS

MOST_EVENTS = 1 << 24
"""Of one tensor: each has a counter in memory."""


def make_grid(op: Op, tiles: Mapping[str, int], spread: AxisSymbols) -> TaskGrid:
    """The tasks of an op. tiles: axis -> extent of a tile. ProgramError for what can't be cut."""
    index = grouped_index(op)
    rows = None
    if index is not None:
        group, row = index.axes
        rows = GroupRows(
            starts=starts_of(op, index),
            num_groups=op.extents[group],
            group_axis=group,
            row_axis=row,
            mesh_axis=str(op.get("group_axis", "")),
        )
    for name, size in tiles.items():
        ranks = kind_of(op).communicates and name == RANK_AXIS
        known = name in op.extents
        cuts = type(size) is int and size >= 1
        if not known or not cuts or not (ranks or op.axis(name).role == "parallel"):
            raise ProgramError(
                f"tiles of {size!r} along axis {name!r} of op {op.name!r}",
                expected="at least 1, along one of its parallel axes",
                remedy=f"cut one of {', '.join(a.name for a in op.axes if a.role == 'parallel')}",
            )
    dims = tuple(
        GridDim(
            axis=name,
            extent=op.extents[name],
            size=min(size, op.extents[name]),
            symbol=spread[op.name].get(name, ""),
        )
        for name, size in tiles.items()
    )
    return TaskGrid(op=op.name, dims=dims, rows=rows)


def event_source(producer: Op, consumer: Op, grid: TaskGrid, shown: Mapping[str, str]) -> Sources:
    """Whose tasks trigger what a consumer awaits: a collective reads what other ranks made, of one
    of them where its tasks are cut by source; and what it reads may be overwritten once all ranks
    have read it. shown: views, and what each is one of.
    """
    if overwrites_team(producer, consumer, shown):
        return "all"
    if not kind_of(consumer).communicates:
        return "own"
    parallel = any(a.name == RANK_AXIS and a.role == "parallel" for a in consumer.axes)
    cut = any(dim.axis == RANK_AXIS and dim.size == 1 for dim in grid.dims)
    return "axis" if parallel and cut else "all"


def overwrites_team(producer: Op, consumer: Op, shown: Mapping[str, str]) -> bool:
    """Whether an op writes what a collective before it reads of every rank."""
    if not kind_of(producer).communicates:
        return False
    read, written = (
        {storage_of(access.tensor, shown) for access in side}
        for side in (producer.reads, consumer.writes)
    )
    return not read.isdisjoint(written)


def event_extent(producer: TaskGrid, notify: EventMap, dim: int, most: int) -> Extent:
    """An event dim is as long as the tasks that signal it are many, where one of theirs is it."""
    if notify.listed or notify.first != notify.last:
        return Extent(most=most)
    position = notify.first[dim]
    if position.only_dim < 0:
        return Extent(most=most)
    source = producer.dims[position.only_dim]
    size = source.size * position.divisor
    if source.symbol:
        return Extent(most=most, symbol=source.symbol, size=size)
    if producer.rows is not None and source.axis == producer.rows.row_axis:
        return Extent(most=most, starts=producer.rows.starts, size=size)
    return Extent(most=most)


def event_count(producer: TaskGrid, counts: Sequence[int]) -> Count:
    """counts: triggers of each event where all tasks run."""
    each = tuple(counts[:1] if len({*counts}) == 1 else counts)
    symbols = sorted({dim.symbol for dim in producer.dims if dim.symbol})
    rows = producer.rows
    cut = rows is not None and any(
        dim.axis in (rows.group_axis, rows.row_axis) for dim in producer.dims
    )
    return Count(
        each=each,
        active=bool(symbols or cut),
        symbol=" ".join(symbols),
        starts=rows.starts if rows is not None and cut else "",
    )


def verify_events(graph: EventGraph) -> EventGraph:
    """Returns the graph if it is one of its program: tasks cover each op once, symbols are dims of
    tensors; maps lead from tasks that there are to events that there are; extents, counts and
    sources are what the producer's tasks make them; consumers come later, and await nothing that
    nobody triggers. VerifyError.
    """
    _verify_symbols(graph)
    _verify_grids(graph)
    names = [event.name for event in graph.events]
    for event in graph.events:
        if names.count(event.name) > 1:
            raise _broken(event, "a name of several", "one event tensor of each name")
        _verify_event(graph, event)
    return graph


def _verify_symbols(graph: EventGraph) -> None:
    try:
        spread_symbols(graph.program, graph.symbol_dims)
    except ProgramError as error:
        raise VerifyError(error.found, expected=error.expected, remedy=error.remedy) from error
    for name, (tensor, dim) in graph.symbol_dims.items():
        most = graph.program.tensor_map()[tensor].shape[dim]
        if graph.symbols[name] != most:
            raise VerifyError(
                f"symbol {name!r} up to {graph.symbols[name]}",
                expected=f"{most}, which is dim {dim} of {tensor!r}",
                remedy="derive the graph with analyse_events",
            )


def _verify_grids(graph: EventGraph) -> None:
    ops = [op for op in graph.program.ops if not op.is_view]
    if [op.name for op in ops] != [grid.op for grid in graph.grids]:
        raise VerifyError(
            f"tasks of {', '.join(grid.op for grid in graph.grids)}",
            expected=f"those of {', '.join(op.name for op in ops)}, in this order",
            remedy="state the tasks of every op that is no view, once",
        )
    for op, grid in zip(ops, graph.grids, strict=True):
        tiles = {dim.axis: dim.size for dim in grid.dims}
        try:
            expected = make_grid(op, tiles, graph.axis_symbols)
        except ProgramError as error:
            raise VerifyError(error.found, expected=error.expected, remedy=error.remedy) from error
        if grid != expected:
            raise VerifyError(
                f"tasks of op {op.name!r}: {grid}",
                expected=f"{expected}, which covers the op once",
                remedy="state axes once, with the extents of the op",
            )


def _verify_event(graph: EventGraph, event: EventTensor) -> None:
    _verify_ends(graph, event)
    triggers = _count_triggers(graph, event)
    _verify_count(event, graph.grid_of[event.producer], triggers)
    for dim, extent in enumerate(event.extents):
        known = event_extent(graph.grid_of[event.producer], event.notify, dim, extent.most)
        if extent not in (known, Extent(most=extent.most)):
            raise _broken(event, f"extent {extent} of dim {dim}", f"{known}")
    _verify_waits(graph, event, triggers)


def _verify_ends(graph: EventGraph, event: EventTensor) -> None:
    """Ops that there are, the producer before its consumers, and maps from their tasks."""
    if event.num_events > MOST_EVENTS:
        raise _broken(event, f"{event.num_events} events", f"at most {MOST_EVENTS}")
    order = {grid.op: position for position, grid in enumerate(graph.grids)}
    consumers = [consumer for consumer, _ in event.waits]
    if event.producer not in order or not {*consumers} <= order.keys():
        raise _broken(event, "an op without tasks", "ops of the program")
    if any(order[consumer] <= order[event.producer] for consumer in consumers):
        raise _broken(event, f"waits of {consumers}", "consumers after the producer")
    for name, positions in ((event.producer, event.notify), *event.waits):
        _verify_map(event, positions, graph.grid_of[name])


def _count_triggers(graph: EventGraph, event: EventTensor) -> dict[Coordinates, int]:
    """Of each event, in order of coordinates, where all tasks run."""
    shape, num_triggers = tuple(extent.most for extent in event.extents), 0
    for number, task in enumerate(graph.coordinates[event.producer]):
        signals = event.notify.num_events(number, task)
        if signals > event.num_events:
            raise _broken(event, f"task {number} signals more", f"events of {shape}")
        num_triggers += signals
    if num_triggers < event.num_events:
        raise _broken(event, counted(num_triggers, "trigger"), f"one for each event of {shape}")
    found = dict.fromkeys(grid_coordinates(shape), 0)
    for number, task in enumerate(graph.coordinates[event.producer]):
        for position in event.notify.events(number, task):
            if position not in found:
                raise _broken(event, f"task {number} signals {position}", f"events of {shape}")
            found[position] += 1
    return found


def _verify_count(
    event: EventTensor, producer: TaskGrid, triggers: Mapping[Coordinates, int]
) -> None:
    """That the count is the number of triggers, and known as its producer's tasks run."""
    count, derived = event.count, event_count(producer, list(triggers.values()))
    for position, each in zip(triggers, _each(count, event.num_events), strict=False):
        if each != triggers[position]:
            what = f"{counted(triggers[position], 'trigger')} of {position}"
            raise _broken(event, what, f"its count, {count}")
    if _each(derived, event.num_events) != _each(count, event.num_events):
        raise _broken(event, f"counts {count.each}", "one number, or one an event")
    if derived.active and not count.active:
        raise _broken(event, "a fixed count of tasks that may not run", "an active count")
    if replace(derived, each=count.each) != count:
        raise _broken(event, f"a count by {count}", f"{derived}, as its producer's tasks run")


def _verify_waits(
    graph: EventGraph, event: EventTensor, triggers: Mapping[Coordinates, int]
) -> None:
    """That consumers await what somebody triggers, of the ranks whose tasks they need."""
    ops = {op.name: op for op in graph.program.ops}
    producer = ops[event.producer]
    for consumer, positions in event.waits:
        source = event_source(producer, ops[consumer], graph.grid_of[consumer], graph.shown)
        team = producer if kind_of(producer).communicates else ops[consumer]
        ranks = int(str(team.attr("num_ranks"))) if source == "all" else 1
        if (event.sources, event.ranks) != (source, ranks):
            what = f"triggers of {event.sources} of {counted(event.ranks, 'rank')} for {consumer!r}"
            raise _broken(event, what, f"{source} of {ranks}")
        for number, task in enumerate(graph.coordinates[consumer]):
            if positions.num_events(number, task) > len(triggers):
                what = f"task {number} of {consumer!r} waits for more"
                raise _broken(event, what, f"the {len(triggers)} events that there are")
            for position in positions.events(number, task):
                if not triggers.get(position, 0):
                    what = f"task {number} of {consumer!r} waits for {position}"
                    raise _broken(event, what, "events that somebody triggers")


def _each(count: Count, num_events: int) -> tuple[int, ...]:
    return count.each * num_events if len(count.each) == 1 else count.each


def _verify_map(event: EventTensor, positions: EventMap, grid: TaskGrid) -> None:
    """A map from tasks that there are, along all dims of the event."""
    if positions.listed:
        if len(positions.listed) != grid.num_tasks:
            what = f"events of {counted(len(positions.listed), 'task')} of {grid.op!r}"
            raise _broken(event, what, f"those of all {grid.num_tasks}")
        return
    if not len(positions.first) == len(positions.last) == len(event.extents):
        what = f"a map of {grid.op!r} to {counted(len(positions.first), 'dim')}"
        raise _broken(event, what, f"one to all {len(event.extents)}")
    for position in (*positions.first, *positions.last):
        dims = [dim for dim, _ in position.terms]
        fits = dims == sorted({*dims} & {*range(len(grid.dims))})
        if not dims and (position.divisor != 1 or position.modulus):
            raise _broken(event, f"{position} of {grid.op!r}", "an offset alone")
        if not fits or position.divisor < 1 or position.modulus < 0:
            raise _broken(
                event, f"{position} of {grid.op!r}", f"one of {counted(len(grid.dims), 'dim')}"
            )
        if position.values and (len(dims) != 1 or len(position.values) != grid.shape[dims[0]]):
            what = f"{len(position.values)} places along dims {dims} of {grid.op!r}"
            raise _broken(event, what, f"one for each of {grid.shape[dims[0] if dims else 0]}")


def _broken(event: EventTensor, found: str, expected: str) -> VerifyError:
    return VerifyError(
        f"event tensor {event.name!r}: {found}",
        expected=expected,
        remedy="derive it with analyse_events",
    )
