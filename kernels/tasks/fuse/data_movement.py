"""What is left of ops that only move elements, where a fused op reads or writes in another order.

In: a segment. Out: for a tensor, the one whose elements it shows, through views, transposes,
reshapes and slices, and the place there of each of its own. Next on the walk: segment.py.
"""

import math
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from distmega.program.types import Access, Op, Tensor, packed_strides

Positions = npt.NDArray[np.int64]

MOVEMENTS = ("view", "transpose", "reshape", "slice")


def source_of(name: str, producers: Mapping[str, Op]) -> str:
    """The tensor that others than movements make and `name` shows."""
    op = producers.get(name)
    while op is not None and op.kind in MOVEMENTS:
        name = op.reads[0].tensor
        op = producers.get(name)
    return name


def moved(
    name: str, producers: Mapping[str, Op], tensors: Mapping[str, Tensor]
) -> tuple[str, Positions]:
    """The tensor that others than movements make and `name` shows, and where each element of it
    stands there, row-major, in its shape.
    """
    op = producers.get(name)
    shape = tensors[name].shape
    if op is None or op.kind not in MOVEMENTS:
        return name, np.arange(math.prod(shape)).reshape(shape)
    source, seen = moved(op.reads[0].tensor, producers, tensors)
    found: Positions = np.empty(math.prod(shape), dtype=np.int64)
    reads, writes = (
        _flat(access, op, tensors[access.tensor].shape) for access in (op.reads[0], op.writes[0])
    )
    found[writes] = seen.ravel()[reads]
    return source, found.reshape(shape)


def movements_to(name: str, producers: Mapping[str, Op]) -> Iterator[Op]:
    """The movements between a tensor and the one that it shows."""
    op = producers.get(name)
    if op is not None and op.kind in MOVEMENTS:
        yield op
        yield from movements_to(op.reads[0].tensor, producers)


def _flat(access: Access, op: Op, shape: tuple[int, ...]) -> Positions:
    """Row-major place in a tensor of every point of an op's axes, in their order."""
    extents = op.extents
    total: Positions = np.zeros([1] * len(extents), dtype=np.int64)
    for index, step in zip(access.dims, packed_strides(shape), strict=True):
        total = total + step * index.offset
        radix = step * index.stride
        for axis in reversed(index.axes):
            along = [-1 if name == axis else 1 for name in extents]
            total = total + radix * np.arange(extents[axis]).reshape(along)
            radix *= extents[axis]
    return np.broadcast_to(total, tuple(extents.values())).ravel()
