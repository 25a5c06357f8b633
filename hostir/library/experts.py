"""Ops on groups of rows that torch does in a quicker way than their references say, pointwise ops
over groups, and what passes make of both.

Comes in: an op of distmega/program/ops/experts.py, which says what each computes, or of kind
fused_groups (../passes/fused_kinds.py), at a rank's mesh coordinate. Goes out: a function of its
operands. Used by ops.py.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor

from distmega.hostir.library.pointwise import Evaluate, OpFunction, evaluate_all
from distmega.hostir.library.torch_types import operand_dtype
from distmega.program import expr
from distmega.program.kinds import Coordinate
from distmega.program.ops.experts import GroupRange, group_range, keep_groups
from distmega.program.types import Op

MultiplyGroups = Callable[[Tensor, Tensor, Tensor, GroupRange, int], Tensor]
MixGroups = Callable[[Tensor, Tensor, Tensor, Tensor, GroupRange, int, expr.Expr], Tensor]
AddRows = Callable[[Tensor, Tensor, Tensor, Tensor, GroupRange], Tensor]


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


def compile_grouped_mix(op: Op, coordinate: Coordinate, mix: MixGroups | None = None) -> OpFunction:
    """An op of kind fused_groups. mix: another way to compute it, which is told how many rows a
    group can have.
    """
    groups, formula = group_range(op, coordinate), expr.parse(str(op.attr("expr")))
    if mix is not None:
        rows = op.extents[op.writes[0].dims[0].axes[1]]
        return lambda xs: (mix(xs[0], xs[1], xs[2], xs[3], groups, rows, formula),)

    def run(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        x, upper, lower, offsets = operands
        products = [grouped_linear(x, w, offsets, groups) for w in (upper, lower)]
        return (keep_groups(evaluate_all([formula], products, None)[0], offsets, groups),)

    return run


def compile_grouped_pointwise(
    op: Op, coordinate: Coordinate, evaluate: Evaluate = evaluate_all
) -> OpFunction:
    """The expression over all operands but the last, which says where groups start. evaluate:
    another way to compute it.
    """
    groups, trees = group_range(op, coordinate), [expr.parse(str(op.attr("expr")))]
    return lambda xs: (keep_groups(evaluate(trees, xs[:-1], None)[0], xs[-1], groups),)


def compile_scatter_add(op: Op, coordinate: Coordinate, add: AddRows) -> OpFunction:
    """add: as scatter_values, by a kernel."""
    groups = group_range(op, coordinate)
    return lambda xs: (add(xs[0], xs[1], xs[2], xs[3], groups),)
