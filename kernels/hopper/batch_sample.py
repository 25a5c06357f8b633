"""Drawing the next tokens of several sequences at a temperature alone, each SM from its own logits.

In: an SM's logits of all sequences, settings and seeds. Out: its best candidates, in place of its
highest logits. Next on the walk: batch_limits.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from distmega.kernels.gluon_compat import cta_barrier
from distmega.kernels.hopper.batch_fields import (
    LIN_ROW0,
    MAX_SMS,
    NUM_ROWS,
    NUM_UNITS,
    SEEDS_AT,
    SETTINGS,
    SETTINGS_AT,
    STATE_POSITIONS,
)
from distmega.kernels.hopper.device import keep
from distmega.kernels.hopper.sample import best_candidate, load_logits
from distmega.kernels.hopper.shapes import UNIT_ROWS


@gluon.jit
def head_rows(words):
    """First row of this SM's logits and the end; found anew for each sequence, or else these stay
    in registers through other tasks.
    """
    row0 = keep(words[LIN_ROW0])
    return row0, gl.minimum(row0 + words[NUM_UNITS] * UNIT_ROWS, words[NUM_ROWS])


@gluon.jit
def draw_tokens(
    words, logits, events, bests, best_rows, state, batch, step, sm, ROWS: gl.constexpr
):
    """This SM's best candidates of all sequences, in place of its highest logits."""
    exchange = gl.multiple_of(events.to(gl.pointer_type(gl.int64), bitcast=True), 16)
    seeds = exchange + SEEDS_AT
    settings = (exchange + SETTINGS_AT).to(gl.pointer_type(gl.float32), bitcast=True)
    cta_barrier()
    for b in range(keep(batch)):
        row0, limit = head_rows(words)
        x = load_logits(row0, limit, logits + b * words[NUM_ROWS], ROWS)
        position = gl.load(state + STATE_POSITIONS + b) + step
        value, row = best_candidate(
            x,
            gl.load(settings + b * SETTINGS + 1),
            row0,
            limit,
            gl.load(settings + b * SETTINGS),
            gl.load(seeds + b),
            position,
            ROWS,
        )
        place = keep(sm)
        gl.store(bests + b * MAX_SMS + place, value)
        gl.store(best_rows + b * MAX_SMS + place, row)
