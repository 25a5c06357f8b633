"""Linear tasks on the compute warps: stage x, multiply the ring's tiles by it, write the epilogue.

In: tagged words of x and weight tiles in the ring. Out: tagged words of the op's output. The norm
before a linear is folded in: its weight into x, its factor into the result. Batch 1. Next on the
walk: attention.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from distmega.kernels.gluon_compat import cta_barrier, reinterpret
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
    DST,
    FROM_EMBEDDING,
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
from distmega.kernels.hopper.shapes import (
    EVERY_WARP,
    GATE_UP,
    GROUP_ROWS,
    GROUP_UNITS,
    MMA3,
    MMA_M,
    NUM_WARPS,
    PER_THREAD,
    QUADS,
    REDUCE,
    SLICE_K,
    SLICES,
    STAGE_CHUNKS,
    THREADS,
    TILE_K,
    TWO_X_PAIRS,
    TWOS,
    UNIT_ROWS,
    W_DOT,
    WORDS_A_CHUNK,
    X_DOT,
    X_SLICE,
)
from distmega.kernels.hopper.spins import spin_chunks
from distmega.kernels.hopper.team import push_best, push_partial, read_alarm, sum_partials


@gluon.jit
def norm_weights(vectors, norm, chunk, num_words):
    """Norm weights of 1024 columns as pairs [256, 2], asked for before x is waited for."""
    words = chunk * WORDS_A_CHUNK + gl.arange(0, WORDS_A_CHUNK, layout=TWOS)
    wanted = (norm >= 0) & (words < gl.multiple_of(num_words, 32))
    pairs = (vectors + gl.multiple_of(norm, 8)).to(gl.pointer_type(gl.int32), bitcast=True)
    w = gl.load(pairs + words, mask=wanted, other=0)
    low, high = gl.split(gl.reshape(w, [THREADS, 2]))
    return gl.convert_layout(low, PER_THREAD), gl.convert_layout(high, PER_THREAD)


@gluon.jit
def scale_pair(word, weight, ss):
    """A pair of x times its norm weights, and its squares added to ss."""
    a = low_half(word)
    b = high_half(word)
    return bf16_pair(a * low_half(weight), b * high_half(weight)), ss + a * a + b * b


@gluon.jit
def stage_four(words, exchange, vectors, tag, x_pairs, RANKS: gl.constexpr):
    """x from tagged words into shared memory; returns each thread's part of its sum of squares.

    Four chunks at a time; those past the last hold zeros.
    """
    threads = gl.arange(0, THREADS, layout=PER_THREAD)
    ss = gl.zeros([THREADS], gl.float32, layout=PER_THREAD)
    norm = words[LIN_NORM]
    num_chunks = keep(words[LIN_NUM_TILES_K])
    num_words = words[LIN_NUM_SRC_WORDS]
    for group in range(0, num_chunks, STAGE_CHUNKS):
        first = group * WORDS_A_CHUNK + threads * 2
        n0, n1 = norm_weights(vectors, norm, group, num_words)
        n2, n3 = norm_weights(vectors, norm, group + 1, num_words)
        n4, n5 = norm_weights(vectors, norm, group + 2, num_words)
        n6, n7 = norm_weights(vectors, norm, group + 3, num_words)
        w0, w1, w2, w3, w4, w5, w6, w7 = spin_chunks(
            exchange, exchange + words[SRC] + first, tag, num_words - first, 4, RANKS
        )
        if norm >= 0:
            w0, ss = scale_pair(w0, n0, ss)
            w1, ss = scale_pair(w1, n1, ss)
            w2, ss = scale_pair(w2, n2, ss)
            w3, ss = scale_pair(w3, n3, ss)
            if group + 2 < num_chunks:
                w4, ss = scale_pair(w4, n4, ss)
                w5, ss = scale_pair(w5, n5, ss)
                w6, ss = scale_pair(w6, n6, ss)
                w7, ss = scale_pair(w7, n7, ss)
        even = gl.join(gl.join(w0, w4), gl.join(w2, w6))
        odd = gl.join(gl.join(w1, w5), gl.join(w3, w7))
        chunks = gl.permute(gl.join(even, odd), [1, 2, 0, 3])
        x_pairs.index(group // STAGE_CHUNKS).store(
            gl.reshape(chunks, [STAGE_CHUNKS, SLICES, SLICE_K // 2])
        )
    return ss


@gluon.jit
def stage_two(words, exchange, vectors, tag, x_pairs, RANKS: gl.constexpr):
    """As stage_four, of at most two chunks, in fewer instructions."""
    threads = gl.arange(0, THREADS, layout=PER_THREAD)
    ss = gl.zeros([THREADS], gl.float32, layout=PER_THREAD)
    norm = words[LIN_NORM]
    num_words = words[LIN_NUM_SRC_WORDS]
    n0, n1 = norm_weights(vectors, norm, 0, num_words)
    n2, n3 = norm_weights(vectors, norm, 1, num_words)
    first = threads * 2
    w0, w1, w2, w3 = spin_chunks(
        exchange, exchange + words[SRC] + first, tag, num_words - first, 2, RANKS
    )
    if norm >= 0:
        w0, ss = scale_pair(w0, n0, ss)
        w1, ss = scale_pair(w1, n1, ss)
        w2, ss = scale_pair(w2, n2, ss)
        w3, ss = scale_pair(w3, n3, ss)
    chunks = gl.permute(gl.join(gl.join(w0, w2), gl.join(w1, w3)), [1, 0, 2])
    pairs = reinterpret(x_pairs, gl.int32, [2, SLICES, SLICE_K // 2], TWO_X_PAIRS)
    pairs.store(gl.reshape(chunks, [2, SLICES, SLICE_K // 2]))
    return ss


@gluon.jit
def stage_tagged(words, exchange, vectors, tag, x_pairs, RANKS: gl.constexpr):
    """x from tagged words into shared memory; returns each thread's part of its sum of squares."""
    ss = gl.zeros([THREADS], gl.float32, layout=PER_THREAD)
    if words[LIN_NUM_TILES_K] <= 2:
        ss = stage_two(words, exchange, vectors, tag, x_pairs, RANKS)
    else:
        ss = stage_four(words, exchange, vectors, tag, x_pairs, RANKS)
    return ss


@gluon.jit
def stage_embedding(words, embed, token, vectors, xs):
    """As stage_tagged, x being the token's row of the embedding matrix."""
    squares = gl.zeros([TILE_K], gl.float32, layout=QUADS)
    num_columns = words[LIN_NUM_SRC_WORDS] * 2
    row = embed + token.to(gl.int64) * num_columns
    for chunk in range(keep(words[LIN_NUM_TILES_K])):
        columns = chunk * TILE_K + gl.arange(0, TILE_K, layout=QUADS)
        x = gl.load(row + columns, mask=columns < num_columns, other=0.0).to(gl.float32)
        squares += x * x
        norm = vectors + gl.multiple_of(words[LIN_NORM], 8) + columns
        x *= gl.load(norm, mask=columns < num_columns, other=0.0).to(gl.float32)
        xs.index(chunk).store(gl.reshape(x.to(gl.bfloat16), [SLICES, SLICE_K]))
    ss = gl.sum(gl.reshape(squares, [THREADS, 4]), axis=1)
    return gl.convert_layout(ss, PER_THREAD)


@gluon.jit
def no_sums():
    """Sums of a unit before its first tile: [slices, m, 8 rows]."""
    return gl.zeros([SLICES, MMA_M, UNIT_ROWS], gl.float32, layout=MMA3)


@gluon.jit
def multiply_tile(xs, k, acc, bufs, ready, free, slot, parity):
    """The tile in a ring slot times chunk k of x, added to the sums; all m are equal."""
    x = gl.expand_dims(xs.index(k).load(X_SLICE), 1)
    x = gl.convert_layout(x.broadcast_to([SLICES, MMA_M, SLICE_K]), X_DOT)
    mbarrier.wait(ready.index(slot), parity)
    w = bufs.index(slot).reshape([SLICES, UNIT_ROWS, SLICE_K]).permute([0, 2, 1]).load(W_DOT)
    mbarrier.arrive(free.index(slot), count=1)
    return mma_v2(x, w, acc)


@gluon.jit
def multiply_group(num_units, num_tiles_k, xs, red, bufs, ready, free, it, STAGES: gl.constexpr):
    """The ring's next num_units units times x, sums of every warp in shared memory."""
    acc = no_sums()
    slot = it % STAGES
    parity = (it // STAGES) & 1
    unit = 0
    k = 0
    num_tiles = num_units * num_tiles_k
    for _ in range(keep(num_tiles)):
        acc = multiply_tile(xs, k, acc, bufs, ready, free, slot, parity)
        slot += 1
        if slot == STAGES:
            slot = 0
            parity ^= 1
        k += 1
        if k == num_tiles_k:
            store_sums(acc, red.index(unit))
            acc = no_sums()
            unit += 1
            k = 0
    return it + num_tiles


@gluon.jit
def store_sums(acc, red):
    """One row of each warp's sums of a unit into shared memory [8, 8, 8]."""
    split: gl.constexpr = [2, SLICES // 2, 2, MMA_M // 2, UNIT_ROWS]
    sums = gl.sum(gl.reshape(acc, split), axis=0)
    low, _ = gl.split(gl.permute(sums, [0, 2, 3, 1]))
    red.store(low)


@gluon.jit
def sum_warps(red):
    """[64] row sums of a group, from red [8 units * 8 warps, 8, 8 rows]; its second dim repeats."""
    parts = red.slice(0, 1, dim=1).load(REDUCE)
    parts = gl.reshape(parts, [GROUP_UNITS, NUM_WARPS, UNIT_ROWS])
    return gl.convert_layout(gl.reshape(gl.sum(parts, axis=1), [GROUP_ROWS]), TWOS)


@gluon.jit
def store_pairs(exchange, first, y, tag, num_words, N: gl.constexpr):
    """The first num_words of N / 2 tagged words of bf16 pairs, from word `first` on."""
    low, high = gl.split(gl.reshape(y, [N // 2, 2]))
    payload = gl.convert_layout(bf16_pair(low, high), PER_THREAD)
    at = gl.arange(0, N // 2, layout=PER_THREAD)
    gl.store(exchange + first + at, tagged(payload, tag), mask=at < num_words)


@gluon.jit
def addend(words, vectors, embed, token, residual, row, wanted):
    """What is added to the rows: residual, embedding or bias, or nothing; asked for early."""
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
    xs,
    x_pairs,
    squares,
    red,
    red_rows,
    bufs,
    ready,
    free,
    it,
    stamps,
    RANKS: gl.constexpr,
    STAGES: gl.constexpr,
    TRACE: gl.constexpr,
):
    """Stages x, then for each group of units multiplies and writes; returns the ring position."""
    opcode = words[OPCODE]
    num_tiles_k = words[LIN_NUM_TILES_K]
    if (opcode == OP_QKV) & (words[LIN_FLAGS] == FROM_EMBEDDING):
        ss = stage_embedding(words, embed, token, vectors, xs)
    else:
        ss = stage_tagged(words, exchange, vectors, tag - words[LIN_TAG_DELTA], x_pairs, RANKS)
    alarm = gl.to_tensor(NO_REPORT)
    if RANKS > 1:  # noqa: SIM102  a constant, so that the rest is compiled only then
        if opcode == OP_PARTIAL:
            alarm = read_alarm(exchange)
    if TRACE:
        gl.store(stamps + 1, clock())
    if words[LIN_NORM] >= 0:
        sums = gl.sum(gl.reshape(ss, [NUM_WARPS, 32]), axis=1)
        squares.store(gl.convert_layout(sums, EVERY_WARP))
    cta_barrier()
    best = gl.full([GROUP_ROWS], float("-inf"), gl.float32, layout=TWOS)
    best_row = gl.full([GROUP_ROWS], 0, gl.int32, layout=TWOS)
    num_units = keep(words[NUM_UNITS])
    limit = gl.minimum(words[LIN_ROW0] + num_units * UNIT_ROWS, words[LIN_NUM_ROWS])
    for group in range(0, num_units, GROUP_UNITS):
        row0 = words[LIN_ROW0] + group * UNIT_ROWS
        row = row0 + gl.arange(0, GROUP_ROWS, layout=TWOS)
        wanted = row < limit
        add = addend(words, vectors, embed, token, residual, row, wanted)
        it = multiply_group(
            gl.minimum(num_units - group, GROUP_UNITS),
            num_tiles_k,
            xs,
            red,
            bufs,
            ready,
            free,
            it,
            STAGES,
        )
        if TRACE and group == 0:
            gl.store(stamps + 2, clock())
        y = sum_warps(red_rows)
        if words[LIN_NORM] >= 0:
            y *= gl.rsqrt(gl.sum(squares.load(EVERY_WARP), axis=0) * inv_hidden + eps)
        y += add
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
            better = wanted & (y > best)
            best = gl.where(better, y, best)
            best_row = gl.where(better, row, best_row)
    if opcode == OP_HEAD:
        value = gl.max(best, axis=0)
        index = gl.min(gl.where(best == value, best_row, 0x7FFFFFFF), axis=0)
        push_best(peers, place, best_words, num_sms, sm, value, first_id + index, tag, RANKS)
    if RANKS > 1:  # noqa: SIM102  a constant, so that the rest is compiled only then
        if opcode == OP_PARTIAL:
            sum_partials(words, exchange, residual, tag, tag - words[LAYER], RANKS)
    return it
