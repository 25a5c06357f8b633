"""Says who waits for what and who owes it, after waits of a persistent kernel were given up.

In: the queues of a launch, and the least wait that was given up, as ptx/spins.py left it in the
report at the start of the symmetric buffer. Out: a HangError. The kernel records only a flag, a
word and an SM; the op, the layer, the rank and the debtor follow from the queues. Torch-free. Next
on the walk: ../runtime/report.py.
"""

from distmega.errors import HangError
from distmega.kernels.hopper.batch_plan.types import BatchQueues
from distmega.kernels.hopper.batch_plan.words import (
    BATCH,
    BEST_WORDS,
    READY_WORDS,
    BatchAttention,
    BatchExperts,
    BatchHeads,
    BatchNorm,
    BatchPointwise,
    BatchProduct,
    BatchRows,
    BatchSample,
)
from distmega.kernels.hopper.plan.types import RowQueues
from distmega.kernels.hopper.plan.words import (
    UNIT_ROWS,
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
from distmega.kernels.hopper.row_plan.accesses import Write, last_row, reads, writes
from distmega.kernels.runtime.report import Report, hang_error

WITHOUT_ROWS = (
    BatchAttention
    | BatchExperts
    | BatchHeads
    | BatchNorm
    | BatchPointwise
    | BatchProduct
    | BatchRows
    | BatchSample
)
"""Instructions that name no rows of an SM."""


def explain_hang(queues: RowQueues, report: Report, *, limit_s: float, rank: int = 0) -> HangError:
    """The error for a report of the rank; never fails, whatever the words say."""
    step, generation = divmod(report.flag - 1, queues.num_generations)
    waiter = next(
        (
            f"instruction {i}, {describe(one)}"
            for i, one in enumerate(_queue(queues, report.last))
            for read in reads(one, queues)
            if report.word in read.words and read.generation == generation
        ),
        "the choice of the next id",
    )
    debtors = [
        f"rank {rank if write.rank is None else write.rank}, SM {sm}, instruction {i}, "
        f"{describe(one)}"
        for sm, queue in enumerate(queues.queues)
        for i, one in enumerate(queue)
        for write in writes(one, queues, sm)
        if report.word in write.words and write.generation == generation
        if not _is_own_row(one, write, rank, queues)
    ]
    return hang_error(
        f"rank {rank}, SM {report.last} ({waiter})",
        name_word(queues, report.word),
        limit_s=limit_s,
        expected=f"flag {report.flag} (step {step}, generation {generation})",
        debtors=debtors,
    )


def _is_own_row(one: Instruction, write: Write, rank: int, queues: RowQueues) -> bool:
    """Whether it is a whole row of the embedding that this rank itself would push: it knows that it
    has none, or it would have.
    """
    is_whole = isinstance(one, RowEmbed) and 2 * one.num_words == queues.entry_columns
    return is_whole and bool(queues.ids) and write.rank == rank


def _queue(queues: RowQueues, sm: int) -> tuple[Instruction, ...]:
    return queues.queues[sm] if sm < len(queues.queues) else ()


def name_word(queues: RowQueues | BatchQueues, word: int) -> str:
    """A flagged word by the buffer it lies in."""
    for buffer in queues.buffers:
        if word in buffer.words:
            return f"word {word - buffer.first} of {buffer.name!r}"
    return f"word {word}, which is in no buffer"


def describe(one: Instruction) -> str:
    """An instruction by the op that it is of, as "layers.3.sum, rows 16 to 32"."""
    match one:
        case RowLinear() | RowPointwise():
            return f"{one.name}, rows {one.row0} to {last_row(one)}"
        case RowAttention():
            return f"{one.name}, kv head {one.head}, split {one.split}"
        case RowCombine():
            return f"{one.name}, sum of head {one.head}"
        case RowSample():
            return (
                f"{one.name}, {'slots' if one.rank_logits else 'rows'} {one.row0} to {one.num_rows}"
            )
        case RowRoute():
            return f"choice of experts {one.name}"
        case RowBarrier():
            return f"barrier after {one.name}"
        case RowEmbed():
            return f"{one.name}, columns from {2 * one.column}"


def explain_batch_hang(
    queues: BatchQueues, report: Report, limit_s: float, rank: int = 0
) -> HangError:
    """The error for a report of the batched kernel, of an event that every SM counts up once a
    step, or of a flagged word that ranks exchange.
    """
    if queues.num_ranks > 1:
        return _explain_team_hang(queues, report, limit_s, rank)
    num_sms, queue = len(queues.queues), queues.queues[0]
    one = queue[report.word] if report.word < len(queue) else None
    what = f"{one.name}, instruction {report.word}" if one else "no instruction"
    return HangError(
        f"a wait for event {report.word} ({what}) lasted {limit_s:g} s",
        expected=f"count {report.flag}, that of step {(report.flag - 1) // num_sms}",
        remedy=f"{report.last} of {num_sms} SMs still owed it; see whether those ran, "
        "or report this as a bug",
    )


def _explain_team_hang(queues: BatchQueues, report: Report, limit_s: float, rank: int) -> HangError:
    """Of several ranks, whose waits all carry the flag of the instruction that waits."""
    num_sms, queue = len(queues.queues), queues.queues[0]
    step, number = divmod(report.flag - 1, len(queue))
    expected = f"flag {report.flag} (step {step}, instruction {number})"
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
    return hang_error(
        f"rank {rank}, SM {last} ({waiter})",
        name_word(queues, report.word),
        limit_s=limit_s,
        expected=expected,
        debtors=_batch_debtors(queues, report.word, number),
    )


def _batch_debtors(queues: BatchQueues, word: int, number: int) -> tuple[str, ...]:
    """Who pushes a flagged word in instruction `number`."""
    buffer = next((one for one in queues.buffers if word in one.words), None)
    if buffer is None:
        return ()
    ranks, at = queues.num_ranks, word - buffer.first
    if buffer.name == "best":
        rank = at // BEST_WORDS % ranks
        return (f"rank {rank}, SM 0, behind {describe_batch(queues, -1)}",)
    if buffer.name == "ready_flags":
        who = f"rank {at // READY_WORDS}, SM {at % READY_WORDS // 2}"
        return (f"{who}, {describe_batch(queues, number - 1)}",)
    rank, at = divmod(at, buffer.num_words // ranks)
    row = at // (BATCH * UNIT_ROWS) * UNIT_ROWS
    sm = next(
        (
            sm
            for sm, queue in enumerate(queues.queues)
            if not isinstance(one := queue[number], WITHOUT_ROWS)
            and one.row0 <= row < one.row0 + one.num_units * UNIT_ROWS
        ),
        None,
    )
    return (f"rank {rank}, SM {sm}, {describe_batch(queues, number, sm)}",)


def describe_batch(queues: BatchQueues, number: int, sm: int | None = None) -> str:
    """An instruction of the batched kernel as "instruction 4, layers.0.sum, rows 16 to 32"."""
    number %= len(queues.queues[0])
    one = queues.queues[sm or 0][number]
    found = f"instruction {number}, {one.name}"
    if isinstance(one, BatchNorm):
        found = f"instruction {number}, norm before {one.name}"
    if isinstance(one, BatchProduct):
        found = f"instruction {number}, product of {one.name}"
    if sm is None or isinstance(one, WITHOUT_ROWS):
        return found
    return f"{found}, rows {one.row0} to {min(one.row0 + one.num_units * UNIT_ROWS, one.num_rows)}"
