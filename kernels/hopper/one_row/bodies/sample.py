"""Sampling the next id in the kernel: what every SM does with its logits once it has all of them.

In: this SM's logits, the settings and the seed of the request. Out: its best candidate, flagged, in
the place where the greedy kernel has its highest logit, so that all else stays as it is. Where
several ranks share the logits, each SM samples from its own logits and tells all ranks if there
are no limits. If there are, all ranks have pushed their logits to all, and each rank samples from
all of them for itself, which gives the same id on all. An id is the argmax of logit +
temperature * Gumbel noise (program/ops/sampling.py is the reference). LIMITED takes only logits
from a cutoff on, which all SMs find alike, in two exchanges: the highest logit of each warp of each
SM, which bounds the top_k-th from below, then the few logits that reach this bound. SMs with more
than 8 of these write further chunks of 8, so that any logits are handled exactly; up to two chunks
stay in registers. SEARCHED has more candidates than that is for: sample_all.py.
batch/bodies/sample.py and batch/bodies/limits.py have several sequences. Next on the walk:
kernel.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from distmega.kernels.gluon_compat import cta_barrier
from distmega.kernels.hopper.one_row.bodies.sample_all import cutoff_of_all
from distmega.kernels.hopper.one_row.bodies.sample_chunks import (
    CHUNK_WORDS,
    chunk_word,
    read_chunk,
    widen,
)
from distmega.kernels.hopper.one_row.team import push_best
from distmega.kernels.hopper.plan.fields import (
    CHUNK,
    LIMITED,
    LOG2_E,
    SAMPLE_NUM_ROWS,
    SAMPLE_RANK_LOGITS,
    SAMPLE_ROW0,
    SAMPLED,
    SEARCHED,
    SRC,
)
from distmega.kernels.hopper.ptx.device import as_float, flagged, flagged_float
from distmega.kernels.hopper.ptx.shapes import (
    NUM_WARPS,
    PER_THREAD,
    THREADS,
    UNIT_ROWS,
    WORDS_A_CHUNK,
)
from distmega.kernels.hopper.ptx.spins import spin_chunks

PROBES = gl.constexpr(6)
"""Halvings of the range in which the lower bound is looked for; more leave fewer candidates."""
LOWEST = gl.constexpr(-1e38)
"""Where limits are looked for from when all logits are candidates: below any of them."""
LOW_BITS = gl.constexpr(0xFFFFFFFF)


@constexpr_function
def spread(num: int) -> gl.BlockedLayout:
    """Layout of `num` logits, the same number a thread."""
    return gl.BlockedLayout([num // THREADS.value], [32], [8], [0])


@gluon.jit
def philox(rows, position, seed):
    """First word of Philox4x32-10 at counter (row, position, 0, 0), as uint32."""
    c0 = rows.to(gl.uint32)
    zero = c0 ^ c0
    c1 = zero + position.to(gl.uint32)
    c2 = zero
    c3 = zero
    k0 = zero + (seed & LOW_BITS).to(gl.uint32)
    k1 = zero + ((seed >> 32) & LOW_BITS).to(gl.uint32)
    m0 = zero + 0xD2511F53
    m1 = zero + 0xCD9E8D57
    for _ in gl.static_range(10):
        high0 = gl.umulhi(c0, m0)
        low0 = c0 * m0
        high1 = gl.umulhi(c2, m1)
        low1 = c2 * m1
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0


@gluon.jit
def gumbel(rows, position, seed):
    """-log(-log(1 - u)) of u = (philox + 1/2) / 2^32; a series where 1 - u would lose its digits.

    The last digits of large u, which give the least noise, are lost.
    """
    u = (philox(rows, position, seed).to(gl.float32) + 0.5) * 2.3283064365386963e-10
    u = gl.minimum(u, 0.99999994)
    series = u * (0.2 + u * (1.0 / 6.0))
    series = u * (0.5 + u * (1.0 / 3.0 + u * (0.25 + series)))
    exponential = gl.where(u < 0.0625, u + u * series, -gl.log(1.0 - u))
    return -gl.log(exponential)


@gluon.jit
def masses(values, highest, heat):
    """exp((value - highest) / heat) of the values of a chunk."""
    scale = LOG2_E / heat
    return (
        gl.exp2((values[0] - highest) * scale),
        gl.exp2((values[1] - highest) * scale),
        gl.exp2((values[2] - highest) * scale),
        gl.exp2((values[3] - highest) * scale),
        gl.exp2((values[4] - highest) * scale),
        gl.exp2((values[5] - highest) * scale),
        gl.exp2((values[6] - highest) * scale),
        gl.exp2((values[7] - highest) * scale),
    )


@gluon.jit
def add_chunk(values, mass, least, num, total):
    """Adds how many values a thread has from `least` on, and their mass."""
    for i in gl.static_range(CHUNK):
        hit = values[i] >= least
        num += hit.to(gl.int32)
        total += gl.where(hit, mass[i], 0.0)
    return num, total


@gluon.jit
def add_pairs(num0, mass0, num1, mass1):
    """Sums of both."""
    return num0 + num1, mass0 + mass1


@gluon.jit
def tally(held, least, highest, heat, symmetric, first, flag, num_more):
    """Number and mass of the candidates from `least` on: of two chunks held, and of num_more."""
    num = gl.zeros([THREADS], gl.int32, layout=PER_THREAD)
    total = gl.zeros([THREADS], gl.float32, layout=PER_THREAD)
    num, total = add_chunk(held[0], held[1], least, num, total)
    num, total = add_chunk(held[2], held[3], least, num, total)
    alive = held[2][CHUNK - 1] > float("-inf")
    for chunk in range(2, num_more + 2):
        more = read_chunk(symmetric, first + chunk * CHUNK_WORDS, flag, alive)
        num, total = add_chunk(more, masses(more, highest, heat), least, num, total)
        alive = more[CHUNK - 1] > float("-inf")
    return gl.reduce((num, total), 0, add_pairs)


@gluon.jit
def count(values, least):
    """Number of values from `least` on."""
    num = gl.zeros([THREADS], gl.int32, layout=PER_THREAD)
    for i in gl.static_range(CHUNK):
        num += (values[i] >= least).to(gl.int32)
    return gl.sum(num, axis=0)


@gluon.jit
def bounds(values):
    """Lowest and highest of some values, -inf ones left out of the lowest."""
    low = gl.full([THREADS], float("inf"), gl.float32, layout=PER_THREAD)
    high = gl.full([THREADS], float("-inf"), gl.float32, layout=PER_THREAD)
    for i in gl.static_range(CHUNK):
        low = gl.minimum(low, gl.where(values[i] > float("-inf"), values[i], float("inf")))
        high = gl.maximum(high, values[i])
    return gl.reduce((low, high), 0, widen)


@gluon.jit
def lower_bound(values, lowest, highest, top_k):
    """A number that at least top_k of the values reach, close below the top_k-th; -inf if there are
    fewer values.
    """
    bound = lowest
    if count(values, lowest) < top_k:
        bound = float("-inf")
    else:
        high = highest
        for _ in gl.static_range(PROBES):
            middle = bound + (high - bound) * 0.5
            if count(values, middle) >= top_k:
                bound = middle
            else:
                high = middle
    return bound


@gluon.jit
def publish(x, bound, symmetric, first, sm, flag):
    """This SM's logits from `bound` on, in chunks; slots left of the last chunk hold -inf, and a
    full chunk is followed by another.
    """
    hit = (x >= bound) & (x > float("-inf"))
    flags = hit.to(gl.int32)
    ends = gl.associative_scan(flags, 0, add)
    gl.store(symmetric + (first + chunk_word(ends - 1, sm)), flagged_float(x, flag), mask=hit)
    num = gl.sum(flags, axis=0)
    slot = num + gl.arange(0, CHUNK, layout=PER_THREAD)
    none = gl.full([CHUNK], float("-inf"), gl.float32, layout=PER_THREAD)
    wanted = slot < num // CHUNK * CHUNK + CHUNK
    gl.store(symmetric + (first + chunk_word(slot, sm)), flagged_float(none, flag), mask=wanted)


@gluon.jit
def add(a, b):
    """a + b."""
    return a + b


@gluon.jit
def publish_peaks(x, symmetric, first, sm, flag, ROWS: gl.constexpr):
    """The highest logit of each warp's part of this SM's, as its first chunk."""
    lanes: gl.constexpr = [NUM_WARPS, ROWS // NUM_WARPS]
    peaks = gl.convert_layout(gl.max(gl.reshape(x, lanes), axis=1), PER_THREAD)
    slots = gl.arange(0, NUM_WARPS, layout=PER_THREAD)
    gl.store(symmetric + (first + chunk_word(slots, sm)), flagged_float(peaks, flag))


@gluon.jit
def find_bound(sampling, symmetric, first, num_sms, flag):
    """From all SMs' peaks: a number that the top_k-th logit reaches, -inf if there are fewer peaks
    than that; and the highest logit.
    """
    top_k = gl.load(sampling + 1).to(gl.int32)
    present = gl.arange(0, THREADS, layout=PER_THREAD) < num_sms
    values = read_chunk(symmetric, first, flag, present)
    lowest, highest = bounds(values)
    return lower_bound(values, lowest, highest, top_k), highest


@gluon.jit
def search(low, highest, sampling, symmetric, first, num_sms, flag, ROWS: gl.constexpr):
    """The least logit that may be sampled, from what all SMs published from `low` on; see
    ops.cutoff.

    first: the first chunk behind that of the peaks.
    """
    heat = gl.maximum(gl.load(sampling), 1e-30)
    top_k = gl.load(sampling + 1).to(gl.int32)
    top_p = gl.load(sampling + 2)
    present = gl.arange(0, THREADS, layout=PER_THREAD) < num_sms
    values = read_chunk(symmetric, first, flag, present)
    full = values[CHUNK - 1] > float("-inf")
    second = read_chunk(symmetric, first + CHUNK_WORDS, flag, full)
    full = second[CHUNK - 1] > float("-inf")
    num_more = 0
    while (gl.max(full.to(gl.int32), axis=0) > 0) & (num_more <= ROWS // CHUNK):
        num_more += 1
        more = read_chunk(symmetric, first + (num_more + 1) * CHUNK_WORDS, flag, full)
        full = more[CHUNK - 1] > float("-inf")
    held = values, masses(values, highest, heat), second, masses(second, highest, heat)
    low = gl.maximum(low, LOWEST)
    above = highest + gl.maximum(gl.abs(highest) * 1e-3, 1e-3)
    low_num, mass = tally(held, low, highest, heat, symmetric, first, flag, num_more)
    high = above
    middle = low + (high - low) * 0.5
    while (low_num > top_k) & (middle > low) & (middle < high):
        num, found = tally(held, middle, highest, heat, symmetric, first, flag, num_more)
        if num >= top_k:
            low = middle
            low_num = num
            mass = found
        else:
            high = middle
        middle = low + (high - low) * 0.5
    if top_p < 1.0:
        wanted = mass * top_p
        high = above
        high_num = 0
        middle = low + (high - low) * 0.5
        while (low_num - high_num > 1) & (middle > low) & (middle < high):
            num, found = tally(held, middle, highest, heat, symmetric, first, flag, num_more)
            if found >= wanted:
                low = middle
                low_num = num
            else:
                high = middle
                high_num = num
            middle = low + (high - low) * 0.5
    return low


@gluon.jit
def find_cutoff(x, sampling, symmetric, first, sm, num_sms, flag, ROWS: gl.constexpr):
    """The least logit that may be sampled, which every SM searches for by itself and finds
    alike.
    """
    publish_peaks(x, symmetric, first, sm, flag, ROWS)
    low, highest = find_bound(sampling, symmetric, first, num_sms, flag)
    first += CHUNK_WORDS
    publish(x, low, symmetric, first, sm, flag)
    return search(low, highest, sampling, symmetric, first, num_sms, flag, ROWS)


@gluon.jit
def row_numbers(row0, ROWS: gl.constexpr):
    """Rows row0 to row0 + ROWS, over all threads."""
    item = gl.arange(0, ROWS, layout=spread(ROWS))
    per: gl.constexpr = ROWS // THREADS
    return row0 + item % per * THREADS + item // per


@gluon.jit
def load_logits(row0, limit, logits, ROWS: gl.constexpr):
    """Logits of rows row0 to limit, at most ROWS of them; -inf beyond."""
    row = row_numbers(row0, ROWS)
    return gl.load(logits + row, mask=row < limit, other=float("-inf"))


@gluon.jit
def slot_numbers(slot0, ROWS: gl.constexpr):
    """Slots slot0 to slot0 + ROWS, over all threads: two in a row of each WORDS_A_CHUNK."""
    item = gl.arange(0, ROWS, layout=spread(ROWS))
    per: gl.constexpr = ROWS // THREADS
    number = item % per
    return slot0 + number // 2 * WORDS_A_CHUNK + item // per * 2 + number % 2


@gluon.jit
def await_logits(symmetric, first, slot0, limit, flag, ROWS: gl.constexpr, RANKS: gl.constexpr):
    """Logits in slots slot0 to limit, at most ROWS of them, once their ranks have pushed them; -inf
    beyond. first: the flagged word of slot 0.
    """
    word = 2 * gl.arange(0, THREADS, layout=PER_THREAD)
    num_left = limit - slot0 - word
    NUM: gl.constexpr = ROWS // WORDS_A_CHUNK
    found = spin_chunks(symmetric, symmetric + (first + slot0 + word), flag, num_left, NUM, RANKS)
    x = gl.reshape(join_all(found, 2 * NUM), [ROWS])
    x = as_float(gl.convert_layout(x, spread(ROWS)))
    return gl.where(slot_numbers(slot0, ROWS) < limit, x, float("-inf"))


@gluon.jit
def join_all(parts, NUM: gl.constexpr):
    """NUM tensors, a power of two, as one, their number in the dims behind."""
    if NUM == 1:
        return parts[0]
    else:
        half: gl.constexpr = NUM // 2
        joined = parts[0:0]
        for i in gl.static_range(half):
            joined += (gl.join(parts[i], parts[i + half]),)
        return join_all(joined, half)


@gluon.jit
def best_candidate(x, cutoff, ids, wanted, temperature, seed, position):
    """The best candidate of logits x of numbers `ids` from `cutoff` on: its value and its id."""
    noise = gumbel(ids, position, seed)
    sampled = gl.where(x >= cutoff, x + temperature * noise, float("-inf"))
    value = gl.max(sampled, axis=0)
    index = gl.min(gl.where((sampled == value) & wanted, ids, 0x7FFFFFFF), axis=0)
    return value, index


@gluon.jit
def sample_task(
    words, logits, first_id, sampling, seeds, position, symmetric, peers, rank, sample_words,
    best_words, sm, num_sms, flag, KIND: gl.constexpr, ROWS: gl.constexpr, RANKS: gl.constexpr,
):  # fmt: skip
    """Publishes the best candidate of an instruction SAMPLE, of at most ROWS logits.

    words: int32, of the instruction. logits: f32, this rank's, from number first_id on, which
    this SM's linear task wrote. sampling: f32, (temperature, least logit) where SAMPLED, else
    (temperature, top_k, top_p), and seeds: i64 [1], local memory that the runner writes between
    launches. position: of the id before the sampled one. symmetric: int64, this rank's flagged
    words; peers: those of all ranks, in memory that all can write, this one's being number `rank`.
    sample_words, best_words: where chunks begin there, which SMs of this rank write, and the
    candidates, which go to all ranks. flag: of all that is exchanged.
    """
    cta_barrier()
    row0 = words[SAMPLE_ROW0]
    limit = words[SAMPLE_NUM_ROWS]
    if RANKS > 1 and KIND != SAMPLED:
        x = await_logits(symmetric, words[SRC], row0, limit, flag, ROWS, RANKS)
    else:
        x = load_logits(row0, limit, logits, ROWS)
    if KIND == LIMITED:
        cutoff = find_cutoff(x, sampling, symmetric, sample_words, sm, num_sms, flag, ROWS)
    elif KIND == SEARCHED:
        cutoff = cutoff_of_all(x, sampling, symmetric, sample_words, sm, num_sms, flag)
    else:
        cutoff = gl.load(sampling + 1)
    if RANKS > 1 and KIND != SAMPLED:
        slot = slot_numbers(row0, ROWS)
        wanted = slot < limit
        rank_logits = words[SAMPLE_RANK_LOGITS]
        units = (rank_logits + UNIT_ROWS - 1) // UNIT_ROWS * UNIT_ROWS
        ids = slot - slot // units * (units - rank_logits)
    else:
        row = row_numbers(row0, ROWS)
        wanted = row < limit
        ids = first_id + row
    value, index = best_candidate(
        x, cutoff, ids, wanted, gl.load(sampling), gl.load(seeds), position
    )
    if RANKS > 1 and KIND == SAMPLED:
        push_best(symmetric, peers, rank, best_words, num_sms, sm, value, index, flag, RANKS)
    else:
        gl.store(symmetric + best_words + 2 * sm, flagged_float(value, flag))
        gl.store(symmetric + best_words + 2 * sm + 1, flagged(index, flag))
