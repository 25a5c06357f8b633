"""Attention tasks on the compute warps: one kv head's query group over one split of the context.

In: tagged words of the qkv output, cached keys and values in the ring. Out: what splits.py writes,
and the new position in the cache. Next on the walk: splits.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from distmega.kernels.hopper.device import (
    as_float,
    clock,
    fence_all,
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
    SRC,
    WINDOW,
)
from distmega.kernels.hopper.loader import first_seen, num_active_splits
from distmega.kernels.hopper.shapes import (
    KV_DOT,
    MMA3,
    MMA_M,
    NUM_WARPS,
    POSITIONS,
    Q_DOT,
    QUERY,
    TILE_ROWS,
    head_rows,
)
from distmega.kernels.hopper.spins import spin_rows
from distmega.kernels.hopper.splits import write_rows


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
def attend_block(
    q0,
    q1,
    bufs,
    ready,
    free,
    it,
    block,
    first,
    position,
    scale,
    m,
    l,
    o0,
    o1,
    HALVES: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Online softmax over the 128 cached positions of one block, 16 a warp, each warp on its own;
    positions before `first` are out of sight, those from `position` on are stale, both masked.
    """
    view: gl.constexpr = [NUM_WARPS, POSITIONS, 64]
    s = gl.zeros([NUM_WARPS, MMA_M, POSITIONS], gl.float32, layout=MMA3)
    for h in gl.static_range(HALVES):
        slot = (it + h) % STAGES
        mbarrier.wait(ready.index(slot), ((it + h) // STAGES) & 1)
        k = bufs.index(slot).reshape(view).permute([0, 2, 1]).load(KV_DOT)
        mbarrier.arrive(free.index(slot), count=1)
        s = mma_v2(q0 if h == 0 else q1, k, s)
    it += HALVES
    warp = gl.arange(0, NUM_WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(1, MMA3)))
    column = gl.arange(0, POSITIONS, layout=gl.SliceLayout(0, gl.SliceLayout(1, MMA3)))
    t = gl.expand_dims(warp * POSITIONS, 1) + gl.expand_dims(column, 0) + block * TILE_ROWS
    seen = (t >= first) & (t < position)
    s = gl.where(gl.expand_dims(seen, 1), s * scale, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, axis=2))
    m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = gl.exp2(m - m_safe)
    p = gl.exp2(s - gl.expand_dims(m_safe, 2))
    l = l * alpha + gl.sum(p, axis=2)
    p = gl.convert_layout(p.to(gl.bfloat16), Q_DOT)
    alpha = gl.expand_dims(alpha, 2)
    slot = it % STAGES
    mbarrier.wait(ready.index(slot), (it // STAGES) & 1)
    v = bufs.index(slot).reshape(view).load(KV_DOT)
    mbarrier.arrive(free.index(slot), count=1)
    o0 = mma_v2(p, v, o0 * alpha)
    if HALVES == 2:
        slot = (it + 1) % STAGES
        mbarrier.wait(ready.index(slot), ((it + 1) // STAGES) & 1)
        v = bufs.index(slot).reshape(view).load(KV_DOT)
        mbarrier.arrive(free.index(slot), count=1)
        o1 = mma_v2(p, v, o1 * alpha)
    it += HALVES
    return it, m_new, l, o0, o1


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
def begin_new(qs, scale, G: gl.constexpr, HALVES: gl.constexpr):
    """State of the online softmax after the new position alone, held by the first warp."""
    ROWS: gl.constexpr = head_rows(64, 4)
    warp = gl.arange(0, NUM_WARPS, layout=gl.SliceLayout(1, QUERY))
    mine = gl.expand_dims(warp, 1) == 0
    s = gl.zeros([MMA_M], gl.float32, layout=gl.SliceLayout(1, ROWS))
    for h in gl.static_range(HALVES):
        q = qs.index(h).load(ROWS).to(gl.float32)
        k = qs.index(h).slice(G, 1, dim=0).load(ROWS).to(gl.float32)
        s += gl.sum(q * k, axis=1)
    s = gl.expand_dims(gl.convert_layout(s * scale, gl.SliceLayout(0, QUERY)), 0)
    m = gl.where(mine, s, float("-inf"))
    l = gl.where(mine & (s == s), 1.0, 0.0)
    return m, l


@gluon.jit
def new_value(qs, h: gl.constexpr, G: gl.constexpr):
    """Half h of the new value for the first warp, zeros for the others: [8, 16, 64]."""
    columns: gl.constexpr = gl.SliceLayout(0, MMA3)
    v = gl.expand_dims(qs.index(h).slice(G + 1, 1, dim=0).load(columns).to(gl.float32), 0)
    warp = gl.arange(0, NUM_WARPS, layout=gl.SliceLayout(1, QUERY))
    mine = gl.expand_dims(gl.expand_dims(warp, 1), 2) == 0
    zeros = gl.zeros([NUM_WARPS, MMA_M, 64], gl.float32, layout=MMA3)
    return gl.where(mine, v + zeros, 0.0)


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
    qs,
    ml,
    scratch,
    scratch1,
    bufs,
    ready,
    free,
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
    """One split of one kv head. `scale` includes log2(e)."""
    HALVES: gl.constexpr = D // 64
    active = num_active_splits(position, words[WINDOW], words[MAX_SPLITS], min_blocks)
    split = words[ATT_SPLIT]
    if split < active:
        a, b = rotated_rows(
            words, exchange, vectors, rope, position, tag, eps, D, G, H, KVH, QK_NORM
        )
        if TRACE:
            gl.store(stamps + 1, clock())
        a = a.to(gl.bfloat16)
        b = b.to(gl.bfloat16)
        store_halves(qs, a, b, D)
        q0 = queries(qs, 0)
        q1 = queries(qs, HALVES - 1)
        m = gl.full([NUM_WARPS, MMA_M], float("-inf"), gl.float32, layout=QUERY)
        l = gl.zeros([NUM_WARPS, MMA_M], gl.float32, layout=QUERY)
        o0 = gl.zeros([NUM_WARPS, MMA_M, 64], gl.float32, layout=MMA3)
        o1 = o0
        if split == 0:
            m, l = begin_new(qs, scale, G, HALVES)
            o0 = new_value(qs, 0, G)
            o1 = new_value(qs, HALVES - 1, G)
        num_blocks = (position + TILE_ROWS - 1) // TILE_ROWS
        first = first_seen(position, words[WINDOW])
        for block in range(first // TILE_ROWS + split, num_blocks, active):
            it, m, l, o0, o1 = attend_block(
                q0,
                q1,
                bufs,
                ready,
                free,
                it,
                block,
                first,
                position,
                scale,
                m,
                l,
                o0,
                o1,
                HALVES,
                STAGES,
            )
        if TRACE:
            gl.store(stamps + 2, clock())
        write_rows(words, exchange, o0, o1, m, l, ml, scratch, scratch1, tag, active, split, D, G)
        if split == 0:
            append_position(words, cache, position, a, b, D, G)
            fence_all()
    return it


@gluon.jit
def store_halves(qs, a, b, D: gl.constexpr):
    """Both halves of rows of d columns into shared memory, 64 columns a buffer."""
    half: gl.constexpr = D // 2
    if half == 64:
        qs.index(0).store(a)
        qs.index(1).store(b)
    else:
        qs.index(0).slice(0, half, dim=1).store(a)
        qs.index(0).slice(half, half, dim=1).store(b)


@gluon.jit
def queries(qs, h: gl.constexpr):
    """Half h of the queries as an operand of every warp's product."""
    q = gl.expand_dims(qs.index(h).load(gl.SliceLayout(0, Q_DOT)), 0)
    return gl.convert_layout(q.broadcast_to([NUM_WARPS, MMA_M, 64]), Q_DOT)
