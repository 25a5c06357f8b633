"""Cuts the sums of a product into parts that the op behind it adds up.

Comes in: a body of lower.py, after join_rows.py, and into how many parts which products are cut.
Where an op over rows (row_ops.py) stands directly behind a product of few rows, and nobody else
reads that, go out: a split_linear, which writes parts of the sums in f32, and the op as fused_rows,
which adds them up, in their order, and the bias. The product so keeps more SMs busy, and none waits
for another's part. Next: order_results.py.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from distmega.hostir.ir.nodes import Allocate, LibraryOp, Node
from distmega.hostir.passes.fused_kinds import is_product
from distmega.hostir.passes.joining import is_handed_on, join_ops, last_work, take
from distmega.hostir.passes.row_ops import (
    RowOp,
    fits_kernel,
    is_of_rows,
    rows_of,
    state_rows,
    with_sum,
)
from distmega.program.ops.parts import access_named, make_op
from distmega.program.types import Access, Op, Tensor, accesses

SumParts = Callable[[int, int, int], int]
"""Of rows, columns and terms of a sum of a product of a half type: how many parts, a divisor of the
terms."""
HALVES = frozenset({"bf16", "f16"})


def split_sums(
    body: Sequence[Node],
    buffers: Mapping[str, Tensor],
    outputs: Sequence[str],
    parts_of: SumParts,
) -> tuple[tuple[Node, ...], Mapping[str, Tensor]]:
    """The body, loops included, with such ops, and the buffers of their parts by name."""
    splitting = _Splitting(buffers, parts_of)
    return join_ops(body, buffers, outputs, splitting.split), splitting.made


class _Splitting:
    """made: buffers of parts, by name."""

    def __init__(self, buffers: Mapping[str, Tensor], parts_of: SumParts) -> None:
        self.names = {*buffers}
        self.parts_of = parts_of
        self.made: dict[str, Tensor] = {}

    def split(
        self,
        above: list[Node],
        node: LibraryOp,
        buffers: Mapping[str, Tensor],
        uses: Mapping[str, int],
    ) -> Node:
        """The op that adds up parts of the product above it, which is put in its place; or the
        node.
        """
        at = last_work(above)
        product = above[at] if at >= 0 else None
        if not isinstance(product, LibraryOp) or not is_product(product.op):
            return node
        gone = product.op.writes[0].tensor
        rows = rows_of(node.op, buffers) if is_of_rows(node.op) else None
        operand = None if rows is None else _whole_operand(rows, gone)
        if rows is None or operand is None or not is_handed_on(gone, buffers, uses):
            return node
        num_parts = self.num_parts(product.op, buffers)
        if num_parts == 1:
            return node
        names = self.part_names(gone, num_parts)
        summed = with_sum(rows, operand, _terms(product.op, operand, names))
        if not fits_kernel(summed):
            return node
        take(above, {at}, {gone})
        above += [Allocate(buffer=name) for name in names]
        above.append(LibraryOp(op=_split(product.op, names)))
        for name in names:
            self.made[name] = replace(buffers[gone], name=name, dtype="f32")
        return LibraryOp(op=state_rows(node.op.name, summed, buffers))

    def num_parts(self, product: Op, buffers: Mapping[str, Tensor]) -> int:
        """1 for a product that stays whole."""
        x, w, *_ = (buffers[access.tensor] for access in product.reads)
        types = {buffers[access.tensor].dtype for access in accesses(product)}
        if len(types) > 1 or not types <= HALVES:
            return 1
        num_sums = math.prod(w.shape[1:])
        return self.parts_of(x.num_elements // num_sums, w.shape[0], num_sums)

    def part_names(self, product: str, num: int) -> list[str]:
        """Names that no buffer has."""
        base = f"{product}.part"
        while any(f"{base}{n}" in self.names for n in range(num)):
            base += "_"
        return [f"{base}{n}" for n in range(num)]


def _split(product: Op, names: Sequence[str]) -> Op:
    """The product's sums, a part in each of these tensors, without its bias."""
    (out,) = product.writes
    writes = [replace(out, tensor=name) for name in names]
    return make_op(product.name, "split_linear", product.axes, product.reads[:2], writes)


def _terms(product: Op, operand: Access, names: Sequence[str]) -> list[Access]:
    """What adds up to the product where an op over rows reads it whole: its parts and its bias."""
    columns = operand.dims[-1:]
    parts = [replace(operand, tensor=name) for name in names]
    return [*parts, *(replace(bias, dims=columns) for bias in product.reads[2:])]


def _whole_operand(rows: RowOp, name: str) -> Access | None:
    """How an op over rows reads a tensor of their shape; None where it reads it otherwise too."""
    found = {access for access in rows.operands if access.tensor == name}
    whole = access_named(name, *rows.names)
    return whole if found == {whole} else None
