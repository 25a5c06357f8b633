"""Which flagged words an instruction of the kernel of one row polls, and which it writes.

In: an instruction and the queues that it is of. Out: ranges of words, and whose they are. What the
proof (proof.py) and the report of a hang (diagnosis.py) know of the kernel is said here alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from distmega.kernels.hopper.plan.matrices import input_columns
from distmega.kernels.hopper.plan.types import RowQueues
from distmega.kernels.hopper.plan.words import (
    CARRY_EMBEDDED,
    EMBEDDED,
    FROM_EMBEDDING,
    MAX_SMS,
    ROW_PAIRED,
    ROW_PARTIAL_EXTRA,
    UNIT_ROWS,
    X_PARTS,
    Instruction,
    RowAttention,
    RowBarrier,
    RowCombine,
    RowEmbed,
    RowLinear,
    RowPointwise,
    RowRoute,
    RowSample,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """Words that an instruction polls, of a generation. always: whether it does in every step;
    else it may have nothing to do. phase: 1 if it does so after it wrote words of phase 0, as where
    SMs or ranks exchange what they have.
    """

    words: range
    generation: int
    always: bool = True
    phase: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """Words that an instruction writes to every rank, once it has polled all words of its phase and
    those before; rank: which rank's instruction, or None if each rank's own writes them at home.
    is_part: whether readers may take those of some ranks alone, the same on each.
    """

    words: range
    generation: int
    rank: int | None = None
    phase: int = 0
    is_part: bool = False


def buffer_words(queues: RowQueues, name: str) -> range:
    """Flagged words of a buffer; none if there is no such buffer."""
    return next((b.words for b in queues.buffers if b.name == name), range(0))


def last_row(one: RowLinear | RowPointwise) -> int:
    """Behind the last row of the output that an instruction has."""
    return min(one.row0 + one.num_units * UNIT_ROWS, one.num_rows)


def reads(one: Instruction, queues: RowQueues) -> Iterator[Read]:
    """What an instruction polls."""
    match one:
        case RowLinear():
            yield from _linear_reads(one, queues)
        case RowAttention():
            shape = queues.attention
            assert shape is not None
            dim, split0 = shape.head_dim, one.split == 0
            for src, head, num in (
                (one.src, one.query0, shape.num_queries),
                (one.k_src, one.head, 1),
                (one.v_src, one.head, 1),
            ):
                words = range(src + head * dim, src + (head + num) * dim)
                yield Read(words=words, generation=one.generation, always=split0)
        case RowCombine():
            assert queues.attention is not None
            stride = queues.attention.head_dim + ROW_PARTIAL_EXTRA
            for split in range(one.max_splits):
                first = one.partial + (one.head * one.max_splits + split) * stride
                words = range(first, first + stride)
                yield Read(words=words, generation=one.generation, always=split == 0)
        case RowBarrier() if one.num_words:
            words = range(one.dst, one.dst + one.num_words)
            yield Read(words=words, generation=one.generation, phase=1)
        case RowSample():
            if one.rank_logits:
                words = range(one.src + one.row0, one.src + one.num_rows)
                yield Read(words=words, generation=one.generation)
            words = buffer_words(queues, "sample")
            yield Read(words=words, generation=one.generation, always=False, phase=1)
        case RowRoute():
            yield Read(words=range(one.src, one.src + one.num_words), generation=one.generation)
        case RowPointwise():
            if one.num_src_words and not one.flags & FROM_EMBEDDING:
                formula = queues.formulas[one.number]
                words = range(one.src, one.src + one.num_src_words)
                if formula.norm == "copy":
                    rows = 2 if formula.numbers else 4
                    first, behind = (at // rows * 2 for at in (one.row0, last_row(one) + rows - 1))
                    words = range(one.src + first, one.src + behind)
                elif formula.parts:
                    words = range(one.src, one.src + queues.num_ranks * one.num_src_words)
                yield Read(words=words, generation=one.generation - one.flag_delta)
        case RowEmbed() | RowBarrier():
            return


def _linear_reads(one: RowLinear, queues: RowQueues) -> Iterator[Read]:
    epilogue, first, last = queues.epilogues[one.opcode], one.row0, last_row(one)
    embedded = range(EMBEDDED + first // 4 * 2, EMBEDDED + (last + 3) // 4 * 2)
    is_embedded = one.flags & CARRY_EMBEDDED and queues.ids
    if not one.flags & FROM_EMBEDDING:
        parts = queues.num_ranks if one.flags & X_PARTS else 1
        words = range(one.src, one.src + parts * one.num_src_words)
        yield Read(words=words, generation=one.generation - one.flag_delta)
    if epilogue.deferred and is_embedded:
        yield Read(words=embedded, generation=0)
    if epilogue.summed:
        for rank in range(queues.num_ranks):
            part = one.dst + (rank - queues.num_ranks) * one.num_rows
            words = range(part + first, part + last)
            yield Read(words=words, generation=one.generation, phase=1)
        if is_embedded:
            yield Read(words=embedded, generation=0, phase=1)


def step_reads(queues: RowQueues) -> Iterator[Read]:
    """What every SM polls when a step begins after another: who chose which id, with the last
    flag of the step before.
    """
    if queues.chosen:
        yield Read(words=buffer_words(queues, "best"), generation=queues.num_generations - 1)


def writes(one: Instruction, queues: RowQueues, sm: int) -> Iterator[Write]:
    """What an instruction of an SM writes, or may write."""
    match one:
        case RowLinear():
            yield from _linear_writes(one, queues, sm)
        case RowAttention():
            assert queues.attention is not None
            stride = queues.attention.head_dim + ROW_PARTIAL_EXTRA
            for query in range(one.query0, one.query0 + queues.attention.num_queries):
                row = one.partial + (query * one.max_splits + one.split) * stride
                yield Write(words=range(row, row + stride), generation=one.generation)
        case RowCombine():
            assert queues.attention is not None
            half = queues.attention.head_dim // 2
            words = range(one.dst + one.head * half, one.dst + (one.head + 1) * half)
            yield Write(words=words, generation=one.generation)
        case RowBarrier():
            words = range(one.dst + 2 * sm, one.dst + 2 * sm + 2)
            yield Write(words=words, generation=one.generation)
        case RowPointwise():
            rows = {"nothing": 0, "numbers": 1, "pairs": 2}[queues.formulas[one.number].publishes]
            if rows:
                words = range(one.dst + one.row0 // rows, one.dst + last_row(one) // rows)
                yield Write(words=words, generation=one.generation)
        case RowEmbed():
            yield from _embed_writes(one, queues)
        case RowRoute():
            return
        case RowSample():
            for plane in buffer_words(queues, "sample")[:: 2 * MAX_SMS]:
                words = range(plane + 2 * sm, plane + 2 * sm + 2)
                yield Write(words=words, generation=one.generation)
            yield from _best_writes(queues, sm, one.generation, 1)


def _linear_writes(one: RowLinear, queues: RowQueues, sm: int) -> Iterator[Write]:
    epilogue, ranks = queues.epilogues[one.opcode], range(queues.num_ranks)
    first, last = one.row0, last_row(one)
    if epilogue.summed:
        for rank in ranks:
            part = one.dst + (rank - len(ranks)) * one.num_rows
            words = range(part + first, part + last)
            yield Write(words=words, generation=one.generation, rank=rank)
    if epilogue.ranked and queues.sampler is None:
        yield from _best_writes(queues, sm, one.generation, 0)
    elif epilogue.ranked:  # the same rows on each rank, in words of their own
        logits = buffer_words(queues, "logits")
        size = len(logits) // len(ranks)
        for rank in ranks if size else ():
            own = logits[rank * size : (rank + 1) * size]
            words = own[first : first + one.num_units * UNIT_ROWS]
            yield Write(words=words, generation=one.generation, rank=rank)
    elif epilogue.gathered:
        buffer = next(b.words for b in queues.buffers if one.dst in b.words)
        rows = 1 if epilogue.publishes == "numbers" else 4 if one.flags & ROW_PAIRED else 2
        size = len(buffer) // len(ranks)
        for rank in ranks:
            own = buffer[rank * size : (rank + 1) * size]
            words = own[first // rows : last // rows]
            yield Write(words=words, generation=one.generation, rank=rank, is_part=True)
    elif epilogue.publishes == "numbers":
        words = range(one.dst + first, one.dst + last)
        yield Write(words=words, generation=one.generation, phase=int(epilogue.summed))
    elif epilogue.publishes == "pairs":
        rows = 4 if one.flags & ROW_PAIRED else 2
        words = range(one.dst + first // rows, one.dst + last // rows)
        yield Write(words=words, generation=one.generation, phase=int(epilogue.summed))


def _embed_writes(one: RowEmbed, queues: RowQueues) -> Iterator[Write]:
    """Each rank's columns of an input or of the id's row, none of a rank that has none; or the
    whole row of the one rank that has it, which may be the reader's own or any other.
    """
    if not queues.ids:
        for rank in range(queues.num_ranks):
            part = input_columns(queues.entry_columns, rank, queues.num_ranks)
            first, behind = part.start // 2 + one.column - one.start, part.stop // 2
            if first < behind:
                words = range(one.dst + first, one.dst + behind)
                yield Write(words=words, generation=0, rank=rank, is_part=True)
        return
    if 2 * one.num_words < queues.entry_columns:
        for rank in range(queues.num_ranks):
            first = EMBEDDED + rank * one.num_words
            words = range(first + one.column, first + one.num_words)
            yield Write(words=words, generation=0, rank=rank, is_part=True)
        return
    for rank in range(queues.num_ranks):
        words = range(one.dst + one.column, one.dst + one.num_words)
        yield Write(words=words, generation=0, rank=rank, is_part=True)


def _best_writes(queues: RowQueues, sm: int, generation: int, phase: int) -> Iterator[Write]:
    """The candidate of an SM: on every rank, or at home where each rank samples for itself."""
    words = buffer_words(queues, "best")
    num_writers = len(words) // (2 * len(queues.queues))
    size = len(words) // num_writers
    for writer in range(num_writers):
        part = words[writer * size : (writer + 1) * size]
        rank = writer if num_writers > 1 else None
        own = part[2 * sm : 2 * sm + 2]
        yield Write(words=own, generation=generation, rank=rank, phase=phase)
