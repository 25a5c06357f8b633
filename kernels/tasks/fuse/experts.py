"""Experts: their choice, their first matrices, their sum where it leaves as it is.

Next on the walk: attention.py.
"""

from distmega.kernels.tasks.fuse.formulas import canonical
from distmega.kernels.tasks.fuse.products import multiplies_groups, product_around, slots_of
from distmega.kernels.tasks.fuse.rows import formula_of
from distmega.kernels.tasks.fuse.state import MAX_STREAMS, Fusion, does_not_fuse, out_of
from distmega.kernels.tasks.fuse.types import (
    IDENTITY,
    Fused,
    FusedContraction,
    FusedRouting,
    WeightStream,
)
from distmega.program import expr
from distmega.program.kinds import kind_of
from distmega.program.types import Op


def fuse_routing(fusion: Fusion, op: Op) -> Fused:
    """The choice of experts of each row: its largest scores, and the sorting of rows by expert,
    which leaves nothing to be done.
    """
    top = fusion.producers.get(fusion.read(op, 0))
    if top is None or top.kind != "top_k" or len(op.reads) > 1:
        raise does_not_fuse(op)
    weights, chosen = (write.tensor for write in top.writes)
    shape = fusion.tensors[chosen].shape
    uses = {user.kind for user in fusion.users.get(weights, [])}
    sorts = {user.kind for write in op.writes for user in fusion.users.get(write.tensor, [])} - {
        "gather_rows",
        "grouped_linear",
        "scatter_add",
        "pointwise",
    }
    made = {write.tensor for one in (top, op) for write in one.writes}
    if fusion.only_user(chosen) is not op or uses - {"scatter_add"} or sorts:
        raise does_not_fuse(top)
    if made & fusion.outputs:
        raise does_not_fuse(op)
    fusion.take(top, op)
    return FusedRouting(
        name=op.name,
        scores=fusion.read(top, 0),
        num_experts=op.extents["g"],
        num_chosen=shape[1],
        weighing=str(top.attr("weights")),
    )


def fuse_expert_rows(fusion: Fusion, op: Op) -> Fused:
    """The first matrices of the experts that rows go to, and what joins their products."""
    products = fusion.users.get(out_of(op), [])
    if not products or not all(map(multiplies_groups, products)):
        raise does_not_fuse(op)
    name, last = out_of(products[0]), fusion.only_user(out_of(products[0]))
    while last is not None and kind_of(last).is_elementwise:
        name, last = out_of(last), fusion.only_user(out_of(last))
    if last is None or not multiplies_groups(last) or fusion.read(last, 0) != name:
        raise does_not_fuse(last or products[0])
    total = fusion.only_user(out_of(last))
    if total is None or total.kind != "scatter_add":
        raise does_not_fuse(last)
    leaves: list[str] = []
    chain: list[Op] = []
    end = fusion.producers[name]
    formula: expr.Expr = IDENTITY
    if kind_of(end).is_elementwise:
        formula = formula_of(fusion, end, leaves, chain)
    streams = leaves or [name]
    known = {out_of(one): one for one in products}
    if streams and (set(streams) != known.keys() or len(streams) > MAX_STREAMS):
        raise does_not_fuse(end)
    if any(fusion.only_user(leaf) not in (*chain, last) for leaf in streams):
        raise does_not_fuse(end)
    if any(out_of(one) in fusion.outputs for one in (op, *products, *chain)):
        raise does_not_fuse(op)
    x, norm = fusion.normed(fusion.read(op, 0), fusion.tensors[out_of(op)].shape[-1])
    fusion.take(op, *products, *chain)
    return FusedContraction(
        name=end.name,
        x=x,
        norm=norm,
        streams=tuple(
            WeightStream(weights=(fusion.read(known[leaf], 1),), biases=("",)) for leaf in streams
        ),
        formula=canonical(expr.Call("mul", (formula, expr.Arg(len(streams))))),
        outs=(name,),
        experts=slots_of(fusion, total, products[0], "rows"),
    )


def fuse_expert_sum(fusion: Fusion, op: Op) -> Fused:
    """Experts whose sum leaves as it is."""
    product = product_around(fusion, op)
    fusion.take(*product.ops)
    return FusedContraction(
        name=op.name,
        x=product.x,
        norm=None,
        streams=(product.stream,),
        outs=(product.out,),
        num_ranks=product.num_ranks,
        experts=product.experts,
    )
