"""Which ops run in chunks, as iterations of a host loop: from a user's `stream` to the ops around.

Comes in: the local ops of one rank, the tensors that a user annotated. Goes out: a StreamSplit per
op that runs in chunks. Everything is read off access maps: an axis can be cut where, in every
operand that it indexes, a chunk of the axis is a chunk of one dim. Annotations spread forwards and
backwards along temporaries and never overwrite each other. Next: host_loops.py.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distmega.program.kinds import kind_of
from distmega.program.types import Access, Axis, Op, Tensor, accesses
from distmega.sharding.layout.domains import LoopDomain, Stream
from distmega.sharding.resolve.collectives import RANK_AXIS
from distmega.sharding.search.options import axis_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSplit:
    """One iteration axis of a local op in chunks, the last maybe shorter.

    extent: of the whole axis. ring: mesh axis whose coordinate is added to the chunk's number, and
    `shift` with it.
    """

    axis: str
    chunk: int
    extent: int
    ring: str = ""
    shift: int = 0

    @property
    def num_chunks(self) -> int:
        return -(-self.extent // self.chunk)

    @property
    def tail(self) -> int:
        """Extent of the last chunk if it is shorter than the others, else 0."""
        return self.extent % self.chunk

    @property
    def shape(self) -> tuple[int, bool, str, int]:
        """Ops share a loop only if these are equal: chunks, a short one, ring."""
        return self.num_chunks, self.tail > 0, self.ring, self.shift

    def domain(self, op: Op) -> LoopDomain:
        """The op's loop domain on one rank, stream axis in front."""
        return self.cut(LoopDomain.of([(axis.name, axis.extent) for axis in op.axes]))

    def cut(self, domain: LoopDomain) -> LoopDomain:
        """A loop domain with the axis in chunks."""
        return stream_axis(domain, self.axis, self)


def stream_axis(domain: LoopDomain, name: str, split: StreamSplit) -> LoopDomain:
    """Cuts an axis of a loop domain into chunks, for a loop in front of all others."""
    domain, outer = domain.split(name, split.chunk), f"{name}.o"
    if split.ring:
        domain, outer = domain.swizzle(outer, split.ring, split.shift), f"{outer}.r"
    return domain.parallelize(outer, Stream()).reorder([outer])


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """A tensor's dim in chunks, in ring order of a mesh axis if one is named: `shift` and the
    coordinate are added to the number of a chunk.
    """

    dim: int
    chunk: int
    ring: str = ""
    shift: int = 0


SUMS = {"sum": "a0 + a1", "max": "maximum(a0, a1)", "min": "minimum(a0, a1)"}
"""How parts of a result come together, by what an axis combines by."""

WHOLE = ChunkPart(-1, 0)
"""What an annotation of one chunk asks for: no loop."""


def cut_axis(op: Op, access: Access, part: ChunkPart) -> tuple[str, int] | None:
    """The iteration axis, and its chunk, that runs over an operand as `part` says, if one does."""
    index = access.dims[part.dim]
    if not index.axes or index.offset or index.stride != 1:
        return None
    inner = math.prod(op.axis(name).extent for name in index.axes[1:])
    return None if part.chunk % inner else (index.axes[0], part.chunk // inner)


def split_as(op: Op, access: Access, part: ChunkPart) -> StreamSplit | None:
    """The chunks of an op in which an operand comes as `part` says, if an axis runs so."""
    cut = cut_axis(op, access, part)
    if cut is None:
        return None
    axis, chunk = cut
    extent = op.axis(axis).extent
    return StreamSplit(axis=axis, chunk=chunk, extent=extent, ring=part.ring, shift=part.shift)


def is_gather_ring(op: Op, split: StreamSplit) -> bool:
    """Whether the op is an all-gather whose parts come one by one, around the ring."""
    return kind_of(op).gathers_all and split.axis == RANK_AXIS


def is_scatter_ring(op: Op, split: StreamSplit) -> bool:
    """Whether the op is a reduce-scatter whose sums travel around the ring, a part an iteration;
    each rank ends with its own.
    """
    return kind_of(op).scatters_sums and split.axis == RANK_AXIS


def is_sum(op: Op, split: StreamSplit) -> bool:
    """Whether iterations combine into one result, one after the other."""
    return kind_of(op).origin != "sharding" and op.axis(split.axis).role == "reduce"


def operand_parts(
    op: Op, split: StreamSplit, tensors: Mapping[str, Tensor]
) -> tuple[ChunkPart | None, ...] | str:
    """What a chunk touches of each operand, reads first (None: all of it), or why it can't be cut.

    Reads through the op's access maps; any op of equal axes and accesses gives the same.
    """
    refused = _refuse(op, op.axis(split.axis), split)
    if refused:
        return refused
    found: list[ChunkPart | None] = []
    for position, access in enumerate(accesses(op)):
        dim = axis_dim(op, access.dims, tensors[access.tensor].shape, split.axis)
        if isinstance(dim, str):
            return f"operand {position}: {dim}"
        found.append(
            ChunkPart(dim[0], split.chunk * dim[1], split.ring, split.shift) if dim else None
        )
    whole = is_sum(op, split) or is_scatter_ring(op, split)
    if None in found[len(op.reads) :] and not whole:
        return "it doesn't index every result"
    seen: dict[str, ChunkPart | None] = {}
    for access, part in zip(op.reads, found, strict=False):
        if seen.setdefault(access.tensor, part) != part and not kind_of(op).reads_apart:
            return f"{access.tensor} is read twice, in chunks and otherwise"
    return tuple(found)


def _refuse(op: Op, axis: Axis, split: StreamSplit) -> str:
    """Why the axis itself can't run in such chunks; "" if it can."""
    if split.ring and split.tail:
        return f"a ring needs equal chunks, and {split.extent} is cut by {split.chunk}"
    if kind_of(op).communicates:
        return _refuse_collective(op, axis, split)
    if axis.role == "parallel":
        return ""
    if axis.role == "scatter" or axis.lookup:
        return "its positions are known only at run time"
    if axis.combine not in SUMS:
        return "the op needs all of it at once"
    if split.ring:
        return "ranks in ring order would add up in different orders"
    return ""


def _refuse_collective(op: Op, axis: Axis, split: StreamSplit) -> str:
    over = str(op.attr("mesh_axis"))
    if axis.name != RANK_AXIS:
        apart = split.ring == over
        return "ranks in ring order would meet with different chunks" if apart else ""
    around = split.ring == over and split.chunk == 1
    if kind_of(op).gathers_all and around and not split.shift:
        return ""
    if kind_of(op).scatters_sums and around and split.shift and op.attr("combine") in SUMS:
        return ""
    return f"ranks bring their parts of it at once; only a ring over {over} can"


def through_view(view: Op, part: ChunkPart, tensors: Mapping[str, Tensor]) -> ChunkPart | None:
    """A chunk of a view as a chunk of what it is a view of; None if it isn't one."""
    return _across(view, view.writes[0], part, tensors, len(view.reads) - 1)


def onto_view(view: Op, part: ChunkPart, tensors: Mapping[str, Tensor]) -> ChunkPart | None:
    """A chunk of what a view shows as a chunk of the view; None if it isn't one."""
    return _across(view, view.reads[0], part, tensors, len(view.reads))


def to_root(
    name: str, part: ChunkPart | None, views: Mapping[str, Op], tensors: Mapping[str, Tensor]
) -> tuple[str, ChunkPart | None]:
    """The storage that a tensor lies in, and a chunk of it as a chunk of that; None if it isn't
    one. views: by the tensors that they make.
    """
    while name in views:
        view = views[name]
        part = part and through_view(view, part, tensors)
        name = view.reads[0].tensor
    return name, part


def _across(
    view: Op, here: Access, part: ChunkPart, tensors: Mapping[str, Tensor], position: int
) -> ChunkPart | None:
    split = split_as(view, here, part)
    if split is None:
        return None
    parts = operand_parts(view, split, tensors)
    return None if isinstance(parts, str) else parts[position]


class StreamSpread:
    """Spreads annotations over the ops of one rank.

    pins: local tensor -> the chunks it was annotated with, WHOLE for none.
    """

    def __init__(
        self, ops: Sequence[Op], tensors: Mapping[str, Tensor], pins: Mapping[str, ChunkPart]
    ) -> None:
        self.ops, self.tensors, self.pins = ops, tensors, pins
        self.views = {op.writes[0].tensor: op for op in ops if op.is_view}
        self.known = dict(pins)
        self.splits: dict[str, StreamSplit] = {}
        self.parts: dict[str, tuple[ChunkPart | None, ...]] = {}
        self.refused: dict[tuple[str, str], str] = {}
        self.changed = True

    def run(self) -> dict[str, StreamSplit]:
        """The splits by op. What stood in the way of an annotation is in `refused`, by tensor and
        op.
        """
        for op in self.ops:
            self.visit(op, [a for a in op.writes if a.tensor in self.pins])
        while self.changed:
            self.changed = False
            for op in self.ops:
                self.visit(op, op.reads)
            for op in reversed(self.ops):
                self.visit(op, op.writes)
                self.learn(op, op.reads, self.parts.get(op.name, ()))
        return self.splits

    def visit(self, op: Op, operands: Sequence[Access]) -> None:
        for access in operands:
            part = self.known.get(access.tensor, WHOLE)
            if part != WHOLE and op.name not in self.splits:
                self.take(op, access, part)

    def take(self, op: Op, access: Access, part: ChunkPart) -> None:
        """Runs an op in chunks, as an operand comes, if that can be and contradicts no pin."""
        where = access.tensor, op.name
        split = split_as(op, access, part)
        if split is None:
            self.refused[where] = f"{op.kind} has no axis that runs over such chunks"
            return
        given = access.tensor in self.pins and self.tensors[access.tensor].role != "temp"
        if is_sum(op, split) and not given:
            self.refused[where] = (
                f"{op.kind} over {split.axis} would combine its iterations, which it does only "
                f"where an input, weight or state is annotated"
            )
            return
        parts = operand_parts(op, split, self.tensors)
        if isinstance(parts, str):
            self.refused[where] = f"{op.kind} over {split.axis}: {parts}"
            return
        if crossed := self.crossed(op, parts):
            self.refused[where] = (
                f"{op.kind} over {split.axis}: it reads other chunks of {crossed} than it writes"
            )
            return
        made = zip(op.writes, parts[len(op.reads) :], strict=True)
        if any(self.pins.get(write.tensor, got) != got for write, got in made):
            self.refused[where] = f"a result of {op.name} is annotated otherwise"
            return
        self.splits[op.name], self.parts[op.name] = split, parts
        self.changed = True
        self.learn(op, op.writes, parts[len(op.reads) :])

    def crossed(self, op: Op, parts: Sequence[ChunkPart | None]) -> str:
        """The storage of which an op would read in one chunk what it writes in another; "" if there
        is none.
        """
        if op.is_view:
            return ""
        ends = [
            to_root(access.tensor, part, self.views, self.tensors)
            for access, part in zip(accesses(op), parts, strict=True)
        ]
        reads, writes = ends[: len(op.reads)], ends[len(op.reads) :]
        for root, part in writes:
            if any(other == root and (seen is None or seen != part) for other, seen in reads):
                return root
        return ""

    def learn(self, op: Op, operands: Sequence[Access], parts: Sequence[ChunkPart | None]) -> None:
        """Notes how temporaries come in chunks; what is known already stays."""
        for access, part in zip(operands, parts, strict=False):
            temp = self.tensors[access.tensor].role == "temp"
            if part is not None and temp and access.tensor not in self.known:
                self.known[access.tensor] = part
                self.changed = True
