"""Pointwise work on rows of the kernel of several rows: a formula of a row after its norm or
softmax, of rows that are kept, and of a row of a table.

In: float32 numbers of whole rows, tables. Out: numbers, activations, squares. An SM does whole
rows, as in norms.py, so that sums, squares and maxima are its own. Next on the walk: attention.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from distmega.kernels.hopper.batch.bodies.norms import (
    AT_A_TIME,
    load_some,
    load_vector,
    squares_of,
    store_some,
    sum_of,
)
from distmega.kernels.hopper.batch.device import of_rows
from distmega.kernels.hopper.batch_plan.fields import (
    BATCH_STATE_POSITIONS,
    BY_SM,
    DST,
    LIN_NEXT_NORM,
    MAX_SMS,
    NORM_COLUMNS,
    NUM_ROWS,
    POINT_BIAS,
    POINT_BY_POSITION,
    POINT_CARRY,
    POINT_CARRY2,
    POINT_EPS,
    POINT_KEEP,
    POINT_LENGTH,
    POINT_NUMBER,
    POINT_SLOT,
    POINT_TABLE,
    POINT_WEIGHT,
    SRC,
)
from distmega.kernels.hopper.epilogues import count, field
from distmega.kernels.hopper.ptx.device import keep, single
from distmega.kernels.hopper.ptx.shapes import VECTOR_MULTIPLE
from distmega.kernels.pipelined.pointwise.formula import evaluate


@gluon.jit
def greatest_of(source, length):
    """The greatest element of a row."""
    most = gl.full([AT_A_TIME], float("-inf"), gl.float32, layout=NORM_COLUMNS)
    for first in range(0, keep(length), AT_A_TIME):
        x, _, mine = load_some(source, first, length)
        most = gl.maximum(most, gl.where(mine, x, float("-inf")))
    return gl.max(most, axis=0)


@gluon.jit
def exponentials_of(source, length, off):
    """The sum of the exponentials of a row without `off`."""
    sums = gl.zeros([AT_A_TIME], gl.float32, layout=NORM_COLUMNS)
    for first in range(0, keep(length), AT_A_TIME):
        x, _, mine = load_some(source, first, length)
        sums += gl.where(mine, gl.exp(x - off), 0.0)
    return gl.sum(sums, axis=0)


@gluon.jit
def scale_of(source, length, eps, NORM: gl.constexpr):
    """What is taken off a row, and what it, or its exponential, is multiplied by then."""
    off = gl.to_tensor(0.0)
    factor = gl.to_tensor(1.0)
    inv_length = 1.0 / length.to(gl.float32)
    if NORM == "softmax":
        off = greatest_of(source, length)
        factor = 1.0 / exponentials_of(source, length, off)
    elif NORM != "":
        if NORM == "layer_norm":
            off = sum_of(source, length) * inv_length
        factor = gl.rsqrt(squares_of(source, length, off) * inv_length + eps)
    return off, factor


@gluon.jit
def table_row(words, vectors, state, b, step, ROWS: gl.constexpr):
    """Where the row of a table begins: the id's or the position's of sequence b."""
    if words[POINT_BY_POSITION] != 0:
        index = gl.load(state + BATCH_STATE_POSITIONS + b) + step
    else:
        index = gl.load(state + (BATCH_STATE_POSITIONS + ROWS) + b, cache_modifier=".cg")
    first = words[POINT_TABLE].to(gl.int64) * VECTOR_MULTIPLE
    return vectors + (first + index.to(gl.int64) * words[NUM_ROWS])


@gluon.jit
def some_arguments(
    words,
    numbers,
    vectors,
    given,
    row,
    start,
    first,
    off,
    factor,
    FORMULAS: gl.constexpr,
    NUMBER: gl.constexpr,
    ROWS: gl.constexpr,
    WIDE: gl.constexpr,
):
    """What a formula takes for columns from start + first on of the row that begins at number `row`
    of each operand; given: of the table's.
    """
    NORM: gl.constexpr = field(FORMULAS, NUMBER, "norm")
    TAKEN: gl.constexpr = field(FORMULAS, NUMBER, "num_carried")
    length = words[POINT_LENGTH]
    taken = ()
    if NORM != "":
        source = numbers + of_rows(words[SRC], ROWS) + row + start
        x, column, mine = load_some(source, first, length)
        if NORM == "softmax":
            taken += single(gl.exp(x - off) * factor)
        else:
            weight = load_vector(vectors, words[POINT_WEIGHT], column, mine, 1.0, WIDE)
            shift = load_vector(vectors, words[POINT_BIAS], column, mine, 0.0, WIDE)
            x = (x - off) * factor
            taken += single(x * weight.to(gl.float32) + shift.to(gl.float32))
    if TAKEN > 0:
        source = numbers + of_rows(words[POINT_CARRY], ROWS) + row + start
        value, _, _ = load_some(source, first, length)
        taken += single(value)
    if TAKEN > 1:
        source = numbers + of_rows(words[POINT_CARRY2], ROWS) + row + start
        value, _, _ = load_some(source, first, length)
        taken += single(value)
    if field(FORMULAS, NUMBER, "has_table"):
        column = first + gl.arange(0, AT_A_TIME, layout=NORM_COLUMNS)
        value = gl.load(given + start + column, mask=column < length, other=0.0)
        taken += single(value.to(gl.float32))
    return taken


@gluon.jit
def formula_rows(
    words,
    memory,
    state,
    batch,
    step,
    sm,
    num_sms,
    FORMULAS: gl.constexpr,
    NUMBER: gl.constexpr,
    ROWS: gl.constexpr,
    WIDE: gl.constexpr,
):
    """Every num_sms-th row from number `sm` on."""
    num_rows = words[NUM_ROWS]
    length = words[POINT_LENGTH]
    eps = words[POINT_EPS].to(gl.float32, bitcast=True)
    sequence = gl.arange(0, ROWS, layout=gl.SliceLayout(1, BY_SM))
    squares = gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(1, BY_SM))
    for b in range(keep(sm), keep(batch), keep(num_sms)):
        row = b * num_rows
        given = memory.vectors
        if field(FORMULAS, NUMBER, "has_table"):
            given = table_row(words, memory.vectors, state, b, step, ROWS)
        total = gl.zeros([AT_A_TIME], gl.float32, layout=NORM_COLUMNS)
        for start in range(0, keep(num_rows), keep(length)):
            source = memory.numbers + of_rows(words[SRC], ROWS) + row + start
            off, factor = scale_of(source, length, eps, field(FORMULAS, NUMBER, "norm"))
            for first in range(0, keep(length), AT_A_TIME):
                taken = some_arguments(
                    words,
                    memory.numbers,
                    memory.vectors,
                    given,
                    row,
                    start,
                    first,
                    off,
                    factor,
                    FORMULAS,
                    NUMBER,
                    ROWS,
                    WIDE,
                )
                y = evaluate(field(FORMULAS, NUMBER, "formula"), taken)
                column = first + gl.arange(0, AT_A_TIME, layout=NORM_COLUMNS)
                mine = column < length
                kept = mine & (words[POINT_KEEP] >= 0)
                at = memory.numbers + of_rows(words[POINT_KEEP], ROWS) + row + start + column
                gl.store(at, y, mask=kept)
                if field(FORMULAS, NUMBER, "scaled"):
                    inside = gl.where(mine, y, 0.0)
                    total += inside * inside
                    weight = load_vector(
                        memory.vectors, words[LIN_NEXT_NORM], start + column, mine, 1.0, WIDE
                    )
                    y *= weight.to(gl.float32)
                if field(FORMULAS, NUMBER, "publishes"):
                    store_some(memory.acts, words[DST], y, b, start, first, length, ROWS)
        if field(FORMULAS, NUMBER, "scaled"):
            squares = gl.where(sequence == b, gl.sum(total, axis=0), squares)
    if field(FORMULAS, NUMBER, "scaled"):
        # of all sequences: readers add up those of all SMs, and the slot had another result's
        at = memory.sums + words[POINT_SLOT] * (ROWS * MAX_SMS) + sequence * MAX_SMS + sm
        gl.store(at, squares)


@gluon.jit
def pointwise_task(
    words,
    memory,
    state,
    batch,
    step,
    sm,
    num_sms,
    FORMULAS: gl.constexpr,
    ROWS: gl.constexpr,
    WIDE: gl.constexpr,
):
    """The formula of an instruction, for the rows of this SM.

    words: int32, of the instruction. memory: see BatchMemory; reads and writes numbers, writes acts
    and sums. state: positions, and ids of this step; step: in this launch. WIDE: whether weights
    of norms are f32.
    """
    for i in gl.static_range(count(FORMULAS)):
        if words[POINT_NUMBER] == i:
            formula_rows(words, memory, state, batch, step, sm, num_sms, FORMULAS, i, ROWS, WIDE)
