"""Pointwise work on rows in the emulated kernel of one row: a formula of a whole row after its norm
or softmax and of what the SM keeps. Mirrors one_row/bodies/pointwise.py. Next on the walk:
kernel.py.
"""

from collections.abc import Generator

import numpy as np

from distmega.kernels.hopper.emulator.interleaving import RAN, Key, Steps
from distmega.kernels.hopper.emulator.numbers import (
    Floats,
    evaluate,
    floats_of,
    halves_of,
    normalised,
)
from distmega.kernels.hopper.emulator.one_row.bodies import added_up, norm_vector, publish_rows
from distmega.kernels.hopper.emulator.sm import RowSm
from distmega.kernels.hopper.plan.types import RowFormula
from distmega.kernels.hopper.plan.words import (
    AT_POSITION,
    BIASED,
    CARRY_EMBEDDED,
    FROM_EMBEDDING,
    NOTHING,
    VECTOR_MULTIPLE,
    RowPointwise,
)
from distmega.kernels.hopper.row_plan.accesses import last_row, reads


def pointwise(sm: RowSm, one: RowPointwise, row_id: int, position: int, flag: int) -> Steps:
    """Rows of this SM."""
    formula = sm.gpu.queues.formulas[one.number]
    row = np.arange(one.row0, last_row(one))
    wanted = np.full(len(row), True)
    taken: list[Floats] = []
    if formula.norm:
        x = yield from whole_row(sm, one, formula, row_id, flag - one.flag_delta)
        taken.append(normalised_row(sm, one, formula, x)[row])
    if formula.num_carried and one.flags & CARRY_EMBEDDED:
        taken.append(sm.gpu.embed[row_id][row])
    elif formula.num_carried:
        taken.append(sm.gpu.kept.load(sm.sm, one.carry + row, wanted))
    if formula.num_carried > 1:
        taken.append(sm.gpu.kept.load(sm.sm, one.second + row, wanted))
    if formula.has_table:
        index = position if one.flags & AT_POSITION else row_id
        taken.append(
            sm.gpu.elements[one.table * VECTOR_MULTIPLE + index * one.num_rows + row],
        )
    yield RAN
    y = evaluate(formula.formula, taken)
    if one.keep != NOTHING:
        sm.gpu.kept.store(sm.sm, one.keep + row, y, wanted)
    publish_rows(sm, one, formula, row, y, flag)


def whole_row(
    sm: RowSm, one: RowPointwise, formula: RowFormula, row_id: int, flag: int
) -> Generator[Key, None, Floats]:
    """x, all of it."""
    if one.flags & FROM_EMBEDDING:
        row: Floats = sm.gpu.embed[row_id][: one.num_rows]
        return row
    (read,) = reads(one, sm.gpu.queues)
    words = np.arange(read.words.start, read.words.stop)
    payload = yield from sm.poll(words, flag, repr(one.name))
    found = floats_of(payload) if formula.numbers else halves_of(payload)
    if formula.parts:
        return added_up(found, sm.gpu.queues.num_ranks)
    first = (read.words.start - one.src) * (1 if formula.numbers else 2)
    return np.concatenate((np.full(first, np.nan, dtype=np.float32), found))


def normalised_row(sm: RowSm, one: RowPointwise, formula: RowFormula, x: Floats) -> Floats:
    """x after its norm or softmax, or as it is."""
    if formula.norm in ("copy", "heard"):
        return x
    y = normalised(formula.norm, x, one.eps)
    if one.norm != NOTHING:
        y = y * norm_vector(sm, one.norm, one.num_rows)
    if one.flags & BIASED:
        y = y + norm_vector(sm, one.norm, one.num_rows, behind=True)
    return y
