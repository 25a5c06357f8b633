"""The device mesh: which ranks run a program and how they are named by coordinates.

Comes in: the user's axis sizes, or a nested list of ranks. Goes out: an immutable DeviceMesh that
placements, collectives and launchers refer to by axis name. Next: domains.py.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from distmega.arguments import is_list, shown
from distmega.errors import MeshError, counted

Nested = int | Sequence["Nested"]

STAGE_AXIS = "pp"
"""The mesh axis of stages of a pipeline."""

MAX_RANKS = 65_536
MAX_DEPTH = 16
"""Of lists of ranks, in which each level is an axis."""
_TEXT = re.compile(r"mesh\(([^)]*)\)(?: on (\d{1,9}(?:,\d{1,9})*))?$")
_NAME = r"[A-Za-z_]\w*"
_AXIS = re.compile(rf"({_NAME})=(\d{{1,9}})$")


@dataclass(frozen=True, slots=True, init=False)
class DeviceMesh:
    """Named mesh axes over ranks: DeviceMesh(dp=2, tp=4) has ranks 0 to 7. Every method raises
    MeshError for an axis, rank or coordinate that the mesh hasn't.

    Attributes:
        axes: (name, size) of each, in order.
        ranks: Numbers of the ranks, row-major: the last axis varies fastest.
    """

    axes: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...]

    def __init__(self, /, **sizes: int) -> None:
        """A mesh over ranks 0 to n - 1: DeviceMesh(dp=2, tp=4). MeshError for a size below 1."""
        self._fill(tuple(sizes.items()), None)

    @classmethod
    def from_ranks(cls, ranks: Sequence[Nested], names: Sequence[str]) -> "DeviceMesh":
        """A mesh over given ranks, one nesting level an axis: [[3, 4, 1], [0, 8, 2]], (dp, tp).
        MeshError where the lists are no rectangle, or a rank comes twice.
        """
        shape, flat = _flatten(ranks)
        if not is_list(names) or len(shape) != len(names):
            found = f"axis names {shown(names)} for ranks {shown(ranks)}"
            raise _bad(found, counted(len(shape), "name"))
        mesh = cls.__new__(cls)
        mesh._fill(tuple(zip(names, shape, strict=True)), flat)
        return mesh

    @classmethod
    def parse(cls, text: str) -> "DeviceMesh":
        """Reads str(mesh) back; MeshError if it does not fit."""
        match = _TEXT.match(text) if isinstance(text, str) else None
        parts = [part.strip() for part in match[1].split(",")] if match and match[1] else []
        found = [_AXIS.match(part) for part in parts]
        if match is None or not all(found):
            raise _bad(f"mesh text {shown(text)}", "text such as 'mesh(dp=2, tp=4)'")
        axes = tuple((axis[1], int(axis[2])) for axis in found if axis)
        mesh = cls.__new__(cls)
        mesh._fill(axes, tuple(map(int, match[2].split(","))) if match[2] else None)
        return mesh

    def _fill(self, axes: tuple[tuple[str, int], ...], given: tuple[int, ...] | None) -> None:
        """given: ranks in order of their coordinates; None for 0, 1, 2 ..."""
        for name, size in axes:
            if not isinstance(name, str) or not re.fullmatch(_NAME, name):
                raise _bad(f"mesh axis {shown(name)}", "a name of letters, digits and _")
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                found = f"size {shown(size)} of mesh axis {name!r}"
                raise _bad(found, "a whole number of at least 1")
        if len({name for name, _ in axes}) != len(axes):
            raise _bad(f"axis names {[name for name, _ in axes]}", "different names")
        count = math.prod(size for _, size in axes)
        if count > MAX_RANKS:
            found = f"mesh axes {[name for name, _ in axes]} of more than {MAX_RANKS} ranks"
            raise _bad(found, "as many at most")
        ranks = tuple(range(count)) if given is None else given
        if len(ranks) != count:
            raise _bad(
                f"{counted(len(ranks), 'rank')} for axes {dict(axes)}", "one rank a coordinate"
            )
        repeated = sorted(rank for rank, num in Counter(ranks).items() if num > 1 or rank < 0)
        if repeated:
            raise _bad(f"ranks {repeated} in {list(ranks)}", "each rank once and none negative")
        object.__setattr__(self, "axes", axes)
        object.__setattr__(self, "ranks", ranks)

    def __str__(self) -> str:
        text = f"mesh({', '.join(f'{name}={size}' for name, size in self.axes)})"
        plain = self.ranks == tuple(range(self.num_ranks))
        return text if plain else f"{text} on {','.join(map(str, self.ranks))}"

    @property
    def num_ranks(self) -> int:
        """Ranks of the whole mesh."""
        return len(self.ranks)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the axes, in order."""
        return tuple(name for name, _ in self.axes)

    def size(self, axis: str) -> int:
        """Ranks along one axis."""
        sizes = dict(self.axes)
        if not isinstance(axis, str) or axis not in sizes:
            raise _bad(f"mesh axis {shown(axis)}", f"one of {list(sizes)}")
        return sizes[axis]

    def coordinate(self, rank: int) -> dict[str, int]:
        """Position of a rank by axis name."""
        if type(rank) is not int or rank not in self.ranks:
            raise _bad(f"rank {shown(rank)}", f"one of {list(self.ranks)}")
        position, found = self.ranks.index(rank), {}
        for name, size in reversed(self.axes):
            position, found[name] = divmod(position, size)
        return {name: found[name] for name, _ in self.axes}

    def coordinates(self) -> Iterator[dict[str, int]]:
        """All coordinates, in the order of `ranks`."""
        for position in product(*(range(size) for _, size in self.axes)):
            yield dict(zip(self.names, position, strict=True))

    def part(self, axis: str, index: int) -> "DeviceMesh":
        """The mesh without one axis: the ranks whose coordinate along it is `index`."""
        size = self.size(axis)
        if type(index) is not int or not 0 <= index < size:
            raise _bad(f"coordinate {shown(index)} along mesh axis {axis!r}", f"0 to {size - 1}")
        mesh = DeviceMesh.__new__(DeviceMesh)
        mesh._fill(
            tuple((name, size) for name, size in self.axes if name != axis),
            tuple(
                rank
                for rank, at in zip(self.ranks, self.coordinates(), strict=True)
                if at[axis] == index
            ),
        )
        return mesh

    def team(self, axis: str, rank: int) -> tuple[int, ...]:
        """Ranks that differ from `rank` only in their coordinate along `axis`, in its order."""
        size, here = self.size(axis), self.coordinate(rank)
        stride = math.prod(self.size(name) for name in self.names[self.names.index(axis) + 1 :])
        first = self.ranks.index(rank) - here[axis] * stride
        return tuple(self.ranks[first + i * stride] for i in range(size))


def _flatten(ranks: Nested, depth: int = 0) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and row-major elements of a nested list."""
    if type(ranks) is int:
        return (), (ranks,)
    if not is_list(ranks) or not ranks or depth > MAX_DEPTH:
        raise _bad(f"ranks {shown(ranks)}", "a rectangular nested list of ranks")
    parts = [_flatten(part, depth + 1) for part in ranks]
    if any(shape != parts[0][0] for shape, _ in parts):
        raise _bad(f"ranks {shown(ranks)}", "a rectangular nested list of ranks")
    return (len(parts), *parts[0][0]), tuple(rank for _, flat in parts for rank in flat)


def _bad(found: str, expected: str) -> MeshError:
    return MeshError(found, expected=expected, remedy="name the mesh as DeviceMesh(dp=2, tp=4)")
