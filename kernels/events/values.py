"""Value types of event tensors: places, maps, extents, counts, guards.

Tasks of an op have coordinates, one a split; events have coordinates, one a dim of their tensor. A
Place says where along one event dim a task is, from its coordinates. A Guard says which
tasks run, from what is known only at run time (RunTime). Next: analyse.py.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import index
from typing import TypeVar

from distmega.errors import ProgramError
from distmega.kernels.events.arguments import require

Coordinates = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventCoordinate:
    """(sum of scale * coordinate `dim` over `terms` + offset) // divisor, of that the remainder by
    `modulus` if there is one. terms: (dim, scale), by dim; none for the offset itself. values:
    where no such formula holds, the place for each value of the one coordinate in `terms`.
    """

    terms: tuple[tuple[int, int], ...] = ()
    offset: int = 0
    divisor: int = 1
    modulus: int = 0
    values: tuple[int, ...] = ()

    def at(self, task: Coordinates) -> int:
        """The place of a task."""
        if self.values:
            return self.values[task[self.terms[0][0]]]
        position = self.offset
        for dim, scale in self.terms:
            position += scale * task[dim]
        position //= self.divisor
        return position % self.modulus if self.modulus else position

    @property
    def only_dim(self) -> int:
        """The dim whose coordinate, or a part of it, is the place; -1 if it is another formula."""
        plain = len(self.terms) == 1 and self.terms[0][1] == 1 and not self.offset
        return self.terms[0][0] if plain and not self.values and not self.modulus else -1


@dataclass(frozen=True, slots=True, kw_only=True)
class EventMap:
    """From a task's coordinates to its events: along each event dim all places from `first` to
    `last`, both included, none where `first` is behind `last`. listed: where no such map holds, the
    events of each task by number.
    """

    first: tuple[EventCoordinate, ...] = ()
    last: tuple[EventCoordinate, ...] = ()
    listed: tuple[tuple[Coordinates, ...], ...] = ()

    def events(self, number: int, task: Coordinates) -> tuple[Coordinates, ...]:
        """Events of the task with this number and these coordinates."""
        if self.listed:
            return self.listed[number]
        found: list[Coordinates] = [()]
        for first, last in zip(self.first, self.last, strict=True):
            positions = range(first.at(task), last.at(task) + 1)
            found = [(*event, position) for event in found for position in positions]
        return tuple(found)

    def num_events(self, number: int, task: Coordinates) -> int:
        """How many `events` gives, without making them."""
        if self.listed:
            return len(self.listed[number])
        ends = zip(self.first, self.last, strict=True)
        return math.prod(max(0, last.at(task) - first.at(task) + 1) for first, last in ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Tiles along a dim: `most` of them, of which ceil(symbol / size) are in use; all without a
    symbol. With groups, those of each group have rows: a vector of starts by name.
    """

    most: int
    symbol: str = ""
    size: int = 1
    starts: str = ""

    def value(self, known: "RunTime") -> int:
        """Tiles in use; of groups the most that any group has."""
        if self.symbol:
            return min(self.most, -(-known.symbol(self.symbol) // self.size))
        if self.starts:
            rows = max(known.rows(self.starts), default=0)
            return min(self.most, -(-rows // self.size))
        return self.most


@dataclass(frozen=True, slots=True, kw_only=True)
class SymbolGuard:
    """Holds where a symbol is more than `first`."""

    symbol: str
    first: int

    def holds(self, known: "RunTime") -> bool:
        return known.symbol(self.symbol) > self.first

    def implies(self, other: "Guard") -> bool:
        """Whether `other` holds wherever this one does."""
        same = isinstance(other, SymbolGuard) and other.symbol == self.symbol
        return same and other.first <= self.first  # type: ignore[union-attr]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsGuard:
    """Holds where one of the groups first_group up to stop_group has more than first_row rows, by a
    vector of starts. mesh_axis: whose ranks share the groups out, `chunk` each, so that these are
    counted from the rank's first one on.
    """

    starts: str
    first_group: int
    stop_group: int
    first_row: int
    mesh_axis: str = ""
    chunk: int = 0

    def holds(self, known: "RunTime") -> bool:
        base = known.coordinate(self.mesh_axis) * self.chunk if self.mesh_axis else 0
        rows = known.rows(self.starts)[base + self.first_group : base + self.stop_group]
        return any(num > self.first_row for num in rows)

    def implies(self, other: "Guard") -> bool:
        """Whether `other` holds wherever this one does."""
        if not isinstance(other, RowsGuard) or other.starts != self.starts:
            return False
        if (other.mesh_axis, other.chunk) != (self.mesh_axis, self.chunk):
            return False
        inside = other.first_group <= self.first_group and self.stop_group <= other.stop_group
        return inside and other.first_row <= self.first_row


Guard = SymbolGuard | RowsGuard


@dataclass(frozen=True, slots=True)
class RunTime:
    """What is known at run time: symbols, vectors of starts of groups, the rank's coordinate."""

    symbols: Mapping[str, int] = field(default_factory=dict)
    starts: Mapping[str, Sequence[int]] = field(default_factory=dict)
    at: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """ProgramError for what isn't by name."""
        require(self.symbols, Mapping, "symbols", "values by name of the symbol")
        require(self.starts, Mapping, "starts", "starts of groups by name of their tensor")
        require(self.at, Mapping, "at", "coordinates by mesh axis")

    def symbol(self, name: str) -> int:
        """The value of a symbol; ProgramError if it has none, or none that an extent can have."""
        value = _given(self.symbols, name, "symbol")
        if type(value) is not int or value < 0:
            raise ProgramError(
                f"symbol {name!r} is {value!r}",
                expected="a whole number of at least 0",
                remedy="give its extent",
            )
        return value

    def coordinate(self, axis: str) -> int:
        """The rank's place along a mesh axis; ProgramError if it has none."""
        return _given(self.at, axis, "coordinate")

    def rows(self, starts: str) -> list[int]:
        """Rows of each group; ProgramError as of `bounds`."""
        return [stop - start for start, stop in pairwise(self.bounds(starts))]

    def bounds(self, starts: str) -> list[int]:
        """The start of each group and the end of the last; ProgramError where they are not known,
        or no whole numbers.
        """
        given = _given(self.starts, starts, "starts")
        try:
            return [*map(index, given)]
        except TypeError as error:
            raise ProgramError(
                f"starts {starts!r} {given!r:.80}",
                expected="whole numbers in a sequence",
                remedy="give the start of each group, and the end of the last",
            ) from error


Value = TypeVar("Value")


def _given(found: Mapping[str, Value], name: str, what: str) -> Value:
    if name not in found:
        raise ProgramError(
            f"{what} {name!r} without a value",
            expected=f"{what} of everything that is known at run time alone",
            remedy="give it in RunTime",
        )
    return found[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """Triggers that complete an event. each: of every event, in order of coordinates, or one number
    for all, where all tasks run. active: only those count that run, so that the number follows from
    `symbol`, or is read from the vector of starts `starts`.
    """

    each: tuple[int, ...]
    active: bool = False
    symbol: str = ""
    starts: str = ""

    def most(self, number: int) -> int:
        """Triggers of the event of this number where all tasks run."""
        return self.each[number] if len(self.each) > 1 else self.each[0]


Sources = str
"""Whose tasks trigger an event: "own" rank's, those of "all" ranks, or of the rank that a
coordinate of the waiting task names ("axis").
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventTensor:
    """Events of one op's tasks. extents: of its dims. notify: from producer tasks. waits: consumer
    op and the map from its tasks. ranks: how many ranks' tasks count, more than one where
    `sources` is "all".
    """

    name: str
    producer: str
    extents: tuple[Extent, ...]
    notify: EventMap
    count: Count
    waits: tuple[tuple[str, EventMap], ...]
    sources: Sources = "own"
    ranks: int = 1

    @property
    def num_events(self) -> int:
        """Events at most."""
        total = 1
        for extent in self.extents:
            total *= extent.most
        return total
