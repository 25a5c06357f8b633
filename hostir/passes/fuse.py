"""Joins library ops that one kernel can do: chains of pointwise ops, a sum with the norm of it, and
what is done to heads before attention (fuse_heads.py).

Comes in: a body of lower.py, buffers still as lowered. Goes out: the body with ops of kinds
fused_pointwise, fused_norm and fused_heads in place of the last op of each group, without
allocations of what stays inside a kernel. An op moves down to the one that it is joined with if
nothing between them touches what it reads or writes. A result that others read too is an output of
both. Next: passes.py.
"""

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

from distmega.hostir.ir.nodes import (
    Allocate,
    ForLoop,
    LibraryOp,
    Node,
    SliceView,
    walk_nodes,
)
from distmega.hostir.ir.uses import node_reads, node_writes, storage_of, view_sources
from distmega.hostir.passes.fuse_heads import (
    HeadsOp,
    chain_heads,
    heads_op,
    inplace_results,
    set_beside,
    state_heads,
)
from distmega.hostir.passes.fused_kinds import MAX_FLOPS, MAX_READS, MAX_WRITES, op_exprs
from distmega.program import expr
from distmega.program.dtypes import FLOATS
from distmega.program.kinds import kind_of
from distmega.program.ops.parts import make_op, rename_axes
from distmega.program.types import Access, Index, Op, Program, Tensor, accesses

_SUM = expr.parse("a0 + a1")


def fuse_ops(
    body: Sequence[Node],
    buffers: Mapping[str, Tensor],
    outputs: Sequence[str],
    segments: Mapping[str, Program],
) -> tuple[Node, ...]:
    """The body, loops included, with fused ops."""
    return _HostFusion(body, buffers, outputs, dict(segments)).body(body)


class _HostFusion:
    """What ops of one program may know of each other."""

    def __init__(
        self,
        body: Sequence[Node],
        buffers: Mapping[str, Tensor],
        outputs: Sequence[str],
        segments: dict[str, Program],
    ) -> None:
        self.buffers = buffers
        self.sources = view_sources(body)
        self.viewed = {*self.sources.values()}
        self.readers = Counter(outputs)
        self.writers = Counter[str]()
        """Nodes that read or write a buffer; being an output counts as being read."""
        for node in walk_nodes(body):
            if not isinstance(node, ForLoop):
                self.readers.update({*node_reads(node, segments)})
                self.writers.update({*node_writes(node, segments)})
        self.inside: set[str] = set()
        """Temps that no longer exist."""

    def body(self, body: Sequence[Node]) -> tuple[Node, ...]:
        """One body: runs of ops with nothing between them but names and allocations."""
        out: list[Node] = []
        run: list[Node] = []
        for node in body:
            if isinstance(node, LibraryOp | Allocate | SliceView):
                run.append(node)
                continue
            out += self.run(run)
            run = []
            out.append(
                replace(node, body=self.body(node.body)) if isinstance(node, ForLoop) else node
            )
        out += self.run(run)
        return tuple(n for n in out if not (isinstance(n, Allocate) and n.buffer in self.inside))

    def run(self, nodes: Sequence[Node]) -> list[Node]:
        """Joins each op with those above whose results it reads, as often as that goes."""
        placed = _Placed(self.sources)
        allocated = {node.buffer for node in nodes if isinstance(node, Allocate)}
        for node in nodes:
            joined = node
            while isinstance(joined, LibraryOp):
                found = self.join_above(placed, allocated, joined.op)
                found = found or self.join_beside(placed, allocated, joined.op)
                if found is None:
                    break
                at, op = found
                placed.nodes[at], joined = None, LibraryOp(op=op)
            placed.add(joined)
        return [node for node in placed.nodes if node is not None]

    def join_above(
        self, above: "_Placed", allocated: Container[str], op: Op
    ) -> tuple[int, Op] | None:
        """Where the nearest op stands that can be done together with `op`, and both as one."""
        makers = above.makers
        made = {makers[access.tensor] for access in op.reads if access.tensor in makers}
        for at in sorted(made, reverse=True):
            node = above.nodes[at]
            if (
                isinstance(node, LibraryOp)
                and self.is_movable(node.op, allocated)
                and not above.touch(at, node.op)
                and (joined := self.join(node.op, op)) is not None
            ):
                return at, joined
        return None

    def join_beside(
        self, above: "_Placed", allocated: Container[str], op: Op
    ) -> tuple[int, Op] | None:
        """Where an op on other heads of the same rows stands, and both as one."""
        then = heads_op(op, self.buffers)
        for at in reversed(range(len(above.nodes) if then is not None else 0)):
            node = above.nodes[at]
            if not isinstance(node, LibraryOp) or node.op.is_view:
                continue
            first = heads_op(node.op, self.buffers)
            if first is None or not self.is_movable(node.op, allocated):
                return None
            assert then is not None, "as asked above"
            both = set_beside(first, then)
            joined = None if both is None else self.stated(op.name, both)
            if joined is None or above.touch(at, node.op):
                return None
            self.count_joined(node.op, op)
            return at, joined
        return None

    def is_movable(self, op: Op, allocated: Container[str]) -> bool:
        """Whether an op is pointwise on floats or one on heads, into temps of its own that have no
        other names, or in place.
        """
        known = inplace_results(op)
        names = [access.tensor for access in op.writes if access.tensor not in known]
        pointwise = kind_of(op).is_elementwise and self.is_float(op)
        return (
            (pointwise or heads_op(op, self.buffers) is not None)
            and all(self.writers[name] == 1 and name in allocated for name in names)
            and self.viewed.isdisjoint(names)
        )

    def is_float(self, op: Op) -> bool:
        return all(self.buffers[access.tensor].dtype in FLOATS for access in accesses(op))

    def join(self, first: Op, then: Op) -> Op | None:
        """Both ops as one; None if no kernel does that."""
        if (heads := heads_op(first, self.buffers)) is not None:
            return self.with_heads(heads, first, then)
        if kind_of(then).scales_elements:
            return self.with_residual(first, then)
        if not kind_of(then).is_elementwise or not self.is_float(then):
            return None
        names = {access.tensor for access in first.writes}
        read = next(access for access in then.reads if access.tensor in names)
        renamed = _in_axes_of(first, read, then)
        return None if renamed is None else self.composed(renamed, then)

    def composed(self, first: Op, then: Op) -> Op | None:
        """Both pointwise ops over the same axes; results that others read stay results."""
        trees = dict(zip(first.writes, op_exprs(first), strict=True))
        made = {access.tensor for access in first.writes}
        rest = [access for access in then.reads if access not in trees]
        if any(access.tensor in made for access in rest):
            return None
        order = list(dict.fromkeys((*first.reads, *rest)))
        args = {access: expr.Arg(position) for position, access in enumerate(order)}
        outer = {w: _substitute(tree, [args[a] for a in first.reads]) for w, tree in trees.items()}
        inner = [outer[access] if access in outer else args[access] for access in then.reads]
        results = {
            w: _substitute(t, inner) for w, t in zip(then.writes, op_exprs(then), strict=True)
        }
        gone = {a.tensor for a in first.writes if a in then.reads and self.readers[a.tensor] == 1}
        results |= {access: tree for access, tree in outer.items() if access.tensor not in gone}
        fits = len(order) <= MAX_READS and len(results) <= MAX_WRITES
        if not fits or sum(map(expr.num_flops, results.values())) > MAX_FLOPS:
            return None
        self.count_joined(first, then)
        self.inside |= gone
        return make_op(
            then.name,
            "fused_pointwise",
            then.axes,
            order,
            tuple(results),
            exprs=tuple(map(str, results.values())),
            dtypes=tuple(self.buffers[access.tensor].dtype for access in results),
        )

    def count_joined(self, first: Op, then: Op) -> None:
        """Two readers become one, which doesn't read what it makes."""
        names = {access.tensor for access in accesses(first)}
        self.readers.subtract(names & {access.tensor for access in then.reads})

    def with_heads(self, heads: HeadsOp, first: Op, then: Op) -> Op | None:
        """What is done to heads, and what is done next to some of them, which nobody else reads."""
        following = heads_op(then, self.buffers)
        if following is None or len(following.parts) != 1:
            return None
        (between,) = {part.x for part in following.parts}
        both = chain_heads(heads, following)
        joined = None if both is None else self.stated(then.name, both)
        if joined is None or self.readers[between] != 1:
            return None
        self.count_joined(first, then)
        self.inside.add(between)
        return joined

    def stated(self, name: str, heads: HeadsOp) -> Op | None:
        """The op of kind fused_heads; None where a part would write what another one writes or
        reads, as a view of a cache, for kernels do the parts in any order.
        """
        op = state_heads(name, heads, self.buffers)
        read, written = (
            {storage_of(access.tensor, self.sources) for access in operands}
            for operands in (op.reads, op.writes)
        )
        return None if len(written) < len(op.writes) or read & written else op

    def with_residual(self, first: Op, then: Op) -> Op | None:
        """A sum of two tensors of one shape and type, and its norm; the sum is a result too."""
        sources = [self.buffers[access.tensor] for access in first.reads]
        total = self.buffers[_out(first)]
        x, row, *vectors = then.reads
        if (
            op_exprs(first) != (_SUM,)
            or {(t.shape, t.dtype) for t in sources} != {(total.shape, total.dtype)}
            or any(_in_axes_of(first, read, then) is None for read in (x, row))
        ):
            return None
        moved = [replace(read, tensor=source.name) for source in sources for read in (x, row)]
        self.count_joined(first, then)
        writes = (*then.writes, replace(x, tensor=total.name))
        return make_op(
            then.name, "fused_norm", then.axes, [*moved, *vectors], writes,
            norm=then.kind, eps=then.attr("eps"),
        )  # fmt: skip


class _Placed:
    """The nodes of a run so far, None where one has moved down, and where they use what.

    makers: where the op stands that wrote a tensor last. reads, writes: of storage, the positions
    that did, views among those that read. names: of slices.
    """

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.sources = sources
        self.nodes: list[Node | None] = []
        self.makers: dict[str, int] = {}
        self.reads: dict[str, list[int]] = {}
        self.writes: dict[str, list[int]] = {}
        self.names: dict[str, list[int]] = {}

    def add(self, node: Node) -> None:
        """A node below the others."""
        at = len(self.nodes)
        self.nodes.append(node)
        if isinstance(node, SliceView):
            self.names.setdefault(node.view, []).append(at)
        elif isinstance(node, LibraryOp):
            op = node.op
            self.makers |= {access.tensor: at for access in op.writes}
            written = self.reads if op.is_view else self.writes
            for uses, operands in ((self.reads, op.reads), (written, op.writes)):
                for name in self.storages(operands):
                    uses.setdefault(name, []).append(at)

    def touch(self, at: int, op: Op) -> bool:
        """Whether what lies behind a position reads or changes what an op writes, changes what it
        reads, or gives a name of it another meaning.
        """
        reads, writes = self.storages(op.reads), self.storages(op.writes)
        behind = [self.writes.get(name, ()) for name in reads | writes]
        behind += [self.reads.get(name, ()) for name in writes]
        behind += [self.names.get(access.tensor, ()) for access in op.reads]
        return any(
            self.nodes[each] is not None
            for uses in behind
            for each in takewhile(lambda each: each > at, reversed(uses))
        )

    def storages(self, operands: Sequence[Access]) -> set[str]:
        return {storage_of(access.tensor, self.sources) for access in operands}


def _out(op: Op) -> str:
    return op.writes[0].tensor


def _in_axes_of(first: Op, read: Access, then: Op) -> Op | None:
    """The first op with the axis names of the second, which reads its result whole, one axis a
    dim and in the order of its own results; None if it doesn't.
    """
    extents = then.extents
    outs = [_whole_axes(access) for access in first.writes]
    there = _whole_axes(read)
    if there is None or any(names != outs[0] for names in outs) or outs[0] is None:
        return None
    names = dict(zip(outs[0], there, strict=True))
    same = all(first.axis(mine).extent == extents[other] for mine, other in names.items())
    if not same or len(names) != len(first.axes):
        return None
    if kind_of(then).is_elementwise and any(_whole_axes(a) != there for a in then.writes):
        return None

    return replace(
        first,
        reads=tuple(rename_axes(read, names) for read in first.reads),
        writes=tuple(rename_axes(write, names) for write in first.writes),
    )


def _whole_axes(access: Access) -> tuple[str, ...] | None:
    """The axes of an access that has one axis a dim."""
    if any(index != Index(axes=index.axes) or len(index.axes) != 1 for index in access.dims):
        return None
    return tuple(index.axes[0] for index in access.dims)


def _substitute(tree: expr.Expr, args: Sequence[expr.Expr]) -> expr.Expr:
    match tree:
        case expr.Arg(index):
            return args[index]
        case expr.Const():
            return tree
        case expr.Call(fn, parts):
            return expr.Call(fn, tuple(_substitute(part, args) for part in parts))
