"""Geometry of a task: the box of iterations it covers, as lengths and strides of every operand.

In: an op, where its operands lie, and the splits of its task group. Out: `IterationBox`s. A task is
one part, or several where its flat range is not a box or its dims do not merge into as few as an
instruction has. Axes of one class (rows, columns, sums ...) merge wherever all operands step
through them evenly. Next on the walk: lowering.py, one rule an op kind.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from distmega.errors import UnsupportedError
from distmega.kernels.runtime.arena import Operand, axis_strides
from distmega.kernels.tasks.regions import split_digits, tile_intervals
from distmega.kernels.tasks.types import TaskGroup
from distmega.program.types import Access, Op, accesses

Strides = tuple[int, ...]
"""Elements a dim steps, for each operand of an op in the order of its accesses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dim:
    """A loop of a part: `start` counts from the beginning of the axis, strides are 0 where an
    operand stands still.
    """

    start: int
    length: int
    strides: Strides


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationBox:
    """A box of iterations: first element of each operand, and the dims of each class, outer first,
    padded to the limit.
    """

    firsts: tuple[int, ...]
    dims: Mapping[str, tuple[Dim, ...]]

    def lengths(self, name: str) -> tuple[int, ...]:
        """Lengths of the dims of a class."""
        return tuple(dim.length for dim in self.dims[name])

    def strides(self, name: str, operand: int) -> tuple[int, ...]:
        """Strides of one operand over the dims of a class."""
        return tuple(dim.strides[operand] for dim in self.dims[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axes:
    """One axis, or several of a split that step evenly together."""

    name: str
    extent: int
    strides: Strides


Box = Mapping[tuple[str, ...], range]
"""Range of each axis, or of several axes composed row-major."""

Clip = Mapping[str, range]
"""Ranges that narrow some axes."""

NO_CLIP: Clip = {}

Classify = Callable[[str], str]
"""Class of an axis by its name; "" leaves the axis out of the box (the instruction treats it
whole).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """An op's axes with the strides of all operands; `limits`: dims an instruction has for each
    class of axes.
    """

    op: Op
    group: TaskGroup
    firsts: tuple[int, ...]
    axes: Mapping[str, _Axes]
    classify: Classify
    limits: Mapping[str, int]

    def stride(self, axis: str, operand: int) -> int:
        """Elements that one operand steps with an axis."""
        return self.axes[axis].strides[operand]

    def parts(self, task: int, clip: Clip = NO_CLIP) -> Iterator[IterationBox]:
        """Parts of a task, in which `clip` narrows axes. Dims beyond a class's limit are walked, as
        _kept_positions chooses them.
        """
        for box in self._boxes(task, fuse=not clip):
            if clip:
                box = {axes: _narrow(values, clip.get(axes[-1])) for axes, values in box.items()}
            if all(box.values()):
                yield from self._split(box)

    def _boxes(self, task: int, *, fuse: bool) -> Iterator[Box]:
        """Boxes of a task; with `fuse`, the evenly stepping axes of a split are one."""
        whole = {(name,): range(axis.extent) for name, axis in self.axes.items()}
        choices: list[list[Box]] = []
        for split, (start, stop) in zip(
            self.group.splits, tile_intervals(self.group, task), strict=True
        ):
            sizes = [self.axes[name].extent for name in split.axes]
            boxes = split_digits(range(start, stop), sizes)
            for name in split.axes:
                del whole[name,]
            if fuse and len(boxes) > 1 and self._even(split.axes):
                choices.append([{split.axes: range(start, stop)}])
            else:
                names = [(name,) for name in split.axes]
                choices.append([dict(zip(names, box, strict=True)) for box in boxes])
        for choice in product(*choices):
            yield whole | {axes: values for part in choice for axes, values in part.items()}

    def _even(self, names: Sequence[str]) -> bool:
        axes = [self.axes[name] for name in names]
        steps = all(_merges(a.strides, b.strides, b.extent) for a, b in pairwise(axes))
        return steps and len({self.classify(name) for name in names}) == 1

    def _split(self, box: Box) -> Iterator[IterationBox]:
        firsts = list(self.firsts)
        classes: dict[str, list[Dim]] = {name: [] for name in self.limits}
        for axes, values in box.items():
            if name := self.classify(axes[-1]):
                strides = self.axes[axes[-1]].strides
                firsts = [
                    first + values.start * step for first, step in zip(firsts, strides, strict=True)
                ]
                classes[name].append(Dim(start=values.start, length=len(values), strides=strides))
        walked: list[Dim] = []
        for name, dims in classes.items():
            merged = _merge(dims)
            chosen = _kept_positions(merged, self.limits[name])
            walked += [dim for position, dim in enumerate(merged) if position not in chosen]
            classes[name] = [merged[position] for position in chosen]
        kept = {name: _pad(dims, self.limits[name], len(firsts)) for name, dims in classes.items()}
        for point in product(*(range(dim.length) for dim in walked)):
            shifts = [[i * s for s in dim.strides] for i, dim in zip(point, walked, strict=True)]
            yield IterationBox(firsts=tuple(map(sum, zip(firsts, *shifts, strict=True))), dims=kept)


def make_geometry(
    group: TaskGroup, operands: Sequence[Operand], classify: Classify, limits: Mapping[str, int]
) -> Geometry:
    """Geometry of a group; `operands` in the order of the op's accesses."""
    op = group.op
    extents = op.extents
    firsts, steps = [], []
    for access, operand in zip(accesses(op), operands, strict=True):
        first, strides = axis_strides(access, operand, extents)
        firsts.append(first)
        steps.append(strides)
    axes = {
        name: _Axes(name=name, extent=extent, strides=tuple(step.get(name, 0) for step in steps))
        for name, extent in extents.items()
    }
    return Geometry(
        op=op, group=group, firsts=tuple(firsts), axes=axes, classify=classify, limits=limits
    )


def inside(op: Op, access: Access, shape: Sequence[int]) -> list[Clip]:
    """Boxes of axis ranges that together are the iterations whose position lies inside the tensor.
    [{}] if all do.

    Concat reads and uneven gathers write past the ends of a dim; such positions are not accessed.
    """
    choices: list[list[Clip]] = []
    for index, extent in zip(access.dims, shape, strict=True):
        sizes = [op.axis(name).extent for name in index.axes]
        span = math.prod(sizes)
        start = max(0, -(index.offset // index.stride))
        stop = min(span, -((index.offset - extent) // index.stride))
        if index.axes and (start, stop) != (0, span):
            boxes = split_digits(range(start, max(start, stop)), sizes)
            choices.append([dict(zip(index.axes, box, strict=True)) for box in boxes])
    return [
        {name: values for part in choice for name, values in part.items()}
        for choice in product(*choices)
    ]


def both(one: Clip, other: Clip) -> Clip:
    """The ranges that satisfy two clips."""
    return dict(one) | {name: _narrow(values, one.get(name)) for name, values in other.items()}


def unfit(op: Op, found: str, expected: str) -> UnsupportedError:
    """The error for an op that no instruction can express; expected: of ops of its kind."""
    return UnsupportedError(
        f"op {op.name!r} of kind {op.kind}: {found}",
        expected=expected,
        remedy="keep it outside megakernels, as a library op",
    )


def _narrow(values: range, limit: range | None) -> range:
    if limit is None:
        return values
    start = max(values.start, limit.start)
    return range(start, max(start, min(values.stop, limit.stop)))


def _merges(outer: Strides, inner: Strides, length: int) -> bool:
    return all(a == b * length for a, b in zip(outer, inner, strict=True))


def _merge(dims: Sequence[Dim]) -> list[Dim]:
    """Drops dims of length 1 and joins neighbours that step evenly; outermost first by the strides
    of all operands.
    """
    ordered = sorted((d for d in dims if d.length > 1), key=lambda d: max(d.strides), reverse=True)
    merged: list[Dim] = []
    for dim in ordered:
        if merged and _merges(merged[-1].strides, dim.strides, dim.length):
            length = merged.pop().length * dim.length
            dim = Dim(start=0, length=length, strides=dim.strides)
        merged.append(dim)
    if not merged and dims:
        return [dims[-1]]
    return merged


def _kept_positions(dims: Sequence[Dim], limit: int) -> list[int]:
    """Positions of the dims that an instruction has, in order: the innermost, where it has others,
    and the longest, so that as few instructions as can be walk the rest.
    """
    last = len(dims) - 1
    ranked = sorted(
        range(len(dims)),
        key=lambda position: (limit > 1 and position == last, dims[position].length, position),
    )
    return sorted(ranked[len(dims) - min(limit, len(dims)) :])


def _pad(dims: Sequence[Dim], limit: int, num_operands: int) -> tuple[Dim, ...]:
    one = Dim(start=0, length=1, strides=(0,) * num_operands)
    return (*(one,) * (limit - len(dims)), *dims)
