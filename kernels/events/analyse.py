"""analyse_events: a Program and the extents of its tiles in, event tensors out.

    graph = analyse_events(program, {"p": {"m": 64, "n": 64}, "c": {"m": 64, "n": 64}})
    print(print_events(graph))
    graph.running(RunTime(symbols={"B": 5}))

Nobody annotates: what waits for what follows from overlap of the regions that tasks touch, as in
kernels/tasks/graph.py, seen in coordinates of groups and rows where the data decide extents
(grouped.py). fit.py then finds the maps that give exactly that. Next: graph.py.
"""

from collections.abc import Iterable, Mapping

from distmega.errors import ProgramError
from distmega.kernels.events.arguments import require, require_count
from distmega.kernels.events.fit import event_coordinates, fit_map
from distmega.kernels.events.graph import EventGraph, TaskGrid, view_sources
from distmega.kernels.events.grouped import ungroup
from distmega.kernels.events.symbols import spread_symbols
from distmega.kernels.events.values import EventTensor
from distmega.kernels.events.verify import (
    event_count,
    event_extent,
    event_source,
    make_grid,
    verify_events,
)
from distmega.kernels.tasks.footprints import Footprints
from distmega.kernels.tasks.graph import build_task_graph
from distmega.kernels.tasks.tile import find_disturbed, tile_segment
from distmega.kernels.tasks.types import TaskEvents as EventTable
from distmega.kernels.tasks.types import TaskGroup
from distmega.program.kinds import kind_of
from distmega.program.types import Op, Program, grouped_index
from distmega.sharding.resolve.collectives import RANK_AXIS

Tilings = Mapping[str, Mapping[str, int]]
"""Op -> axis -> extent of a tile; axes left out run whole inside a task."""


def analyse_events(
    program: Program,
    tilings: Tilings,
    *,
    symbols: Mapping[str, tuple[str, int]] | None = None,
    num_ranks: int = 1,
) -> EventGraph:
    """The event tensors of a program cut into tiles.

    tilings: op -> axis -> tile; any parallel axis, and the rank axis `r` of a collective: of an
    all-gather the parts of each source, of a reduce-scatter the owners, one by one where nothing is
    said of it. Other ops of which nothing is said are one task. symbols: name -> (tensor,
    dim) whose extent is known only at run time, the program's being the most. num_ranks: of the
    team that runs the program together. ProgramError for tiles of what isn't there.
    """
    require(program, Program, "program", "what a ProgramBuilder builds")
    require_tilings(tilings)
    require_count(num_ranks, "num_ranks")
    symbols = {} if symbols is None else symbols
    spread = spread_symbols(program, symbols)
    stated = [op for op in program.ops if not op.is_view]
    grids = tuple(make_grid(op, tilings.get(op.name, _by_rank(op)), spread) for op in stated)
    names = {grid.op for grid in grids}
    if unknown := [name for name in tilings if name not in names]:
        raise ProgramError(
            f"tiles of {unknown[0]!r}",
            expected=f"ops of program {program.name!r} that are no views",
            remedy="name one of its ops",
        )
    tasks = ungroup(program)
    by_name = {op.name: op for op in tasks.ops}
    groups = [TaskGroup(op=by_name[grid.op], splits=grid.splits()) for grid in grids]
    footprints = Footprints(tasks)
    for group in groups:
        if group.num_tasks > 1 and (disturbed := find_disturbed(group, footprints)):
            raise ProgramError(
                f"tiles of {group.op.name!r}, which read {disturbed!r} where others write it",
                expected="tasks of one op that have nothing to do with each other",
                remedy="give it no tiles: then it is one task",
            )
    table = build_task_graph(tasks, groups, num_ranks)
    kinds, shown = {op.name: op for op in program.ops}, view_sources(program)
    events: list[EventTensor] = []
    for each in table.events:
        events += _forms(each, grids, kinds, shown, num_ranks, len(events))
    tensors = program.tensor_map()
    bounds = {name: tensors[tensor].shape[dim] for name, (tensor, dim) in symbols.items()}
    graph = EventGraph(
        program=program,
        tasks=tasks,
        grids=grids,
        events=tuple(events),
        symbols=bounds,
        symbol_dims=dict(symbols),
    )
    return verify_events(graph)


def require_tilings(tilings: Tilings) -> None:
    """ProgramError for what is no mapping of mappings."""
    expected = "tiles by axis, by op"
    require(tilings, Mapping, "tilings", expected)
    for op, tiles in tilings.items():
        require(tiles, Mapping, f"tilings of {op!r}", expected)


def _by_rank(op: Op) -> dict[str, int]:
    """Tiles of a collective of which nothing is said: each rank's part."""
    ranks = kind_of(op).communicates and RANK_AXIS in op.extents
    return {RANK_AXIS: 1} if ranks else {}


def choose_tilings(program: Program, num_sms: int, *, rows: int = 16) -> dict[str, dict[str, int]]:
    """Tiles of all ops of a program, about `num_sms` an op: groups one by one, their rows `rows` at
    a time, collectives whole, other ops as kernels/tasks cuts them. ProgramError for what is no
    program and no number.
    """
    require(program, Program, "program", "what a ProgramBuilder builds")
    require_count(num_sms, "num_sms")
    require_count(rows, "rows", most=2**31 - 1)
    found: dict[str, dict[str, int]] = {}
    for group in tile_segment(program, num_sms, min_task_bytes=1, row_multiple=1):
        op, index = group.op, grouped_index(group.op)
        tiles: dict[str, int] = {}
        if kind_of(op).communicates:
            pass
        elif index is None:
            for split in group.splits:
                composed = len(split.axes) > 1
                tiles[split.axes[0]] = 1 if composed else split.bounds[1] - split.bounds[0]
        else:
            axes = {axis.name: axis.extent for axis in op.axes if axis.role == "parallel"}
            wanted = dict(zip(index.axes, (1, rows), strict=True))
            tiles = {name: wanted[name] for name in axes if name in wanted}
            last = list(axes)[-1]
            if last not in tiles:
                tiles[last] = -(-axes[last] // (2 if tiles else num_sms))
        found[op.name] = tiles
    return found


def _forms(
    table: EventTable,
    grids: tuple[TaskGrid, ...],
    ops: Mapping[str, Op],
    shown: Mapping[str, str],
    num_ranks: int,
    first: int,
) -> Iterable[EventTensor]:
    """Event tensors of one producer: consumers that await the same events share one."""
    producer = grids[table.producer]
    shared: dict[tuple[int, ...], list[tuple[TaskGrid, tuple[tuple[int, ...], ...]]]] = {}
    for position, waits in table.consumers:
        used = tuple(sorted({event for events in waits for event in events}))
        shared.setdefault(used, []).append((grids[position], waits))
    for used, consumers in shared.items():
        by_source: dict[str, list[tuple[TaskGrid, tuple[tuple[int, ...], ...]]]] = {}
        for grid, waits in consumers:
            source = event_source(ops[producer.op], ops[grid.op], grid, shown)
            by_source.setdefault(source, []).append((grid, waits))
        for source, members in by_source.items():
            yield _form(table, producer, used, members, source, num_ranks, first)
            first += 1


def _form(
    table: EventTable,
    producer: TaskGrid,
    used: tuple[int, ...],
    consumers: list[tuple[TaskGrid, tuple[tuple[int, ...], ...]]],
    source: str,
    num_ranks: int,
    number: int,
) -> EventTensor:
    renumbered = {event: n for n, event in enumerate(used)}
    notify = [tuple(renumbered[e] for e in es if e in renumbered) for es in table.notify]
    awaited = [
        (grid, [tuple(renumbered[e] for e in events) for events in waits])
        for grid, waits in consumers
    ]
    sides = [(producer.shape, notify), *((grid.shape, waits) for grid, waits in awaited)]
    positions = event_coordinates(sides, len(used))
    order = sorted(range(len(used)), key=lambda n: positions[n])
    counts = tuple(table.counts[used[n]] for n in order)
    notified = fit_map(producer.shape, notify, positions)
    shape = tuple(
        max(position[dim] for position in positions) + 1 for dim in range(len(positions[0]))
    )
    return EventTensor(
        name=f"{producer.op}.{number}",
        producer=producer.op,
        extents=tuple(event_extent(producer, notified, n, most) for n, most in enumerate(shape)),
        notify=notified,
        count=event_count(producer, counts),
        waits=tuple((grid.op, fit_map(grid.shape, waits, positions)) for grid, waits in awaited),
        sources=source,
        ranks=num_ranks if source == "all" else 1,
    )
