"""What the ops on groups of rows touch, when the data decide how many rows each group has.

Comes in: an op with a grouped index, extents of one rank's part. Goes out: how many groups have a
row and how many rows there are, expected of rows sent at random. Used by cost.py; nothing here
looks at kinds, only at access maps.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from distmega.program.types import Op, Tensor, accesses, grouped_index


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLoad:
    """Of the groups along `axis`, how many have rows, and how many rows these have together."""

    axis: str
    num_groups: float
    num_rows: float


def group_load(op: Op, tensors: Mapping[str, Tensor], sizes: Mapping[str, int]) -> GroupLoad | None:
    """The load expected of one rank's part of an op; None for an op that runs over no groups.

    sizes: extents of that part. Each of the rows that can be in a group goes to equally many of all
    groups, which are sampled at random; where ranks share groups out, of the rank that gets most,
    for which the others wait.
    """
    index = grouped_index(op)
    if index is None:
        return None
    axis, rows_axis = index.axes
    total = max(
        tensors[a.tensor].shape[dim]
        for a in accesses(op)
        for dim, each in enumerate(a.dims)
        if each.is_grouped
    )
    here, num = sizes[axis], int(str(op.get("num_groups", op.extents[axis])))
    share = min(1.0, total / (op.extents[rows_axis] * num))
    hit = 1.0 - math.pow(1.0 - share, op.extents[rows_axis])
    part = min(1.0, here / num)
    num_ranks = round(1 / part)
    return GroupLoad(
        axis=axis,
        num_groups=min(here, _most_of(num_ranks, here, hit)),
        num_rows=min(total, _most_of(num_ranks, total, part)),
    )


_MOST_NORMAL = (0.0, 0.0, 0.564, 0.846, 1.029, 1.163, 1.267, 1.352, 1.424)
"""Expected largest of n standard normal values, n from 0 to 8."""


def _most_of(num_ranks: int, num: int, chance: float) -> float:
    """Expected largest over ranks of how many of `num` samples fall to a rank, each by `chance`."""
    known = num_ranks < len(_MOST_NORMAL)
    above = _MOST_NORMAL[num_ranks] if known else math.sqrt(2 * math.log(num_ranks))
    return num * chance + above * math.sqrt(num * chance * (1.0 - chance))
