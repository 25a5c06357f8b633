"""Says who waits for what and who owes it, after waits of the decode kernel were given up.

In: the queues of a launch, and the least wait that was given up, as spins.py left it in the report
at the start of the exchange. Out: a HangError. The kernel records only a tag, a word and an SM; the
op, the layer, the rank and the debtor follow from the queues. Torch-free. Next on the walk:
alarm.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from distmega.errors import HangError
from distmega.kernels.hopper.batch_queues import BatchQueues
from distmega.kernels.hopper.batch_words import (
    BATCH,
    BEST_WORDS,
    TOLD_WORDS,
    BatchAttention,
    BatchDraw,
    BatchEmbed,
    BatchHead,
)
from distmega.kernels.hopper.plan import DecodeQueues
from distmega.kernels.hopper.words import (
    EMBEDDED,
    MAX_SMS,
    PARTIAL_EXTRA,
    UNIT_ROWS,
    Attention,
    Barrier,
    Combine,
    Embed,
    Instruction,
    Linear,
    Opcode,
    Sample,
)

NAMED_DEBTORS = 3
LAYER_OPS = ("qkv", "attention", "o", "gated", "down")
"""Instructions of a layer of the batched kernel, the first of which is instruction 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A wait that was given up, the least of all. Of the decode kernel: SM `last` waited for tag
    (steps ever run) * layers + layer + 1 at a tagged word. Of the batched kernel: for the count
    `tag` of event `word`, which `last` SMs still owed; or where ranks share the model, for an event
    or as the decode kernel for a tagged word, `tag` being (steps ever run) * instructions +
    instruction + 1 of the one that waits.
    """

    tag: int
    word: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """Tagged words that an instruction writes to every rank; rank: which rank's instruction, or
    None if each rank's own writes them at home.
    """

    words: range
    rank: int | None = None


def read_report(word: int) -> Report:
    """The report in a signed 64-bit word."""
    return Report(tag=word >> 32 & 0xFFFFFFFF, word=word >> 8 & 0xFFFFFF, last=word & 0xFF)


def explain_hang(
    queues: DecodeQueues, report: Report, *, limit_s: float, rank: int = 0
) -> HangError:
    """The error for a report of the rank; never fails, whatever the words say."""
    layers = queues.shape.num_layers
    step, layer = divmod(report.tag - 1, layers)
    waiter = next(
        (
            f"instruction {i}, {describe(one, queues)}"
            for i, one in enumerate(_queue(queues, report.last))
            if report.word in words_read(one, queues)
            and (one.layer - tag_delta(one)) % layers == layer
        ),
        "the choice of the next token",
    )
    debtors = [
        f"rank {rank if write.rank is None else write.rank}, SM {sm}, instruction {i}, "
        f"{describe(one, queues)}"
        for sm, queue in enumerate(queues.queues)
        for i, one in enumerate(queue)
        if one.layer == layer
        for write in writes(one, queues, sm)
        if report.word in write.words
    ]
    more = f" or {len(debtors) - NAMED_DEBTORS} more" if len(debtors) > NAMED_DEBTORS else ""
    owed = " or ".join(debtors[:NAMED_DEBTORS]) + more or "nobody: no instruction writes it"
    return HangError(
        f"rank {rank}, SM {report.last} ({waiter}) waited {limit_s:g} s for "
        f"{name_word(queues, report.word)}",
        expected=f"tag {report.tag} (step {step}, layer {layer})",
        remedy=f"it is owed by {owed}; see whether that SM ran, or report this as a bug",
    )


def _queue(queues: DecodeQueues, sm: int) -> tuple[Instruction, ...]:
    return queues.queues[sm] if sm < len(queues.queues) else ()


def name_word(queues: DecodeQueues | BatchQueues, word: int) -> str:
    """A tagged word by the buffer it lies in."""
    for buffer in queues.buffers:
        if word in buffer.words:
            return f"word {word - buffer.first} of {buffer.name!r}"
    return f"word {word}, which is in no buffer"


def describe(one: Instruction, queues: DecodeQueues) -> str:
    """An instruction as "down of layer 3, rows 16 to 32"."""
    where = f"{name_op(one, queues)} of layer {one.layer}"
    match one:
        case Linear():
            last = min(one.row0 + one.num_units * UNIT_ROWS, one.num_rows)
            return f"{where}, rows {one.row0} to {last}"
        case Attention():
            return f"{where}, kv head {one.head}, split {one.split}"
        case Combine():
            return f"{where}, head {one.head}"
        case Sample():
            return f"{where}, {'slots' if one.vocab else 'rows'} {one.row0} to {one.num_rows}"
        case Barrier():
            return where
        case Embed():
            return f"{where}, columns from {2 * one.column}"


def name_op(one: Instruction, queues: DecodeQueues) -> str:
    """The op of an instruction in a word; sums into the residual are told apart by their inputs."""
    if isinstance(one, Linear) and one.opcode in (Opcode.RESIDUAL, Opcode.PARTIAL):
        return "o" if one.src == _buffer(queues, "attended").start else "down"
    return one.opcode.name.lower()


def tag_delta(one: Instruction) -> int:
    """Layers between the words that an instruction reads and those it writes."""
    return one.tag_delta if isinstance(one, Linear) else 0


def words_read(one: Instruction, queues: DecodeQueues) -> range:
    """Tagged words that an instruction polls, from the first to the last."""
    shape = queues.shape
    match one:
        case Linear(opcode=Opcode.PARTIAL):
            first = min(one.src, one.dst - shape.num_ranks * one.num_rows)
            return range(first, max(one.src + one.num_src_words, one.dst))
        case Linear():
            return range(one.src, one.src + one.num_src_words)
        case Attention():
            heads = shape.num_heads + 2 * shape.num_kv_heads
            return range(one.src, one.src + heads * shape.head_dim)
        case Combine():
            size = one.max_splits * (shape.head_dim + PARTIAL_EXTRA)
            return range(one.partial + one.head * size, one.partial + (one.head + 1) * size)
        case Barrier():
            return range(one.dst, one.dst + one.num_words)
        case Sample():  # logits of all ranks, if any, lie before what SMs exchange
            chunks = _buffer(queues, "sample")
            return range(one.src + one.row0 if one.vocab else chunks.start, chunks.stop)
        case Embed():
            return range(0)


def writes(one: Instruction, queues: DecodeQueues, sm: int) -> Iterator[Write]:
    """What an instruction of an SM writes, or may write."""
    shape = queues.shape
    match one:
        case Linear():
            yield from _linear_writes(one, queues, sm)
        case Attention():
            stride = shape.head_dim + PARTIAL_EXTRA
            for query in range(one.query0, one.query0 + shape.num_queries):
                row = one.partial + (query * one.max_splits + one.split) * stride
                yield Write(words=range(row, row + stride))
        case Combine():
            half = shape.head_dim // 2
            yield Write(words=range(one.dst + one.head * half, one.dst + (one.head + 1) * half))
        case Barrier():
            yield Write(words=range(one.dst + 2 * sm, one.dst + 2 * sm + 2))
        case Embed():
            yield from _embed_writes(one, queues)
        case Sample():
            for plane in _buffer(queues, "sample")[:: 2 * MAX_SMS]:
                yield Write(words=range(plane + 2 * sm, plane + 2 * sm + 2))
            yield from _best_writes(queues, sm)


def _embed_writes(one: Embed, queues: DecodeQueues) -> Iterator[Write]:
    """Each rank's columns of the token's row, or the whole row of any of the other ranks: this one
    knows that the token is not its own, or it would have pushed.
    """
    shape = queues.shape
    if 2 * one.num_words < shape.hidden:
        for rank in range(shape.num_ranks):
            first = EMBEDDED + rank * one.num_words
            yield Write(words=range(first + one.column, first + one.num_words), rank=rank)
        return
    for rank in range(shape.num_ranks):
        if rank * shape.vocab != queues.first_id:
            yield Write(words=range(one.dst + one.column, one.dst + one.num_words), rank=rank)


def _best_writes(queues: DecodeQueues, sm: int) -> Iterator[Write]:
    """The candidate of an SM: on every rank, or at home where each rank draws for itself."""
    words = _buffer(queues, "best")
    num_writers = len(words) // (2 * len(queues.queues))
    for rank, part in enumerate(_parts(words, num_writers)):
        yield Write(words=part[2 * sm : 2 * sm + 2], rank=rank if num_writers > 1 else None)


def _buffer(queues: DecodeQueues, name: str) -> range:
    """Tagged words of a buffer."""
    return next(buffer.words for buffer in queues.buffers if buffer.name == name)


def _parts(words: range, num: int) -> list[range]:
    """Equal parts."""
    size = len(words) // num
    return [words[part * size : (part + 1) * size] for part in range(num)]


def _linear_writes(one: Linear, queues: DecodeQueues, sm: int) -> Iterator[Write]:
    ranks, first = range(queues.shape.num_ranks), one.row0
    last = min(first + one.num_units * UNIT_ROWS, one.num_rows)
    match one.opcode:
        case Opcode.HEAD if queues.draw is None:
            yield from _best_writes(queues, sm)
        case Opcode.HEAD:  # the same rows on each rank, in words of their own
            for rank, own in enumerate(_parts(_buffer(queues, "logits"), len(ranks))):
                yield Write(words=own[first : first + one.num_units * UNIT_ROWS], rank=rank)
        case Opcode.QKV:
            yield Write(words=range(one.dst + first, one.dst + last))
        case Opcode.GATED:
            yield Write(words=range(one.dst + first // 4, one.dst + last // 4))
        case _:
            yield Write(words=range(one.dst + first // 2, one.dst + last // 2))
    if one.opcode is Opcode.PARTIAL:
        for rank in ranks:
            part = one.dst + (rank - len(ranks)) * one.num_rows
            yield Write(words=range(part + first, part + last), rank=rank)


def explain_batch_hang(
    queues: BatchQueues, report: Report, limit_s: float, rank: int = 0
) -> HangError:
    """The error for a report of the batched kernel, of an event that every SM counts up once a
    step, or of a tagged word that ranks exchange.
    """
    if queues.shape.num_ranks > 1:
        return _explain_team_hang(queues, report, limit_s, rank)
    num_sms, queue = len(queues.queues), queues.queues[0]
    one = queue[report.word] if report.word < len(queue) else None
    what = f"{one.opcode.name.lower()}, instruction {report.word}" if one else "no instruction"
    return HangError(
        f"a wait for event {report.word} ({what}) lasted {limit_s:g} s",
        expected=f"count {report.tag}, that of step {(report.tag - 1) // num_sms}",
        remedy=f"{report.last} of {num_sms} SMs still owed it; see whether those ran, "
        "or report this as a bug",
    )


def _explain_team_hang(queues: BatchQueues, report: Report, limit_s: float, rank: int) -> HangError:
    """Of several ranks, whose waits all carry the tag of the instruction that waits."""
    num_sms, queue = len(queues.queues), queues.queues[0]
    step, number = divmod(report.tag - 1, len(queue))
    expected = f"tag {report.tag} (step {step}, instruction {number})"
    if report.word < len(queue):
        return HangError(
            f"rank {rank}: {describe_batch(queues, number)} waited {limit_s:g} s for event "
            f"{report.word} ({describe_batch(queues, report.word)})",
            expected=expected,
            remedy=f"it is owed by rank {rank}, by {report.last} of {num_sms} SMs; see whether "
            "those ran, or report this as a bug",
        )
    last = report.last
    waiter = describe_batch(queues, number, last) if last < num_sms else "which has no queue"
    return HangError(
        f"rank {rank}, SM {last} ({waiter}) waited {limit_s:g} s for "
        f"{name_word(queues, report.word)}",
        expected=expected,
        remedy=f"it is owed by {_batch_debtor(queues, report.word, number)}; see whether that SM "
        "ran, or report this as a bug",
    )


def _batch_debtor(queues: BatchQueues, word: int, number: int) -> str:
    """Who pushes a tagged word in instruction `number`."""
    buffer = next((one for one in queues.buffers if word in one.words), None)
    if buffer is None:
        return "nobody: no instruction writes it"
    ranks, at = queues.shape.num_ranks, word - buffer.first
    if buffer.name == "best":
        return f"rank {at // BEST_WORDS % ranks}, SM 0, behind {describe_batch(queues, -1)}"
    if buffer.name == "told":
        who = f"rank {at // TOLD_WORDS}, SM {at % TOLD_WORDS // 2}"
        return f"{who}, {describe_batch(queues, number - 1)}"
    rank, at = divmod(at, buffer.num_words // ranks)
    row = at // (BATCH * UNIT_ROWS) * UNIT_ROWS
    sm = next(
        (
            sm
            for sm, queue in enumerate(queues.queues)
            if not isinstance(one := queue[number], BatchAttention | BatchDraw)
            and one.row0 <= row < one.row0 + one.num_units * UNIT_ROWS
        ),
        None,
    )
    return f"rank {rank}, SM {sm}, {describe_batch(queues, number, sm)}"


def describe_batch(queues: BatchQueues, number: int, sm: int | None = None) -> str:
    """An instruction of the batched kernel as "instruction 4, o of layer 0, rows 16 to 32"."""
    number %= len(queues.queues[0])
    layer, place = divmod(number - 1, len(LAYER_OPS))
    one = queues.queues[sm or 0][number]
    found = f"instruction {number}, {LAYER_OPS[place]} of layer {layer}"
    if isinstance(one, BatchEmbed | BatchHead | BatchDraw):
        found = f"instruction {number}, {one.opcode.name.lower()}"
    if sm is None or isinstance(one, BatchAttention | BatchDraw):
        return found
    return f"{found}, rows {one.row0} to {min(one.row0 + one.num_units * UNIT_ROWS, one.num_rows)}"
