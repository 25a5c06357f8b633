"""Linear tasks on the compute warps: stage x, multiply the ring's tiles by it, write the epilogue.

In: tagged words of x and weight tiles in the ring. Out: tagged words of the op's output. The norm
before a linear is folded in: its weight into x, its factor into the result. Batch 1. Next on the
walk: attention.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from distmega.kernels.hopper.device import (
    as_float,
    bf16_pair,
    clock,
    high_half,
    keep,
    low_half,
    spin2,
    spin_packed,
    tagged,
    tagged_float,
)
from distmega.kernels.hopper.fields import (
    DST,
    FROM_EMBEDDING,
    LIN_BIAS,
    LIN_FLAGS,
    LIN_NORM,
    LIN_NUM_ROWS,
    LIN_NUM_SRC_WORDS,
    LIN_NUM_TILES_K,
    LIN_ROW0,
    LIN_TAG_DELTA,
    NUM_UNITS,
    OP_GATED,
    OP_HEAD,
    OP_QKV,
    OP_RESIDUAL,
    OPCODE,
    SRC,
)
from distmega.kernels.hopper.shapes import (
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
    TWOS,
    UNIT_ROWS,
    W_DOT,
    WORDS_A_CHUNK,
    X_DOT,
    X_SLICE,
)


@gluon.jit
def norm_weights(vectors, norm, chunk, num_columns):
    """Norm weights of 1024 columns, ones without a norm; asked for before x is waited for."""
    columns = chunk * TILE_K + gl.arange(0, TILE_K, layout=QUADS)
    wanted = (norm >= 0) & (columns < num_columns)
    at = vectors + gl.multiple_of(norm, 8) + columns
    return gl.load(at, mask=wanted, other=1.0)


@gluon.jit
def stage_chunk(w0, w1, weights, xs, chunk, ss):
    """1024 columns of x, as 256 x 2 bf16 pairs, times the norm weights into shared memory."""
    a = low_half(w0)
    b = high_half(w0)
    c = low_half(w1)
    d = high_half(w1)
    ss += a * a + b * b + c * c + d * d
    x = gl.convert_layout(gl.reshape(gl.join(gl.join(a, c), gl.join(b, d)), [TILE_K]), QUADS)
    x = (x * weights.to(gl.float32)).to(gl.bfloat16)
    xs.index(chunk).store(gl.reshape(x, [SLICES, SLICE_K]))
    return ss


@gluon.jit
def stage_tagged(words, exchange, vectors, tag, xs):
    """x from tagged words into shared memory; returns each thread's part of its sum of squares."""
    threads = gl.arange(0, THREADS, layout=PER_THREAD)
    ss = gl.zeros([THREADS], gl.float32, layout=PER_THREAD)
    norm = words[LIN_NORM]
    num_chunks = words[LIN_NUM_TILES_K]
    num_columns = words[LIN_NUM_SRC_WORDS] * 2
    for group in range(0, keep(num_chunks), STAGE_CHUNKS):
        first = group * WORDS_A_CHUNK + threads * 2
        n0 = norm_weights(vectors, norm, group, num_columns)
        n1 = norm_weights(vectors, norm, group + 1, num_columns)
        n2 = norm_weights(vectors, norm, group + 2, num_columns)
        n3 = norm_weights(vectors, norm, group + 3, num_columns)
        w = spin_packed(exchange + words[SRC] + first, tag, words[LIN_NUM_SRC_WORDS] - first)
        ss = stage_chunk(w[0], w[1], n0, xs, group, ss)
        if group + 1 < num_chunks:
            ss = stage_chunk(w[2], w[3], n1, xs, group + 1, ss)
        if group + 2 < num_chunks:
            ss = stage_chunk(w[4], w[5], n2, xs, group + 2, ss)
        if group + 3 < num_chunks:
            ss = stage_chunk(w[6], w[7], n3, xs, group + 3, ss)
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
        x *= norm_weights(vectors, words[LIN_NORM], chunk, num_columns).to(gl.float32)
        xs.index(chunk).store(gl.reshape(x.to(gl.bfloat16), [SLICES, SLICE_K]))
    ss = gl.sum(gl.reshape(squares, [THREADS, 4]), axis=1)
    return gl.convert_layout(ss, PER_THREAD)


@gluon.jit
def multiply_unit(num_tiles_k, xs, bufs, ready, free, it, STAGES: gl.constexpr):
    """Next num_tiles_k ring slots times x: [slices, m, 8 rows] partial sums; all m are equal."""
    acc = gl.zeros([SLICES, MMA_M, UNIT_ROWS], gl.float32, layout=MMA3)
    for k in range(keep(num_tiles_k)):
        slot = it % STAGES
        x = gl.expand_dims(xs.index(k).load(X_SLICE), 1)
        x = gl.convert_layout(x.broadcast_to([SLICES, MMA_M, SLICE_K]), X_DOT)
        mbarrier.wait(ready.index(slot), (it // STAGES) & 1)
        tile = bufs.index(slot).reshape([SLICES, UNIT_ROWS, SLICE_K]).permute([0, 2, 1])
        w = tile.load(W_DOT)
        mbarrier.arrive(free.index(slot), count=1)
        acc = mma_v2(x, w, acc)
        it += 1
    return acc, it


@gluon.jit
def store_slices(acc, red):
    """One row of each warp's sums of multiply_unit's slices into shared memory [8, 8, 8]."""
    split: gl.constexpr = [2, SLICES // 2, 2, MMA_M // 2, UNIT_ROWS]
    sums = gl.sum(gl.reshape(acc, split), axis=0)
    low, _ = gl.split(gl.permute(sums, [0, 2, 3, 1]))
    red.store(low)


@gluon.jit
def sum_warps(red):
    """[32] row sums of a group, from red [4 units * 8 warps, 8, 8 rows]; its second dim repeats."""
    parts = red.slice(0, 1, dim=1).load(REDUCE)
    parts = gl.reshape(parts, [GROUP_UNITS, NUM_WARPS, UNIT_ROWS])
    return gl.convert_layout(gl.reshape(gl.sum(parts, axis=1), [GROUP_ROWS]), QUADS)


@gluon.jit
def store_pairs(exchange, first, y, tag, num_words, N: gl.constexpr, LAYOUT: gl.constexpr):
    """The first num_words of N / 2 tagged words of bf16 pairs, from word `first` on."""
    low, high = gl.split(gl.reshape(y, [N // 2, 2]))
    payload = gl.convert_layout(bf16_pair(low, high), LAYOUT)
    at = gl.arange(0, N // 2, layout=LAYOUT)
    gl.store(exchange + first + at, tagged(payload, tag), mask=at < num_words)


@gluon.jit
def addend(words, vectors, embed, token, residual, row, wanted):
    """What is added to the rows: residual, embedding or bias, or nothing; asked for early."""
    add = gl.zeros([GROUP_ROWS], gl.float32, layout=QUADS)
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
    eps,
    inv_hidden,
    xs,
    red,
    bufs,
    ready,
    free,
    it,
    stamps,
    STAGES: gl.constexpr,
    TRACE: gl.constexpr,
):
    """Stages x, then for each group of units multiplies and writes; returns the ring position."""
    opcode = words[OPCODE]
    num_tiles_k = words[LIN_NUM_TILES_K]
    if (opcode == OP_QKV) & (words[LIN_FLAGS] == FROM_EMBEDDING):
        ss = stage_embedding(words, embed, token, vectors, xs)
    else:
        ss = stage_tagged(words, exchange, vectors, tag - words[LIN_TAG_DELTA], xs)
    if TRACE:
        gl.store(stamps + 1, clock())
    scale = 1.0
    if words[LIN_NORM] >= 0:
        scale = gl.rsqrt(gl.sum(ss, axis=0) * inv_hidden + eps)
    best = gl.full([GROUP_ROWS], float("-inf"), gl.float32, layout=QUADS)
    best_row = gl.full([GROUP_ROWS], 0, gl.int32, layout=QUADS)
    num_units = keep(words[NUM_UNITS])
    limit = gl.minimum(words[LIN_ROW0] + num_units * UNIT_ROWS, words[LIN_NUM_ROWS])
    for group in range(0, num_units, GROUP_UNITS):
        row0 = words[LIN_ROW0] + group * UNIT_ROWS
        row = row0 + gl.arange(0, GROUP_ROWS, layout=QUADS)
        wanted = row < limit
        add = addend(words, vectors, embed, token, residual, row, wanted)
        for j in gl.static_range(GROUP_UNITS):
            if group + j < num_units:
                acc, it = multiply_unit(num_tiles_k, xs, bufs, ready, free, it, STAGES)
                store_slices(acc, red.slice(j * NUM_WARPS, NUM_WARPS, dim=0))
        if TRACE and group == 0:
            gl.store(stamps + 2, clock())
        y = sum_warps(red) * scale + add
        if opcode == OP_QKV:
            gl.store(exchange + words[DST] + row, tagged_float(y, tag), mask=wanted)
        elif opcode == OP_RESIDUAL:
            gl.store(residual + row, y, mask=wanted)
            num_words = (limit - row0) // 2
            store_pairs(exchange, words[DST] + row0 // 2, y, tag, num_words, GROUP_ROWS, TWOS)
        elif opcode == OP_GATED:
            pairs = gl.reshape(y, [GROUP_UNITS // 2, 2, UNIT_ROWS])
            gate, up = gl.split(gl.convert_layout(gl.permute(pairs, [0, 2, 1]), GATE_UP))
            mixed = gl.reshape(gate / (1.0 + gl.exp(-gate)) * up, [GROUP_ROWS // 2])
            mixed = gl.convert_layout(mixed, TWOS)
            first = words[DST] + row0 // 4
            num_words = (limit - row0) // 4
            store_pairs(exchange, first, mixed, tag, num_words, GROUP_ROWS // 2, PER_THREAD)
        else:
            gl.store(logits + row, y, mask=wanted)
            better = wanted & (y > best)
            best = gl.where(better, y, best)
            best_row = gl.where(better, row, best_row)
    if opcode == OP_HEAD:
        value = gl.max(best, axis=0)
        index = gl.min(gl.where(best == value, best_row, 0x7FFFFFFF), axis=0)
        gl.store(exchange + best_words + 2 * sm, tagged_float(value, tag))
        gl.store(exchange + best_words + 2 * sm + 1, tagged(index, tag))
    return it


@gluon.jit
def most_likely(exchange, best_words, num_sms, tag):
    """Token with the highest logit over all SMs' parts; the lowest id among equals."""
    sms = gl.arange(0, THREADS, layout=PER_THREAD)
    bits, rows = spin2(exchange + best_words + 2 * sms, tag, sms < num_sms)
    values = gl.where(sms < num_sms, as_float(bits), float("-inf"))
    highest = gl.max(values, axis=0)
    return gl.min(gl.where(values == highest, rows, 0x7FFFFFFF), axis=0)
