"""Instructions of the rows that come in, of pointwise work on rows, and of gathers over ranks.

Next on the walk: ../batch/bodies/pointwise.py.
"""

from typing import Any

from distmega.kernels.hopper.batch_plan.choice import rank_logits
from distmega.kernels.hopper.batch_plan.draft import BatchDraft
from distmega.kernels.hopper.batch_plan.results import plain_epilogue, position_result
from distmega.kernels.hopper.batch_plan.types import BatchFormula
from distmega.kernels.hopper.batch_plan.words import (
    BatchEmbed,
    BatchGather,
    BatchPointwise,
)
from distmega.kernels.hopper.plan.matrices import share
from distmega.kernels.hopper.plan.pointwise import split_operands
from distmega.kernels.hopper.plan.types import unfit
from distmega.kernels.hopper.plan.words import NOTHING, UNIT_ROWS
from distmega.kernels.tasks.fuse import FusedGather, FusedPointwise


def add_entry(draft: BatchDraft) -> None:
    """The rows that come in. Where ranks share a table, each has all columns of some ids, or
    some columns of all; where they add up an input, the first rank has it and others add zeros.
    """
    op, entry_columns = draft.embedding, draft.elements(draft.entry)
    rows, columns = draft.weights.tensors[op.table].shape if op else (draft.batch, entry_columns)
    is_whole = columns == entry_columns
    if draft.shares_rows and op is None and draft.team_rank:
        rows = 0
    draft.rank_logits = rank_logits(draft)
    more = position_result(draft, -1, (draft.entry,), entry_columns, draft.entry in draft.taken)
    if draft.shares_rows:
        more |= draft.next_parts(entry_columns)
    for sm, queue in enumerate(draft.queues):
        first, last = share(entry_columns, 1, sm, draft.num_sms)
        queue.append(
            BatchEmbed(
                name=op.name if op else draft.entry,
                row0=first * UNIT_ROWS,
                num_units=last - first,
                num_rows=entry_columns,
                first_table_row=draft.team_rank * rows if op and is_whole else 0,
                num_table_rows=rows,
                first_column=0 if is_whole else draft.team_rank * columns,
                num_columns=columns,
                first_id=draft.team_rank * draft.rank_logits,
                best=draft.symmetric.get("best", 0),
                team_rank=draft.team_rank,
                **more,
            )
        )


def add_pointwise(draft: BatchDraft, now: int, op: FusedPointwise) -> None:
    """Whole rows of its result, a sequence an SM."""
    rows, norm = draft.elements(op.out), op.norm
    carried, table = split_operands(op, draft.tables, draft.elements)
    for name in (*carried, *filter(None, [op.x])):
        if name not in draft.number_of:
            raise unfit(f"{op.name!r} of {name!r}, which no op keeps")
    kept = {name: draft.number_of[name] for name in (op.x, *carried) if name}
    length = op.length if norm else rows
    form, publishes = draft.published(op.out)
    if publishes and length % 2:
        raise unfit(f"{op.name!r}, which normalises {length} of {rows} elements together")
    formula = BatchFormula(
        norm=norm.kind if norm else "",
        formula=op.formula,
        num_carried=len(carried),
        has_table=table is not None,
        publishes=publishes,
        scaled=form is not None,
    )
    if formula not in draft.formulas:
        draft.formulas.append(formula)
    carries = zip(("carry", "carry2"), (kept[name] for name in carried), strict=False)
    addresses: dict[str, Any] = {
        **dict(carries), **position_result(draft, now, (op.out,), rows, op.out in draft.taken)
    }  # fmt: skip
    one = BatchPointwise(
        name=op.name,
        number=draft.formulas.index(formula),
        num_rows=rows,
        length=length,
        src=kept.get(op.x, NOTHING),
        weight=draft.placed.vector(norm.weight) if norm and norm.weight else NOTHING,
        bias=draft.placed.vector(norm.bias) if norm and norm.bias else NOTHING,
        eps=norm.eps if norm else 0.0,
        table=draft.placed.table(table.table) if table else NOTHING,
        by_position=table is not None and table.ids == draft.positions,
        slot=draft.slot_of.get((op.out, form), 0),
        **addresses,
    )
    for queue in draft.queues:
        queue.append(one)


def add_gather(draft: BatchDraft, now: int, op: FusedGather) -> None:
    """Columns that ranks have, shared out; each adds its own to a sum of zeros."""
    rows, columns = draft.elements(op.out), draft.elements(op.x)
    if op.x not in draft.number_of or rows % UNIT_ROWS:
        raise unfit(f"{op.name!r} of {op.x!r}, of {rows} elements")
    epilogue = plain_epilogue(draft, op.out, summed=True)
    if epilogue not in draft.gathers:
        draft.gathers.append(epilogue)
    common = position_result(draft, now, (op.out,), rows, epilogue.keeps) | draft.next_parts(rows)
    for sm, queue in enumerate(draft.queues):
        first, last = share(rows, 1, sm, draft.num_sms)
        queue.append(
            BatchGather(
                name=op.name,
                number=draft.gathers.index(epilogue),
                row0=first * UNIT_ROWS,
                num_units=last - first,
                num_rows=rows,
                src=draft.number_of[op.x],
                first_column=draft.team_rank * columns,
                num_columns=columns,
                **common,
            )
        )
