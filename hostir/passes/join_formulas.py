"""Lets a product make what a pointwise op directly behind it does of each of its elements.

Comes in: a body of lower.py, after mix_columns.py. Where a pointwise op of a product alone stands
directly behind it, and nobody else reads the product, goes out: a fused_product, which adds the
bias, if there is one, and applies the formula before anything is written. Next: passes.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from distmega.hostir.ir.nodes import LibraryOp, Node
from distmega.hostir.passes.fused_kinds import is_product, op_exprs
from distmega.hostir.passes.joining import Both, join_ops, with_last
from distmega.program.kinds import kind_of
from distmega.program.ops.axis_views import is_plain
from distmega.program.ops.parts import make_op
from distmega.program.types import Op, Tensor, accesses


def join_formulas(
    body: Sequence[Node], buffers: Mapping[str, Tensor], outputs: Sequence[str]
) -> tuple[Node, ...]:
    """The body, loops included, with such products."""
    return join_ops(body, buffers, outputs, with_last(_join))


def _join(first: Node, op: Op, buffers: Mapping[str, Tensor]) -> Both | None:
    """The product that does the op too."""
    if not isinstance(first, LibraryOp) or not is_product(first.op):
        return None
    joined = _joined(first.op, op, buffers)
    if joined is None:
        return None
    return Both(LibraryOp(op=joined), gone=first.op.writes[0].tensor)


def _joined(product: Op, op: Op, buffers: Mapping[str, Tensor]) -> Op | None:
    """Both as one; None where `op` is no formula of the product's elements alone."""
    (made,), (write, *others) = product.writes, op.writes
    if not kind_of(op).is_elementwise or others or {a.tensor for a in op.reads} != {made.tensor}:
        return None
    if not all(map(is_plain, accesses(op))) or any(read.dims != write.dims for read in op.reads):
        return None
    names = {access.tensor for access in (*accesses(product), write)}
    same = buffers[made.tensor].shape == buffers[write.tensor].shape
    (tree,) = op_exprs(op)
    if not same or len({buffers[name].dtype for name in names}) != 1 or len(op.reads) != 1:
        return None
    return make_op(
        op.name, "fused_product", product.axes, product.reads, [replace(made, tensor=write.tensor)],
        expr=str(tree),
    )  # fmt: skip
