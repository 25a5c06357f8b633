"""The memory one rank needs, from a schedule and its host loops: what the host program will hold.

Comes in: a RankSchedule, final allocations, host loops. Goes out: a Memory. It follows the order in
which hostir/lower/lower.py allocates and hostir/passes/deallocations.py frees, chunk by chunk in
loops: a collective holds its operands until something needs its result, and the first and last
chunk may need other bytes than those between. Used by planner.py.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from distmega.program.dtypes import item_bytes
from distmega.program.kinds import communicates
from distmega.program.types import Program
from distmega.sharding.layout.allocation import AllocationDomain
from distmega.sharding.overlap.pairs import Pair
from distmega.sharding.resolve.collectives import RANK_AXIS
from distmega.sharding.resolve.padding import additive_reads
from distmega.sharding.resolve.resolve import PlacedOp, RankSchedule, Reshard
from distmega.sharding.streams.host_loops import HostLoop
from distmega.sharding.streams.streams import StreamSplit, is_sum


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes one rank needs; `temp_peak_bytes` is the most that temporaries occupy at once,
    `symmetric_bytes` the peer memory of fused matmuls, twice the largest need of each mesh axis.
    """

    input_bytes: int
    weight_bytes: int
    state_bytes: int
    temp_peak_bytes: int
    symmetric_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        given = self.input_bytes + self.weight_bytes + self.state_bytes
        return given + self.temp_peak_bytes + self.symmetric_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _StorageUse:
    """A step and the storage it touches. travels: the mesh axis of a collective, which ends where
    it is waited for, at the latest before one of another axis. alone: a fused matmul, which waits
    for all of them.

    first: reads of the first chunk alone (a bias). adds: iterations add to its result. gathers,
    scatters: it is passed around a ring, a part an iteration.
    """

    reads: frozenset[str]
    writes: frozenset[str]
    travels: str = ""
    alone: bool = False
    first: frozenset[str] = frozenset()
    adds: bool = False
    gathers: bool = False
    scatters: bool = False

    @property
    def names(self) -> frozenset[str]:
        return self.reads | self.writes


@dataclass(slots=True)
class _Holding:
    """Bytes held while steps run, and the steps that are to be waited for.

    left: name -> how many steps have still to end before it is freed; other names stay.
    """

    sizes: Mapping[str, int]
    left: Counter[str]
    live: int = 0
    peak: int = 0
    held: set[str] = field(default_factory=set)
    pending: list[_StorageUse] = field(default_factory=list)

    def take(self, names: Iterable[str]) -> None:
        """Allocates what isn't yet."""
        for name in names:
            if name in self.left and name not in self.held:
                self.held.add(name)
                self.live += self.sizes[name]
        self.peak = max(self.peak, self.live)

    def end(self, use: _StorageUse) -> None:
        """Frees what no other step needs."""
        for name in use.names & self.held:
            self.left[name] -= 1
            if not self.left[name]:
                self.live -= self.sizes[name]

    def settle(self, touched: frozenset[str], written: frozenset[str]) -> None:
        """Waits for the collectives that a step which touches these names needs."""
        for use in tuple(self.pending):
            if use.writes & touched or use.reads & written:
                self.pending.remove(use)
                self.end(use)

    def settle_others(self, mesh_axis: str) -> None:
        """Waits for the collectives of other mesh axes."""
        for use in tuple(self.pending):
            if use.travels != mesh_axis:
                self.pending.remove(use)
                self.end(use)

    def settle_all(self) -> None:
        for use in self.pending:
            self.end(use)
        self.pending.clear()

    def run(self, use: _StorageUse) -> None:
        """One step: waits, allocations, then what it lets go."""
        if use.alone:
            self.settle_all()
        if use.travels:
            self.settle_others(use.travels)
        self.settle(use.names, use.writes)
        self.take(use.names)
        if use.travels:
            self.pending.append(use)
        else:
            self.end(use)


class _Loop:
    """One host loop: its steps, as the bodies that hostir/lower/chunks.py makes of them."""

    def __init__(
        self,
        uses: Sequence[_StorageUse],
        loop: HostLoop,
        chunks: Mapping[str, AllocationDomain],
        sizes: Mapping[str, int],
    ) -> None:
        self.uses, self.loop, self.sizes = uses, loop, sizes
        self.chunks = {n: chunks[n] for use in uses for n in use.names if n in chunks}
        self.outer = frozenset(name for use in uses for name in use.names) - self.chunks.keys()
        self.gathers = [use for use in uses if use.gathers]
        head = any(use.adds or use.scatters for use in uses)
        tail = loop.has_tail or bool(self.gathers)
        counts = {"head": int(head), "": loop.num_chunks - head - tail, "tail": int(tail)}
        self.parts = [part for part, count in counts.items() if count]

    def touched(self, part: str) -> frozenset[str]:
        """Storage from outside that one body touches."""
        names = frozenset[str]()
        for use in self.uses:
            own = use.names - use.first if part != "head" else use.names
            names |= use.writes if use.gathers else own
        return names - self.chunks.keys()

    def peak(self, part: str) -> int:
        """Bytes that an iteration allocates at most."""
        steps = list(self.steps(part))
        sizes = {name: self.size(name, part) for name in self.chunks}
        beside = {name: self.sizes[name.partition("+")[0]] for u in steps for name in u.names
                  if "+" in name}  # fmt: skip
        sizes |= beside
        left = Counter(name for use in steps for name in use.names if name in sizes)
        inner = _Holding(sizes, left)
        inner.take(name for name in beside if name.endswith("+in"))
        for use in steps:
            inner.run(use)
            if use.adds:
                inner.settle_all()
        return inner.peak

    def steps(self, part: str) -> Iterator[_StorageUse]:
        """The steps of one iteration, with what they allocate beside chunks: sums ("y+part") and
        what comes in around a ring ("y+in").
        """
        for use in self.uses:
            more = "+part" * use.adds or "+in" * use.scatters
            beside = frozenset(name + more for name in use.writes if more and part != "head")
            if not use.gathers:
                yield replace(use, writes=use.writes | beside, travels="" if more else use.travels)

    def size(self, name: str, part: str) -> int:
        """Bytes of a chunk; the first around a scatter ring is made where the sum will be."""
        if part == "head" and any(use.scatters and name in use.reads for use in self.uses):
            return 0
        domain = self.chunks[name]
        if part != "tail" or not self.loop.has_tail or domain.chunk is None:
            return self.sizes[name]
        dim, chunk = domain.chunk
        return self.sizes[name] // chunk * (domain.local_shape[dim] % chunk)


def measure_memory(
    program: Program,
    schedule: RankSchedule,
    allocations: Mapping[str, AllocationDomain],
    host_loops: Sequence[HostLoop],
    fused: Sequence[Pair] = (),
) -> Memory:
    """Bytes of one rank; temporaries are freed after their last use, outputs are not. What a fused
    pair hands on lies in peer memory.
    """
    tensors = program.tensor_map()
    sizes = {
        name: math.prod(allocations[name].stored_shape) * item_bytes(tensors[whole].dtype)
        for name, (whole, _) in schedule.locals.items()
    }
    by_role = dict.fromkeys(("input", "weight", "state"), 0)
    given = {tensor.name for tensor in program.tensors if tensor.role != "temp"}
    for name in given:
        by_role[tensors[name].role] += sizes[name]
    return Memory(
        input_bytes=by_role["input"],
        weight_bytes=by_role["weight"],
        state_bytes=by_role["state"],
        temp_peak_bytes=_temp_peak(program, schedule, allocations, host_loops, fused, sizes, given),
        symmetric_bytes=2 * sum(_symmetric_buffers(fused).values()),
    )


def _symmetric_buffers(fused: Sequence[Pair]) -> dict[str, int]:
    """Bytes of the largest need of peer memory, by mesh axis."""
    symmetric_buffers: dict[str, int] = {}
    for pair in fused:
        symmetric_buffers[pair.mesh_axis] = max(
            symmetric_buffers.get(pair.mesh_axis, 0), pair.product.symmetric_bytes
        )
    return symmetric_buffers


def _temp_peak(
    program: Program,
    schedule: RankSchedule,
    allocations: Mapping[str, AllocationDomain],
    host_loops: Sequence[HostLoop],
    fused: Sequence[Pair],
    sizes: Mapping[str, int],
    given: set[str],
) -> int:
    views: dict[str, str] = {}
    for step in schedule.steps:
        if isinstance(step, PlacedOp) and step.op.is_view:
            views[step.writes[0]] = views.get(step.reads[0], step.reads[0])
    chunks = {name: allocations[name] for name in schedule.locals if allocations[name].chunk}
    turns: list[_StorageUse | _Loop] = []
    for loop, group in groupby(_uses(schedule, views, host_loops, fused), key=lambda use: use[0]):
        uses = [use for _, use in group]
        turns += uses if loop is None else [_Loop(uses, loop, chunks, sizes)]
    left: Counter[str] = Counter()
    for turn in turns:
        for names in _touched(turn):
            left.update(names - given)
    left.update({views.get(name, name) for name in program.outputs} - given)
    holding = _Holding(sizes, left)
    for turn in turns:
        if isinstance(turn, _StorageUse):
            holding.run(turn)
        else:
            _run_loop(turn, holding)
    return holding.peak


def _touched(turn: "_StorageUse | _Loop") -> Iterator[frozenset[str]]:
    """What is touched at each of the moments after which something can be freed."""
    if isinstance(turn, _StorageUse):
        yield turn.names
        return
    yield from (use.names for use in turn.gathers)
    yield from map(turn.touched, turn.parts)


def _run_loop(loop: _Loop, holding: _Holding) -> None:
    """A loop waits for all collectives before it, a gather ring first for those of its part."""
    if not loop.gathers:
        holding.settle_all()
    for use in loop.gathers[:1]:
        holding.settle(use.names, use.writes)
    holding.take(loop.outer)
    for use in loop.gathers:
        holding.settle(use.names, use.writes)
        holding.end(use)
    holding.settle_all()
    for part in loop.parts:
        holding.peak = max(holding.peak, holding.live + loop.peak(part))
        names = loop.touched(part)
        holding.end(_StorageUse(reads=names, writes=frozenset()))


def _uses(
    schedule: RankSchedule,
    views: Mapping[str, str],
    host_loops: Sequence[HostLoop],
    fused: Sequence[Pair],
) -> Iterator[tuple[HostLoop | None, _StorageUse]]:
    """Each step but views, with the loop it is in. Fused pairs are one step, where the second
    stands.
    """
    firsts, seconds = {pair.first for pair in fused}, {pair.second: pair for pair in fused}
    waiting: dict[str, frozenset[str]] = {}
    loops = {name: (loop, split) for loop in host_loops for name, split in loop.splits}
    for step in schedule.steps:
        if isinstance(step, PlacedOp) and step.op.is_view:
            continue
        reads, writes = (
            frozenset(views.get(name, name) for name in names)
            for names in (step.reads, step.writes)
        )
        name = step.name if isinstance(step, Reshard) else step.op.name
        if name in firsts:
            waiting[name] = reads
            continue
        if pair := seconds.get(name):
            reads = (reads | waiting.pop(pair.first)) - {pair.between}
            yield None, _StorageUse(reads=reads, writes=writes, alone=True)
            continue
        loop, split = loops.get(name, (None, None))
        if isinstance(step, Reshard):
            yield loop, _movement_use(step, split, reads, writes)
            continue
        adds = split is not None and is_sum(step.op, split)
        first = frozenset(
            views.get(step.reads[n], step.reads[n]) for n in additive_reads(step.op) if adds
        )
        yield loop, _StorageUse(reads=reads, writes=writes, adds=adds, first=first)


def _movement_use(
    step: Reshard, split: StreamSplit | None, reads: frozenset[str], writes: frozenset[str]
) -> _StorageUse:
    """What a movement of data does with storage; split: how a loop cuts it, if one does."""
    rings, kind = split is not None and split.axis == RANK_AXIS, step.move.kind
    return _StorageUse(
        reads=reads,
        writes=writes,
        travels=step.move.axis if communicates(kind) else "",
        gathers=rings and kind == "all_gather",
        scatters=rings and kind == "reduce_scatter",
    )
