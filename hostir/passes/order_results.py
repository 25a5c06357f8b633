"""Lets an attention write its result in the order of dims that a movement behind it asks for.

Comes in: a body of lower.py, after fuse.py. Where a transpose stands directly behind an attention
of keys and values at hand, whose result nobody else reads, goes out: the attention, which writes
what the transpose would; the movement is gone. Kernels of attention take any strides of results, so
heads that are put beside each other cost nothing. Next: passes.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from distmega.hostir.ir.nodes import LibraryOp, Node
from distmega.hostir.passes.joining import Both, join_ops, with_last
from distmega.program.kinds import kind_of
from distmega.program.ops.axis_views import is_plain
from distmega.program.types import Access, Op, Tensor, accesses


def order_results(
    body: Sequence[Node], buffers: Mapping[str, Tensor], outputs: Sequence[str]
) -> tuple[Node, ...]:
    """The body, loops included, with such attentions."""
    return join_ops(body, buffers, outputs, with_last(_order))


def _order(first: Node, op: Op, buffers: Mapping[str, Tensor]) -> Both | None:
    """The attention that does the op too."""
    if not isinstance(first, LibraryOp) or not _writes_any_order(first.op):
        return None
    made = first.op.writes[0]
    write = _reordered(made, op, buffers)
    if write is None:
        return None
    return Both(LibraryOp(op=replace(first.op, writes=(write,))), gone=made.tensor)


def _writes_any_order(op: Op) -> bool:
    """Whether a library op gives its result in whatever order of dims its write says."""
    kind = kind_of(op)
    return kind.mixes_values and not kind.reads_positions and not kind.inplace


def _reordered(made: Access, movement: Op, buffers: Mapping[str, Tensor]) -> Access | None:
    """Where a movement puts what `made` writes, dim by dim; None if it does more than reorder."""
    if not kind_of(movement).only_copies or kind_of(movement).inplace or movement.is_view:
        return None
    if len(movement.reads) != 1 or movement.reads[0].tensor != made.tensor:
        return None
    (read,), (write,) = movement.reads, movement.writes
    there = dict(zip(read.dims, made.dims, strict=True))
    each_an_axis = all(map(is_plain, accesses(movement)))
    if not each_an_axis or {*write.dims} != {*read.dims} or len(write.dims) != len(there):
        return None
    source, target = buffers[made.tensor], buffers[write.tensor]
    extents = dict(zip(read.dims, source.shape, strict=True))
    if [extents[index] for index in write.dims] != [*target.shape] or source.dtype != target.dtype:
        return None
    return Access(tensor=write.tensor, dims=tuple(there[index] for index in write.dims))
