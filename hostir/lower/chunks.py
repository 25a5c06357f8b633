"""The ops of a host loop as they run on one chunk: axes cut, operands renamed to views of chunks.

Comes in: a HostLoop of sharding/streams/host_loops.py and the ops in it. Goes out: a ChunkBody, ops
over chunk-sized tensors, with the slices and views that name those. lower.py makes the nodes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from distmega.errors import VerifyError
from distmega.hostir.ir.nodes import SliceView
from distmega.program.ops.compute import pointwise
from distmega.program.ops.data_movement import copy
from distmega.program.ops.parts import fresh_name
from distmega.program.types import Access, Op, Tensor, accesses
from distmega.sharding.resolve.padding import additive_reads
from distmega.sharding.streams.host_loops import HostLoop
from distmega.sharding.streams.streams import (
    SUMS,
    ChunkPart,
    StreamSplit,
    is_gather_ring,
    is_scatter_ring,
    is_sum,
    operand_parts,
    through_view,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherRing:
    """An all-gather that comes part by part: `here` is the part in use, `following` the next one,
    `own` (not in a loop) this rank's; all are parts of `target`.
    """

    name: str
    mesh_axis: str
    source: str
    target: str
    own: SliceView
    here: str
    following: SliceView


@dataclass(frozen=True, slots=True, kw_only=True)
class ScatterRing:
    """A reduce-scatter whose sums travel: `target` has the sum of the iteration before, which the
    next rank goes on with, `incoming` receives the other neighbour's; op `add` needs it.
    """

    name: str
    mesh_axis: str
    target: str
    incoming: str
    add: str


@dataclass(slots=True, kw_only=True)
class ChunkBody:
    """What runs in iterations `shift` and on of a loop.

    index: of the for-loop that runs them. tensors, views, slices: what the ops name beyond the
    program's own. sums: op that writes what iterations add to -> its number in the loop; the first
    iteration's only writes it. whole: ops that write all of a buffer from outside.
    """

    index: str
    shift: int
    extent: int
    ops: list[Op] = field(default_factory=list)
    gathers: list[GatherRing] = field(default_factory=list)
    scatters: list[ScatterRing] = field(default_factory=list)
    sums: dict[str, int] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    views: dict[str, Op] = field(default_factory=dict)
    slices: dict[str, SliceView] = field(default_factory=dict)


class _Chunker:
    """Fills one ChunkBody."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        views: Mapping[str, Op],
        chunked: Mapping[str, tuple[int, int]],
        loop: HostLoop,
        body: ChunkBody,
        *,
        part: str,
    ) -> None:
        """part: "head" or "tail" where the body is not that of most iterations."""
        self.tensors, self.views, self.chunked = tensors, views, chunked
        self.loop, self.body = loop, body
        self.short = part == "tail" and loop.has_tail
        self.is_head = part == "head"
        self.suffix = f".{part}" if part else ""
        self.names: dict[tuple[str, ChunkPart], str] = {}
        self.homes: set[str] = set()
        """Buffers from outside that a chunk's ops write as if they were a chunk."""

    def chunk(self, extent: int, chunk: int) -> int:
        return extent % chunk if self.short else chunk

    def add(self, op: Op, split: StreamSplit) -> None:
        """An op of the loop, cut to one chunk."""
        parts = operand_parts(op, split, self.tensors)
        assert not isinstance(parts, str), (op.name, parts)
        for access, part in zip(accesses(op), parts, strict=True):
            chunk = self.chunked.get(access.tensor)
            if chunk and (part is None or (part.dim, part.chunk) != chunk):
                raise _not_a_chunk(access.tensor, op)
        if is_gather_ring(op, split):
            part = parts[-1]
            assert part is not None, op
            if not self.body.shift:
                self.body.gathers.append(self.ring(op, part))
            return
        if is_scatter_ring(op, split):
            part = parts[0]
            assert part is not None, op
            self.scatter(op, part)
            return
        named = [
            replace(access, tensor=self.name(access.tensor, part) if part else access.tensor)
            for access, part in zip(accesses(op), parts, strict=True)
        ]
        made = self.cut(op, split.axis, split.chunk, named)
        if is_sum(op, split):
            self.add_up(made, op.axis(split.axis).combine)
            return
        self.body.ops.append(made)
        if any(access.tensor in self.homes for access in made.writes):
            self.body.whole.add(made.name)

    def start_scatter(self, op: Op, split: StreamSplit) -> None:
        """The part of a scatter ring's first iteration is made where the sums will be."""
        part = operand_parts(op, split, self.tensors)[0]
        source, target = op.reads[0].tensor, op.writes[0].tensor
        if isinstance(part, ChunkPart) and source in self.chunked and source not in self.views:
            self.names[source, part] = target
            self.homes.add(target)

    def scatter(self, op: Op, part: ChunkPart) -> None:
        """A reduce-scatter's iteration: what came in is added to this rank's part."""
        target = op.writes[0].tensor
        here, whole = self.name(op.reads[0].tensor, part), self.tensors[target]
        if self.is_head:
            if here != target:
                built, _ = copy(op.name + self.suffix, replace(whole, name=here), whole)
                self.body.ops.append(built)
                self.body.whole.add(built.name)
            return
        ring = ScatterRing(
            name=op.name,
            mesh_axis=str(op.attr("mesh_axis")),
            target=target,
            incoming=self.beside(target, "in"),
            add=f"{op.name}.add",
        )
        self.body.scatters.append(ring)
        self.combine(ring.add, str(op.attr("combine")), target, here, ring.incoming)

    def add_up(self, op: Op, combine: str) -> None:
        """An op of which iterations give parts of one result; a bias is in the first only."""
        (write,) = op.writes
        number = len(self.body.sums)
        if self.is_head:
            self.body.ops.append(op)
            self.body.sums[op.name] = number
            self.body.whole.add(op.name)
            return
        part = self.beside(write.tensor, "part")
        bias = additive_reads(op)
        reads = tuple(read for position, read in enumerate(op.reads) if position not in bias)
        self.body.ops.append(replace(op, reads=reads, writes=(replace(write, tensor=part),)))
        name = f"{op.name}.add"
        self.combine(name, combine, write.tensor, write.tensor, part)
        self.body.sums[name] = number

    def beside(self, tensor: str, what: str) -> str:
        """A temp of an iteration, shaped as a whole tensor is."""
        name = self.fresh(f"{tensor}.{what}{self.suffix}")
        self.body.tensors[name] = replace(self.tensors[tensor], name=name, role="temp")
        return name

    def fresh(self, name: str) -> str:
        """A name that no tensor has, of the program's or of this body."""
        return fresh_name(name, self.tensors, self.body.tensors)

    def combine(self, name: str, combine: str, target: str, *parts: str) -> None:
        whole = self.tensors[target]
        operands = (replace(whole, name=part) for part in parts)
        built, _ = pointwise(name, SUMS[combine], *operands)
        (write,) = built.writes
        self.body.ops.append(replace(built, writes=(replace(write, tensor=target),)))
        self.body.whole.add(name)

    def cut(self, op: Op, axis: str, chunk: int, named: Sequence[Access]) -> Op:
        axes = tuple(
            replace(a, extent=self.chunk(a.extent, chunk)) if a.name == axis else a for a in op.axes
        )
        reads, writes = tuple(named[: len(op.reads)]), tuple(named[len(op.reads) :])
        name = op.name + self.suffix
        return replace(op, name=name, axes=axes, reads=reads, writes=writes)

    def name(self, tensor: str, part: ChunkPart) -> str:
        """The name of a chunk of a tensor, declared if it is new. One may be cut along two dims."""
        unnamed: list[tuple[str, ChunkPart]] = []
        each: tuple[str, ChunkPart] | None = (tensor, part)
        while each is not None and each not in self.names:
            self.enter(*each)
            unnamed.append(each)
            each = self.source(*each)
        for each in reversed(unnamed):
            self.show(*each)
        return self.names[tensor, part]

    def source(self, tensor: str, part: ChunkPart) -> tuple[str, ChunkPart] | None:
        """What a chunk of a view shows, as a chunk; None where it is none."""
        view = self.views.get(tensor)
        seen = view and through_view(view, part, self.tensors)
        return (view.reads[0].tensor, seen) if view and seen else None

    def show(self, tensor: str, part: ChunkPart) -> None:
        """Says what the name of a chunk stands for, unless it has storage of its own."""
        name, source = self.names[tensor, part], self.source(tensor, part)
        if source is not None:
            view = self.views[tensor]
            cut = view.writes[0].dims[part.dim].axes[0]
            named = [
                replace(view.reads[0], tensor=self.names[source]),
                replace(view.writes[0], tensor=name),
            ]
            whole = self.cut(view, cut, self.cut_chunk(view, part), named)
            self.body.views[name] = replace(whole, name=name)
        elif tensor not in self.chunked:
            shift = self.body.shift + part.shift
            self.body.slices[name] = self.slice(name, tensor, part, shift)

    def cut_chunk(self, view: Op, part: ChunkPart) -> int:
        inner = 1
        for axis in view.writes[0].dims[part.dim].axes[1:]:
            inner *= view.axis(axis).extent
        return part.chunk // inner

    def shape(self, tensor: str, part: ChunkPart) -> tuple[int, ...]:
        shape = self.tensors[tensor].shape
        return tuple(
            self.chunk(e, part.chunk) if dim == part.dim else e for dim, e in enumerate(shape)
        )

    def enter(self, tensor: str, part: ChunkPart) -> None:
        """Gives a chunk a name and declares that."""
        if tensor in self.chunked:
            name = self.fresh(tensor + self.suffix) if self.suffix else tensor
        else:
            name = f"{tensor}@{self.body.index}"
            name = self.fresh(f"{name}.{part.dim}" if name in self.body.tensors else name)
        self.names[tensor, part] = name
        self.declare(name, tensor, part)

    def declare(self, name: str, tensor: str, part: ChunkPart) -> None:
        whole = self.tensors[tensor]
        shape = self.shape(tensor, part)
        self.body.tensors[name] = Tensor(name=name, shape=shape, dtype=whole.dtype)

    def slice(self, name: str, tensor: str, part: ChunkPart, shift: int) -> SliceView:
        return SliceView(
            view=name,
            buffer=tensor,
            dim=part.dim,
            index=self.body.index,
            shift=shift,
            step=0 if part.ring or self.body.extent == self.loop.num_chunks else part.chunk,
            swizzle=part.ring,
        )

    def ring(self, op: Op, part: ChunkPart) -> GatherRing:
        target = op.writes[0].tensor
        here = self.name(target, part)
        own, following = (self.fresh(f"{here}.{what}") for what in ("own", "next"))
        for name in (own, following):
            self.declare(name, target, part)
        first = replace(self.slice(own, target, part, 0), index="")
        return GatherRing(
            name=op.name,
            mesh_axis=str(op.attr("mesh_axis")),
            source=op.reads[0].tensor,
            target=target,
            own=first,
            here=here,
            following=self.slice(following, target, part, 1),
        )


def verify_homes(
    ops: Sequence[Op], loops: Mapping[str, HostLoop], chunked: Mapping[str, tuple[int, int]]
) -> None:
    """VerifyError unless what is allocated by chunk is used by the ops of one loop alone."""
    homes: dict[str, HostLoop | None] = {}
    for op in ops:
        for access in accesses(op) if chunked and not op.is_view else ():
            if access.tensor in chunked:
                loop = loops.get(op.name)
                if loop is None or homes.setdefault(access.tensor, loop) != loop:
                    raise _not_a_chunk(access.tensor, op)


def _not_a_chunk(tensor: str, op: Op) -> VerifyError:
    return VerifyError(
        f"{tensor!r} is allocated by chunk, and {op.name!r} uses it otherwise",
        expected="ops of one host loop that use the same chunk in each iteration",
        remedy="leave allocations as finalize_allocations made them",
    )


def chunk_bodies(
    loop: HostLoop,
    ops: Mapping[str, Op],
    tensors: Mapping[str, Tensor],
    views: Mapping[str, Op],
    chunked: Mapping[str, tuple[int, int]],
) -> list[ChunkBody]:
    """The body of a loop; apart from it that of the first chunk where later ones add to what it
    writes, and that of the last where it is shorter or where a ring has nothing left to send.

    ops: those of the loop by name; tensors: the program's, whole; chunked: what is allocated by
    chunk.
    """
    steps = [(ops[name], split) for name, split in loop.splits]
    head = any(is_sum(op, split) or is_scatter_ring(op, split) for op, split in steps)
    tail = loop.has_tail or any(is_gather_ring(op, split) for op, split in steps)
    extents = {"head": int(head), "": loop.num_chunks - head - tail, "tail": int(tail)}
    bodies: list[ChunkBody] = []
    shift = 0
    for part, extent in extents.items():
        if extent:
            index = f"{loop.index}.{part}" if part else loop.index
            body = ChunkBody(index=index, shift=shift, extent=extent)
            chunker = _Chunker(tensors, views, chunked, loop, body, part=part)
            for op, split in steps if part == "head" else ():
                if is_scatter_ring(op, split):
                    chunker.start_scatter(op, split)
            for op, split in steps:
                chunker.add(op, split)
            bodies.append(body)
        shift += extent
    return bodies
