"""Sampling ids of several sequences at a temperature alone, each SM from its own logits.

In: an SM's logits of all sequences, settings and seeds. Out: its best candidates, in place of its
highest logits. Each thread keeps its own best candidate of every sequence, all of which are then
compared at once. Next on the walk: limits.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from distmega.kernels.gluon_compat import cta_barrier
from distmega.kernels.hopper.batch.bodies.limits import NO_ROW, columns_of, item_numbers
from distmega.kernels.hopper.batch_plan.fields import (
    BATCH,
    BATCH_STATE_POSITIONS,
    LIN_ROW0,
    LOGITS_FIRST_ID,
    MAX_SMS,
    NUM_ROWS,
    NUM_UNITS,
    SEEDS_AT,
    SETTINGS,
    SETTINGS_AT,
)
from distmega.kernels.hopper.one_row.bodies.sample import gumbel
from distmega.kernels.hopper.ptx.device import keep
from distmega.kernels.hopper.ptx.shapes import THREADS, UNIT_ROWS


@gluon.jit
def better(value0, row0, value1, row1):
    """The better one of two candidates, the lower row among equals."""
    first = (value0 > value1) | ((value0 == value1) & (row0 < row1))
    return gl.where(first, value0, value1), gl.where(first, row0, row1)


@gluon.jit
def load_own(words, logits, b, ROWS: gl.constexpr):
    """This SM's logits of sequence b, [rows / 256, 256], -inf behind the last, and their rows of
    the head.
    """
    row0 = keep(words[LIN_ROW0])
    limit = gl.minimum(row0 + words[NUM_UNITS] * UNIT_ROWS, words[NUM_ROWS])
    row = item_numbers(row0, ROWS // THREADS)
    at = logits + b * words[NUM_ROWS] + row
    return gl.load(at, mask=row < limit, other=float("-inf")), row


@gluon.jit
def sample_ids(
    words,
    logits,
    events,
    bests,
    best_rows,
    state,
    batch,
    step,
    sm,
    ROWS: gl.constexpr,
    RANKS: gl.constexpr,
):
    """This SM's best candidates of all sequences, in place of its highest logits. The noise is that
    of the id, whichever rank has its logit.

    words: int32, of the instruction. logits: f32 [16, this rank's], of which this SM
    has just written its rows. events: seeds and settings from the runner. bests, best_rows: f32 and
    int32 [16, 256], in which this SM writes column `sm`. state: positions; step: in this launch.
    """
    first_id = words[LOGITS_FIRST_ID] if RANKS > 1 else 0
    symmetric = gl.multiple_of(events.to(gl.pointer_type(gl.int64), bitcast=True), 16)
    settings = (symmetric + SETTINGS_AT).to(gl.pointer_type(gl.float32), bitcast=True)
    cta_barrier()
    sequence = item_numbers(0, BATCH) // THREADS
    best = gl.full([BATCH, THREADS], float("-inf"), gl.float32, layout=columns_of(BATCH))
    best_row = gl.full([BATCH, THREADS], NO_ROW, gl.int32, layout=columns_of(BATCH))
    x, row = load_own(words, logits, 0, ROWS)
    for b in range(keep(batch)):
        ahead, _ = load_own(words, logits, gl.minimum(b + 1, batch - 1), ROWS)
        temperature = gl.load(settings + b * SETTINGS)
        least = gl.load(settings + b * SETTINGS + 1)
        position = gl.load(state + BATCH_STATE_POSITIONS + b) + step
        noise = gumbel(first_id + row, position, gl.load(symmetric + SEEDS_AT + b))
        sampled = gl.where(x >= least, x + temperature * noise, float("-inf"))
        own, own_row = gl.reduce((sampled, row), 0, better)
        own = gl.convert_layout(own, gl.SliceLayout(0, columns_of(BATCH)))
        own_row = gl.convert_layout(own_row, gl.SliceLayout(0, columns_of(BATCH)))
        best = gl.where(sequence == b, gl.expand_dims(own, 0), best)
        best_row = gl.where(sequence == b, gl.expand_dims(own_row, 0), best_row)
        x = ahead
    value, row = gl.reduce((best, best_row), 1, better)
    b = gl.arange(0, BATCH, layout=gl.SliceLayout(1, columns_of(BATCH)))
    gl.store(bests + b * MAX_SMS + sm, value, mask=b < batch)
    gl.store(best_rows + b * MAX_SMS + sm, row, mask=b < batch)
