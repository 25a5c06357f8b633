"""Lets a product whose ranks sum it make the norm of that sum too.

Comes in: a body of lower.py, after fuse.py. Where a fused_norm stands directly behind a FusedMatmul
that ends with an all-reduce, and one of the two tensors that it adds is that sum, which nobody else
reads, goes out: a FusedMatmul with a SumNorm, which writes the norm and what it is of; the sum by
itself is nowhere. A device that has the sum row by row so reads it once. Next: passes.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, cast

from distmega.hostir.ir.matmul_nodes import FusedMatmul, SumNorm
from distmega.hostir.ir.nodes import Node
from distmega.hostir.passes.joining import Both, join_ops, with_last
from distmega.program.types import Index, Op, Tensor


def norm_sums(
    body: Sequence[Node], buffers: Mapping[str, Tensor], outputs: Sequence[str]
) -> tuple[Node, ...]:
    """The body, loops included, with such products."""
    return join_ops(body, buffers, outputs, with_last(_join))


def _join(first: Node, op: Op, buffers: Mapping[str, Tensor]) -> Both | None:
    """The product that does the op too."""
    if not isinstance(first, FusedMatmul) or first.norm is not None:
        return None
    norm = _norm_of(first, op, buffers)
    if norm is None:
        return None
    return Both(replace(first, out=op.writes[0].tensor, norm=norm), gone=first.out)


def _norm_of(product: FusedMatmul, op: Op, buffers: Mapping[str, Tensor]) -> SumNorm | None:
    """What `op` does to the product's result; None where it is no norm of its rows."""
    plain = product.kind == "matmul_all_reduce" and not (product.forced or product.mixes)
    kind, eps, out = op.get("norm", ""), op.get("eps", 0.0), buffers[product.out]
    if op.kind != "fused_norm" or not plain or kind not in ("rms_norm", "layer_norm"):
        return None
    x, _, residual, _, *vectors = op.reads
    others = {x.tensor, residual.tensor} - {product.out}
    whole = all(index == Index(axes=index.axes) for access in op.reads for index in access.dims)
    if len(out.shape) != product.num_rows + 1 or len(others) != 1 or not vectors or not whole:
        return None
    if op.writes[0].dims != op.writes[1].dims or x.dims != op.writes[0].dims:
        return None
    total = op.writes[1].tensor
    shapes = {buffers[name].shape for name in (*others, total, op.writes[0].tensor)}
    types = {buffers[access.tensor].dtype for access in (*op.reads, *op.writes)}
    if shapes != {out.shape} or len(types) != 1:
        return None
    return SumNorm(
        kind=cast(Literal["rms_norm", "layer_norm"], kind),
        eps=float(cast(float, eps)),
        residual=others.pop(),
        total=total,
        weight=vectors[0].tensor,
        bias=vectors[1].tensor if len(vectors) > 1 else "",
    )
