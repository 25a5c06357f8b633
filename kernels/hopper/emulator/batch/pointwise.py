"""Pointwise work on rows in the emulated kernel of several rows. Mirrors batch/bodies/pointwise.py.
Next on the walk: kernel.py.
"""

import numpy as np

from distmega.kernels.hopper.batch_plan.types import BatchFormula
from distmega.kernels.hopper.batch_plan.words import (
    BATCH,
    BATCH_STATE_POSITIONS,
    BatchPointwise,
)
from distmega.kernels.hopper.emulator.batch.bodies import norm_vector
from distmega.kernels.hopper.emulator.batch.sm import BatchSm
from distmega.kernels.hopper.emulator.interleaving import RAN, Steps
from distmega.kernels.hopper.emulator.numbers import (
    Floats,
    Indices,
    evaluate,
    normalised,
    to_bf16,
)
from distmega.kernels.hopper.plan.words import NOTHING, VECTOR_MULTIPLE


def pointwise(sm: BatchSm, one: BatchPointwise, step: int) -> Steps:
    """Whole rows: every num_sms-th from the SM's number on."""
    gpu, column = sm.gpu, np.arange(one.num_rows)
    formula = gpu.queues.formulas.each[one.number]
    squares: Floats = np.zeros(gpu.rows, dtype=np.float32)
    for b in range(sm.sm, gpu.queues.batch, gpu.num_sms):
        row = b * one.num_rows + column
        taken = [normalised_row(sm, one, formula, row)] if formula.norm else []
        for first in (one.carry, one.carry2)[: formula.num_carried]:
            taken.append(sm.load(gpu.numbers, sm.first_number(first) + row))
        if formula.has_table:
            given = one.table * VECTOR_MULTIPLE + table_index(sm, one, b, step) * one.num_rows
            taken.append(gpu.elements[given + column])
        yield RAN
        y = evaluate(formula.formula, taken)
        if one.keep != NOTHING:
            sm.store(gpu.numbers, sm.first_number(one.keep) + row, y)
        at = (one.dst // BATCH + column) * gpu.rows + b
        if formula.scaled:
            squares[b] = (y * y).sum(dtype=np.float32)
            y = y * norm_vector(sm, one.next_norm, one.num_rows)
        if formula.publishes:
            sm.store(gpu.acts, at, to_bf16(y))
    if formula.scaled:
        sm.store(gpu.sums, sm.own_part(one.slot), squares)


def normalised_row(sm: BatchSm, one: BatchPointwise, formula: BatchFormula, row: Indices) -> Floats:
    """x of a row after its norm, `length` elements together."""
    x = sm.load(sm.gpu.numbers, sm.first_number(one.src) + row).reshape(-1, one.length)
    y = normalised(formula.norm, x, one.eps)
    if one.weight != NOTHING:
        y = y * norm_vector(sm, one.weight, one.length)
    if one.bias != NOTHING:
        y = y + norm_vector(sm, one.bias, one.length)
    return y.reshape(-1)


def table_index(sm: BatchSm, one: BatchPointwise, b: int, step: int) -> int:
    """The row of a table that sequence b takes."""
    state = sm.gpu.state
    if one.by_position:
        return int(state.read(sm.compute, np.array([BATCH_STATE_POSITIONS + b]))[0]) + step
    return int(state.read(sm.compute, np.array([BATCH_STATE_POSITIONS + sm.gpu.rows + b]))[0])
