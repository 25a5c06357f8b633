"""Instructions that hand out the row that comes in, where ranks share the program."""

from dataclasses import replace

from distmega.kernels.hopper.plan.matrices import input_columns
from distmega.kernels.hopper.plan.types import unfit
from distmega.kernels.hopper.plan.words import EMBEDDED, NOTHING, RowEmbed
from distmega.kernels.hopper.row_plan.draft import Made, RowDraft
from distmega.kernels.hopper.row_plan.pointwise import add_copies
from distmega.kernels.tasks.fuse import FusedContraction, FusedPointwise

EMBED_WORDS = 256
"""Flagged words of the embedded id that one SM pushes: one a thread."""


def add_embedding(draft: RowDraft) -> None:
    """Where ranks share the matrix, those with a part of the id's row push it to all. Of an
    input, which all have, each pushes columns of its own: so who has read the row knows of
    every rank that it is done with the launch before.
    """
    if draft.num_ranks == 1:
        return
    op, entry_columns = draft.embedding, draft.entry_columns()
    given = op.table if op else draft.entry
    if given in draft.divided and (op is None or op.num_ranks == 1):
        raise unfit(f"a row of {given!r}, of which ranks have parts that others don't ask for")
    first = draft.reserve("embedded", entry_columns // 2)
    assert first == EMBEDDED
    kept = draft.take_kept(entry_columns) if keeps_entry(draft) else NOTHING
    draft.made[draft.entry] = made = Made(first, 0, entry_columns, 1, kept)
    if op is None:
        parts = [
            input_columns(entry_columns, rank, draft.num_ranks) for rank in range(draft.num_ranks)
        ]
        own, num_columns = parts[draft.team_rank], max(map(len, parts))
        one = RowEmbed(
            name=draft.entry,
            row0=0,
            num_rows=1,
            column=own.start // 2,
            start=own.start // 2,
            num_words=own.stop // 2,
            dst=first,
        )
    else:
        rows, num_columns = draft.weights.tensors[op.table].shape
        is_whole = num_columns == entry_columns
        one = RowEmbed(
            name=op.name,
            row0=draft.team_rank * rows if is_whole else 0,
            num_rows=rows,
            column=0,
            num_words=num_columns // 2,
            dst=first + (0 if is_whole else draft.team_rank * num_columns // 2),
        )
    for number, word in enumerate(range(0, num_columns // 2, EMBED_WORDS)):
        draft.queues[draft.lightest[number % draft.num_sms]].append(
            replace(one, column=one.column + word)
        )
    if kept != NOTHING:
        add_copies(draft, draft.entry, made, "copy")


def keeps_entry(draft: RowDraft) -> bool:
    """Whether SMs keep their rows of what ranks hand out: where others than sums over ranks,
    which look them up, take them otherwise than by polling.
    """
    return draft.entry in map(draft.storage, draft.segment.outputs) or any(
        draft.entry in op.operands
        if isinstance(op, FusedPointwise)
        else isinstance(op, FusedContraction)
        and (
            (draft.entry in op.operands and op.num_ranks == 1)
            or bool(op.normed and op.x == draft.entry)
        )
        for op in draft.fused
    )
