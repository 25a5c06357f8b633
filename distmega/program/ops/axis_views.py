"""Access maps as torch views: an operand seen with one dim per iteration axis, and results put back
in tensor dims.

Comes in: a tensor of torch and its Access. Goes out: strided views, no data is copied. References
use them for every op whose meaning is "the same point of the iteration space", whatever the order
and grouping of the dims.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from distmega.program.types import Access


def access_axes(access: Access) -> tuple[str, ...]:
    """Axes that index the tensor, in the order of its dims, composed ones unfolded outer first."""
    return tuple(name for index in access.dims for name in index.axes)


def is_plain(access: Access) -> bool:
    """Whether each dim is one whole axis, so that the tensor already has one dim per axis."""
    return all(len(i.axes) == 1 and i.offset == 0 and i.stride == 1 for i in access.dims)


def unfold_axes(x: Any, access: Access, extents: Mapping[str, int]) -> Any:
    """View of x with one dim per axis of `access_axes(access)`: slices, selects and splits, never
    copies.
    """
    for dim in reversed(range(len(access.dims))):
        index = access.dims[dim]
        if not index.axes:
            x = x.select(dim, index.offset)
            continue
        shape = [extents[name] for name in index.axes]
        span = math.prod(shape)
        if (index.offset, index.stride, span) != (0, 1, x.shape[dim]):
            stop = index.offset + index.stride * (span - 1) + 1
            x = x[(slice(None),) * dim + (slice(index.offset, stop, index.stride),)]
        if len(shape) > 1:
            x = x.unflatten(dim, shape)
    return x


def order_axes(x: Any, have: Sequence[str], want: Sequence[str]) -> Any:
    """View of x, whose dims are the axes `have`, with dims `want`; axes it lacks get extent 1."""
    if tuple(have) != tuple(want):
        x = x.permute([have.index(name) for name in want if name in have])
        for dim, name in enumerate(want):
            if name not in have:
                x = x.unsqueeze(dim)
    return x


def fold_axes(x: Any, have: Sequence[str], write: Access, extents: Mapping[str, int]) -> Any:
    """x, whose dims are the axes `have`, in the dims of the written tensor; a view where torch
    allows it.
    """
    ordered = order_axes(x, have, access_axes(write))
    if is_plain(write):
        return ordered
    return ordered.reshape([math.prod([extents[n] for n in index.axes]) for index in write.dims])
