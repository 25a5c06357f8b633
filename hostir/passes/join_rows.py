"""Joins norms with the pointwise ops and norms around them, which one kernel does row by row.

Comes in: a body of lower.py, after join_formulas.py. Where an op over rows, a norm or a formula of
each element, stands directly behind another whose result it takes, and one of them is a norm, goes
out: one op of kind fused_rows. Results that others read too stay results. Next: row_ops.py.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from distmega.hostir.ir.nodes import LibraryOp, Node
from distmega.hostir.passes.joining import join_ops, last_work, take
from distmega.hostir.passes.row_ops import both_rows, fits_kernel, is_of_rows, rows_of, state_rows
from distmega.program.types import Access, Tensor, accesses


def join_rows(
    body: Sequence[Node], buffers: Mapping[str, Tensor], outputs: Sequence[str]
) -> tuple[Node, ...]:
    """The body, loops included, with such ops."""
    return join_ops(body, buffers, outputs, _RowJoining().join)


class _RowJoining:
    """What is known of the ops that have been joined. fewer: how many nodes less name a buffer."""

    def __init__(self) -> None:
        self.fewer = Counter[str]()

    def join(
        self,
        above: list[Node],
        node: LibraryOp,
        buffers: Mapping[str, Tensor],
        uses: Mapping[str, int],
    ) -> Node:
        """The op that does `node` and the one above it, which is taken from there; or the node."""
        at = _work_above(above)
        first = above[at] if at >= 0 else None
        if not isinstance(first, LibraryOp) or not all(map(is_of_rows, (first.op, node.op))):
            return node
        names = [{access.tensor for access in accesses(op)} for op in (first.op, node.op)]
        made = {access.tensor for access in first.op.writes}
        shown = {access.tensor for other in above[at:] for access in _viewed(other)}
        if made.isdisjoint(names[1]) or not made.isdisjoint(shown):
            return node
        both = both_rows(rows_of(first.op, buffers), rows_of(node.op, buffers))
        if both is None:
            return node
        shared = Counter(names[0] & names[1])
        gone = {
            name
            for name in {access.tensor for access in both.results}
            if buffers[name].role == "temp"
            and uses[name] - self.fewer[name] - shared[name] == 1  # itself
        }
        kept = {access: n for access, n in both.results.items() if access.tensor not in gone}
        joined = replace(both, results=kept)
        if not kept or not fits_kernel(joined):
            return node
        self.fewer += shared
        take(above, {at}, gone)
        return LibraryOp(op=state_rows(node.op.name, joined, buffers))


def _work_above(above: Sequence[Node]) -> int:
    """Where the last node stands that is neither an Allocate nor a view; -1 if there is none."""
    at = last_work(above)
    while at >= 0 and _viewed(above[at]):
        at = last_work(above[:at])
    return at


def _viewed(node: Node) -> tuple[Access, ...]:
    """What a view shows; nothing for other nodes."""
    return node.op.reads if isinstance(node, LibraryOp) and node.op.is_view else ()
