"""From tables of who triggers and awaits which event to maps over coordinates.

Comes in: grids of tasks, and for each task the events it has, by number. Goes out: coordinates of
the events and EventMaps that give exactly these tables. Nothing is guessed: what no formula gives
stays a table. Used by analyse.py.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np

from distmega.kernels.events.values import Coordinates, EventCoordinate, EventMap

Grid = tuple[int, ...]
Table = Sequence[tuple[int, ...]]
"""Events of each task, by task number, row-major over the grid."""


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
    falls, rises = (all(sign * (b - a) >= 0 for a, b in pairwise(values)) for sign in (-1, 1))
    for modulus in (0,) if rises else (0, max(values) + 1):
        line = _unwrapped(values, modulus) if modulus else values
        slope = _slope(line) if modulus or rises or falls else None
        if slope is not None:
            scale, offset, divisor = slope
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


def _slope(values: Sequence[int]) -> tuple[int, int, int] | None:
    """Scale, offset and divisor of (scale * n + offset) // divisor, which gives value n, of values
    that rise or fall: the smallest that do. None if there are none.

    A slope scale / divisor gives them if value n less n times the slope keeps within less than 1.
    Slopes are tried as the tree of Stern and Brocot has them, the simplest first; it ends between
    two, each the difference of two values, give or take 1, by that of their numbers.
    """
    falls = values[-1] < values[0]
    found = _simplest(np.array(values[::-1] if falls else values, dtype=np.int64))
    if found is None:
        return None
    scale, divisor = -found[0] if falls else found[0], found[1]
    return scale, max(divisor * value - scale * n for n, value in enumerate(values)), divisor


def _simplest(values: "np.ndarray[Any, Any]") -> tuple[int, int] | None:
    """Of values that rise, the slope with the smallest divisor, as numerator and divisor. Steps in
    one direction are doubled, then halved, so that it takes a few hundred looks at most.
    """
    numbers = np.arange(len(values))

    def side(slope: tuple[int, int]) -> int:
        """0 for a slope that fits, 1 for one that is too small, -1 for one that is too large."""
        rest = slope[1] * values - slope[0] * numbers
        most, least = int(rest.argmax()), int(rest.argmin())
        return 0 if rest[most] - rest[least] < slope[1] else 1 if most > least else -1

    ends = {1: (0, 1), -1: (1, 0)}
    while True:
        slope = _between(ends[1], ends[-1], 1)
        turned = side(slope)
        if turned == 0:
            return slope
        start, way = ends[turned], ends[-turned]
        steps = 2
        while side(_between(start, way, steps)) == turned:
            if _between(start, way, steps)[1] > 2 * len(values):
                return None
            steps *= 2
        first, stop = steps // 2 + 1, steps
        while first < stop:
            middle = (first + stop) // 2
            if side(_between(start, way, middle)) == turned:
                first = middle + 1
            else:
                stop = middle
        slope = _between(start, way, first)
        if side(slope) == 0:
            return slope
        ends = {turned: _between(start, way, first - 1), -turned: slope}
        if slope[1] > 2 * len(values):
            return None


def _between(start: tuple[int, int], way: tuple[int, int], steps: int) -> tuple[int, int]:
    """The slope so many steps from one end of the tree towards the other."""
    return start[0] + steps * way[0], start[1] + steps * way[1]
