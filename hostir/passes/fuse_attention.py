"""Joins attention of one row of each sequence with what is done to its heads before: one kernel
appends the row to the caches and attends over them.

Comes in: a body of lower.py, after fuse.py. Where a fused_heads op that makes queries and appends
keys and values stands directly before the attention that reads them, goes out: one op of kind
fused_attention. Nothing else in the program writes these caches or the positions, and no loop has
the op, so its kernel may read rows that earlier runs appended before the kernel in front of it is
done, where that is one of the same run (../run/early_reads.py).

`parts`, an attribute: as of fused_heads, of queries, keys and values; `eps`: of their norms; scale,
window, softcap: as of attention. Reads: positions [m]; the table of angles if queries and keys are
rotated; then q [m, h, g, d], k [m, h, d] and v [m, h, e], each of the first two by element, by head
and with its norm's weight if it has one; both caches. Writes: the result [m, h, g, e], both caches
in place, a cache for each row or one of a single row. Read by hostir/library/heads.py. Next:
split_sums.py.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from distmega.errors import counted
from distmega.hostir.ir.nodes import Allocate, Deallocate, ForLoop, LibraryOp, Node, walk_nodes
from distmega.hostir.ir.uses import named_buffers, shown, storage_of, view_sources
from distmega.hostir.passes.fuse_heads import FUSED as HEADS
from distmega.hostir.passes.fuse_heads import (
    HeadPart,
    HeadsOp,
    heads_op,
    next_heads,
    op_parts,
    require_part,
)
from distmega.hostir.passes.joining import Both, join_ops, with_last
from distmega.program.ops.attention import attention
from distmega.program.ops.norms import eps_of
from distmega.program.ops.parts import Built, access_named, bad_op, make_op
from distmega.program.types import Attr, Axis, Op, Tensor

FUSED = "fused_attention"
FACTORS = ("scale", "window", "softcap")
"""Attributes of an attention of rows at any positions of their own sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOp:
    """What an op does. heads: parts of queries, which are not kept, of keys and of values, each
    with the cache that it goes to; out: the result; factors: FACTORS that the op has.
    """

    heads: HeadsOp
    out: str
    factors: Mapping[str, Attr]


def fuse_attention(
    body: Sequence[Node], buffers: Mapping[str, Tensor], outputs: Sequence[str]
) -> tuple[Node, ...]:
    """The body with such ops."""
    written = WrittenStorage(body)
    looped = {node.op.name for node in _looped(body) if isinstance(node, LibraryOp)}

    def join(first: Node, op: Op, buffers: Mapping[str, Tensor]) -> Both | None:
        joined = None if op.name in looped else _joined(first, op, buffers)
        if joined is None or joined.out in written.sources or not written.once(joined.heads):
            return None
        fused = LibraryOp(op=state_attention(op.name, joined, buffers))
        return Both(fused, gone=op.reads[0].tensor)

    return join_ops(body, buffers, outputs, with_last(join))


def appends_once(body: Sequence[Node]) -> bool:
    """Whether all that the pass asks for holds of each fused_attention op in a body, which may be
    the work of several bodies of the pass, one after the other or in loops.
    """
    written, looped = WrittenStorage(body), {id(node) for node in _looped(body)}
    return all(
        id(node) not in looped and written.once(_stated(node.op).heads)
        for node in walk_nodes(body)
        if isinstance(node, LibraryOp) and node.op.kind == FUSED
    )


class WrittenStorage:
    """How many nodes of a body write into what."""

    def __init__(self, body: Sequence[Node]) -> None:
        self.sources = view_sources(body)
        self.counts = Counter[str]()
        for node in walk_nodes(body):
            self.counts.update({storage_of(name, self.sources) for name in _maybe_written(node)})

    def once(self, heads: HeadsOp) -> bool:
        """Whether one node appends to caches that are no views, and none writes positions."""
        caches = [part.out for part in heads.parts[1:]]
        positions = storage_of(heads.positions, self.sources)
        return not self.counts[positions] and all(
            self.counts[cache] == 1 and cache not in self.sources for cache in caches
        )


def _maybe_written(node: Node) -> tuple[str, ...]:
    """What a node may write: of one that is no library op, all that it names."""
    if isinstance(node, Allocate | Deallocate) or shown(node):
        return ()
    if isinstance(node, LibraryOp):
        return tuple(access.tensor for access in node.op.writes)
    return named_buffers(node)


def _looped(body: Sequence[Node]) -> Iterator[Node]:
    """Nodes in loops."""
    return (n for loop in body if isinstance(loop, ForLoop) for n in walk_nodes(loop.body))


def _joined(first: Node, op: Op, buffers: Mapping[str, Tensor]) -> AttentionOp | None:
    """What an attention and the op on heads before it do; None if no kernel does both."""
    if op.kind != "attention" or not isinstance(first, LibraryOp) or first.op.kind != HEADS:
        return None
    heads = heads_op(first.op, buffers)
    assert heads is not None, f"{first.op.name} is {HEADS}"
    names = [access.tensor for access in op.reads]
    made = {part.out: part for part in heads.parts}
    if len(made) != 3 or {*names[:3]} != made.keys() or names[3:] != [heads.positions]:
        return None
    q, k, v = (made[name] for name in names[:3])
    known = {key for key, _ in op.attrs} <= {*FACTORS}
    in_order = "append" not in q.steps and "append" in k.steps and v.steps == ("append",)
    rows_apart = heads.own or (not heads.sequences and op.extents["m"] == 1)
    state = all(buffers[part.out].role == "state" for part in (k, v))
    if not (known and in_order and rows_apart and state) or _rotates(q) != _rotates(k):
        return None
    parts = replace(q, out=""), k, v
    out = op.writes[0].tensor
    return AttentionOp(heads=replace(heads, parts=parts), out=out, factors=dict(op.attrs))


def _rotates(part: HeadPart) -> bool:
    return "rope" in part.steps


def restated_attention(op: Op, *operands: Tensor) -> Built:
    """What state_attention makes of an op of kind fused_attention: of its attributes, and of what
    it reads and then what it writes. ProgramError for operands that its steps do not take.
    """
    steps = op_parts(op)
    rotated = ["rope" in each for each in steps[:2]]
    takes = len(steps) == 3 and "append" not in steps[0] and "append" in steps[1]
    if not takes or steps[2] != ("append",) or rotated[0] != rotated[1]:
        found = "parts=" + ", ".join(" ".join(each) for each in steps)
        expected = "of queries, of keys with append, of values append alone; rope of two or none"
        raise bad_op(op.name, found, expected)
    num_reads = 3 + rotated[0] + sum(1 + (s != ("append",)) + ("norm" in s) for s in steps)
    if (len(op.reads), len(op.writes)) != (num_reads, 3):
        found = f"{counted(len(op.reads), 'operand')} and {counted(len(op.writes), 'result')}"
        raise bad_op(op.name, found, f"{num_reads} and 3, of its parts")
    stated, buffers = _stated(op), {each.name: each for each in operands}
    _require_fitting(op.name, stated, buffers)
    return state_attention(op.name, stated, buffers), ()


def _require_fitting(name: str, stated: AttentionOp, buffers: Mapping[str, Tensor]) -> None:
    """ProgramError for operands that are not those of attention over caches to which keys and
    values were appended.
    """
    heads, out = stated.heads, buffers[stated.out]
    q, k, v = heads.parts
    queries = replace(buffers[q.x], name=f"{name}.q")
    known = {**buffers, queries.name: queries}
    for part in (replace(q, out=queries.name), k, v):
        require_part(name, heads, part, known)
    factors = {key: float(str(stated.factors.get(key, 0))) for key in FACTORS}
    factors["window"] = int(factors["window"])
    caches = buffers[k.out], buffers[v.out]
    _, (made,) = attention(name, queries, *caches, buffers[heads.positions], **factors)  # type: ignore[arg-type]
    if not heads.own and queries.shape[0] != 1:
        found = f"{counted(queries.shape[0], 'row')} and cache {caches[0].shape}"
        raise bad_op(name, found, "a cache for each row")
    if (out.shape, out.dtype) != (made.shape, made.dtype):
        found = f"result {out.shape} of {out.dtype}"
        raise bad_op(name, found, f"{made.shape} of {made.dtype}")
    written = {out.name, k.out, v.out}
    read = {q.x, k.x, v.x, q.weight, k.weight, heads.positions, heads.table}
    if len(written) < 3 or written & read:
        raise bad_op(name, f"results {out.name}, {k.out}, {v.out}", "others")


def _stated(op: Op) -> AttentionOp:
    steps, eps = op_parts(op), eps_of(op)
    names = iter([access.tensor for access in op.reads])
    positions = next(names)
    table = next(names) if "rope" in steps[0] else ""
    out, *caches = (access.tensor for access in op.writes)
    parts = []
    for each, to in zip(steps, ("", *caches), strict=True):
        x, weight = next_heads(names, each)
        parts.append(HeadPart(x=x, weight=weight or "", out=to, steps=each))
    own = len(op.writes[1].dims) == 4
    heads = HeadsOp(parts=tuple(parts), positions=positions, table=table, own=own, eps=eps)
    factors = {key: value for key, value in op.attrs if key in FACTORS}
    return AttentionOp(heads=heads, out=out, factors=factors)


def state_attention(name: str, stated: AttentionOp, buffers: Mapping[str, Tensor]) -> Op:
    """The op of kind fused_attention."""
    heads = stated.heads
    q, k, v = heads.parts
    (m, h, g, d), (t, e) = buffers[q.x].shape, buffers[v.out].shape[-2:]
    # i: elements of keys that are appended; c: where to
    axes = [Axis(name=n, extent=x) for n, x in zip("mhgei", (m, h, g, e, d), strict=True)]
    axes += [Axis(name="d", extent=d, role="reduce"), Axis(name="t", extent=t, role="reduce")]
    axes.append(Axis(name="c", extent=t, role="scatter", lookup=True))
    reads = [access_named(heads.positions, "m")]
    if heads.table:
        rows, columns = buffers[heads.table].shape
        axes.append(Axis(name="n", extent=rows, role="reduce", lookup=True))
        axes.append(Axis(name="a", extent=columns, role="reduce"))
        reads.append(access_named(heads.table, "n", "a"))
    if any(part.steps != ("append",) for part in heads.parts):
        axes.append(Axis(name="r", extent=d, role="reduce"))
    for part, inner, dim in zip(heads.parts, ("hg", "h", "h"), "die", strict=True):
        reads.append(access_named(part.x, "m", *inner, dim))
        if part.steps != ("append",):
            reads.append(access_named(part.x, "m", *inner, "r"))
        if part.weight:
            reads.append(access_named(part.weight, dim))
    own = ["m"] if heads.own else []
    reads += [access_named(part.out, *own, "h", "t", n) for part, n in ((k, "d"), (v, "e"))]
    writes = [access_named(stated.out, *"mhge")]
    writes += [access_named(part.out, *own, "h", "c", n) for part, n in ((k, "i"), (v, "e"))]
    texts = tuple(" ".join(part.steps) for part in heads.parts)
    attrs: dict[str, Attr] = {"parts": texts, "eps": heads.eps, **stated.factors}
    return make_op(name, FUSED, axes, reads, writes, **attrs)
