"""Contractions: linears and the sums of experts, with norms before and pointwise ops behind them.

Next on the walk: experts.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from distmega.kernels.tasks.fuse.formulas import canonical, substitute
from distmega.kernels.tasks.fuse.rows import formula_of, fuse_rows
from distmega.kernels.tasks.fuse.state import Fusion, does_not_fuse, out_of
from distmega.kernels.tasks.fuse.types import (
    ExpertSlots,
    Fused,
    FusedContraction,
    InputNorm,
    WeightStream,
)
from distmega.program import expr
from distmega.program.kinds import kind_of
from distmega.program.types import Op, contracts, grouped_index


@dataclass(frozen=True, slots=True, kw_only=True)
class FusibleProduct:
    """A linear with what stands around it: the norm before, the sum over ranks behind."""

    op: Op
    x: str
    norm: InputNorm | None
    out: str
    num_ranks: int
    ops: tuple[Op, ...]
    experts: ExpertSlots | None = None

    @property
    def stream(self) -> WeightStream:
        has_bias = contracts(self.op) and len(self.op.reads) == 3
        bias = self.op.reads[2].tensor if has_bias else ""
        return WeightStream(weights=(self.op.reads[1].tensor,), biases=(bias,))


def fuse_linear(fusion: Fusion, op: Op) -> Fused:
    """A linear whose result leaves as it is, and all others of the same x that do; what an
    attention takes lies as it does there. One whose columns an attention takes gives these.
    """
    first = product_around(fusion, op)
    together = [first]
    is_gathered = is_taken_by_gather(fusion, first.out)
    is_cut = first.out in fusion.parts
    if first.num_ranks == 1 and fusion.joining.beside and not is_gathered and not is_cut:
        together = [
            one
            for user in fusion.users[fusion.storage(op.reads[0].tensor)]
            if contracts(user) and user.name not in fusion.taken
            for one in [product_around(fusion, user)]
            if one.num_ranks == 1 and fusion.read(user, 0) == fusion.read(op, 0)
            if not is_taken_by_gather(fusion, one.out) and one.out not in fusion.parts
        ]
    order = {name: i for i, name in enumerate(fusion.attended)}
    together.sort(key=lambda one: order.get(one.out, len(order)))
    fusion.take(*(part for one in together for part in one.ops))
    streams = [one.stream for one in together]
    return FusedContraction(
        name=op.name,
        x=first.x,
        norm=first.norm,
        streams=(
            WeightStream(
                weights=tuple(name for one in streams for name in one.weights),
                biases=tuple(name for one in streams for name in one.biases),
            ),
        ),
        outs=fusion.parts.get(first.out) or tuple(one.out for one in together),
        num_ranks=first.num_ranks,
    )


def is_taken_by_gather(fusion: Fusion, name: str) -> bool:
    """Whether a gather takes a tensor that no fused op has yet."""
    users = fusion.users.get(name, [])
    return any(kind_of(user).gathers_all and user.name not in fusion.taken for user in users)


def fuse_chain(fusion: Fusion, op: Op) -> Fused:
    """A pointwise op with those before it whose results it alone takes, and the contraction
    that it follows last; others of the same x are streams beside it.
    """
    leaves: list[str] = []
    chain: list[Op] = []
    formula = formula_of(fusion, op, leaves, chain)
    products = {leaf: one for leaf in leaves for one in product_of(fusion, leaf)}
    if not products:
        return fuse_rows(fusion, op, formula, leaves, chain)
    last = max(products.values(), key=lambda one: fusion.position[one.ops[-1].name])
    beside = [
        leaf
        for leaf, one in products.items()
        if one is not last
        and one.num_ranks == last.num_ranks == 1
        and (one.x, one.norm) == (last.x, last.norm)
    ]
    if len(beside) >= fusion.joining.streams:
        beside = []
    streams = [leaf for leaf in leaves if leaf in beside or products.get(leaf) is last]
    operands = [leaf for leaf in leaves if leaf not in streams]
    order = {leaf: i for i, leaf in enumerate((*streams, *operands))}
    fusion.take(*chain, *(part for leaf in streams for part in products[leaf].ops))
    arguments = tuple(expr.Arg(order[leaf]) for leaf in leaves)
    return FusedContraction(
        name=op.name,
        x=last.x,
        norm=last.norm,
        streams=tuple(products[leaf].stream for leaf in streams),
        formula=canonical(substitute(formula, arguments)),
        operands=tuple(operands),
        outs=(out_of(op),),
        num_ranks=last.num_ranks,
        experts=last.experts,
    )


def slots_of(fusion: Fusion, total: Op, product: Op, by: Literal["rows", "columns"]) -> ExpertSlots:
    """The slots of what a scatter_add adds up, of experts whose matrices `product` takes. Where
    ranks have whole experts, their sum over these ranks must follow.
    """
    route = fusion.producers.get(fusion.read(total, 2))
    top = fusion.producers.get(fusion.read(total, 1))
    if route is None or top is None or fusion.producers.get(fusion.read(route, 0)) is not top:
        raise does_not_fuse(total)
    axis = total.get("group_axis", "")
    _, _, ops = fusion.summed(total)
    if axis and ops[-1].get("mesh_axis", "") != axis:
        raise does_not_fuse(total)
    return ExpertSlots(
        routing=route.name,
        by=by,
        num_experts=route.extents["g"],
        num_own=fusion.tensors[fusion.read(product, 1)].shape[0],
        num_chosen=fusion.tensors[fusion.read(total, 1)].shape[1],
    )


def product_of(fusion: Fusion, name: str) -> Sequence[FusibleProduct]:
    """The linear, or sum of experts, whose result `name` is, if one op alone reads it and no
    fused op has it.
    """
    op = fusion.producers.get(name)
    if op is not None and kind_of(op).sums_all:
        op = fusion.producers.get(fusion.read(op, 0))
    if op is None or op.name in fusion.taken:
        return ()
    if not contracts(op) and op.kind != "scatter_add":
        return ()
    found = product_around(fusion, op)
    return (found,) if found.out == name and fusion.only_user(name) is not None else ()


def product_around(fusion: Fusion, op: Op) -> FusibleProduct:
    """A linear, or experts, with the norm of its x and the sum of its result over ranks."""
    if op.kind == "scatter_add":
        return expert_product(fusion, op)
    if not is_by_rows(op):
        raise does_not_fuse(op)
    x, norm = fusion.normed(fusion.read(op, 0), op.num_reduced)
    out, num_ranks, ops = fusion.summed(op)
    return FusibleProduct(op=op, x=x, norm=norm, out=out, num_ranks=num_ranks, ops=ops)


def expert_product(fusion: Fusion, total: Op) -> FusibleProduct:
    """The last matrices of experts, with the sums over these and over ranks."""
    last = fusion.producers.get(fusion.read(total, 0))
    if last is None or not multiplies_groups(last) or fusion.only_user(out_of(last)) is not total:
        raise does_not_fuse(total)
    out, num_ranks, ops = fusion.summed(total)
    return FusibleProduct(
        op=last,
        x=fusion.read(last, 0),
        norm=None,
        out=out,
        num_ranks=num_ranks,
        ops=(last, *ops),
        experts=slots_of(fusion, total, last, "columns"),
    )


def is_by_rows(linear: Op) -> bool:
    """Whether each result is the product of a row of x and one of the weights, as both lie."""
    x, w = ([dim.axes for dim in access.dims] for access in linear.reads[:2])
    out = [dim.axes for dim in linear.writes[0].dims]
    num = sum(axis.role == "reduce" for axis in linear.axes)
    return x[-num:] == w[-num:] and out == x[:-num] + w[:-num]


def multiplies_groups(op: Op) -> bool:
    """Whether rows are multiplied by the matrix of their group."""
    return kind_of(op).contracts and grouped_index(op) is not None
