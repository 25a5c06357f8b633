"""The walk of passes that let a node do what an op directly behind it does, and what they share.

Comes in: a body, and what says whether an op joins one of the nodes above it. Goes out: the body,
loops included. Used by the passes of JOINS (../lower/lower.py). Next: norm_sums.py.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from distmega.hostir.ir.nodes import Allocate, ForLoop, LibraryOp, Node, walk_nodes
from distmega.hostir.ir.uses import named_buffers
from distmega.program.types import Op, Tensor

Join = Callable[[list[Node], LibraryOp, Mapping[str, Tensor], Mapping[str, int]], Node]
"""Called with the nodes above an op in its body, from which it may take some away, the op, the
buffers, and how many nodes name each; gives what stands in place of the op.
"""


@dataclass(frozen=True, slots=True)
class Both:
    """A node that does what two did, of which the first made `gone` for the second."""

    node: Node
    gone: str


JoinLast = Callable[[Node, Op, Mapping[str, Tensor]], Both | None]
"""Called with a node, an op behind it and the buffers; None where they stay two."""


def join_ops(
    body: Sequence[Node], buffers: Mapping[str, Tensor], outputs: Sequence[str], join: Join
) -> tuple[Node, ...]:
    """The body, loops included, each op joined where it can be. outputs: named once more each."""
    uses = Counter(outputs)
    for node in walk_nodes(body):
        if not isinstance(node, Allocate):
            uses.update(set(named_buffers(node)))
    return _joined(body, buffers, uses, join)


def _joined(
    body: Sequence[Node], buffers: Mapping[str, Tensor], uses: Mapping[str, int], join: Join
) -> tuple[Node, ...]:
    out: list[Node] = []
    for node in body:
        if isinstance(node, ForLoop):
            node = replace(node, body=_joined(node.body, buffers, uses, join))
        if isinstance(node, LibraryOp):
            node = join(out, node, buffers, uses)
        out.append(node)
    return tuple(out)


def with_last(join: JoinLast) -> Join:
    """Joins an op with the last node above it that works, whose result nobody else takes."""

    def joined(
        above: list[Node], node: LibraryOp, buffers: Mapping[str, Tensor], uses: Mapping[str, int]
    ) -> Node:
        at = last_work(above)
        both = join(above[at], node.op, buffers) if at >= 0 else None
        if both is None or not is_handed_on(both.gone, buffers, uses):
            return node
        take(above, {at}, {both.gone})
        return both.node

    return joined


def last_work(above: Sequence[Node]) -> int:
    """Where the last node stands that is no Allocate; -1 if there is none."""
    at = len(above) - 1
    while at >= 0 and isinstance(above[at], Allocate):
        at -= 1
    return at


def is_handed_on(name: str, buffers: Mapping[str, Tensor], uses: Mapping[str, int]) -> bool:
    """Whether a buffer is named by one node that writes it and one that reads it alone."""
    return buffers[name].role == "temp" and uses[name] == 2


def take(above: list[Node], positions: Collection[int], gone: Collection[str]) -> None:
    """Takes the nodes at some positions away, and what allocates the buffers `gone`."""
    above[:] = [
        node
        for position, node in enumerate(above)
        if position not in positions and not (isinstance(node, Allocate) and node.buffer in gone)
    ]
