"""Instructions and buffers of the choice of a token, the most likely one or a sample.

Next on the walk: ../one_row/bodies/sample.py.
"""

from distmega.kernels.hopper.plan.matrices import num_units, share
from distmega.kernels.hopper.plan.words import (
    MAX_SMS,
    SAMPLE_CHUNK,
    SEARCH_CHUNKS,
    UNIT_ROWS,
    RowSample,
)
from distmega.kernels.hopper.row_plan.draft import RowDraft
from distmega.kernels.tasks.fuse import FusedChoice, FusedSample


def slot_rows(draft: RowDraft) -> int:
    """Of a rank's logits where all ranks have those of all: a whole number of units."""
    return UNIT_ROWS * num_units(draft.vocab)


def samples_from_all(draft: RowDraft, sampler: FusedSample | None) -> bool:
    """Whether a rank needs the logits of others: limits are those of all tokens."""
    return sampler is not None and sampler.limits != "given" and draft.num_ranks > 1


def reserve_logits(draft: RowDraft, rows: int) -> int:
    """First word of this rank's logits where all ranks exchange them, in whole units."""
    sampler = draft.choice.sampler if draft.choice else None
    if not samples_from_all(draft, sampler):
        return draft.num_words
    slots = UNIT_ROWS * num_units(rows)
    return draft.reserve("logits", draft.num_ranks * slots) + draft.team_rank * slots


def reserve_choice(draft: RowDraft, head: FusedChoice) -> None:
    """best: of all ranks, or of one that samples for itself."""
    ranks = 1 if samples_from_all(draft, head.sampler) else draft.num_ranks
    draft.reserve("best", 2 * draft.num_sms * ranks)


def head_rows(draft: RowDraft, sampler: FusedSample | None) -> int:
    """Logits from which one SM chooses, at most; two a thread where it polls them."""
    if not samples_from_all(draft, sampler):
        return UNIT_ROWS * -(-num_units(draft.vocab) // draft.num_sms)
    units = draft.num_ranks * num_units(draft.vocab)
    return max(2 * MAX_SMS, UNIT_ROWS * -(-units // draft.num_sms))


def add_choice(draft: RowDraft, op: FusedChoice) -> None:
    """Each SM samples from what it has of the logits, or from as large a part of all."""
    if op.sampler is None:
        return
    limit = min(draft.vocab, max(0, op.vocab - draft.team_rank * draft.vocab))
    rows, src, vocab = draft.vocab, 0, 0
    if samples_from_all(draft, op.sampler):
        rows = limit = draft.num_ranks * slot_rows(draft)
        src, vocab = draft.firsts["logits"], draft.vocab
    source = draft.made[op.source]
    dst = draft.reserve("sample", num_sample_words(op.sampler, head_rows(draft, op.sampler)))
    for sm, queue in enumerate(draft.queues):
        first, last = share(rows, 1, sm, draft.num_sms)
        queue.append(
            RowSample(
                name=op.name,
                generation=source.generation,
                row0=first * UNIT_ROWS,
                num_rows=min(last * UNIT_ROWS, limit),
                src=src,
                vocab=vocab,
                dst=dst,
                logits=draft.logits_at,
            )
        )


def num_sample_words(sampler: FusedSample, head_rows: int) -> int:
    """Flagged words in which SMs exchange what they need to find the limits of a sample, each
    having at most head_rows logits: a chunk of maxima, then as many as those may fill; or those of
    a search.
    """
    chunks = {"given": 0, "candidates": 2 + head_rows // SAMPLE_CHUNK, "all": SEARCH_CHUNKS}
    return chunks[sampler.limits] * SAMPLE_CHUNK * MAX_SMS
