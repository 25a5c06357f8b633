"""What the ranks of a team do together in the kernel: the embedding, sums over ranks, the id.

In: `peers`, the symmetric buffer of every rank, in team order; memory that peers write is polled at
home. Out: the same bits on every rank, since sums are taken in rank order everywhere. A pushed
datum carries its flag, so a push is one store to each rank and needs no fence; it costs one way
over NVLink. With RANKS = 1 only the local exchange is touched. batch/team.py has several sequences.
Next on the walk: linear.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from distmega.kernels.gluon_compat import cta_barrier
from distmega.kernels.hopper.plan.fields import (
    BAR_NUM_WORDS,
    CARRY_EMBEDDED,
    DST,
    EMB_COLUMN,
    EMB_NUM_ROWS,
    EMB_NUM_WORDS,
    EMB_ROW0,
    EMBEDDED,
    LIN_CARRY,
    LIN_KEEP,
    LIN_NUM_ROWS,
    LIN_PACKED,
    LIN_PAIR_ROW,
    LIN_ROW0,
    NO_REPORT,
    NUM_UNITS,
    REPORT_FIRST,
)
from distmega.kernels.hopper.ptx.device import (
    as_float,
    bf16_pair,
    flagged,
    flagged_float,
    high_half,
    keep,
    low_half,
)
from distmega.kernels.hopper.ptx.shapes import GROUP_ROWS, PER_THREAD, THREADS, TWOS, UNIT_ROWS
from distmega.kernels.hopper.ptx.spins import spin2, spin_ranks
from distmega.kernels.pipelined.pointwise.formula import evaluate


@gluon.jit
def push_words(peers, at, word, wanted, RANKS: gl.constexpr):
    """Flagged words into every rank's symmetric buffer, from `at` words on."""
    for rank in gl.static_range(RANKS):
        gl.store(peers[rank] + at, word, mask=wanted)


@gluon.jit
def sum_ranks(symmetric, pointers, stride_bytes, flag, wanted, RANKS: gl.constexpr):
    """Two consecutive numbers of each rank's part, from the first rank's on, in rank order."""
    parts = spin_ranks(symmetric, pointers, stride_bytes, flag, wanted, RANKS)
    low = as_float(parts[0])
    high = as_float(parts[1])
    for rank in gl.static_range(1, RANKS):
        low += as_float(parts[2 * rank])
        high += as_float(parts[2 * rank + 1])
    return low, high


@gluon.jit
def embed_task(words, peers, embed, row_id, flag, RANKS: gl.constexpr):
    """Pushes a part of the id's row, if this rank holds it, to every rank: bf16 pairs.

    words: int32, of the instruction. peers: a tuple of int64, the flagged words of all ranks, in
    memory that all can write; writes those from words[DST] on, with `flag`. embed: bf16 [rows,
    columns] of this rank, local, written by nobody; or the input's row, as if it ended with this
    rank's columns.
    """
    local = row_id - words[EMB_ROW0]
    if (local >= 0) & (local < words[EMB_NUM_ROWS]):
        at = words[EMB_COLUMN] + gl.arange(0, THREADS, layout=PER_THREAD)
        wanted = at < words[EMB_NUM_WORDS]
        pairs = embed.to(gl.pointer_type(gl.int32), bitcast=True)
        pair = gl.load(pairs + local.to(gl.int64) * words[EMB_NUM_WORDS] + at, wanted, 0)
        push_words(peers, words[DST] + at, flagged(pair, flag), wanted, RANKS)


@gluon.jit
def read_alarm(symmetric):
    """Not NO_REPORT once a wait of this rank was given up, so that what it computes is void. The
    report's lower half, which tells as much.
    """
    first = (symmetric + REPORT_FIRST).to(gl.pointer_type(gl.int32), bitcast=True)
    return gl.load(first, volatile=True)


@gluon.jit
def push_partial(words, peers, team_rank, row0, limit, y, flag, alarm, RANKS: gl.constexpr):
    """Rows of this rank's product into its part of every rank's partial sums. None if the alarm
    says that they are void: then the others give up waiting for them, and say so.
    """
    num_rows = words[LIN_NUM_ROWS]
    first = gl.multiple_of(words[DST] + (team_rank - RANKS) * num_rows + row0, 8)
    at = gl.arange(0, GROUP_ROWS, layout=TWOS)
    to = first + at
    word = flagged_float(y, flag)
    # kept until here, or else the product would wait for the alarm
    is_sound = keep(alarm) == NO_REPORT
    wanted = at < gl.multiple_of(gl.where(is_sound, limit - row0, 0), 8)
    push_words(peers, to, word, wanted, RANKS)


@gluon.jit
def sum_partials(
    words,
    symmetric,
    embed,
    kept,
    flag,
    flag0,
    FORMULA: gl.constexpr,
    NUM_CARRIED: gl.constexpr,
    FIRST_CARRIES: gl.constexpr,
    PUBLISHES: gl.constexpr,
    GIVEN: gl.constexpr,
    RANKS: gl.constexpr,
):
    """All rows of this SM, two a thread: the ranks' products in rank order, then the formula, kept
    and published here.

    flag0: the flag of the embedded id, where the formula takes its row. GIVEN: that row is an
    input, which every rank has; peers that hand out the next one must not wait for this read.
    FIRST_CARRIES: the formula was applied to the parts.
    """
    num_rows = words[LIN_NUM_ROWS]
    row = words[LIN_ROW0] + 2 * gl.arange(0, THREADS, layout=PER_THREAD)
    limit = gl.minimum(words[LIN_ROW0] + words[NUM_UNITS] * UNIT_ROWS, num_rows)
    wanted = row < limit
    if not FIRST_CARRIES:
        carries = wanted & (words[LIN_CARRY] >= 0)
        own = kept + words[LIN_CARRY] + row
        low = gl.load(own, mask=carries, other=0.0)
        high = gl.load(own + 1, mask=carries, other=0.0)
        if GIVEN:
            given = wanted & ((words[LIN_PACKED] & CARRY_EMBEDDED) != 0)
            low += gl.load(embed + row, mask=given, other=0.0).to(gl.float32)
            high += gl.load(embed + row + 1, mask=given, other=0.0).to(gl.float32)
        elif (words[LIN_PACKED] & CARRY_EMBEDDED) != 0:
            four = symmetric + (EMBEDDED + row // 4 * 2)
            even, odd = spin2(symmetric, four, flag0, wanted, RANKS)
            pair = gl.where(row % 4 == 0, even, odd)
            low = low_half(pair)
            high = high_half(pair)
    if NUM_CARRIED == 2:
        second = kept + words[LIN_PAIR_ROW] + row
        low2 = gl.load(second, mask=wanted, other=0.0)
        high2 = gl.load(second + 1, mask=wanted, other=0.0)
    first = symmetric + (words[DST] - RANKS * num_rows + row)
    total_low, total_high = sum_ranks(
        symmetric, first, num_rows.to(gl.int64) * 8, flag, wanted, RANKS
    )
    if FIRST_CARRIES:
        low = total_low
        high = total_high
    elif NUM_CARRIED == 2:
        low = evaluate(FORMULA, (total_low, low, low2))
        high = evaluate(FORMULA, (total_high, high, high2))
    else:
        low = evaluate(FORMULA, (total_low, low))
        high = evaluate(FORMULA, (total_high, high))
    keeps = wanted & (words[LIN_KEEP] >= 0)
    gl.store(kept + words[LIN_KEEP] + row, low, mask=keeps)
    gl.store(kept + words[LIN_KEEP] + row + 1, high, mask=keeps)
    if PUBLISHES == "pairs":
        pair = flagged(bf16_pair(low, high), flag)
        gl.store(symmetric + (words[DST] + row // 2), pair, mask=wanted)
    elif PUBLISHES == "numbers":
        gl.store(symmetric + (words[DST] + row), flagged_float(low, flag), mask=wanted)
        gl.store(symmetric + (words[DST] + row + 1), flagged_float(high, flag), mask=wanted)


@gluon.jit
def push_best(
    symmetric, peers, team_rank, best_words, num_sms, sm, value, index, flag, RANKS: gl.constexpr
):
    """This SM's highest logit, or what it drew, and its id, to every rank; none that are void
    (push_partial).
    """
    at = keep(best_words) + 2 * (team_rank * num_sms + sm)
    if RANKS == 1:
        gl.store(peers[0] + at, flagged_float(value, flag))
        gl.store(peers[0] + at + 1, flagged(index, flag))
    else:
        is_sound = read_alarm(symmetric) == NO_REPORT
        for rank in gl.static_range(RANKS):
            gl.store(peers[rank] + at, flagged_float(value, flag), mask=is_sound)
            gl.store(peers[rank] + at + 1, flagged(index, flag), mask=is_sound)


@gluon.jit
def push_logits(words, peers, row0, num_rows, wanted, y, flag, alarm, RANKS: gl.constexpr):
    """Rows row0 to row0 + num_rows of this SM's logits into its part of all ranks' on every rank:
    whole units, -inf where no row is wanted. None that are void (push_partial).
    """
    first = gl.multiple_of(words[DST] + row0, 8)
    at = gl.arange(0, GROUP_ROWS, layout=TWOS)
    to = first + at
    word = flagged_float(gl.where(wanted, y, float("-inf")), flag)
    is_sound = keep(alarm) == NO_REPORT
    pushed = at < gl.multiple_of(gl.where(is_sound, num_rows, 0), 8)
    push_words(peers, to, word, pushed, RANKS)


@gluon.jit
def pass_barrier(words, symmetric, sm, flag):
    """Waits until all SMs of this rank have come here, after all that they did before. symmetric:
    int64, this rank's flagged words, of which SM `sm` writes two from words[DST] on.
    """
    cta_barrier()
    first = symmetric + words[DST]
    gl.store(first + 2 * sm, flagged(sm, flag))
    gl.store(first + 2 * sm + 1, flagged(sm, flag))
    at = 2 * gl.arange(0, THREADS, layout=PER_THREAD)
    spin2(symmetric, first + at, flag, at < words[BAR_NUM_WORDS])
    cta_barrier()


@gluon.jit
def most_likely(symmetric, best_words, num_sms, flag, RANKS: gl.constexpr):
    """Id with the highest logit over all SMs of all ranks; the lowest id among equals, also
    where all are -inf.
    """
    sms = gl.arange(0, THREADS, layout=PER_THREAD)
    wanted = sms < num_sms
    values = gl.full([THREADS], float("-inf"), gl.float32, layout=PER_THREAD)
    ids = gl.full([THREADS], 0x7FFFFFFF, gl.int32, layout=PER_THREAD)
    first = keep(best_words)  # else addresses stay in registers from step to step
    for rank in gl.static_range(RANKS):
        at = symmetric + (first + 2 * (rank * num_sms + sms))
        bits, row_id = spin2(symmetric, at, flag, wanted, RANKS)
        value = gl.where(wanted, as_float(bits), float("-inf"))
        better = (value > values) | (rank == 0)  # ids grow with the rank
        values = gl.where(better, value, values)
        ids = gl.where(better & wanted, row_id, ids)
    highest = gl.max(values, axis=0)
    return gl.min(gl.where(values == highest, ids, 0x7FFFFFFF), axis=0)
