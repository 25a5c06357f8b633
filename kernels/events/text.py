"""Printed form of an EventGraph's tasks and event tensors, and its parser.

    events sums
      symbol B: 16 of x.0
      tasks p(m:16/1@B)
      tasks c(m:16/1@B, n:64/16)
      tasks q(e:4/1, r:4/2) rows routing.offsets of 4 (e, r)
      event p.0[ceil(B/1)<=16] own from p(d0) count 1 active B to c(d0)

A dim of a grid prints as axis:extent/tile, with its symbol. A place prints as a sum of the task's
coordinates, `d0*4-d1+3`, divided and as a remainder, `(d0*4+1)/3%8`, as `d0{0,0,2}` where only a
table gives it, `#2` where it is fixed, and as two of them, `first..last`, where a task has several
events, or none, the first being behind the last. parse_events(print_events(g), g.program) == g.
"""

import re

from distmega.collecting import parse_literal
from distmega.errors import ParseError
from distmega.kernels.events.arguments import require
from distmega.kernels.events.graph import EventGraph, GridDim, GroupRows, TaskGrid
from distmega.kernels.events.grouped import ungroup
from distmega.kernels.events.values import (
    Coordinates,
    Count,
    EventCoordinate,
    EventMap,
    EventTensor,
    Extent,
)
from distmega.kernels.events.verify import verify_events
from distmega.program.text import parse_number
from distmega.program.types import Program


def print_events(graph: EventGraph) -> str:
    """One line for each symbol, op with tasks, and event tensor."""
    require(graph, EventGraph, "graph", "what analyse_events gives")
    lines = [f"events {graph.program.name}"]
    for name, (tensor, dim) in graph.symbol_dims.items():
        lines.append(f"  symbol {name}: {graph.symbols[name]} of {tensor}.{dim}")
    lines += [f"  {_print_grid(grid)}" for grid in graph.grids]
    lines += [f"  {_print_event(event)}" for event in graph.events]
    return "\n".join(lines) + "\n"


def _print_grid(grid: TaskGrid) -> str:
    dims = ", ".join(
        f"{d.axis}:{d.extent}/{d.size}" + (f"@{d.symbol}" if d.symbol else "") for d in grid.dims
    )
    text = f"tasks {grid.op}({dims})"
    if grid.rows is None:
        return text
    rows = grid.rows
    text += f" rows {rows.starts} of {rows.num_groups} ({rows.group_axis}, {rows.row_axis})"
    return text + (f" over {rows.mesh_axis}" if rows.mesh_axis else "")


def _print_event(event: EventTensor) -> str:
    extents = ", ".join(map(_print_extent, event.extents))
    ranks = f"*{event.ranks}" if event.ranks > 1 else ""
    waits = "".join(f" {consumer}({_print_map(positions)})" for consumer, positions in event.waits)
    return (
        f"event {event.name}[{extents}] {event.sources}{ranks}"
        f" from {event.producer}({_print_map(event.notify)})"
        f" count {_print_count(event.count)} to{waits}"
    )


def _print_extent(extent: Extent) -> str:
    if extent.symbol:
        return f"ceil({extent.symbol}/{extent.size})<={extent.most}"
    if extent.starts:
        return f"rows({extent.starts}/{extent.size})<={extent.most}"
    return str(extent.most)


def _print_count(count: Count) -> str:
    text = str(count.each[0]) if len(count.each) == 1 else f"{list(count.each)}"
    if not count.active:
        return text
    return text + " active" + f" {count.symbol}".rstrip() + f" {count.starts}".rstrip()


def _print_map(positions: EventMap) -> str:
    if positions.listed:
        return f"listed {[list(events) for events in positions.listed]}"
    ends = zip(positions.first, positions.last, strict=True)
    return ", ".join(
        _print_coordinate(first) + (f"..{_print_coordinate(last)}" if last != first else "")
        for first, last in ends
    )


def _print_coordinate(position: EventCoordinate) -> str:
    if not position.terms:
        return f"#{position.offset}"
    if position.values:
        return f"d{position.terms[0][0]}{{{','.join(map(str, position.values))}}}"
    text = "".join(map(_print_term, position.terms)).removeprefix("+")
    text += f"{position.offset:+d}" if position.offset else ""
    divisor = f"/{position.divisor}" if position.divisor != 1 else ""
    modulus = f"%{position.modulus}" if position.modulus else ""
    return f"({text}){divisor}{modulus}" if divisor or modulus else text


def _print_term(term: tuple[int, int]) -> str:
    dim, scale = term
    sign = "-" if scale < 0 else "+"
    return f"{sign}d{dim}" + (f"*{abs(scale)}" if abs(scale) != 1 else "")


_NAME = r"[\w./@#-]+"
_SYMBOL = re.compile(rf"symbol (\w+): (\d+) of ({_NAME})\.(\d+)")
_GRID = re.compile(
    rf"tasks ({_NAME})\(([^()]*)\)"
    rf"(?: rows ({_NAME}) of (\d+) \((\w+), (\w+)\)(?: over (\w+))?)?"
)
_DIM = re.compile(r"(\w+):(\d+)/(\d+)(?:@(\w+))?")
_EVENT = re.compile(
    rf"event ({_NAME})\[(.*?)\] (own|all|axis)(?:\*(\d+))? from ({_NAME})\((.*)\)"
    r" count (.*?) to (.*)"
)
_EXTENT = re.compile(rf"(\d+)|(?:ceil\((\w+)/(\d+)\)|rows\(({_NAME})/(\d+)\))<=(\d+)")
_COUNT = re.compile(rf"(\d+|\[\d+(?:, \d+)+\])( active)?((?: {_NAME})*)")
_COORDINATE = re.compile(
    r"#(-?\d+)|d(\d+)\{(\d+(?:,\d+)*)\}"
    r"|(\()?([+-]?d\d+(?:\*-?\d+)?(?:[+-]d\d+(?:\*-?\d+)?)*)([+-]\d+)?"
    r"(?(4)\)(?=[/%])(?:/(\d+))?(?:%([1-9]\d*))?)"
)
_TERM = re.compile(r"([+-]?)d(\d+)(?:\*(-?\d+))?")
_TARGET = re.compile(rf"({_NAME})\(((?:[^()]|\([^()]*\))*)\) ?")


def parse_events(text: str, program: Program) -> EventGraph:
    """Reads the printed form back, of this program; ParseError names the line that does not fit,
    VerifyError what its maps contradict, ProgramError what is no text and no program.
    """
    require(text, str, "text", "what print_events gives")
    require(program, Program, "program", "what a ProgramBuilder builds")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines or lines[0] != f"events {program.name}":
        raise _unreadable(lines[0] if lines else text)
    symbols: dict[str, int] = {}
    symbol_dims: dict[str, tuple[str, int]] = {}
    grids: list[TaskGrid] = []
    events: list[EventTensor] = []
    for line in lines[1:]:
        if (match := _SYMBOL.fullmatch(line)) and match[1] not in symbols:
            symbols[match[1]] = parse_number(match[2])
            symbol_dims[match[1]] = match[3], parse_number(match[4])
        elif match := _GRID.fullmatch(line):
            grids.append(_parse_grid(line, match))
        elif match := _EVENT.fullmatch(line):
            events.append(_parse_event(line, match, symbols))
        else:
            raise _unreadable(line)
    graph = EventGraph(
        program=program,
        tasks=ungroup(program),
        grids=tuple(grids),
        events=tuple(events),
        symbols=symbols,
        symbol_dims=symbol_dims,
    )
    return verify_events(graph)


def _parse_grid(line: str, match: re.Match[str]) -> TaskGrid:
    op, dims, starts, num_groups, group, row, mesh_axis = match.groups(default="")
    found = [_DIM.fullmatch(dim) for dim in dims.split(", ") if dim]
    rows = None
    if starts:
        rows = GroupRows(
            starts=starts,
            num_groups=parse_number(num_groups),
            group_axis=group,
            row_axis=row,
            mesh_axis=mesh_axis,
        )
    parsed = []
    for dim in found:
        if dim is None:
            raise _unreadable(line)
        axis, extent, size, symbol = dim.groups(default="")
        parsed.append(
            GridDim(axis=axis, extent=parse_number(extent), size=parse_number(size), symbol=symbol)
        )
    return TaskGrid(op=op, dims=tuple(parsed), rows=rows)


def _parse_event(line: str, match: re.Match[str], symbols: dict[str, int]) -> EventTensor:
    name, extents, sources, ranks, producer, notify, count, waits = match.groups()
    targets = list(_TARGET.finditer(waits))
    if "".join(target[0] for target in targets) != waits:
        raise _unreadable(line)
    return EventTensor(
        name=name,
        producer=producer,
        extents=tuple(_parse_extent(line, part) for part in extents.split(", ") if part),
        notify=_parse_map(line, notify),
        count=_parse_count(line, count, symbols),
        waits=tuple((target[1], _parse_map(line, target[2])) for target in targets),
        sources=sources,
        ranks=parse_number(ranks or "1"),
    )


def _parse_extent(line: str, text: str) -> Extent:
    match = _EXTENT.fullmatch(text)
    if not match:
        raise _unreadable(line)
    fixed, symbol, size, starts, row_size, most = match.groups(default="")
    return Extent(
        most=parse_number(fixed or most),
        symbol=symbol,
        size=parse_number(size or row_size or "1"),
        starts=starts,
    )


def _parse_count(line: str, text: str, symbols: dict[str, int]) -> Count:
    match = _COUNT.fullmatch(text)
    if not match:
        raise _unreadable(line)
    words = match[3].split()
    return Count(
        each=tuple(map(parse_number, match[1].strip("[]").split(", "))),
        active=bool(match[2]),
        symbol=" ".join(word for word in words if word in symbols),
        starts=" ".join(word for word in words if word not in symbols),
    )


def _parse_map(line: str, text: str) -> EventMap:
    if text.startswith("listed "):
        return EventMap(listed=_parse_listed(line, text.removeprefix("listed ")))
    first, last = [], []
    for part in re.split(r", (?![^{]*\})", text) if text else []:
        ends = part.split("..")
        first.append(_parse_coordinate(line, ends[0]))
        last.append(_parse_coordinate(line, ends[-1]))
    return EventMap(first=tuple(first), last=tuple(last))


def _parse_listed(line: str, text: str) -> tuple[tuple[Coordinates, ...], ...]:
    """Events of each task, as [[(0, 1), (0, 2)], [(1, 1)]]."""
    try:
        tasks: list[list[Coordinates]] = parse_literal(text)
        numbers = [number for events in tasks for event in events for number in event]
    except (ValueError, SyntaxError, TypeError) as error:
        raise _unreadable(line) from error
    found = tuple(tuple(tuple(event) for event in events) for events in tasks)
    if repr([list(events) for events in found]) != text or not all(
        type(number) is int for number in numbers
    ):
        raise _unreadable(line)
    return found


def _parse_coordinate(line: str, text: str) -> EventCoordinate:
    match = _COORDINATE.fullmatch(text)
    if not match:
        raise _unreadable(line)
    fixed, table_dim, values, _, terms, offset, divisor, modulus = match.groups()
    if fixed is not None:
        return EventCoordinate(offset=parse_number(fixed))
    if table_dim is not None:
        numbers = tuple(map(parse_number, values.split(",")))
        return EventCoordinate(terms=((parse_number(table_dim), 1),), values=numbers)
    scales: dict[int, int] = {}
    for sign, dim, scale in _TERM.findall(terms):
        number, factor = parse_number(dim), parse_number(f"{sign}1") * parse_number(scale or "1")
        scales[number] = scales.get(number, 0) + factor
    found = EventCoordinate(
        terms=tuple(sorted((dim, scale) for dim, scale in scales.items() if scale)),
        offset=parse_number(offset or "0"),
        divisor=parse_number(divisor or "1"),
        modulus=parse_number(modulus or "0"),
    )
    if found.terms or found.divisor < 1:
        return found
    return EventCoordinate(offset=found.at(()))


def _unreadable(line: str) -> ParseError:
    return ParseError(
        f"cannot read {line!r}",
        expected="a line as print_events writes it",
        remedy="see kernels/events/text.py",
    )
