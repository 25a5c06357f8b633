"""From tables of who triggers and awaits which event to maps over coordinates.

Comes in: grids of tasks, and for each task the events it has, by number. Goes out: coordinates of
the events and EventMaps that give exactly these tables. Nothing is guessed: what no formula gives
stays a table. Used by analyse.py.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise, product

from distmega.kernels.events.values import Coordinates, EventCoordinate, EventMap

Grid = tuple[int, ...]
Table = Sequence[tuple[int, ...]]
"""Events of each task, by task number, row-major over the grid."""

MAX_FACTOR = 16
"""Scales and divisors of formulas that are tried."""


def grid_coordinates(grid: Grid) -> Iterator[Coordinates]:
    """All coordinates, row-major."""
    return product(*map(range, grid))


def event_coordinates(sides: Sequence[tuple[Grid, Table]], num_events: int) -> list[Coordinates]:
    """Coordinates of events 0 up to num_events: by the first side of which every task has one event
    and whose dims tell events apart, or the numbers themselves.
    """
    for grid, table in sides:
        if all(len(events) == 1 for events in table):
            found = _factor(grid, [events[0] for events in table])
            if found is not None and len(found) == num_events:
                return [found[event] for event in range(num_events)]
    return [(event,) for event in range(num_events)]


def _factor(grid: Grid, events: Sequence[int]) -> dict[int, Coordinates] | None:
    """Event -> coordinates, where they are a product of classes of the values of each grid dim; a
    dim whose values are all alike gives none. None where they are no such product.
    """
    at = dict(zip(grid_coordinates(grid), events, strict=True))
    classes: list[list[int]] = []
    for dim, extent in enumerate(grid):
        rows = [
            tuple(event for position, event in at.items() if position[dim] == value)
            for value in range(extent)
        ]
        known: dict[tuple[int, ...], int] = {}
        classes.append([known.setdefault(row, len(known)) for row in rows])
    kept = [dim for dim, found in enumerate(classes) if max(found, default=0) > 0]
    named: dict[int, Coordinates] = {}
    for position, event in at.items():
        coordinates = tuple(classes[dim][position[dim]] for dim in kept)
        if named.setdefault(event, coordinates) != coordinates:
            return None
    total = math.prod(max(classes[dim]) + 1 for dim in kept)
    return named if len(named) == total == len(set(named.values())) else None


def fit_map(grid: Grid, table: Table, coordinates: Sequence[Coordinates]) -> EventMap:
    """The map from tasks to events that gives a table."""
    sets = [tuple(sorted(coordinates[event] for event in events)) for events in table]
    found = _fit_ranges(grid, sets) if all(sets) else _fit_steps(grid, sets)
    tasks = enumerate(grid_coordinates(grid))
    if found and all(tuple(sorted(found.events(n, t))) == sets[n] for n, t in tasks):
        return found
    return EventMap(listed=tuple(sets))


def _fit_ranges(grid: Grid, sets: Sequence[tuple[Coordinates, ...]]) -> EventMap | None:
    """The map of tasks that all have events, where formulas give the first and last of each."""
    ends = [
        [
            [pick(event[dim] for event in events) for events in sets]
            for dim in range(len(sets[0][0]))
        ]
        for pick in (min, max)
    ]
    positions = [[fit_coordinate(grid, values) for values in end] for end in ends]
    first, last = (tuple(p for p in end if p is not None) for end in positions)
    return EventMap(first=first, last=last) if len(first) == len(last) == len(ends[0]) else None


def _fit_steps(grid: Grid, sets: Sequence[tuple[Coordinates, ...]]) -> EventMap | None:
    """The map where along some dims only every n-th task has events: first places are rounded up
    and last ones down, so that the tasks in between have none.
    """
    used = [task for task, events in zip(grid_coordinates(grid), sets, strict=True) if events]
    along = [sorted({task[dim] for task in used}) for dim in range(len(grid))]
    if not used or not all(
        len(found) > 1 or extent == 1 for found, extent in zip(along, grid, strict=True)
    ):
        return None
    steps = [range(a[0], a[-1] + 1, a[1] - a[0] if len(a) > 1 else 1) for a in along]
    if list(product(*steps)) != used:
        return None
    inner = _fit_ranges(tuple(map(len, steps)), [events for events in sets if events])
    if inner is None or not all(map(_steps_alone, (*inner.first, *inner.last))):
        return None
    return EventMap(
        first=tuple(_spread(position, steps, rounds_up=True) for position in inner.first),
        last=tuple(_spread(position, steps, rounds_up=False) for position in inner.last),
    )


def _steps_alone(position: EventCoordinate) -> bool:
    """Whether a place follows one coordinate at most: then its steps alone say when it is one."""
    return len(position.terms) <= 1 and not position.values and not position.modulus


def _spread(
    position: EventCoordinate, steps: Sequence[range], *, rounds_up: bool
) -> EventCoordinate:
    """The place by a coordinate of which it was found by the number of its step."""
    if not position.terms:
        return position
    ((dim, scale),) = position.terms
    start, step = steps[dim].start, steps[dim].step
    offset = position.offset * step - scale * start + (step - 1) * rounds_up
    return replace(position, offset=offset, divisor=position.divisor * step)


def fit_coordinate(grid: Grid, values: Sequence[int]) -> EventCoordinate | None:
    """The place that gives `values`, one a task; None if it depends on several coordinates by no
    formula.
    """
    if len(set(values)) <= 1:
        return EventCoordinate(offset=values[0] if values else 0)
    tasks = list(grid_coordinates(grid))
    for dim, extent in enumerate(grid):
        seen: dict[int, int] = {}
        if all(seen.setdefault(t[dim], v) == v for t, v in zip(tasks, values, strict=True)):
            alone = [seen[n] for n in range(extent)]
            return _formula(((dim, 1),), alone) or EventCoordinate(
                terms=((dim, 1),), values=tuple(alone)
            )
    return _affine(grid, values) or _formula(_row_major(grid), values)


def _row_major(grid: Grid) -> tuple[tuple[int, int], ...]:
    """The terms that number tasks."""
    strides = [math.prod(grid[dim + 1 :]) for dim in range(len(grid))]
    return tuple((dim, strides[dim]) for dim, extent in enumerate(grid) if extent > 1)


def _affine(grid: Grid, values: Sequence[int]) -> EventCoordinate | None:
    """A sum of scaled coordinates and an offset."""
    scales = [(dim, values[stride] - values[0]) for dim, stride in _row_major(grid)]
    terms = tuple((dim, scale) for dim, scale in scales if scale)
    found = EventCoordinate(terms=terms, offset=values[0])
    tasks = grid_coordinates(grid)
    return found if all(found.at(t) == v for t, v in zip(tasks, values, strict=True)) else None


def _formula(number: tuple[tuple[int, int], ...], values: Sequence[int]) -> EventCoordinate | None:
    """The formula that gives value n where the sum of the terms `number` is n; None without one."""
    ascending = all(before <= value for before, value in pairwise(values))
    for modulus in (0,) if ascending else (0, max(values) + 1):
        line = _unwrapped(values, modulus) if modulus else values
        for scale, offset, divisor in _candidates(line):
            if all((scale * n + offset) // divisor == v for n, v in enumerate(line)):
                terms = tuple((dim, scale * each) for dim, each in number)
                return EventCoordinate(terms=terms, offset=offset, divisor=divisor, modulus=modulus)
    return None


def _unwrapped(values: Sequence[int], modulus: int) -> list[int]:
    """Values that are remainders, each with the multiple that makes them ascend."""
    found, base = [values[0]], 0
    for before, value in pairwise(values):
        base += modulus * (value < before)
        found.append(base + value)
    return found


def _candidates(values: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Scale, offset and divisor of formulas that may give the values, the smallest divisors first:
    lines, small fractions, and stairs whose steps are 1 high.
    """
    first = values[0]
    yield values[1] - first, first, 1
    for divisor in range(2, MAX_FACTOR + 1):
        for scale in range(1, MAX_FACTOR + 1):
            if math.gcd(scale, divisor) == 1:
                for offset in range(first * divisor, (first + 1) * divisor):
                    yield scale, offset, divisor
    runs = [len(list(run)) for _, run in groupby(values)]
    divisor = max(runs)
    yield 1, (first + 1) * divisor - runs[0], divisor
