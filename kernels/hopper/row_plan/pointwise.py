"""Instructions of pointwise work on a row, of norms as results, and of gathers over ranks.

Next on the walk: ../one_row/bodies/pointwise.py.
"""

from distmega.kernels.hopper.plan.matrices import share
from distmega.kernels.hopper.plan.pointwise import MAX_CARRIED, split_operands
from distmega.kernels.hopper.plan.types import RowFormula, unfit
from distmega.kernels.hopper.plan.words import (
    AT_POSITION,
    BIASED,
    CARRY_EMBEDDED,
    FROM_EMBEDDING,
    MAX_SMS,
    NOTHING,
    UNIT_ROWS,
    RowPointwise,
)
from distmega.kernels.hopper.row_plan.draft import POLLED_WORDS, Made, RowDraft
from distmega.kernels.hopper.row_plan.epilogues import published_form
from distmega.kernels.tasks.fuse import IDENTITY, FusedGather, FusedPointwise

MAX_ROWS = 8 * MAX_SMS
"""Rows of pointwise work of an SM, at most: eight a thread."""


def add_pointwise(draft: RowDraft, nth: int, op: FusedPointwise) -> None:
    """The rows of its result, shared out as those of a matrix."""
    rows = draft.elements(op.out)
    x = draft.of_x(op) if op.x else Made(0, 0, 0, 1, NOTHING)
    is_given = bool(op.x) and op.x not in draft.made
    number = formula_number(draft, op)
    formula = draft.formulas[number]
    size = {"nothing": 0, "numbers": rows, "pairs": rows // 2}[formula.publishes]
    kind, generation = draft.turn(draft.classes[nth])
    dst = draft.reserve(kind, size)
    carries = [draft.carried(op.name, name, rows, 1) for name in op.operands[: formula.num_carried]]
    embedded = any(given for _, given in carries)
    carry, second = [carry for carry, _ in (*carries, *[(NOTHING, False)] * MAX_CARRIED)][:2]
    norm = op.norm
    flags = (FROM_EMBEDDING if is_given else 0) | (CARRY_EMBEDDED if embedded else 0)
    flags |= BIASED if norm and norm.bias else 0
    table = NOTHING
    if formula.has_table:
        flags |= AT_POSITION if draft.tables[op.operands[-1]].ids == draft.positions else 0
        table = draft.placed.table(draft.tables[op.operands[-1]].table)
    if norm and norm.bias:
        draft.placed.require_next(norm.weight, norm.bias)
    weight = draft.placed.vector(norm.weight) if norm and norm.weight else NOTHING
    kept = draft.keep(op, rows)
    draft.made[op.out] = Made(dst, generation, rows, 1, kept)
    for sm, queue in enumerate(draft.queues):
        first, last = share(rows, 1, sm, draft.num_sms)
        if first == last:
            continue
        queue.append(
            RowPointwise(
                name=op.name,
                generation=generation,
                number=number,
                num_units=last - first,
                src=x.first,
                num_src_words=0 if not op.x else rows if formula.numbers else rows // 2,
                flag_delta=generation - x.generation if op.x else 0,
                flags=flags,
                norm=weight,
                eps=norm.eps if norm else 0.0,
                dst=dst,
                row0=first * UNIT_ROWS,
                num_rows=rows,
                keep=kept,
                carry=carry,
                second=second,
                table=table,
            )
        )


def add_gather(draft: RowDraft, op: FusedGather) -> None:
    """All columns lie where ranks have pushed them. What is taken otherwise than by polling is
    kept by the SMs whose rows it is.
    """
    part, rows, form = draft.made.get(op.x), draft.elements(op.out), draft.forms.get(op.x)
    made_by = {out for one in draft.contractions() for out in one.outs}
    if part is None or form is None or op.x not in made_by:
        raise unfit(f"{op.name!r} of {op.x!r}, which is no contraction's result")
    size = draft.elements(op.x) // (2 if form == "pairs" else 1)
    kept = draft.keep(op, rows)
    made = Made(part.first - draft.team_rank * size, part.generation, rows, 1, kept)
    draft.made[op.out], draft.forms[op.out] = made, form
    if kept != NOTHING:
        add_copies(draft, op.out, made, "heard" if draft.hears_all else "copy")


def add_copies(draft: RowDraft, name: str, made: Made, norm: str) -> None:
    """Each SM keeps its rows of what lies in flagged words. norm: as of a RowFormula."""
    formula = RowFormula(
        norm=norm,
        numbers=draft.forms.get(name, "pairs") == "numbers",
        formula=IDENTITY,
        publishes="nothing",
        num_carried=0,
        has_table=False,
    )
    if formula not in draft.formulas:
        draft.formulas.append(formula)
    if draft.most_rows(made.rows) > MAX_ROWS:
        raise unfit(f"{name!r} of {made.rows} elements")
    for sm, queue in enumerate(draft.queues):
        first, last = share(made.rows, 1, sm, draft.num_sms)
        if first == last:
            continue
        queue.append(
            RowPointwise(
                name=f"{name} kept",
                generation=made.generation,
                number=draft.formulas.index(formula),
                num_units=last - first,
                src=made.first,
                num_src_words=-(-made.rows // (1 if formula.numbers else 2)),
                flag_delta=0,
                flags=0,
                norm=NOTHING,
                eps=0.0,
                dst=0,
                row0=first * UNIT_ROWS,
                num_rows=made.rows,
                keep=made.kept,
                carry=NOTHING,
                second=NOTHING,
                table=NOTHING,
            )
        )


def formula_number(draft: RowDraft, op: FusedPointwise) -> int:
    """Its formula among those of the segment, as it is told apart by kernels."""
    rows = draft.elements(op.out)
    carried, table = split_operands(op, draft.tables, draft.elements)
    if op.norm and op.length != rows:
        raise unfit(f"{op.name!r}, which normalises {op.length} of {rows} elements together")
    if rows % POLLED_WORDS or draft.most_rows(rows) > MAX_ROWS:
        raise unfit(f"{op.name!r} of {rows} elements")
    form = draft.forms.get(op.x, "pairs")
    publishes = published_form(draft, op.name, (op.out,))
    draft.forms[op.out] = publishes
    found = RowFormula(
        norm=op.norm.kind if op.norm else "",
        numbers=form == "numbers",
        formula=op.formula,
        publishes=publishes,
        num_carried=len(carried),
        has_table=table is not None,
        parts=op.x in draft.deferred,
    )
    if found not in draft.formulas:
        draft.formulas.append(found)
    return draft.formulas.index(found)
