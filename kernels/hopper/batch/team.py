"""What the ranks of a team do together for several sequences: sums over ranks, the next ids, the
logits that these are sampled from.

In: `peers`, the symmetric buffer of every rank, in team order. Out: the same bits on every rank. As
in one_row/team.py, numbers are pushed as flagged words, and an SM has the same rows on every rank:
it pushes its part of them to its likes and sums what they pushed, in rank order. A rank's part of a
sum lies in units of 8 rows, 16 sequences each. Logits are plain numbers, which are read several
times: an SM that has written its own to every rank says so by flagged words behind a fence at scope
sys, and who has polled those of all SMs passes such a fence before it reads. Next on the walk:
linear.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from distmega.kernels.gluon_compat import cta_barrier
from distmega.kernels.hopper.batch.bodies.limits import columns_of
from distmega.kernels.hopper.batch_plan.fields import (
    ALL_LOGITS,
    ALL_ROW_MAXIMA,
    BATCH,
    BATCH_MATRIX_SHIFT,
    BEST_WORDS,
    BY_SM,
    COLUMNS,
    EMB_BEST,
    EMB_FIRST_ID,
    LIN_ROW0,
    LOGITS_FIRST_ID,
    LOGITS_TEAM_RANK,
    MAX_SMS,
    NUM_LOGITS,
    NUM_ROWS,
    NUM_UNITS,
    OWN_PART,
    PACKED,
    PAIRS,
    PARTS_AT,
    READY_FLAGS,
    READY_WORDS,
    ROUND,
    ROUND_COLUMNS,
    ROUND_UNITS,
)
from distmega.kernels.hopper.one_row.team import push_words, read_alarm, sum_ranks
from distmega.kernels.hopper.plan.fields import NO_REPORT
from distmega.kernels.hopper.ptx.device import as_float, flagged, flagged_float, keep
from distmega.kernels.hopper.ptx.shapes import PER_THREAD, THREADS, UNIT_ROWS
from distmega.kernels.hopper.ptx.spins import spin_ranks


@gluon.jit
def symmetric_of(events):
    """The flagged words behind the events, which start with the report."""
    return gl.multiple_of(events.to(gl.pointer_type(gl.int64), bitcast=True), 16)


@gluon.jit
def push_round(words, peers, y, unit, flag, alarm, RANKS: gl.constexpr):
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
    push_words(peers, at, flagged_float(y, flag), wanted, RANKS)


@gluon.jit
def sum_round_of_ranks(words, symmetric, unit, flag, RANKS: gl.constexpr):
    """[4 units, 128] sums over ranks, zeros past the last unit."""
    u = gl.expand_dims(gl.arange(0, ROUND_UNITS, layout=gl.SliceLayout(1, PAIRS)), 1)
    c = gl.expand_dims(gl.arange(0, COLUMNS // 2, layout=gl.SliceLayout(0, PAIRS)), 0) * 2
    first = words[PARTS_AT] + (words[LIN_ROW0] // UNIT_ROWS + unit) * COLUMNS
    wanted = (u < words[NUM_UNITS] - unit).broadcast_to([ROUND_UNITS, COLUMNS // 2])
    stride_bytes = words[NUM_ROWS].to(gl.int64) * (8 * BATCH)
    pointers = symmetric + (first + u * COLUMNS + c)
    low, high = sum_ranks(symmetric, pointers, stride_bytes, flag, wanted, RANKS)
    y = gl.reshape(gl.join(low, high), [ROUND_UNITS, COLUMNS])
    return gl.convert_layout(y, ROUND)


@gluon.jit
def argmax_of_ranks(words, values, rows, symmetric, peers, after, sm, flag, RANKS: gl.constexpr):
    """[16] ids with the highest logits of all ranks, of which this one has values, of its rows;
    the lowest id among equals. words: of the embedding; after: flagged words behind its `best`.
    """
    b = gl.arange(0, BATCH, layout=gl.SliceLayout(1, BY_SM))
    if sm == 0:
        own = words[EMB_BEST] + (words[PACKED] >> BATCH_MATRIX_SHIFT) * BEST_WORDS + after + 2 * b
        sound = (b >= 0) & (read_alarm(symmetric) == NO_REPORT)
        push_words(peers, own, flagged_float(values, flag), sound, RANKS)
        push_words(peers, own + 1, flagged(words[EMB_FIRST_ID] + rows, flag), sound, RANKS)
    b = gl.arange(0, BATCH, layout=PER_THREAD)
    first = symmetric + (words[EMB_BEST] + after + 2 * b)
    stride_bytes = gl.to_tensor(16 * BATCH).to(gl.int64)
    found = spin_ranks(symmetric, first, stride_bytes, flag, b >= 0, RANKS)
    highest = as_float(found[0])
    ids = found[1]
    for rank in gl.static_range(1, RANKS):
        value = as_float(found[2 * rank])
        better = value > highest  # ids grow with the rank
        highest = gl.where(better, value, highest)
        ids = gl.where(better, found[2 * rank + 1], ids)
    return gl.convert_layout(ids, gl.SliceLayout(1, BY_SM))


@gluon.jit
def as_floats(words, at):
    """The float32 numbers from 64-bit word `at` on."""
    return gl.multiple_of(words + at, 16).to(gl.pointer_type(gl.float32), bitcast=True)


@constexpr_function
def tell_asm() -> str:
    """PTX for inline_asm_elementwise. Operands: whether this thread does it, the word, where it
    goes twice.
    """
    # logits were written by all threads, before a barrier; the fence makes them visible to all
    # ranks before this thread's word is. A release of Triton's would be an atomic of one word
    lines = [
        "{",
        ".reg .pred mine;",
        "setp.ne.s32 mine, $1, 0;",
        "@mine fence.acq_rel.sys;",
        "@mine st.relaxed.sys.global.v2.b64 [$3], {$2, $2};",
        "mov.b32 $0, 0;",
        "}",
    ]
    return "\n".join(lines)


@gluon.jit
def threads_here():
    """[256]: the threads' numbers, anew. Else addresses that follow from them are computed once and
    stay in registers, and the loop over k has to spill.
    """
    return keep(0) + gl.arange(0, THREADS, layout=PER_THREAD)


@gluon.jit
def push_logits(words, logits, bests, events, peers, batch, sm, flag, RANKS: gl.constexpr):
    """This SM's logits of all sequences and the highest of each to where every rank has all, and
    then that they are there. Nothing if they are void: they might overwrite what others still
    sample from. words: of a BatchLogits.
    """
    cta_barrier()
    symmetric = symmetric_of(events)
    is_sound = read_alarm(symmetric) == NO_REPORT
    row0 = keep(words[LIN_ROW0])
    limit = gl.minimum(row0 + words[NUM_UNITS] * UNIT_ROWS, words[NUM_ROWS])
    limit = gl.where(is_sound, limit, row0)
    columns: gl.constexpr = columns_of(BATCH)
    b = gl.expand_dims(gl.arange(0, BATCH, layout=gl.SliceLayout(1, columns)), 1)
    t = gl.expand_dims(gl.convert_layout(threads_here(), gl.SliceLayout(0, columns)), 0)
    for first in range(row0, keep(limit), THREADS):
        row = first + t
        wanted = (b < batch) & (row < limit)
        x = gl.load(logits + b * words[NUM_ROWS] + row, mask=wanted)
        at = words[LOGITS_FIRST_ID] + b * words[NUM_LOGITS] + row
        for rank in gl.static_range(RANKS):
            gl.store(as_floats(peers[rank], words[ALL_LOGITS]) + at, x, mask=wanted)
    b = threads_here()
    wanted = (b < batch) & is_sound
    high = gl.load(bests + b * MAX_SMS + sm, mask=wanted)
    at = (b * RANKS + words[LOGITS_TEAM_RANK]) * MAX_SMS + sm
    for rank in gl.static_range(RANKS):
        gl.store(as_floats(peers[rank], words[ALL_ROW_MAXIMA]) + at, high, mask=wanted)
    cta_barrier()
    at = words[READY_FLAGS] + words[LOGITS_TEAM_RANK] * READY_WORDS + 2 * sm
    tell_ranks(at, symmetric, peers, flag, RANKS)


@gluon.jit
def tell_ranks(at, symmetric, peers, flag, RANKS: gl.constexpr):
    """Two words at `at` of every rank, after all that this SM did before the last barrier; none if
    any thread may have found then that it is void.
    """
    is_sound = read_alarm(symmetric) == NO_REPORT
    threads = threads_here()
    there = peers[0] + (at + 0 * threads)  # a rank a thread
    for rank in gl.static_range(1, RANKS):
        there = gl.where(threads == rank, peers[rank] + (at + 0 * threads), there)
    # a rank a thread: the stores leave together
    gl.inline_asm_elementwise(
        tell_asm(),
        "=r,r,l,l",
        [((threads < RANKS) & is_sound).to(gl.int32), flagged(threads, flag), there],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def hear_ranks(words, symmetric, num_sms, flag, RANKS: gl.constexpr):
    """Until all SMs of all ranks have told that their logits are here; all threads see them."""
    sms = threads_here()
    stride_bytes = gl.to_tensor(8 * READY_WORDS).to(gl.int64)
    first = symmetric + (words[READY_FLAGS] + 2 * sms)
    spin_ranks(symmetric, first, stride_bytes, flag, sms < num_sms, RANKS)
    # polls are relaxed: what others wrote before their words is visible behind this
    gl.inline_asm_elementwise(
        "fence.acq_rel.sys; mov.b32 $0, $1;", "=r,r", [sms], dtype=gl.int32, is_pure=False, pack=1
    )
    cta_barrier()
