"""Instructions and buffers of the choice of an id, the most likely one or a sample.

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
    return UNIT_ROWS * num_units(draft.rank_logits)


def samples_from_all(draft: RowDraft, sampler: FusedSample | None) -> bool:
    """Whether a rank needs the logits of others: limits are those of all logits."""
    return sampler is not None and sampler.limits != "given" and draft.num_ranks > 1


def reserve_logits(draft: RowDraft, rows: int) -> int:
    """First word of this rank's logits where all ranks exchange them, in whole units."""
    sampler = draft.choice.sampler if draft.choice else None
    if not samples_from_all(draft, sampler):
        return draft.num_words
    slots = UNIT_ROWS * num_units(rows)
    return draft.reserve("logits", draft.num_ranks * slots) + draft.team_rank * slots


def reserve_choice(draft: RowDraft, choice: FusedChoice) -> None:
    """best: of all ranks, or of one that samples for itself."""
    ranks = 1 if samples_from_all(draft, choice.sampler) else draft.num_ranks
    draft.reserve("best", 2 * draft.num_sms * ranks)


def sm_logits(draft: RowDraft, sampler: FusedSample | None) -> int:
    """Logits from which one SM chooses, at most; two a thread where it polls them."""
    if not samples_from_all(draft, sampler):
        return UNIT_ROWS * -(-num_units(draft.rank_logits) // draft.num_sms)
    units = draft.num_ranks * num_units(draft.rank_logits)
    return max(2 * MAX_SMS, UNIT_ROWS * -(-units // draft.num_sms))


def add_choice(draft: RowDraft, op: FusedChoice) -> None:
    """Each SM samples from what it has of the logits, or from as large a part of all."""
    if op.sampler is None:
        return
    limit = min(draft.rank_logits, max(0, op.num_logits - draft.team_rank * draft.rank_logits))
    rows, src, rank_logits = draft.rank_logits, 0, 0
    if samples_from_all(draft, op.sampler):
        rows = limit = draft.num_ranks * slot_rows(draft)
        src, rank_logits = draft.first_of("logits"), draft.rank_logits
    source = draft.made[op.source]
    dst = draft.reserve("sample", num_sample_words(op.sampler, sm_logits(draft, op.sampler)))
    for sm, queue in enumerate(draft.queues):
        first, last = share(rows, 1, sm, draft.num_sms)
        queue.append(
            RowSample(
                name=op.name,
                generation=source.generation,
                row0=first * UNIT_ROWS,
                num_rows=min(last * UNIT_ROWS, limit),
                src=src,
                rank_logits=rank_logits,
                dst=dst,
                logits=draft.logits_at,
            )
        )


def num_sample_words(sampler: FusedSample, sm_logits: int) -> int:
    """Flagged words in which SMs exchange what they need to find the limits of a sample, each
    having at most sm_logits of them: a chunk of maxima, then as many as those may fill; or those of
    a search.
    """
    chunks = {"given": 0, "candidates": 2 + sm_logits // SAMPLE_CHUNK, "all": SEARCH_CHUNKS}
    return chunks[sampler.limits] * SAMPLE_CHUNK * MAX_SMS
