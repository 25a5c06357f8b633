"""Iteration domains: axes under split, merge, reorder and swizzle, each with a parallel type.

Comes in: the iteration axes of an op (a loop domain). Goes out: for every parallel coordinate, the
exact positions that an access touches; two shardings are equal when these maps are equal, whatever
their axes are called. Next: placements.py, the tensor's side.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from distmega.errors import VerifyError
from distmega.program.types import Index

Array = npt.NDArray[np.int64]
Ranges = tuple[tuple[int, int], ...]
"""Positions as sorted, disjoint, half-open ranges."""


@dataclass(frozen=True, slots=True)
class Device:
    """Values run on different ranks, along one mesh axis."""

    axis: str

    def __str__(self) -> str:
        return f"Device({self.axis})"


@dataclass(frozen=True, slots=True)
class Stream:
    """Values run as iterations of a host loop, on CUDA streams."""

    def __str__(self) -> str:
        return "Stream"


@dataclass(frozen=True, slots=True)
class Task:
    """Values run as tasks of a persistent megakernel, along one dim of its grid of tasks."""

    dim: int = 0

    def __str__(self) -> str:
        return f"Task({self.dim})" if self.dim else "Task"


@dataclass(frozen=True, slots=True)
class Serial:
    """Values run one after the other inside whatever holds them."""

    def __str__(self) -> str:
        return "Serial"


Parallel = Device | Stream | Task | Serial


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopAxis:
    """One axis of a domain after its transforms."""

    name: str
    extent: int
    parallel: Parallel = Serial()

    def __str__(self) -> str:
        mark = "" if isinstance(self.parallel, Serial) else f" {self.parallel}"
        return f"{self.name}:{self.extent}{mark}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """source = outer * inner_extent + inner, for values below `extent`; the rest is padding."""

    source: str
    extent: int
    outer: str
    inner: str
    inner_extent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """result = outer * inner_extent + inner."""

    outer: str
    inner: str
    inner_extent: int
    result: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Swizzle:
    """source = (result + coordinate along the mesh axis + shift) mod extent: the ring."""

    source: str
    result: str
    extent: int
    axis: str
    shift: int = 0


Transform = Split | Merge | Swizzle


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopDomain:
    """Root axes (name, extent), the transforms applied to them in order, and the axes that result.

    `axes` is the loop nest, outermost first. Every method gives a new domain.
    """

    roots: tuple[tuple[str, int], ...]
    transforms: tuple[Transform, ...] = ()
    axes: tuple[LoopAxis, ...]

    @staticmethod
    def of(roots: Sequence[tuple[str, int]]) -> "LoopDomain":
        """A domain without transforms: every root a serial axis. VerifyError for equal names."""
        names = [name for name, _ in roots]
        if len(set(names)) < len(names):
            raise _bad(f"roots {names}", "different names")
        axes = tuple(LoopAxis(name=name, extent=extent) for name, extent in roots)
        return LoopDomain(roots=tuple(roots), axes=axes)

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.axes))}]"

    def axis(self, name: str) -> LoopAxis:
        """The loop axis of that name. VerifyError if it is not (or no longer) one."""
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise _bad(f"axis {name!r} of loop domain {self}", "one of its axes")

    def split(self, name: str, factor: int, *, outer: bool = False) -> "LoopDomain":
        """Splits an axis into name.o and name.i. `factor` is the extent of name.i, or of name.o.

        The other extent is rounded up; values past the axis' extent are padding.
        """
        source = self.axis(name)
        if type(factor) is not int or factor < 1:
            raise _bad(f"split of {name!r} by {factor}", "a whole number of at least 1")
        other = -(-source.extent // factor)
        outer_extent, inner_extent = (factor, other) if outer else (other, factor)
        transform = Split(
            source=name,
            extent=source.extent,
            outer=f"{name}.o",
            inner=f"{name}.i",
            inner_extent=inner_extent,
        )
        new = (
            LoopAxis(name=transform.outer, extent=outer_extent),
            LoopAxis(name=transform.inner, extent=inner_extent),
        )
        return self._replaced((name,), new, transform)

    def merge(self, outer: str, inner: str) -> "LoopDomain":
        """Joins two axes into one named outer&inner, placed where the outer one was."""
        first, second = self.axis(outer), self.axis(inner)
        if outer == inner:
            raise _bad(f"merge of {outer!r} with itself", "two axes")
        result = f"{outer}&{inner}"
        transform = Merge(outer=outer, inner=inner, inner_extent=second.extent, result=result)
        new = (LoopAxis(name=result, extent=first.extent * second.extent),)
        return self._replaced((outer, inner), new, transform)

    def swizzle(self, name: str, axis: str, shift: int = 0) -> "LoopDomain":
        """Rotates an axis by the coordinate along a mesh axis: name.r runs the ring."""
        source, result = self.axis(name), f"{name}.r"
        transform = Swizzle(
            source=name, result=result, extent=source.extent, axis=axis, shift=shift
        )
        return self._replaced((name,), (replace(source, name=result),), transform)

    def parallelize(self, name: str, parallel: Parallel) -> "LoopDomain":
        """Gives an axis a parallel type. VerifyError if another axis has the same one: a mesh axis,
        the stream index and a dim of the grid of tasks each number the values of one axis.
        """
        taken = [axis.parallel for axis in self.axes if axis.name != name]
        if not isinstance(parallel, Serial) and parallel in taken:
            expected = "one axis a mesh axis, a stream, a dim of tasks; merge the two first"
            raise _bad(f"second axis {name!r} marked {parallel} in {self}", expected)
        self.axis(name)
        axes = (replace(a, parallel=parallel) if a.name == name else a for a in self.axes)
        return replace(self, axes=tuple(axes))

    def reorder(self, front: Sequence[str]) -> "LoopDomain":
        """Moves the named axes to the front, in that order. VerifyError if one comes twice."""
        if len(set(front)) < len(front):
            raise _bad(f"reorder with {list(front)} in front", "each axis once")
        first = tuple(self.axis(name) for name in front)
        rest = tuple(axis for axis in self.axes if axis.name not in front)
        return replace(self, axes=first + rest)

    def shard(self, name: str, axis: str, size: int) -> "LoopDomain":
        """Divides an axis over a mesh axis and moves the device axis to the front."""
        domain = self.split(name, size, outer=True).parallelize(f"{name}.o", Device(axis))
        return domain.reorder([f"{name}.o"])

    def extent_of(self, parallel: Parallel) -> int:
        """Extent of the axis with this parallel type; 1 without one."""
        return next((axis.extent for axis in self.axes if axis.parallel == parallel), 1)

    def positions(self, root: str, coordinate: Mapping[Parallel, int]) -> Ranges:
        """Values of a root axis that run at a parallel coordinate.

        coordinate: coordinate by parallel type; axes of a type not in it run whole.
        """
        extent, needed = dict(self.roots)[root], _ancestors(self.transforms, root)
        relevant = [t for t in self.transforms if needed.intersection(_sources(t))]
        if not relevant:
            return _clip(self.axis(root), coordinate, extent)
        if len(relevant) == 1 and isinstance(split := relevant[0], Split):
            outer, inner = self.axis(split.outer), self.axis(split.inner)
            if outer.parallel in coordinate and inner.parallel not in coordinate:
                start = coordinate[outer.parallel] * split.inner_extent
                return ((start, min(start + split.inner_extent, extent)),) * (start < extent)
        return _ranges(self._enumerate(root, coordinate))

    def _enumerate(self, root: str, coordinate: Mapping[Parallel, int]) -> Array:
        """All values of one root at a parallel coordinate."""
        return np.unique(self.enumerate((root,), coordinate)[root])

    def enumerate(
        self, roots: Sequence[str], coordinate: Mapping[Parallel, int]
    ) -> dict[str, Array]:
        """Values that the roots take together at a parallel coordinate, padding left out.

        Runs the transforms backwards over all values of the axes that the roots became, and that
        others became which share an axis with them: padding of one is padding of all.
        """
        needed = _joined([_ancestors(self.transforms, root) for root, _ in self.roots], roots)
        grids = [
            np.array([coordinate[axis.parallel]])
            if axis.parallel in coordinate
            else np.arange(axis.extent)
            for axis in self.axes
            if axis.name in needed
        ]
        names = [axis.name for axis in self.axes if axis.name in needed]
        if not names:
            return {}
        mesh = np.meshgrid(*grids, indexing="ij")
        values: dict[str, Array] = {n: g.reshape(-1) for n, g in zip(names, mesh, strict=True)}
        valid = np.ones(next(iter(values.values())).shape, dtype=bool)
        for transform in reversed(self.transforms):
            match transform:
                case Split(source=source, outer=outer, inner=inner) if outer in values:
                    values[source] = values[outer] * transform.inner_extent + values[inner]
                    valid &= values[source] < transform.extent
                case Merge(result=result) if result in values:
                    values[transform.outer] = values[result] // transform.inner_extent
                    values[transform.inner] = values[result] % transform.inner_extent
                case Swizzle(result=result) if result in values:
                    shift = transform.shift + coordinate.get(Device(transform.axis), 0)
                    values[transform.source] = (values[result] + shift) % transform.extent
        return {root: values[root][valid] for root in roots}

    def _replaced(
        self, old: Sequence[str], new: Sequence[LoopAxis], transform: Transform
    ) -> "LoopDomain":
        names = {name for name, _ in self.roots} | {axis.name for axis in self.axes}
        if taken := sorted(names.intersection(axis.name for axis in new)):
            raise _bad(f"{old} becoming {taken} in {self}", "names that no axis or root has")
        at = next(i for i, axis in enumerate(self.axes) if axis.name == old[0])
        axes = list(self.axes)
        axes[at : at + 1] = new
        kept = tuple(axis for axis in axes if axis.name not in old or axis in new)
        return replace(self, axes=kept, transforms=(*self.transforms, transform))


def _sources(transform: Transform) -> tuple[str, ...]:
    """Names that a transform replaced."""
    if isinstance(transform, Merge):
        return (transform.outer, transform.inner)
    return (transform.source,)


def _ancestors(transforms: Sequence[Transform], root: str) -> set[str]:
    """Names whose values decide the root's value: the root and all that it was turned into."""
    names = {root}
    for transform in transforms:
        match transform:
            case Split(source=source, outer=outer, inner=inner) if source in names:
                names |= {outer, inner}
            case Merge(outer=outer, inner=inner, result=result) if {outer, inner} & names:
                names.add(result)
            case Swizzle(source=source, result=result) if source in names:
                names.add(result)
    return names


def _joined(families: Sequence[set[str]], roots: Sequence[str]) -> set[str]:
    """All families that hold one of the roots, or share a name with such a family."""
    needed = set(roots)
    for _ in families:
        for family in families:
            if family & needed:
                needed |= family
    return needed


def _clip(axis: LoopAxis, coordinate: Mapping[Parallel, int], extent: int) -> Ranges:
    if axis.parallel in coordinate:
        start = coordinate[axis.parallel]
        return ((start, start + 1),) * (start < extent)
    return ((0, extent),)


def _ranges(values: Array) -> Ranges:
    if not len(values):
        return ()
    cuts = np.flatnonzero(np.diff(values) != 1)
    starts = values[np.concatenate(([0], cuts + 1))]
    stops = values[np.concatenate((cuts, [len(values) - 1]))] + 1
    return tuple(zip(starts.tolist(), stops.tolist(), strict=True))


def dim_positions(
    domain: LoopDomain, index: Index, extent: int, coordinate: Mapping[Parallel, int]
) -> Ranges:
    """Positions of a tensor dim of `extent` that an access touches at a parallel coordinate."""
    sizes = dict(domain.roots)
    if not index.axes:
        return ((index.offset, index.offset + 1),)
    parts = [domain.positions(name, coordinate) for name in index.axes]
    inner = int(np.prod([sizes[name] for name in index.axes[1:]], dtype=np.int64))
    whole = all(p == ((0, sizes[n]),) for n, p in zip(index.axes[1:], parts[1:], strict=True))
    if whole and index.stride == 1:
        moved = ((a * inner + index.offset, b * inner + index.offset) for a, b in parts[0])
        kept = ((max(a, 0), min(b, extent)) for a, b in moved)
        return tuple((a, b) for a, b in kept if a < b)
    values = np.zeros(1, dtype=np.int64)
    for name, part in zip(index.axes, parts, strict=True):
        digits = np.concatenate([np.arange(a, b) for a, b in part] or [np.zeros(0, np.int64)])
        values = (values[:, None] * sizes[name] + digits[None, :]).reshape(-1)
    found = np.unique(values * index.stride + index.offset)
    return _ranges(found[(found >= 0) & (found < extent)])


def _bad(found: str, expected: str) -> VerifyError:
    return VerifyError(found, expected=expected, remedy="check the transforms of the domain")
