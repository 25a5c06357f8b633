"""Proof that the kernel of several rows reads what it should and overwrites nothing too early.

In: its queues, and the fused ops that they are for. Out: nothing, or the first hazard in words. All
SMs of a rank are in one instruction at a time, since each waits for the event of the one before: so
a read is right if the op that gives the tensor wrote its place last, in an instruction before; and
a write is safe unless other SMs read or write there in the same instruction. Two steps are looked
at, the second of which stands for all that follow.

Ranks are joined by what they receive from all others: a rank that has received something in an
instruction knows that its peers had begun that one, hence that all of their SMs were done with
those before. What a rank pushes may take the place of what its peers read in an instruction before
such a one.

Of experts it takes that all have been chosen which rows can choose: the places of others are
neither written nor read, and experts.py shows that each that is has one writer. Next on the walk:
batch/runner.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from distmega.kernels.hopper.batch_plan.experts import (
    NUM_ZERO_CHUNKS,
    find_wrong_experts,
    find_wrong_share,
)
from distmega.kernels.hopper.batch_plan.types import BatchEpilogue, BatchQueues
from distmega.kernels.hopper.batch_plan.words import (
    BATCH,
    BATCH_EXPERT_COLUMNS,
    BATCH_PAIRED,
    NORMED,
    NUMBERS,
    PRODUCT_TILE,
    STEP_K,
    BatchAttention,
    BatchEmbed,
    BatchExperts,
    BatchGather,
    BatchHeads,
    BatchInstruction,
    BatchLinear,
    BatchLogits,
    BatchNorm,
    BatchPointwise,
    BatchProduct,
    BatchRows,
    BatchSample,
    sm_of_step,
)
from distmega.kernels.hopper.plan.words import NOTHING, TILE_K, UNIT_ROWS
from distmega.kernels.tasks.fuse import (
    Fused,
    FusedAttention,
    FusedContraction,
    FusedEmbedding,
    FusedGather,
    FusedPointwise,
    FusedRouting,
    FusedRowAttention,
    InputNorm,
)

NUM_STEPS = 2
CHUNK = TILE_K * BATCH
"""Elements of 1024 columns of x."""

Memory = str
"""Of "x", in chunks of activations; "kept", in blocks of numbers; "squares"; "parts", of products;
"exchanged" words; "cached" rows, of which the first stands for all of a cache.
"""
Content = tuple[str, InputNorm | None, bool]
"""A tensor, its norm, and whether that lacks its factor."""


@dataclass(frozen=True, slots=True)
class _Access:
    """Places of a memory. own: each SM has its own part of them, in the order of its rows."""

    memory: Memory
    span: range
    content: Content
    own: bool = False


@dataclass(frozen=True, slots=True)
class _Push:
    """Words that every rank gets from all, read in the same instruction; reads_first: only after
    it has received something else from all.
    """

    words: range
    reads_first: bool = False


def find_batch_hazard(queues: BatchQueues, fused: Sequence[Fused]) -> str:
    """The first hazard, "" if there is none."""
    return _BatchProof(queues, fused).run()


@dataclass(slots=True)
class _BatchProof:
    queues: BatchQueues
    fused: Sequence[Fused]
    ops: dict[str, Fused] = field(init=False)
    tables: set[str] = field(init=False)
    """What embeddings give whose rows pointwise work looks up by itself."""
    folded: dict[str, InputNorm | None] = field(default_factory=dict)
    """Of tensors that linears take without the factor of their norm: the norm."""
    held: dict[tuple[Memory, int], tuple[Content, int]] = field(default_factory=dict)
    """What lies in a place, and number of the instruction, over all steps, that wrote it."""
    received: int = -1
    """The last instruction in which all ranks were heard."""
    pushed: list[tuple[range, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ops = {op.name: op for op in self.fused}
        given = {one.name for one in self.queues.queues[0] if isinstance(one, BatchEmbed)}
        tables = [op for op in self.fused if isinstance(op, FusedEmbedding)]
        self.tables = {op.out for op in tables if op.name not in given}
        for rows in self.queues.given:
            if rows.is_rows:
                for block in self.numbers(rows.first, rows.extents[1]):
                    self.held["kept", block] = (rows.tensor, None, False), NOTHING
        for one in self.queues.queues[0]:
            op = self.ops.get(one.name)
            if not isinstance(one, BatchLinear | BatchExperts | BatchLogits):
                continue
            if not one.flags & NORMED:
                continue
            if isinstance(op, FusedContraction):
                self.folded[op.x] = op.norm

    def run(self) -> str:
        first = self.queues.queues[0]
        for i in range(len(first)):
            if hazard := self.check_parts(i):
                return hazard
        for now in range(NUM_STEPS * len(first)):
            one = first[now % len(first)]
            hazard = self.check_reads(one, now) or self.check_writes(one, now)
            hazard = hazard or self.check_pushes(one, now)
            if hazard:
                return f"{one.name!r}, instruction {now % len(first)}, {hazard}"
        found = find_wrong_experts(self.queues, self.fused) or find_wrong_share(self.queues)
        return found or find_wrong_steps(self.queues)

    def check_parts(self, i: int) -> str:
        """Whether all SMs have the same instruction but for their rows, each of which is one's."""
        ones = [queue[i] for queue in self.queues.queues]
        if len({_common(one) for one in ones}) > 1:
            return f"instruction {i} is another on each SM"
        row = 0
        for one in ones:
            if isinstance(one, BatchLinear | BatchLogits | BatchEmbed | BatchGather):
                if one.row0 != row:
                    return f"rows {row} to {one.row0} of {one.name!r} are no SM's"
                row += one.num_units * UNIT_ROWS
                rows = one.num_rows
        if isinstance(ones[0], BatchLinear | BatchEmbed | BatchGather) and row < rows:
            return f"rows {row} to {rows} of {ones[0].name!r} are no SM's"
        return ""

    def check_reads(self, one: BatchInstruction, now: int) -> str:
        for read in self.reads(one):
            for number in read.span:
                found, writer = self.held.get((read.memory, number), (None, NOTHING))
                if found != read.content or writer >= now:
                    return f"reads {read.content[0]!r} where {found and found[0]!r} lies"
        return ""

    def check_writes(self, one: BatchInstruction, now: int) -> str:
        reads = list(self.reads(one))
        if self.waits_for_nobody(one):
            # other SMs may still be in the product before
            product = self.queues.queues[0][now % len(self.queues.queues[0]) - 1]
            reads += self.reads(product)
        for write in self.writes(one):
            if self.queues.experts and write.memory == "x" and write.span.start < NUM_ZERO_CHUNKS:
                return f"writes {write.content[0]!r} where zeros are to stay"
            for read in reads:
                if read.memory == write.memory and _meet(read.span, write.span):
                    inplace = read.own and write.own and read.span == write.span
                    if not inplace:
                        return f"overwrites {read.content[0]!r} while other SMs read it"
            for number in write.span:
                _, writer = self.held.get((write.memory, number), (None, NOTHING))
                if writer == now:
                    return f"writes {write.content[0]!r} over another result of its own"
                self.held[write.memory, number] = write.content, now
        return ""

    def waits_for_nobody(self, one: BatchInstruction) -> bool:
        """Whether an instruction begins as soon as its SM is done with the product before."""
        if not isinstance(one, BatchLinear | BatchLogits):
            return False
        return self.queues.rows > BATCH and one.src == 1

    def check_pushes(self, one: BatchInstruction, now: int) -> str:
        if self.queues.num_ranks == 1:
            return ""
        for push in self.pushes(one):
            heard = now if push.reads_first else self.received
            for words, reader in self.pushed:
                if _meet(words, push.words) and reader >= heard:
                    return f"overwrites word {push.words.start} before other ranks have read it"
            self.pushed = [known for known in self.pushed if not _meet(known[0], push.words)]
            self.pushed.append((push.words, now))
            self.received = now
        return ""

    # what instructions do

    def reads(self, one: BatchInstruction) -> Iterator[_Access]:
        op = self.ops.get(one.name)
        match one:
            case BatchLinear() | BatchExperts() | BatchLogits():
                assert isinstance(op, FusedContraction)
                yield from self.contraction_reads(one, op)
            case BatchProduct():
                assert isinstance(op, FusedContraction)
                span = range(one.src, one.src + -(-one.length // TILE_K))
                yield _Access("x", span, (op.x, op.norm, bool(one.flags & NORMED)))
            case BatchAttention():
                assert isinstance(op, FusedAttention)
                yield from self.attention_reads(one, op)
            case BatchHeads() | BatchRows():
                assert isinstance(op, FusedRowAttention)
                yield from self.heads_reads(one, op)
            case BatchGather():
                assert isinstance(op, FusedGather)
                yield _Access("kept", _blocks(one.src, one.num_columns), self.exactly(op.x))
            case BatchNorm():
                assert isinstance(op, FusedContraction)
                yield _Access("kept", _blocks(one.src, one.num_rows), self.exactly(op.x))
            case BatchPointwise():
                assert isinstance(op, FusedPointwise)
                names = [name for name in op.operands if name not in self.tables]
                taken = [(one.src, op.x)] if op.x else []
                taken += zip((one.carry, one.carry2), names, strict=False)
                for first, name in taken:
                    span = _blocks(first, one.num_rows)
                    yield _Access("kept", span, self.exactly(name), own=True)
            case BatchEmbed() | BatchSample():
                return

    def contraction_reads(
        self, one: BatchLinear | BatchExperts | BatchLogits, op: FusedContraction
    ) -> Iterator[_Access]:
        is_folded = bool(one.flags & NORMED)
        content = op.x, op.norm, is_folded
        if self.queues.rows > BATCH:
            yield _Access("parts", range(1), (op.outs[0], op.norm, is_folded))
        else:
            times = self.queues.max_hits if one.flags & BATCH_EXPERT_COLUMNS else 1
            yield _Access("x", range(one.src, one.src + times * one.num_tiles_k), content)
        if is_folded:
            yield _Access("squares", range(one.squares, one.squares + 1), content)
        if isinstance(one, BatchExperts):
            assert self.queues.experts is not None
            scores = _blocks(one.scores, self.queues.experts.num_experts)
            yield _Access("kept", scores, self.exactly(self.scores_of(op)))
        given = (one.carry, one.carry2) if isinstance(one, BatchLinear) else ()
        rows = one.num_rows // (2 if one.flags & BATCH_PAIRED else 1)
        for name, first in zip(op.operands, given, strict=False):
            yield _Access("kept", _blocks(first, rows), self.exactly(name), own=True)

    def attention_reads(self, one: BatchAttention, op: FusedAttention) -> Iterator[_Access]:
        shape = self.queues.attention
        assert shape is not None
        if not shape.apart:
            yield _Access("kept", _blocks(one.src, one.num_rows), self.exactly(op.q))
            return
        sources = (one.src, op.q), (one.k_src, op.k), (one.v_src, op.v)
        for at, (first, name) in enumerate(sources):
            rows = shape.head_dim * (shape.num_kv_heads if at else shape.num_heads)
            yield _Access("kept", _blocks(first, rows), self.exactly(name))

    def heads_reads(self, one: BatchHeads | BatchRows, op: FusedRowAttention) -> Iterator[_Access]:
        """Rows of contractions, or, once they are prepared, heads alone."""
        names = [self.exactly(heads.tensor) for heads in (op.q, op.k, op.v)]
        if op.prepares and isinstance(one, BatchRows):
            yield _Access("kept", self.numbers(one.src, one.num_rows), _prepared(op, "q"))
            if op.k_cache:
                for name, row in ((op.k_cache, one.k_src), (op.v_cache, one.v_src)):
                    yield _Access("cached", range(row, row + 1), (name, None, False))
                return
            yield _Access("kept", self.numbers(one.k_src, one.k_rows), _prepared(op, "k"))
            rows = [(one.v_src, one.v_rows)]
        else:
            rows = [(one.src, one.num_rows), (one.k_src, one.k_rows), (one.v_src, one.v_rows)]
        behind = 3 - len(rows)
        for n, (start, num) in enumerate(rows, start=behind):
            heads, content = (op.q, op.k, op.v)[n], names[n]
            if heads.steps is None:
                yield _Access("kept", self.numbers(start - heads.first, num), content)

    def heads_writes(self, one: BatchHeads, op: FusedRowAttention) -> Iterator[_Access]:
        width = op.num_heads * op.head_dim
        yield _Access("kept", self.numbers(one.dst, width), _prepared(op, "q"))
        if op.k_cache:
            for name, row in ((op.k_cache, one.k_dst), (op.v_cache, one.v_dst)):
                yield _Access("cached", range(row, row + 1), (name, None, False))
        else:
            width = op.num_kv_heads * op.head_dim
            yield _Access("kept", self.numbers(one.k_dst, width), _prepared(op, "k"))

    def numbers(self, first: int, rows: int) -> range:
        """Blocks of the numbers from `first` on, as the kernel computes rows."""
        return _blocks(first // self.queues.rows * BATCH, rows)

    def scores_of(self, op: FusedContraction) -> str:
        """The scores that the experts of a contraction are chosen from."""
        routing = self.ops.get(op.experts.routing) if op.experts else None
        return routing.scores if isinstance(routing, FusedRouting) else ""

    def exactly(self, name: str) -> Content:
        """A tensor as it is kept: by the first name of those that lie there together."""
        for op in self.fused:
            if isinstance(op, FusedContraction) and name in op.outs:
                return op.outs[0], None, False
        return name, None, False

    def writes(self, one: BatchInstruction) -> Iterator[_Access]:
        op = self.ops.get(one.name)
        match one:
            case BatchLinear() | BatchEmbed() | BatchGather():
                yield from self.row_writes(one, op)
            case BatchProduct():
                assert isinstance(op, FusedContraction)
                content = op.outs[0], op.norm, bool(one.flags & NORMED)
                yield _Access("parts", range(1), content)
            case BatchExperts():
                assert isinstance(op, FusedContraction)
                assert self.queues.experts is not None
                num = self.queues.max_hits * -(-self.queues.experts.width // TILE_K)
                first = one.dst // CHUNK
                yield _Access("x", range(first, first + num), (op.outs[0], None, False))
            case BatchAttention():
                assert isinstance(op, FusedAttention)
                shape = self.queues.attention
                assert shape is not None
                width = shape.num_heads * shape.head_dim
                yield _Access("x", _chunks(one.dst, width), (op.out, None, False))
            case BatchHeads():
                assert isinstance(op, FusedRowAttention)
                yield from self.heads_writes(one, op)
            case BatchRows():
                assert isinstance(op, FusedRowAttention)
                width, content = op.num_heads * op.head_dim, (op.out, None, False)
                if one.dst != NOTHING:
                    yield _Access("x", _chunks(one.dst, width), content)
                if one.keep != NOTHING:
                    yield _Access("kept", self.numbers(one.keep, width), content)
            case BatchNorm():
                assert isinstance(op, FusedContraction)
                yield _Access("x", _chunks(one.dst, one.num_rows), (op.x, op.norm, False))
                if one.keep != NOTHING:
                    content = op.normed, None, False
                    yield _Access("kept", _blocks(one.keep, one.num_rows), content)
            case BatchPointwise():
                assert isinstance(op, FusedPointwise)
                yield from self.pointwise_writes(one, op)
            case BatchLogits() | BatchSample():
                return

    def row_writes(
        self, one: BatchLinear | BatchEmbed | BatchGather, op: Fused | None
    ) -> Iterator[_Access]:
        given = op.outs[0] if isinstance(op, FusedContraction) else one.name
        if isinstance(op, FusedEmbedding | FusedGather):
            given = op.out
        rows = one.num_rows
        if isinstance(one, BatchLinear) and one.flags & BATCH_PAIRED:
            rows //= 2
        if one.keep != NOTHING:
            yield _Access("kept", _blocks(one.keep, rows), (given, None, False), own=True)
        norm, epilogue = self.norm_behind(given, one), self.epilogue(one)
        content = given, norm, norm is not None
        if epilogue.publishes:
            yield _Access("x", _chunks(one.dst, rows), content)
        if norm:
            yield _Access("squares", range(epilogue.slot, epilogue.slot + 1), content)

    def pointwise_writes(self, one: BatchPointwise, op: FusedPointwise) -> Iterator[_Access]:
        if one.keep != NOTHING:
            span = _blocks(one.keep, one.num_rows)
            yield _Access("kept", span, (op.out, None, False), own=True)
        formula, norm = self.queues.formulas.each[one.number], self.norm_behind(op.out, one)
        if formula.publishes:
            content = op.out, norm, norm is not None
            yield _Access("x", _chunks(one.dst, one.num_rows), content)
        if formula.scaled:
            content = op.out, norm, True
            yield _Access("squares", range(one.slot, one.slot + 1), content)

    def epilogue(self, one: BatchLinear | BatchEmbed | BatchGather) -> BatchEpilogue:
        epilogues = self.queues.epilogues
        if isinstance(one, BatchGather):
            return epilogues.gathers[one.number]
        return epilogues.each[one.opcode] if isinstance(one, BatchLinear) else epilogues.entry

    def norm_behind(
        self, name: str, one: BatchLinear | BatchEmbed | BatchGather | BatchPointwise
    ) -> InputNorm | None:
        """The norm whose weight the instruction multiplies its result by."""
        return self.folded.get(name) if one.next_norm != NOTHING else None

    def pushes(self, one: BatchInstruction) -> Iterator[_Push]:
        """What ranks push to each other, in order."""
        ranks = self.queues.num_ranks
        if isinstance(one, BatchEmbed) and one.best:
            buffer = next(b for b in self.queues.buffers if b.name == "best")
            yield _Push(buffer.words)
        if isinstance(one, BatchLinear | BatchEmbed | BatchGather) and one.parts:
            words = range(one.parts, one.parts + ranks * one.num_rows * BATCH)
            yield _Push(words, reads_first=isinstance(one, BatchEmbed) and bool(one.best))
        if isinstance(one, BatchSample):
            for name in ("logits", "row_maxima", "ready_flags"):
                buffer = next(b for b in self.queues.buffers if b.name == name)
                yield _Push(buffer.words)


def find_wrong_steps(queues: BatchQueues) -> str:
    """The first product of which a step is not one SM's, or whose parts the instruction behind it
    counts otherwise, "" if there is none.
    """
    for i, one in enumerate(queues.queues[0]):
        if not isinstance(one, BatchProduct):
            continue
        then = queues.queues[0][i + 1]
        tiles = -(-one.num_rows // PRODUCT_TILE)
        behind, of_tile, early = 0, [0] * tiles, ""
        for sm, queue in enumerate(queues.queues):
            mine, sums = queue[i], queue[i + 1]
            assert isinstance(mine, BatchProduct)
            if mine.first_step != behind:
                return f"steps {behind} to {mine.first_step} of {one.name!r} are no SM's"
            behind += mine.num_units
            steps = range(mine.first_step, behind)
            total = tiles * one.num_tiles_k
            own = {step // one.num_tiles_k for step in steps}
            for tile in own:
                of_tile[tile] += 1
            if one.most_parts == 1 and isinstance(sums, BatchLinear | BatchLogits):
                units = range(sums.row0 // UNIT_ROWS, sums.row0 // UNIT_ROWS + sums.num_units)
                if any(unit * UNIT_ROWS // PRODUCT_TILE not in own for unit in units):
                    early = f"SM {sm} adds up {one.name!r} before others have multiplied it"
            elif any(sm_of_step(step, total, len(queues.queues)) != sm for step in steps):
                return f"steps {steps} of {one.name!r} are another SM's than {sm}"
        if behind != tiles * one.num_tiles_k or one.num_tiles_k * STEP_K < one.length:
            return f"of {tiles * one.num_tiles_k} steps of {one.name!r} SMs have {behind}"
        unfollowed = f"{one.name!r} is not followed by what adds its parts up"
        if not isinstance(then, BatchLinear | BatchLogits) or then.name != one.name:
            return unfollowed
        if (then.num_rows, then.num_tiles_k) != (one.num_rows, one.num_tiles_k):
            return unfollowed
        if max(of_tile) > one.most_parts or then.src != one.most_parts:
            return f"{one.name!r} has {max(of_tile)} parts of a tile"
        if early:
            return early
    return ""


def _common(one: BatchInstruction) -> tuple[object, ...]:
    """What all SMs have of an instruction."""
    match one:
        case BatchLinear():
            return (
                one.opcode, one.name, one.num_rows, one.matrix, one.num_tiles_k, one.length,
                one.src, one.packed, one.bias, one.dst, one.next_norm, one.keep, one.carry,
                one.carry2, one.parts, one.own_part,
            )  # fmt: skip
        case BatchEmbed():
            return (
                one.name, one.num_rows, one.packed, one.dst, one.next_norm, one.keep, one.parts,
                one.own_part, one.best,
            )  # fmt: skip
        case BatchGather():
            return (
                one.number, one.name, one.num_rows, one.src, one.first_column, one.num_columns,
                one.dst, one.next_norm, one.keep, one.parts, one.own_part,
            )  # fmt: skip
        case BatchLogits():
            return one.opcode, one.name, one.num_rows, one.num_tiles_k, one.src, one.packed
        case BatchProduct():
            return (
                one.name, one.num_rows, one.weight_row, one.pair_row, one.num_tiles_k, one.src,
                one.packed, one.most_parts,
            )  # fmt: skip
    return (one,)


def _prepared(op: FusedRowAttention, heads: str) -> Content:
    """Heads of queries or keys that an instruction of their own has made."""
    return f"{op.name} {heads}", None, False


def _meet(a: range, b: range) -> bool:
    return a.start < b.stop and b.start < a.stop


def _chunks(first: int, columns: int) -> range:
    start = first // CHUNK
    return range(start, start - (-columns // TILE_K))


def _blocks(first: int, rows: int) -> range:
    start = first // (BATCH * NUMBERS)
    return range(start, start - (-rows // NUMBERS))
