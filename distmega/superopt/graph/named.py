"""Arrays whose dims have names: what programs and graphs are interpreted with.

Comes in: planes of shape [samples, ...] and access maps. Goes out: one dim an axis, and back. The
first dim counts the samples and has no name. Next: reference.py and interpret.py.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from distmega.superopt.graph.arithmetic import Arithmetic, Array, Planes

Dims = tuple[tuple[str, ...], ...]
"""The axes of each dim of a tensor, outer first; none where its extent is 1."""


def dim_of(dims: Dims, axis: str) -> int:
    """The dim that an axis runs along, -1 if none does."""
    return next((n for n, dim in enumerate(dims) if axis in dim), -1)


@dataclass(frozen=True, slots=True)
class Named:
    """Planes with an axis a dim, after the samples' dim."""

    axes: tuple[str, ...]
    planes: Planes

    def each(self, change: Callable[[Array], Array], axes: Sequence[str]) -> "Named":
        """Every plane changed alike; the axes afterwards."""
        return Named(tuple(axes), tuple(map(change, self.planes)))

    def take(self, parts: Mapping[str, tuple[int, int]]) -> "Named":
        """The elements of a part of some axes: (number of the part, number of parts)."""

        def cut(x: Array) -> Array:
            where: list[slice] = [slice(None)]
            for axis, extent in zip(self.axes, x.shape[1:], strict=True):
                index, count = parts.get(axis, (0, 1))
                size = extent // count
                where.append(slice(index * size, (index + 1) * size))
            return x[tuple(where)]

        return self.each(cut, self.axes)

    def positions(self, names: Sequence[str]) -> tuple[int, ...]:
        """Where the named axes lie."""
        return tuple(self.axes.index(name) + 1 for name in names)


def ordered(x: Named, want: Sequence[str]) -> Named:
    """x with dims `want`; axes that it lacks get extent 1."""
    order = [0, *(x.axes.index(name) + 1 for name in want if name in x.axes)]
    missing = tuple(dim for dim, name in enumerate(want, start=1) if name not in x.axes)
    return x.each(lambda a: np.expand_dims(a.transpose(order), missing), want)


def union(*axes: Sequence[str]) -> tuple[str, ...]:
    """All axes, in the order in which they first stand."""
    return tuple(dict.fromkeys(name for part in axes for name in part))


def unfold(planes: Planes, dims: Dims, extents: Mapping[str, int]) -> Named:
    """A tensor seen with one dim an axis."""
    shape = [extents[name] for dim in dims for name in dim]
    axes = tuple(name for dim in dims for name in dim)
    return Named(axes, tuple(x.reshape(x.shape[0], *shape) for x in planes))


def fold(x: Named, dims: Dims, extents: Mapping[str, int]) -> Planes:
    """Planes in the dims of a tensor."""
    found = ordered(x, [name for dim in dims for name in dim])
    wide = [extents[name] for name in found.axes]
    shape = [math.prod(extents[name] for name in dim) for dim in dims]
    return tuple(
        np.broadcast_to(a, (a.shape[0], *wide)).reshape(a.shape[0], *shape) for a in found.planes
    )


def contract(arithmetic: Arithmetic, a: Named, b: Named, reduced: Sequence[str]) -> Named:
    """Sum over the reduced axes of a * b."""
    axes = union(a.axes, b.axes)
    x, y = ordered(a, axes), ordered(b, axes)
    dims = tuple(axes.index(name) + 1 for name in reduced)
    left = tuple(name for name in axes if name not in reduced)
    return Named(left, arithmetic.contract(x.planes, y.planes, dims))


def reduce(arithmetic: Arithmetic, x: Named, reduced: Sequence[str], combine: str) -> Named:
    """Combines axes away by "sum", "max" or "min"."""
    left, dims = tuple(name for name in x.axes if name not in reduced), x.positions(reduced)
    if combine == "sum":
        return Named(left, arithmetic.sum(x.planes, dims))
    return Named(left, arithmetic.extreme(x.planes, dims, combine))


def join(parts: Sequence[Named], axis: str, name: str) -> Named:
    """Elements of all parts side by side along one axis, called `name` afterwards; `axis` names it
    in all of them.
    """
    first = parts[0].axes
    rest = [ordered(part, first) for part in parts]
    dim = first.index(axis) + 1
    planes = tuple(
        np.concatenate(planes, axis=dim)
        for planes in zip(*(part.planes for part in rest), strict=True)
    )
    return Named(tuple(name if a == axis else a for a in first), planes)
