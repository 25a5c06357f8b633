"""Linear tasks on the compute warps: stage x, multiply the ring's tiles by it, write the epilogue.

In: tagged words of x and weight tiles in the ring. Out: tagged words of the op's output. The norm
before a linear is folded in: its weight into x, its factor into the result. Batch 1. Next on the
walk: block_ptx.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from distmega.kernels.gluon_compat import cta_barrier
from distmega.kernels.hopper.device import (
    bf16_pair,
    clock,
    high_half,
    keep,
    low_half,
    tagged,
    tagged_float,
)
from distmega.kernels.hopper.fields import (
    DRAWN,
    DST,
    FROM_EMBEDDING,
    GREEDY,
    LAYER,
    LIN_BIAS,
    LIN_FLAGS,
    LIN_NORM,
    LIN_NUM_ROWS,
    LIN_NUM_SRC_WORDS,
    LIN_NUM_TILES_K,
    LIN_ROW0,
    LIN_TAG_DELTA,
    NO_REPORT,
    NUM_UNITS,
    OP_GATED,
    OP_HEAD,
    OP_PARTIAL,
    OP_QKV,
    OP_RESIDUAL,
    OPCODE,
    SRC,
)
from distmega.kernels.hopper.products import (
    CHUNK_BYTES,
    aim,
    multiply_tiles,
    own_word,
    store_x,
    take_tiles,
)
from distmega.kernels.hopper.shapes import (
    EVERY_WARP,
    GATE_UP,
    GROUP_ROWS,
    GROUP_UNITS,
    PER_THREAD,
    REDUCE,
    STAGE_CHUNKS,
    THREADS,
    TWOS,
    UNIT_ROWS,
    WORDS_A_CHUNK,
)
from distmega.kernels.hopper.spins import spin_chunks
from distmega.kernels.hopper.team import (
    push_best,
    push_logits,
    push_partial,
    read_alarm,
    sum_partials,
)


@gluon.jit
def pairs_at(source, word, num_words):
    """Two words (pairs of columns) of a bf16 vector from `word` on, zeros past the last."""
    fours = source.to(gl.pointer_type(gl.int64), bitcast=True)
    both = gl.load(fours + word // 2, mask=word < gl.multiple_of(num_words, 32), other=0)
    return both.to(gl.int32), (both >> 32).to(gl.int32)


@gluon.jit
def scale_pair(word, weight, ss):
    """A pair of x times its norm weights, and its squares added to ss."""
    a = low_half(word)
    b = high_half(word)
    return bf16_pair(a * low_half(weight), b * high_half(weight)), ss + a * a + b * b


@gluon.jit
def stage_chunks(
    words, exchange, vectors, tag, place, ss, chunk, NUM: gl.constexpr, RANKS: gl.constexpr
):
    """NUM chunks of x from tagged words into shared memory, zeros past the last; adds each thread's
    part of their sum of squares.
    """
    norm = words[LIN_NORM]
    num_words = words[LIN_NUM_SRC_WORDS]
    num_weights = gl.where(norm >= 0, num_words, 0)
    weights = vectors + gl.multiple_of(norm, 8)
    first = chunk * WORDS_A_CHUNK + own_word()
    factors = ()
    for i in gl.static_range(NUM):
        factors += pairs_at(weights, first + i * WORDS_A_CHUNK, num_weights)
    at = exchange + words[SRC] + first
    pairs = spin_chunks(exchange, at, tag, num_words - first, NUM, RANKS)
    if norm >= 0:
        scaled = pairs[0:0]
        for i in gl.static_range(2 * NUM):
            pair, ss = scale_pair(pairs[i], factors[i], ss)
            scaled += (pair,)
        store_x(place, scaled, NUM)
    else:
        store_x(place, pairs, NUM)
    return ss


@gluon.jit
def stage_tagged(words, exchange, vectors, tag, place, RANKS: gl.constexpr):
    """x from tagged words into shared memory; returns each thread's part of its sum of squares."""
    ss = gl.zeros([THREADS], gl.float32, layout=PER_THREAD)
    num_chunks = keep(words[LIN_NUM_TILES_K])
    if num_chunks == 1:
        ss = stage_chunks(words, exchange, vectors, tag, place, ss, 0, 1, RANKS)
    elif num_chunks == 2:
        ss = stage_chunks(words, exchange, vectors, tag, place, ss, 0, 2, RANKS)
    else:
        for chunk in range(0, num_chunks, STAGE_CHUNKS):
            to = place + chunk * CHUNK_BYTES
            ss = stage_chunks(words, exchange, vectors, tag, to, ss, chunk, STAGE_CHUNKS, RANKS)
    return ss


@gluon.jit
def stage_embedding(words, embed, token, vectors, place):
    """As stage_tagged, x being the token's row of the embedding matrix."""
    ss = gl.zeros([THREADS], gl.float32, layout=PER_THREAD)
    num_words = words[LIN_NUM_SRC_WORDS]
    row = embed + token.to(gl.int64) * (num_words * 2)
    for chunk in range(keep(words[LIN_NUM_TILES_K])):
        word = chunk * WORDS_A_CHUNK + own_word()
        n0, n1 = pairs_at(vectors + gl.multiple_of(words[LIN_NORM], 8), word, num_words)
        w0, w1 = pairs_at(row, word, num_words)
        w0, ss = scale_pair(w0, n0, ss)
        w1, ss = scale_pair(w1, n1, ss)
        store_x(place + chunk * CHUNK_BYTES, (w0, w1), 1)
    return ss


@gluon.jit
def sum_warps(red):
    """[64] row sums of a group, from red [8 warps, 64]."""
    return gl.convert_layout(gl.sum(red.load(REDUCE), axis=0), TWOS)


@gluon.jit
def store_pairs(exchange, first, y, tag, num_words, N: gl.constexpr):
    """The first num_words of N / 2 tagged words of bf16 pairs, from word `first` on."""
    low, high = gl.split(gl.reshape(y, [N // 2, 2]))
    payload = gl.convert_layout(bf16_pair(low, high), PER_THREAD)
    at = gl.arange(0, N // 2, layout=PER_THREAD)
    gl.store(exchange + first + at, tagged(payload, tag), mask=at < num_words)


@gluon.jit
def group_rows(words, group):
    """Rows of the units from number `group` on: [64]."""
    return words[LIN_ROW0] + group * UNIT_ROWS + gl.arange(0, GROUP_ROWS, layout=TWOS)


@gluon.jit
def addend(words, vectors, embed, token, residual, row, limit):
    """What is added to the rows: residual, embedding or bias, or nothing; asked for early."""
    wanted = row < limit
    add = gl.zeros([GROUP_ROWS], gl.float32, layout=TWOS)
    if words[OPCODE] == OP_RESIDUAL:
        if words[LIN_FLAGS] == FROM_EMBEDDING:
            at = embed + token.to(gl.int64) * words[LIN_NUM_ROWS] + row
            add = gl.load(at, mask=wanted, other=0.0).to(gl.float32)
        else:
            add = gl.load(residual + row, mask=wanted, other=0.0)
    if words[LIN_BIAS] >= 0:
        at = vectors + words[LIN_BIAS] + row
        add = gl.load(at, mask=wanted, other=0.0).to(gl.float32)
    return add


@gluon.jit
def linear_task(
    words,
    exchange,
    vectors,
    embed,
    token,
    residual,
    logits,
    tag,
    sm,
    best_words,
    num_sms,
    peers,
    place,
    first_id,
    eps,
    inv_hidden,
    squares,
    red,
    places,
    it,
    stamps,
    CHOICE: gl.constexpr,
    RANKS: gl.constexpr,
    STAGES: gl.constexpr,
    TRACE: gl.constexpr,
):
    """Stages x, then for each group of units multiplies and writes; returns the ring position.

    Where tokens are drawn, the head only writes its logits, for SAMPLE.
    """
    PUSHES: gl.constexpr = RANKS > 1 and CHOICE != GREEDY and CHOICE != DRAWN
    opcode = words[OPCODE]
    num_tiles_k = words[LIN_NUM_TILES_K]
    num_units = keep(words[NUM_UNITS])
    limit = gl.minimum(words[LIN_ROW0] + num_units * UNIT_ROWS, words[LIN_NUM_ROWS])
    ss = gl.zeros([THREADS], gl.float32, layout=PER_THREAD)
    best = gl.full([GROUP_ROWS], float("-inf"), gl.float32, layout=TWOS)
    best_row = gl.full([GROUP_ROWS], 0, gl.int32, layout=TWOS)
    for group in range(0, num_units, GROUP_UNITS):
        number = keep(group)  # unknown to the compiler, which would copy the loop for the first
        row0 = words[LIN_ROW0] + number * UNIT_ROWS
        row = group_rows(words, number)
        wanted = row < limit
        num_tiles = keep(gl.minimum(num_units - number, GROUP_UNITS) * num_tiles_k)
        aims = aim(places, it % STAGES)
        add = addend(words, vectors, embed, token, residual, row, limit)
        taken = take_tiles(places, aims, num_tiles, (it // STAGES) & 1, STAGES)
        if number == 0:
            if (opcode == OP_QKV) & (words[LIN_FLAGS] == FROM_EMBEDDING):
                ss = stage_embedding(words, embed, token, vectors, aims[0])
            else:
                before = tag - words[LIN_TAG_DELTA]
                ss = stage_tagged(words, exchange, vectors, before, aims[0], RANKS)
            if TRACE:
                gl.store(stamps + 1, clock())
        alarm = gl.to_tensor(NO_REPORT)
        if RANKS > 1:  # noqa: SIM102  a constant, so that the rest is compiled only then
            if opcode == OP_PARTIAL:
                alarm = read_alarm(exchange)
        if PUSHES:  # noqa: SIM102  a constant
            if opcode == OP_HEAD:
                alarm = read_alarm(exchange)
        norm = gl.where(number == 0, words[LIN_NORM], -1)
        multiply_tiles(places, aims, taken, num_tiles, num_tiles_k, ss, norm, STAGES)
        it += num_tiles
        cta_barrier()
        if PUSHES:  # noqa: SIM102  a constant
            # logits are the last that others get, so none may follow from an x that is void
            if (opcode == OP_HEAD) & (number == 0):
                alarm = read_alarm(exchange)
        if TRACE:  # noqa: SIM102  a constant
            if number == 0:
                gl.store(stamps + 2, clock())
        y = sum_warps(red)
        factor = gl.rsqrt(gl.sum(squares.load(EVERY_WARP), axis=0) * inv_hidden + eps)
        y = y * gl.where(words[LIN_NORM] >= 0, factor, 1.0) + add
        if opcode == OP_QKV:
            gl.store(exchange + words[DST] + row, tagged_float(y, tag), mask=wanted)
        elif opcode == OP_RESIDUAL:
            gl.store(residual + row, y, mask=wanted)
            num_words = (limit - row0) // 2
            store_pairs(exchange, words[DST] + row0 // 2, y, tag, num_words, GROUP_ROWS)
        elif opcode == OP_PARTIAL:
            if RANKS > 1:
                push_partial(words, peers, place, row0, limit, y, tag, alarm, RANKS)
        elif opcode == OP_GATED:
            pairs = gl.reshape(y, [GROUP_UNITS // 2, 2, UNIT_ROWS])
            gate, up = gl.split(gl.convert_layout(gl.permute(pairs, [0, 2, 1]), GATE_UP))
            mixed = gl.reshape(gate / (1.0 + gl.exp(-gate)) * up, [GROUP_ROWS // 2])
            mixed = gl.convert_layout(mixed, TWOS)
            first = words[DST] + row0 // 4
            num_words = (limit - row0) // 4
            store_pairs(exchange, first, mixed, tag, num_words, GROUP_ROWS // 2)
        else:
            gl.store(logits + row, y, mask=wanted)
            if CHOICE == GREEDY:
                better = wanted & (y > best)
                best = gl.where(better, y, best)
                best_row = gl.where(better, row, best_row)
            elif PUSHES:
                num_rows = gl.minimum(num_units - number, GROUP_UNITS) * UNIT_ROWS
                push_logits(words, peers, row0, num_rows, wanted, y, tag, alarm, RANKS)
        cta_barrier()
    if CHOICE == GREEDY:  # noqa: SIM102  a constant
        if opcode == OP_HEAD:
            value = gl.max(best, axis=0)
            index = gl.min(gl.where(best == value, best_row, 0x7FFFFFFF), axis=0)
            push_best(
                exchange, peers, place, best_words, num_sms, sm, value, first_id + index, tag, RANKS
            )
    if RANKS > 1:  # noqa: SIM102  a constant, so that the rest is compiled only then
        if opcode == OP_PARTIAL:
            sum_partials(words, exchange, residual, tag, tag - words[LAYER], RANKS)
    return it
