"""Experts of up to 16 rows in the body of linears: which units an SM has, which rows of x count,
and what becomes of products of their first matrices.

In: a choice of experts (route.py). Out: units and tiles for the loader and for the compute warps,
who walk them in one order; x of an expert's last matrix. An expert's tiles meet x of all 16 rows,
since a product has as many in any case: rows that did not choose the expert are not loaded, and
their results are zero. Next on the walk: linear.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from distmega.kernels.hopper.batch.device import pair_index
from distmega.kernels.hopper.batch.route import (
    count_hits,
    expert_of_hit,
    rows_of_hit,
    weights_of,
)
from distmega.kernels.hopper.batch_plan.fields import (
    BATCH,
    BATCH_EXPERT_COLUMNS,
    BATCH_EXPERT_ROWS,
    BATCH_PAIRED,
    COLUMNS,
    DST,
    GROUP_UNITS,
    HALF_CHUNK,
    LIN_NUM_TILES_K,
    NUM_UNITS,
    PACKED,
    PAIRS,
    ROUND_COLUMNS,
    ROUND_UNITS,
    ROW_PAIRS,
    TWO_STREAMS,
)
from distmega.kernels.hopper.epilogues import field
from distmega.kernels.hopper.ptx.device import bf16_pair, keep
from distmega.kernels.hopper.ptx.shapes import TILE_K, UNIT_ROWS
from distmega.kernels.pipelined.pointwise.formula import evaluate

ALL_ROWS = gl.constexpr(0xFFFF)


@constexpr_function
def tiles_of(experts):
    """Tiles along k of an expert's last matrix, and chunks of its x."""
    return -(-experts.width // TILE_K.value)


@gluon.jit
def is_of_rows(words):
    """Whether an instruction chooses experts and does their first matrices."""
    return (words[PACKED] & BATCH_EXPERT_ROWS) != 0


@gluon.jit
def is_of_columns(words):
    """Whether an instruction does the last matrices of experts."""
    return (words[PACKED] & BATCH_EXPERT_COLUMNS) != 0


@gluon.jit
def units_a_hit(words, EXPERTS: gl.constexpr):
    """Units of an expert's first matrices."""
    units = EXPERTS.width // UNIT_ROWS
    return gl.where((words[PACKED] & BATCH_PAIRED) != 0, 2 * units, units)


@gluon.jit
def share_of(words, chosen, sm, num_sms, EXPERTS: gl.constexpr):
    """First unit of this SM and of the next one, and chunks of x. Units of first matrices are
    counted through all experts that are hit, see batch_plan/experts.py.
    """
    first = gl.to_tensor(0)
    stop = words[NUM_UNITS]
    chunks = words[LIN_NUM_TILES_K]
    if is_of_rows(words):
        parts = count_hits(chosen) * (EXPERTS.width // UNIT_ROWS)
        step = gl.where((words[PACKED] & BATCH_PAIRED) != 0, 2, 1)
        first = parts * sm // num_sms * step
        stop = parts * (sm + 1) // num_sms * step
    if is_of_columns(words):
        chunks = chunks * count_hits(chosen)
    return first, stop, chunks


@gluon.jit
def group_from(words, unit, stop, EXPERTS: gl.constexpr):
    """Of the units from `unit` on that share a read of x: the end, and whose they are, counted
    through experts that are hit.
    """
    end = gl.minimum(unit + GROUP_UNITS, stop)
    hit = gl.to_tensor(0)
    if is_of_rows(words):
        size = units_a_hit(words, EXPERTS)
        hit = unit // size
        end = gl.minimum(end, (hit + 1) * size)
    return end, hit


@gluon.jit
def rows_of_group(words, chosen, hit):
    """Rows of x that count for a group, as bits."""
    rows = gl.to_tensor(ALL_ROWS)
    if is_of_rows(words):
        rows = rows_of_hit(chosen, hit)
    return rows


@gluon.jit
def rows_of_chunk(rows, chosen, chunk, of_columns, EXPERTS: gl.constexpr):
    """Rows that count of a chunk of x, number `chunk`: those of its expert, or `rows`."""
    if of_columns:
        rows = rows_of_hit(chosen, chunk // tiles_of(EXPERTS))
    return rows


@gluon.jit
def write_weighted(
    words,
    acts,
    y,
    unit,
    stop,
    chosen,
    EXPERTS: gl.constexpr,
    EPILOGUES: gl.constexpr,
    NUMBER: gl.constexpr,
):
    """A round of products of an expert to x of its last matrix: zeros where a row has not chosen
    it. unit, stop: its first unit, and that behind its last.
    """
    # again: no registers to keep it in while weights are multiplied
    hit = keep(unit) // units_a_hit(words, EXPERTS)
    rows = rows_of_hit(chosen, hit)
    FORMULA: gl.constexpr = field(EPILOGUES, NUMBER, "formula")
    acts += (words[DST] + hit * (tiles_of(EXPERTS) * 2 * HALF_CHUNK)) // 2
    expert = expert_of_hit(chosen, hit)
    own = unit - hit * units_a_hit(words, EXPERTS)
    if field(EPILOGUES, NUMBER, "num_streams") == 2:
        MIXED: gl.constexpr = gl.SliceLayout(2, TWO_STREAMS)
        pairs = gl.permute(gl.reshape(y, [ROUND_UNITS // 2, 2, COLUMNS]), [0, 2, 1])
        first, second = gl.split(gl.convert_layout(pairs, TWO_STREAMS))
        b = gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, MIXED)), 0) // UNIT_ROWS
        z = evaluate(FORMULA, (first, second, weights_of(chosen, expert, b)))
        z = gl.where(((rows >> b) & 1) != 0, z, 0.0)
        low, high = gl.split(gl.reshape(z, [ROUND_UNITS // 2, COLUMNS // 2, 2]))
        payload = gl.convert_layout(bf16_pair(low, high), ROW_PAIRS)
        u = gl.expand_dims(gl.arange(0, ROUND_UNITS // 2, layout=gl.SliceLayout(1, ROW_PAIRS)), 1)
        c = gl.expand_dims(gl.arange(0, COLUMNS // 2, layout=gl.SliceLayout(0, ROW_PAIRS)), 0) * 2
        row = (own // 2 + u) * UNIT_ROWS + c % UNIT_ROWS
        mine = unit // 2 + u < stop // 2
    else:
        b = gl.expand_dims(gl.arange(0, COLUMNS, layout=ROUND_COLUMNS), 0) // UNIT_ROWS
        z = evaluate(FORMULA, (y, weights_of(chosen, expert, b)))
        z = gl.where(((rows >> b) & 1) != 0, z, 0.0)
        low, high = gl.split(gl.reshape(z, [ROUND_UNITS, COLUMNS // 2, 2]))
        payload = gl.convert_layout(bf16_pair(low, high), PAIRS)
        u = gl.expand_dims(gl.arange(0, ROUND_UNITS, layout=gl.SliceLayout(1, PAIRS)), 1)
        c = gl.expand_dims(gl.arange(0, COLUMNS // 2, layout=gl.SliceLayout(0, PAIRS)), 0) * 2
        row = (own + u) * UNIT_ROWS + c % UNIT_ROWS
        mine = unit + u < stop
    gl.store(acts + pair_index(row, c // UNIT_ROWS, BATCH), payload, mask=mine)
