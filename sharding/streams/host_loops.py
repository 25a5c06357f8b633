"""Host loops: which ops run together, chunk by chunk, and in what order everything runs.

Comes in: local ops in program order, the StreamSplit of those that run in chunks. Goes out: a
StreamPlan: an order of the ops in which those that can share a loop stand together, the loops, and
the tensors of which a chunk at a time is enough. Two ops can share a loop if they have the same
chunks, and whatever one leaves to the other is used chunk by chunk as it was made; an op that could
run in several loops runs in that of the ops which need it, as sink.py says. Next: finalize.py.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from distmega.program.types import Access, Op, Tensor, accesses, storage_behind, view_chain
from distmega.sharding.streams.sink import Edge, Storage, sink_ops
from distmega.sharding.streams.streams import (
    ChunkPart,
    StreamSplit,
    is_gather_ring,
    onto_view,
    operand_parts,
    to_root,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLoop:
    """Ops that run in one loop of the host, in order; `index` names its iterations."""

    index: str
    splits: tuple[tuple[str, StreamSplit], ...]

    @property
    def num_chunks(self) -> int:
        return self.splits[0][1].num_chunks

    @property
    def has_tail(self) -> bool:
        """Whether the last chunk is shorter than the others."""
        return self.splits[0][1].tail > 0

    def __str__(self) -> str:
        split = self.splits[0][1]
        ring = f" in ring order of {split.ring}" if split.ring else ""
        ops = ", ".join(f"{op}({s.axis} {s.extent} by {s.chunk})" for op, s in self.splits)
        return f"{self.index} in {self.num_chunks}{ring}: {ops}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlan:
    """order: positions of the ops given. chunks: tensor -> the part of it that is allocated.
    refused: (tensor, op that uses it) -> why the op does not run in the chunks that it comes in.
    """

    order: tuple[int, ...]
    loops: tuple[HostLoop, ...] = ()
    chunks: Mapping[str, ChunkPart] = field(default_factory=dict)
    refused: Mapping[tuple[str, str], str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _ChunkUse:
    """An op touching storage: part is None where it isn't a chunk of the storage's own dims."""

    op: int
    part: ChunkPart | None
    writes: bool


class _Former:
    def __init__(
        self,
        ops: Sequence[Op],
        tensors: Mapping[str, Tensor],
        splits: Mapping[str, StreamSplit],
        outputs: Sequence[str],
    ) -> None:
        self.ops, self.tensors = ops, tensors
        self.views = {op.writes[0].tensor: op for op in ops if op.is_view}
        self.splits = {op.name: splits[op.name] for op in ops if self.is_cut(op, splits)}
        self.kept = {self.root(name) for name in outputs}
        self.uses: dict[str, list[_ChunkUse]] = {}
        self.open: dict[str, list[_ChunkUse]] = {}
        """Storage -> its last write and the reads since."""
        self.levels = [0] * len(ops)
        self.edges: list[Edge] = []

    def is_cut(self, op: Op, splits: Mapping[str, StreamSplit]) -> bool:
        """Whether an op runs in a loop: it has chunks, and each writes its own part of storage."""
        if op.is_view or op.name not in splits or splits[op.name].num_chunks < 2:
            return False
        if not any(access.tensor in self.views for access in op.writes):
            return True
        parts = operand_parts(op, splits[op.name], self.tensors)[len(op.reads) :]
        made = zip(op.writes, parts, strict=True)
        return all(isinstance(p, ChunkPart) and self.to_root(a, p)[1] is not None for a, p in made)

    def root(self, name: str) -> str:
        return storage_behind(name, self.views)

    def touched(self, at: int) -> Iterator[tuple[str, _ChunkUse]]:
        """Storage that an op touches, chunk by chunk where it does."""
        op = self.ops[at]
        split = self.splits.get(op.name)
        parts: Sequence[ChunkPart | None] = (None,) * (len(op.reads) + len(op.writes))
        if split is not None:
            found = operand_parts(op, split, self.tensors)
            assert not isinstance(found, str), (op.name, found)
            parts = found
        for position, (access, part) in enumerate(zip(accesses(op), parts, strict=True)):
            root, seen = self.to_root(access, part)
            yield root, _ChunkUse(at, seen, position >= len(op.reads))

    def to_root(self, access: Access, part: ChunkPart | None) -> tuple[str, ChunkPart | None]:
        return to_root(access.tensor, part, self.views, self.tensors)

    def run(self) -> StreamPlan:
        compute = [at for at, op in enumerate(self.ops) if not op.is_view]
        for at in compute:
            self.assign(at)
        self.levels = sink_ops(self.levels, self.edges, [*self.storages()])
        groups = self.groups(compute)
        order = self.sort(groups)
        loops: dict[int, list[tuple[str, StreamSplit]]] = {}
        for at in order:
            name = self.ops[at].name
            if name in self.splits:
                loops.setdefault(groups[at], []).append((name, self.splits[name]))
        found = tuple(
            HostLoop(index=f"i{n}", splits=tuple(each)) for n, each in enumerate(loops.values())
        )
        chunks = dict(self.chunks(groups))
        return StreamPlan(order=tuple(self.with_views(order)), loops=found, chunks=chunks)

    def assign(self, at: int) -> None:
        """The earliest level of an op: in one level, ops outside of loops come before the loops."""
        cut = self.ops[at].name in self.splits
        for root, use in self.touched(at):
            self.uses.setdefault(root, []).append(use)
            before = self.open.setdefault(root, [])
            for other in before if use.writes else before[:1]:
                if other.op != at and (other.writes or use.writes):
                    looped = self.ops[other.op].name in self.splits
                    shared = looped and cut and self.can_share(other, use)
                    self.edges.append(Edge(one=other.op, two=at, shared=shared))
                    level = self.levels[other.op] + (looped and not shared)
                    self.levels[at] = max(self.levels[at], level)
            if use.writes:
                before.clear()
            before.append(use)

    def can_share(self, one: _ChunkUse, two: _ChunkUse) -> bool:
        """Whether two ops that touch common storage may be iterations of one loop."""
        splits = [self.splits[self.ops[use.op].name] for use in (one, two)]
        ahead = two.writes and is_gather_ring(self.ops[two.op], splits[1])
        same = one.part is not None and one.part == two.part
        return same and splits[0].shape == splits[1].shape and not ahead

    def groups(self, compute: Sequence[int]) -> dict[int, int]:
        """For each op but views the first op of its loop; itself outside of loops."""
        first: dict[tuple[object, ...], int] = {}
        found = {}
        for at in compute:
            split = self.splits.get(self.ops[at].name)
            key = (self.levels[at], split.shape) if split else (at,)
            found[at] = first.setdefault(key, at)
        return found

    def sort(self, groups: Mapping[int, int]) -> list[int]:
        """Ops by group, as near to program order as dependencies allow."""
        members: dict[int, list[int]] = {}
        for at, group in groups.items():
            members.setdefault(group, []).append(at)
        after: dict[int, set[int]] = {group: set() for group in members}
        for edge in self.edges:
            if groups[edge.one] != groups[edge.two]:
                after[groups[edge.one]].add(groups[edge.two])
        num_open = dict.fromkeys(members, 0)
        for followers in after.values():
            for each in followers:
                num_open[each] += 1
        ready = [group for group, num in num_open.items() if not num]
        heapq.heapify(ready)
        order: list[int] = []
        while ready:
            group = heapq.heappop(ready)
            order += members[group]
            for each in after[group]:
                num_open[each] -= 1
                if not num_open[each]:
                    heapq.heappush(ready, each)
        assert len(order) == len(groups), "levels keep groups apart that depend on each other"
        return order

    def with_views(self, order: Sequence[int]) -> Iterator[int]:
        """The order with each view before its first use; those that nothing uses come last."""
        positions = {op.name: at for at, op in enumerate(self.ops)}
        left = dict(self.views)

        def before(name: str) -> Iterator[int]:
            for view in view_chain(name, left):
                del left[view.writes[0].tensor]
                yield positions[view.name]

        for at in order:
            for access in accesses(self.ops[at]):
                yield from before(access.tensor)
            yield at
        for name in list(left):
            yield from before(name)

    def storages(self) -> Iterator[Storage]:
        """The temporaries, and who touches them."""
        for root, uses in self.uses.items():
            if self.tensors[root].role == "temp" and root not in self.kept:
                yield Storage(
                    size=self.tensors[root].num_elements,
                    writers=frozenset(use.op for use in uses if use.writes),
                    users=frozenset(use.op for use in uses),
                    cuts=self.part(root, uses) is not None,
                )

    def part(self, root: str, uses: Sequence[_ChunkUse]) -> ChunkPart | None:
        """The part in which all ops touch a temporary that doesn't leave, if it is the same.

        What a ring gathers is whole: a part comes while the one before is used.
        """
        if self.tensors[root].role != "temp" or root in self.kept:
            return None
        for use in uses:
            op = self.ops[use.op]
            if use.part != uses[0].part:
                return None
            if use.writes and use.part and is_gather_ring(op, self.splits[op.name]):
                return None
        return uses[0].part

    def chunks(self, groups: Mapping[int, int]) -> Iterator[tuple[str, ChunkPart]]:
        """Temporaries that never leave an iteration: made and used by one loop, in equal parts."""
        found: dict[str, ChunkPart] = {}
        for root, uses in self.uses.items():
            part = self.part(root, uses)
            if part is not None and len({groups[use.op] for use in uses}) == 1:
                found[root] = part
        yield from found.items()
        for op in self.ops:
            if op.is_view and op.reads[0].tensor in found:
                seen = onto_view(op, found[op.reads[0].tensor], self.tensors)
                if seen is not None:
                    found[op.writes[0].tensor] = seen
                    yield op.writes[0].tensor, seen


def form_loops(
    ops: Sequence[Op],
    tensors: Mapping[str, Tensor],
    splits: Mapping[str, StreamSplit],
    outputs: Sequence[str],
) -> StreamPlan:
    """The order, the loops and what is allocated by chunk. tensors: local ones; outputs stay whole.

    Takes time linear in ops but for the sorting.
    """
    if not splits:
        return StreamPlan(order=tuple(range(len(ops))))
    return _Former(ops, tensors, splits, outputs).run()
