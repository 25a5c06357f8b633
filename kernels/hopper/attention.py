"""Attention tasks on the compute warps: one kv head's query group over one split of the context.

In: tagged words of the qkv output, cached keys and values in the ring. Out: tagged words of the
split's outputs, maxima and sums, and the new position in the cache. Next on the walk: splits.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from distmega.kernels.gluon_compat import cta_barrier
from distmega.kernels.hopper.blocks import (
    add_values,
    aim_block,
    aim_rows,
    place_new,
    score_block,
    stage_queries,
)
from distmega.kernels.hopper.device import (
    as_float,
    clock,
    fence_all,
    keep,
    tagged_float,
)
from distmega.kernels.hopper.fields import (
    ATT_K_NORM,
    ATT_K_ROW,
    ATT_Q_NORM,
    ATT_QUERY0,
    ATT_SPLIT,
    ATT_V_ROW,
    HEAD,
    MAX_SPLITS,
    PARTIAL,
    SRC,
    WINDOW,
)
from distmega.kernels.hopper.loader import first_seen, num_active_splits
from distmega.kernels.hopper.shapes import (
    MMA_M,
    PARTIAL_EXTRA,
    PER_THREAD,
    THREADS,
    TILE_ROWS,
    head_rows,
)
from distmega.kernels.hopper.spins import spin_rows


@gluon.jit
def half_rows(w0, w1, w2, w3, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """[16, COLUMNS] float32 from payloads, four consecutive ones a thread."""
    joined = gl.join(gl.join(w0, w2), gl.join(w1, w3))
    return gl.convert_layout(as_float(gl.reshape(joined, [MMA_M, COLUMNS])), LAYOUT)


@gluon.jit
def rotated_rows(
    words,
    exchange,
    vectors,
    rope,
    position,
    tag,
    eps,
    D: gl.constexpr,
    G: gl.constexpr,
    H: gl.constexpr,
    KVH: gl.constexpr,
    QK_NORM: gl.constexpr,
):
    """Both halves [16, d / 2] of G queries and the new key, normed and rotated, and the value."""
    half: gl.constexpr = D // 2
    QUAD: gl.constexpr = head_rows(half // 4, 1)
    PAIR: gl.constexpr = head_rows(half, 4)
    r = gl.arange(0, MMA_M, layout=gl.SliceLayout(1, QUAD))
    c = gl.arange(0, half // 4, layout=gl.SliceLayout(0, QUAD))
    head = words[HEAD]
    source = gl.where(r < G, words[ATT_QUERY0] + r, gl.where(r == G, H + head, H + KVH + head))
    at = exchange + words[SRC] + gl.expand_dims(source * D, 1) + gl.expand_dims(c * 4, 0)
    wanted = gl.expand_dims(r < G + 2, 1) & gl.expand_dims(c >= 0, 0)
    columns = gl.arange(0, half, layout=gl.SliceLayout(0, PAIR))
    cos = gl.expand_dims(gl.load(rope + position * D + columns), 0)
    sin = gl.expand_dims(gl.load(rope + position * D + half + columns), 0)
    rows = gl.expand_dims(gl.arange(0, MMA_M, layout=gl.SliceLayout(1, PAIR)), 1)
    if QK_NORM:
        weight = gl.where(rows < G, words[ATT_Q_NORM], words[ATT_K_NORM])
        weight1 = gl.load(vectors + weight + gl.expand_dims(columns, 0)).to(gl.float32)
        weight2 = gl.load(vectors + weight + half + gl.expand_dims(columns, 0)).to(gl.float32)
    w0, w1, w2, w3, w4, w5, w6, w7 = spin_rows(exchange, at, tag, wanted, D)
    a = half_rows(w0, w1, w2, w3, half, PAIR)
    b = half_rows(w4, w5, w6, w7, half, PAIR)
    is_value = rows > G
    if QK_NORM:
        inv = gl.rsqrt(gl.expand_dims(gl.sum(a * a + b * b, axis=1), 1) / D + eps)
        a = gl.where(is_value, a, a * inv * weight1)
        b = gl.where(is_value, b, b * inv * weight2)
    return gl.where(is_value, a, a * cos - b * sin), gl.where(is_value, b, b * cos + a * sin)


@gluon.jit
def append_position(words, cache, position, a, b, D: gl.constexpr, G: gl.constexpr):
    """Rows G (key) and G + 1 (value) of both halves into the cache at `position`."""
    half: gl.constexpr = D // 2
    PAIR: gl.constexpr = head_rows(half, 4)
    row = gl.expand_dims(gl.arange(0, MMA_M, layout=gl.SliceLayout(1, PAIR)), 1)
    columns = gl.expand_dims(gl.arange(0, half, layout=gl.SliceLayout(0, PAIR)), 0)
    first = gl.where(row == G, words[ATT_K_ROW], words[ATT_V_ROW]) + position
    at = cache + first.to(gl.int64) * D + columns
    new = (row >= G) & (row < G + 2) & (columns >= 0)
    gl.store(at, a, mask=new)
    gl.store(at + half, b, mask=new)


@gluon.jit
def write_partial(
    words, exchange, split, o0, o1, o2, o3, m, l, tag, D: gl.constexpr, G: gl.constexpr
):
    """Outputs, maxima and sums of a split, as add_values leaves them in threads."""
    thread = gl.arange(0, THREADS, layout=PER_THREAD)
    warp = thread // 32
    row = thread % 32 // 4
    query = thread % 4 * 2
    stride: gl.constexpr = D + PARTIAL_EXTRA
    step = words[MAX_SPLITS] * stride
    first = exchange + words[PARTIAL] + (words[ATT_QUERY0] * words[MAX_SPLITS] + split) * stride
    column = warp * 16 + row
    at = first + query * step + column
    inside = (query < G) & (column < D)
    gl.store(at, tagged_float(o0, tag), mask=inside)
    gl.store(at + 8, tagged_float(o2, tag), mask=inside)
    inside = (query + 1 < G) & (column < D)
    gl.store(at + step, tagged_float(o1, tag), mask=inside)
    gl.store(at + step + 8, tagged_float(o3, tag), mask=inside)
    at = first + row * step + D
    inside = (warp == 0) & (query == 0) & (row < G)
    gl.store(at, tagged_float(m, tag), mask=inside)
    gl.store(at + 1, tagged_float(l, tag), mask=inside)


@gluon.jit
def attention_task(
    words,
    exchange,
    vectors,
    cache,
    rope,
    position,
    tag,
    eps,
    scale,
    min_blocks,
    places,
    it,
    stamps,
    D: gl.constexpr,
    G: gl.constexpr,
    H: gl.constexpr,
    KVH: gl.constexpr,
    QK_NORM: gl.constexpr,
    STAGES: gl.constexpr,
    TRACE: gl.constexpr,
):
    """One split of one kv head, every `active`-th block of 128 positions from its first on; returns
    the ring position. `scale` includes log2(e). places: see kernel.decode. it: of the ring.
    """
    HALVES: gl.constexpr = D // 64
    PAIR: gl.constexpr = head_rows(D // 2, 4)
    active = num_active_splits(position, words[WINDOW], words[MAX_SPLITS], min_blocks)
    split = words[ATT_SPLIT]
    if split < active:
        first = first_seen(position, words[WINDOW])
        last = keep(position // TILE_ROWS)
        block = keep(first // TILE_ROWS + split)
        num_blocks = keep((last - block) // active + 1)
        is_last = keep(((last - block) % active == 0).to(gl.int32))
        row = gl.expand_dims(gl.arange(0, MMA_M, layout=gl.SliceLayout(1, PAIR)), 1)
        column = gl.expand_dims(gl.arange(0, D // 2, layout=gl.SliceLayout(0, PAIR)), 0)
        aims = aim_block(places, G)
        row_aims = aim_rows(
            places, it + (num_blocks - 1) * (2 * HALVES), position, row, column, G, HALVES, STAGES
        )
        slot = keep(it % STAGES)
        phase = keep(it // STAGES % 2)
        it += HALVES
        value_slot = keep(it % STAGES)
        value_phase = keep(it // STAGES % 2)
        a, b = rotated_rows(
            words, exchange, vectors, rope, position, tag, eps, D, G, H, KVH, QK_NORM
        )
        if TRACE:
            gl.store(stamps + 1, clock())
        a = a.to(gl.bfloat16)
        b = b.to(gl.bfloat16)
        stage_queries(row_aims, a, b)
        o0 = gl.zeros([THREADS], gl.float32, layout=PER_THREAD)
        o1 = o0
        o2 = o0
        o3 = o0
        l = o0
        m = gl.full([THREADS], float("-inf"), gl.float32, layout=PER_THREAD)
        for i in range(num_blocks):
            number = keep(i)  # unknown to the compiler, which would copy the loop for the first
            holds_new = (number + 1 == num_blocks) & (is_last != 0)
            if holds_new:
                place_new(row_aims, a, b)
            if holds_new | (number == 0):
                cta_barrier()
            turn = number & 1
            score_block(
                places, aims, turn, slot, phase, block, first, position, scale, HALVES, STAGES
            )
            cta_barrier()
            o0, o1, o2, o3, m, l = add_values(
                places, aims, turn, value_slot, value_phase, o0, o1, o2, o3, m, l, HALVES, STAGES
            )
            it += HALVES
            slot = it % STAGES
            phase = it // STAGES % 2
            it += HALVES
            value_slot = it % STAGES
            value_phase = it // STAGES % 2
            block += active
        it -= HALVES
        if TRACE:
            gl.store(stamps + 2, clock())
        write_partial(words, exchange, split, o0, o1, o2, o3, m, l, tag, D, G)
        if is_last != 0:
            append_position(words, cache, position, a, b, D, G)
            fence_all()
        cta_barrier()
    return it
