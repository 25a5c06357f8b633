"""Chains of pointwise ops, norms and softmax, as work of their own.

Next on the walk: products.py.
"""

from collections.abc import Sequence
from dataclasses import replace

from distmega.kernels.tasks.fuse.formulas import canonical, substitute
from distmega.kernels.tasks.fuse.state import Fusion, does_not_fuse, norm_of, out_of
from distmega.kernels.tasks.fuse.types import Fused, FusedPointwise, InputNorm
from distmega.program import expr
from distmega.program.kinds import kind_of
from distmega.program.types import Op, grouped_index


def fuse_rows(
    fusion: Fusion, op: Op, formula: expr.Expr, leaves: Sequence[str], chain: Sequence[Op]
) -> Fused:
    """A chain without products, and the last of the norms that it alone takes, if any."""
    norms = [leaf for leaf in leaves if is_own_norm(fusion, leaf)]
    fusion.take(*chain)
    if not norms:
        return FusedPointwise(
            name=op.name, x="", norm=None, length=0, out=out_of(op),
            formula=canonical(formula), operands=tuple(leaves),
        )  # fmt: skip
    last = max(norms, key=lambda leaf: fusion.position[fusion.producers[leaf].name])
    operands = tuple(leaf for leaf in leaves if leaf != last)
    order = {leaf: i for i, leaf in enumerate((last, *operands))}
    arguments = tuple(expr.Arg(order[leaf]) for leaf in leaves)
    alone = fuse_norm(fusion, fusion.producers[last])
    return replace(
        alone, name=op.name, out=out_of(op), operands=operands,
        formula=canonical(substitute(formula, arguments)),
    )  # fmt: skip


def is_own_norm(fusion: Fusion, name: str) -> bool:
    """Whether a tensor is a norm or softmax that one op takes and no fused op has."""
    op = fusion.producers.get(name)
    if op is None or not kind_of(op).is_norm or op.name in fusion.taken:
        return False
    return fusion.only_user(name) is not None


def fuse_norm(fusion: Fusion, op: Op) -> FusedPointwise:
    """A norm or a softmax whose result is taken as it is."""
    fusion.take(op)
    plain = op.kind == "softmax"
    norm = InputNorm(weight="", eps=0.0, kind=op.kind) if plain else norm_of(op)
    return FusedPointwise(
        name=op.name, x=fusion.read(op, 0), norm=norm, length=op.num_reduced, out=out_of(op)
    )


def formula_of(fusion: Fusion, op: Op, leaves: list[str], chain: list[Op]) -> expr.Expr:
    """What a chain of pointwise ops computes of `leaves`, which are appended as they come; an op
    whose result is read twice stands in the chain twice.
    """
    chain.append(op)
    if len(chain) > expr.MAX_DEPTH:
        raise does_not_fuse(op)
    size = fusion.size(out_of(op))
    arguments: list[expr.Expr] = []
    num_starts = 0 if grouped_index(op) is None else 1  # read last
    for position in range(len(op.reads) - num_starts):
        name = fusion.read(op, position)
        before = fusion.producers.get(name)
        if fusion.size(name) != size:
            raise does_not_fuse(op)
        if before and kind_of(before).is_elementwise and fusion.only_user(name) is op:
            arguments.append(formula_of(fusion, before, leaves, chain))
            continue
        if name not in leaves:
            leaves.append(name)
        arguments.append(expr.Arg(leaves.index(name)))
    formula = substitute(expr.parse(str(op.attr("expr"))), arguments)
    if not expr.within_limits(formula):
        raise does_not_fuse(op)
    return formula
