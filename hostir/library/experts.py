"""What the ops on groups of rows compute, by torch: top_k, route, gather_rows, grouped_linear,
scatter_add, and pointwise over groups.

Comes in: an op of distmega/program/ops/experts.py, at a rank's mesh coordinate. Goes out: a
function of its operands. Where ranks share the groups out, a rank does the rows of its own groups
and leaves zeros in those of others, so that the parts add up. Used by ops.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from distmega.errors import RequestError
from distmega.hostir.library.pointwise import OpFunction, pointwise
from distmega.hostir.library.torch_types import operand_dtype, widen
from distmega.program import expr
from distmega.program.types import Op

Coordinate = Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRange:
    """The groups that a rank does: `first` up to `stop`, of `num` in all."""

    first: int
    stop: int
    num: int

    @property
    def is_all(self) -> bool:
        return self.stop - self.first == self.num


MultiplyGroups = Callable[[Tensor, Tensor, Tensor, GroupRange, int], Tensor]


def group_range(op: Op, coordinate: Coordinate) -> GroupRange:
    """All groups, or the rank's where a mesh axis shares them out; the last ranks may have fewer,
    or none.
    """
    extent = op.extents["e"]
    if not op.get("group_axis", ""):
        return GroupRange(first=0, stop=extent, num=extent)
    num = int(str(op.attr("num_groups")))
    first = min(coordinate[str(op.attr("group_axis"))] * extent, num)
    return GroupRange(first=first, stop=min(first + extent, num), num=num)


def top_k(x: Tensor, num: int, weights: str) -> tuple[Tensor, Tensor]:
    """Weights f32 and columns i32 of the num largest of each row; see experts.top_k."""
    wide = x.float() if x.dtype != torch.float64 else x
    ordered, columns = wide.sort(dim=-1, descending=True, stable=True)
    chosen, columns = ordered[:, :num], columns[:, :num]
    if weights == "softmax":
        chosen = wide.softmax(-1).gather(1, columns)
    elif weights == "softmax_chosen":
        chosen = chosen.softmax(-1)
    if x.is_cpu and bool(chosen.isnan().any()):
        row = int(chosen.isnan().any(1).nonzero()[0, 0])
        raise RequestError(
            f"a router score of row {row} is not a number",
            expected="finite scores",
            remedy="look for NaN or infinities in the weights or activations before it",
        )
    return chosen.float(), columns.int()


def route(
    ids: Tensor, num_groups: int, num_rows: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """counts, offsets, order and slots, i32; see experts.route."""
    flat = ids.reshape(-1).long()
    if num_rows is not None:
        pairs = torch.arange(len(flat), device=ids.device)
        flat = flat.masked_fill(pairs >= num_rows * ids.shape[1], num_groups)
    allowed = num_groups if num_rows is None else num_groups + 1
    if ids.is_cpu and not bool(((flat >= 0) & (flat < allowed)).all()):
        raise RequestError(
            f"a row sent to group {int(flat[(flat < 0) | (flat >= allowed)][0])}",
            expected=f"groups from 0 to {num_groups - 1}",
            remedy="correct the ids",
        )
    _, order = flat.sort(dim=0, stable=True)
    counts = torch.zeros(num_groups + 1, dtype=torch.int64, device=ids.device)
    counts = counts.index_add_(0, flat, torch.ones_like(flat))[:num_groups]
    offsets = F.pad(counts.cumsum(0), (1, 0))
    slots = torch.empty_like(order)
    slots[order] = torch.arange(len(flat), device=ids.device)
    return counts.int(), offsets.int(), order.int(), slots.reshape(ids.shape).int()


def gather_rows(x: Tensor, order: Tensor, num_choices: int) -> Tensor:
    """x[order // num_choices]."""
    return x.index_select(0, order.long() // num_choices)


def grouped_linear(x: Tensor, w: Tensor, offsets: Tensor, groups: GroupRange) -> Tensor:
    """Rows of each group times its matrix; w holds those of `groups`, rows of others stay zero."""
    dtype = operand_dtype(x)
    out = x.new_zeros(x.shape[0], w.shape[1])
    bounds = offsets[groups.first : groups.stop + 1].tolist()
    for position, (start, stop) in enumerate(pairwise(bounds)):
        if start < stop:
            rows = F.linear(x[start:stop].to(dtype), w[position].to(dtype))
            out[start:stop] = rows.to(x.dtype)
    return out


def scatter_add(
    y: Tensor, weights: Tensor, slots: Tensor, offsets: Tensor, groups: GroupRange
) -> Tensor:
    """Weighted rows, each added to the row it came from, in order of the choices."""
    wide = widen(y)
    out = wide.new_zeros(slots.shape[0], y.shape[1])
    here = torch.ones_like(slots, dtype=torch.bool)
    if not groups.is_all:
        here = (slots >= offsets[groups.first]) & (slots < offsets[groups.stop])
    for choice in range(slots.shape[1]):
        rows = wide.index_select(0, slots[:, choice].long())
        term = rows * weights[:, choice : choice + 1].to(wide.dtype)
        out += term.masked_fill(~here[:, choice : choice + 1], 0)
    return out.to(y.dtype)


def keep_groups(x: Tensor, offsets: Tensor, groups: GroupRange) -> Tensor:
    """x with zeros in the rows of other groups."""
    if groups.is_all:
        return x
    rows = torch.arange(len(x), device=x.device)
    mine = (rows >= offsets[groups.first]) & (rows < offsets[groups.stop])
    return x.masked_fill(~mine.view(-1, *[1] * (x.dim() - 1)), 0)


def compile_top_k(op: Op, coordinate: Coordinate) -> OpFunction:
    """See top_k."""
    num, weights = op.extents["c"], str(op.attr("weights"))
    return lambda xs: top_k(xs[0], num, weights)


def compile_route(op: Op, coordinate: Coordinate) -> OpFunction:
    """See route."""
    num_groups = op.extents["g"]
    return lambda xs: route(xs[0], num_groups, xs[1] if len(xs) > 1 else None)


def compile_gather_rows(op: Op, coordinate: Coordinate) -> OpFunction:
    """See gather_rows. Where ranks share the rows of x out, a rank gathers its own."""
    groups, extents = group_range(op, coordinate), op.extents
    whole = int(str(op.get("extent", extents["m"])))
    num_choices = extents["p"] // whole
    base = 0
    if op.get("base_axis", ""):
        base = coordinate[str(op.attr("base_axis"))] * int(str(op.attr("base_stride")))

    def run(xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        x, order, offsets = xs
        if whole == x.shape[0]:
            return (keep_groups(gather_rows(x, order, num_choices), offsets, groups),)
        rows = order.long() // num_choices - base
        mine = (rows >= 0) & (rows < x.shape[0])
        found = x.index_select(0, rows.clamp(0, x.shape[0] - 1))
        found = found.masked_fill(~mine.view(-1, *[1] * (x.dim() - 1)), 0)
        return (keep_groups(found, offsets, groups),)

    return run


def compile_grouped_linear(
    op: Op, coordinate: Coordinate, multiply: MultiplyGroups | None = None
) -> OpFunction:
    """See grouped_linear. multiply: another way to compute it, which is told how many rows a group
    can have.
    """
    groups = group_range(op, coordinate)
    if multiply is not None:
        rows = op.extents[op.writes[0].dims[0].axes[1]]
        return lambda xs: (multiply(xs[0], xs[1], xs[2], groups, rows),)
    return lambda xs: (grouped_linear(xs[0], xs[1], xs[2], groups),)


def compile_grouped_pointwise(op: Op, coordinate: Coordinate) -> OpFunction:
    """The expression over all operands but the last, which says where groups start."""
    groups, tree = group_range(op, coordinate), expr.parse(str(op.attr("expr")))
    return lambda xs: (keep_groups(pointwise(tree, xs[:-1]), xs[-1], groups),)


def compile_scatter_add(op: Op, coordinate: Coordinate) -> OpFunction:
    """See scatter_add."""
    groups = group_range(op, coordinate)
    return lambda xs: (scatter_add(xs[0], xs[1], xs[2], xs[3], groups),)
