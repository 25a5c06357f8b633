"""Tiles that follow those of a product or an attention: a formula takes the elements of a tile
where they were made, so that no SM waits for another in between.

In: a formula, a reordering or a view, and what made the tensors that it reads. Out: the splits of
that op on its own axes. Used by tile.py.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from distmega.kernels.tasks.types import RangeSplit, TaskGroup
from distmega.program.types import Access, Index, Op


class TiledGroup(NamedTuple):
    """A group cut into tiles, and the position of its op in the program."""

    position: int
    group: TaskGroup


def followed_splits(op: Op, made: Mapping[str, TiledGroup]) -> tuple[RangeSplit, ...]:
    """Splits of the group that was made last of those that an op can follow; () where there is
    none, and for ops that do not make one element from one. made: by the tensor that was made.
    """
    if op.kind not in ("pointwise", "transpose") and not op.is_view:
        return ()
    reads = [read for read in op.reads if read.tensor in made]
    for read in sorted(reads, key=lambda read: -made[read.tensor].position):
        if splits := _splits_on(op, made[read.tensor].group, read):
            return splits
    return ()


def _splits_on(op: Op, group: TaskGroup, read: Access) -> tuple[RangeSplit, ...]:
    """A group's splits on the axes by which an op reads the same dims; () where a split cuts part
    of a dim, or the op goes through dims in another way.
    """
    written = group.op.writes[0].dims
    if not all(map(_is_plain, (*written, *read.dims))):
        return ()
    found = []
    for split in group.splits:
        dims = [d for d, index in enumerate(written) if set(index.axes) & set(split.axes)]
        axes = _joined(op, read.dims, dims)
        extent = math.prod(op.extents[name] for name in axes)
        if _joined(group.op, written, dims) != split.axes or extent != split.bounds[-1]:
            return ()
        found.append(RangeSplit(axes=axes, bounds=split.bounds))
    return tuple(found)


def _is_plain(index: Index) -> bool:
    return not index.offset and index.stride == 1 and not index.is_grouped


def _joined(op: Op, dims: Sequence[Index], chosen: Sequence[int]) -> tuple[str, ...]:
    """The axes of some dims of an op's access, one behind the other, those of one element left
    out.
    """
    extents = op.extents
    return tuple(name for d in chosen for name in dims[d].axes if extents[name] > 1)
