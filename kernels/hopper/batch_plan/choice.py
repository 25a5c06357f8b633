"""Instructions that choose ids: from logits as they are made, and samples within limits.

Next on the walk: ../batch/bodies/sample.py.
"""

from collections.abc import Sequence

from distmega.kernels.hopper.batch_plan.draft import BatchDraft
from distmega.kernels.hopper.batch_plan.words import BatchLogits, BatchSample
from distmega.kernels.hopper.plan.matrices import rows_of
from distmega.kernels.hopper.plan.segment import is_ranked
from distmega.kernels.hopper.plan.types import unfit
from distmega.kernels.hopper.plan.words import UNIT_ROWS
from distmega.kernels.tasks.fuse import FusedChoice, FusedContraction


def rank_logits(draft: BatchDraft) -> int:
    """Rows of this rank's part of what an id is chosen from."""
    contractions = (op for op in draft.fused if isinstance(op, FusedContraction))
    ranked = [op for op in contractions if is_ranked(op, draft.choice)]
    if draft.choice and not ranked:
        raise unfit(f"a choice from {draft.choice.source!r}")
    return rows_of(ranked[0], draft.placed) if ranked else 0


def logit_rows(draft: BatchDraft) -> int:
    """Of them, those that are logits, not padding."""
    num = draft.choice.num_logits if draft.choice else 0
    return min(draft.rank_logits, max(0, num - draft.team_rank * draft.rank_logits))


def add_logits(
    draft: BatchDraft,
    op: FusedContraction,
    start: int,
    common: dict[str, int],
    units: Sequence[range],
) -> None:
    """The rows that an id is chosen from, of which each SM has some units."""
    assert draft.choice is not None
    shared = {
        name: draft.symmetric.get(name, 0) for name in ("logits", "row_maxima", "ready_flags")
    }
    for own, queue in zip(units, draft.queues, strict=True):
        queue.append(
            BatchLogits(
                name=op.name,
                row0=own.start * UNIT_ROWS,
                num_units=len(own),
                num_rows=logit_rows(draft),
                weight_row=start + own.start * UNIT_ROWS,
                first_id=draft.team_rank * draft.rank_logits,
                bias=draft.placed.bias(op.streams),
                team_rank=draft.team_rank,
                num_logits=draft.choice.num_logits,
                **shared,
                **common,
            )
        )


def add_sample(draft: BatchDraft, op: FusedChoice) -> None:
    """What samples within limits from the logits of all."""
    shared = {
        name: draft.symmetric.get(name, 0) for name in ("logits", "row_maxima", "ready_flags")
    }
    for queue in draft.queues:
        queue.append(BatchSample(name=op.name, num_rows=op.num_logits, **shared))
