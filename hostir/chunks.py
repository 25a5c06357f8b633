"""The ops of a host loop as they run on one chunk: axes cut, operands renamed to views of chunks.

Comes in: a HostLoop of sharding/host_loops.py and the ops in it. Goes out: a ChunkBody, ops over
chunk-sized tensors, with the slices and views that name those. lower.py makes the nodes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from distmega.errors import VerifyError
from distmega.hostir.nodes import SliceView
from distmega.program import Access, Op, Tensor, accesses
from distmega.sharding.host_loops import HostLoop
from distmega.sharding.streams import (
    Part,
    StreamSplit,
    is_gather_ring,
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


@dataclass(slots=True, kw_only=True)
class ChunkBody:
    """What runs in iterations `shift` and on of a loop.

    index: of the for-loop that runs them. tensors, views, slices: what the ops name beyond the
    program's own.
    """

    index: str
    shift: int
    extent: int
    ops: list[Op] = field(default_factory=list)
    gathers: list[GatherRing] = field(default_factory=list)
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
        is_tail: bool,
    ) -> None:
        self.tensors, self.views, self.chunked = tensors, views, chunked
        self.loop, self.body = loop, body
        self.short = is_tail and loop.has_tail
        self.suffix = ".tail" if is_tail else ""
        self.names: dict[tuple[str, Part], str] = {}

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
        named = [
            replace(access, tensor=self.name(access.tensor, part) if part else access.tensor)
            for access, part in zip(accesses(op), parts, strict=True)
        ]
        self.body.ops.append(self.cut(op, split.axis, split.chunk, named))

    def cut(self, op: Op, axis: str, chunk: int, named: Sequence[Access]) -> Op:
        axes = tuple(
            replace(a, extent=self.chunk(a.extent, chunk)) if a.name == axis else a for a in op.axes
        )
        reads, writes = tuple(named[: len(op.reads)]), tuple(named[len(op.reads) :])
        name = op.name + self.suffix
        return replace(op, name=name, axes=axes, reads=reads, writes=writes)

    def name(self, tensor: str, part: Part) -> str:
        """The name of a chunk of a tensor, declared if it is new. One may be cut along two dims."""
        view = self.views.get(tensor)
        source = view and through_view(view, part, self.tensors)
        name = self.names.get((tensor, part), "")
        if not name:
            name = f"{tensor}@{self.body.index}"
            if tensor in self.chunked:
                name = tensor + self.suffix
            elif name in self.body.tensors:
                name += f".{part.dim}"
            self.names[tensor, part] = name
            self.declare(name, tensor, part)
            if view and source:
                cut = view.writes[0].dims[part.dim].axes[0]
                chunk = self.cut_chunk(view, part)
                named = [
                    replace(view.reads[0], tensor=self.name(view.reads[0].tensor, source)),
                    replace(view.writes[0], tensor=name),
                ]
                whole = self.cut(view, cut, chunk, named)
                self.body.views[name] = replace(whole, name=name)
            elif tensor not in self.chunked:
                self.body.slices[name] = self.slice(name, tensor, part, self.body.shift)
        return name

    def cut_chunk(self, view: Op, part: Part) -> int:
        inner = 1
        for axis in view.writes[0].dims[part.dim].axes[1:]:
            inner *= view.axis(axis).extent
        return part.chunk // inner

    def shape(self, tensor: str, part: Part) -> tuple[int, ...]:
        shape = self.tensors[tensor].shape
        return tuple(
            self.chunk(e, part.chunk) if dim == part.dim else e for dim, e in enumerate(shape)
        )

    def declare(self, name: str, tensor: str, part: Part) -> None:
        whole = self.tensors[tensor]
        shape = self.shape(tensor, part)
        self.body.tensors[name] = Tensor(name=name, shape=shape, dtype=whole.dtype)

    def slice(self, name: str, tensor: str, part: Part, shift: int) -> SliceView:
        return SliceView(
            view=name,
            buffer=tensor,
            dim=part.dim,
            index=self.body.index,
            shift=shift,
            step=part.chunk if self.loop.has_tail else 0,
            swizzle=part.ring,
        )

    def ring(self, op: Op, part: Part) -> GatherRing:
        target = op.writes[0].tensor
        here = self.name(target, part)
        own, following = f"{here}.own", f"{here}.next"
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
        for access in accesses(op) if chunked and op.kind != "view" else ():
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
    """The body of a loop, and apart from it that of its last chunk where it is shorter or where a
    ring has nothing left to send.

    ops: those of the loop by name; tensors: the program's, whole; chunked: what is allocated by
    chunk.
    """
    gathers = any(is_gather_ring(ops[name], split) for name, split in loop.splits)
    num = loop.num_chunks - (gathers or loop.has_tail)
    bodies = [ChunkBody(index=loop.index, shift=0, extent=num)]
    if num < loop.num_chunks:
        bodies.append(ChunkBody(index=f"{loop.index}.tail", shift=num, extent=1))
    for body in bodies:
        chunker = _Chunker(tensors, views, chunked, loop, body, is_tail=body is not bodies[0])
        for name, split in loop.splits:
            chunker.add(ops[name], split)
    return bodies
