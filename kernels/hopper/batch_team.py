"""What the ranks of a team do together for several sequences: sums over ranks, the next tokens.

In: `peers`, the exchange of every rank, in team order. Out: the same bits on every rank. As in
team.py, numbers are pushed as tagged words, and an SM has the same rows on every rank: it pushes
its part of them to its likes and sums what they pushed, in rank order. A rank's part of a sum lies
in units of 8 rows, 16 sequences each. Next on the walk: batch_linear.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from distmega.kernels.hopper.batch_fields import (
    BATCH,
    BY_SM,
    COLUMNS,
    EMB_BEST,
    EMB_FIRST_ID,
    EMB_OWN_BEST,
    LIN_ROW0,
    NUM_ROWS,
    NUM_UNITS,
    OWN_PART,
    PAIRS,
    PARTS_AT,
    ROUND,
    ROUND_COLUMNS,
    ROUND_UNITS,
)
from distmega.kernels.hopper.device import as_float, keep, tagged, tagged_float
from distmega.kernels.hopper.fields import NO_REPORT
from distmega.kernels.hopper.shapes import PER_THREAD, UNIT_ROWS
from distmega.kernels.hopper.spins import spin_ranks
from distmega.kernels.hopper.team import push_words, read_alarm, sum_ranks


@gluon.jit
def exchange_of(events):
    """The tagged words behind the events, which start with the report."""
    return gl.multiple_of(events.to(gl.pointer_type(gl.int64), bitcast=True), 16)


@gluon.jit
def push_round(words, peers, y, unit, tag, alarm, RANKS: gl.constexpr):
    """[4 units, 128] of this rank's part of a sum. None if the alarm says that they are void: then
    the others give up waiting for them, and say so.
    """
    u = gl.expand_dims(gl.arange(0, ROUND_UNITS, layout=gl.SliceLayout(1, ROUND)), 1)
    c = gl.expand_dims(gl.arange(0, COLUMNS, layout=ROUND_COLUMNS), 0)
    first = words[OWN_PART] + (words[LIN_ROW0] // UNIT_ROWS + unit) * COLUMNS
    # kept until here, or else the product would wait for the alarm
    num = gl.where(keep(alarm) == NO_REPORT, words[NUM_UNITS] - unit, 0)
    wanted = (u < num).broadcast_to([ROUND_UNITS, COLUMNS])
    at = gl.multiple_of(first, 16) + u * COLUMNS + c
    push_words(peers, at, tagged_float(y, tag), wanted, RANKS)


@gluon.jit
def sum_round_of_ranks(words, exchange, unit, tag, RANKS: gl.constexpr):
    """[4 units, 128] sums over ranks, zeros past the last unit."""
    u = gl.expand_dims(gl.arange(0, ROUND_UNITS, layout=gl.SliceLayout(1, PAIRS)), 1)
    c = gl.expand_dims(gl.arange(0, COLUMNS // 2, layout=gl.SliceLayout(0, PAIRS)), 0) * 2
    first = words[PARTS_AT] + (words[LIN_ROW0] // UNIT_ROWS + unit) * COLUMNS
    wanted = (u < words[NUM_UNITS] - unit).broadcast_to([ROUND_UNITS, COLUMNS // 2])
    stride_bytes = words[NUM_ROWS].to(gl.int64) * (8 * BATCH)
    pointers = exchange + (first + u * COLUMNS + c)
    low, high = sum_ranks(exchange, pointers, stride_bytes, tag, wanted, RANKS)
    y = gl.reshape(gl.join(low, high), [ROUND_UNITS, COLUMNS])
    return gl.convert_layout(y, ROUND)


@gluon.jit
def likeliest(words, values, rows, exchange, peers, after, sm, tag, RANKS: gl.constexpr):
    """[16] tokens with the highest logits of all ranks, of which this one has values, of its rows;
    the lowest id among equals. words: of the embedding; after: tagged words behind its `best`.
    """
    b = gl.arange(0, BATCH, layout=gl.SliceLayout(1, BY_SM))
    if sm == 0:
        own = words[EMB_OWN_BEST] + after + 2 * b
        sound = (b >= 0) & (read_alarm(exchange) == NO_REPORT)
        push_words(peers, own, tagged_float(values, tag), sound, RANKS)
        push_words(peers, own + 1, tagged(words[EMB_FIRST_ID] + rows, tag), sound, RANKS)
    b = gl.arange(0, BATCH, layout=PER_THREAD)
    first = exchange + (words[EMB_BEST] + after + 2 * b)
    stride_bytes = gl.to_tensor(16 * BATCH).to(gl.int64)
    found = spin_ranks(exchange, first, stride_bytes, tag, b >= 0, RANKS)
    highest = as_float(found[0])
    tokens = found[1]
    for rank in gl.static_range(1, RANKS):
        value = as_float(found[2 * rank])
        better = value > highest  # tokens grow with the rank
        highest = gl.where(better, value, highest)
        tokens = gl.where(better, found[2 * rank + 1], tokens)
    return gl.convert_layout(tokens, gl.SliceLayout(1, BY_SM))
