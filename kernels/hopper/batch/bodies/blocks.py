"""Attention of the batched kernel on one block of cached positions, and on the new one.

In: queries, the new key and value in shared memory, keys and values in the ring. Out: what each
warp has of its 16 positions. Next on the walk: attention.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from distmega.kernels.hopper.plan.fields import LOG2_E
from distmega.kernels.hopper.ptx.shapes import (
    KV_DOT,
    MMA3,
    MMA_M,
    NUM_WARPS,
    POSITIONS,
    Q_DOT,
    QUERY,
    TILE_ROWS,
    head_rows,
    num_halves,
)


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


@gluon.jit
def capped(s, SOFTCAP: gl.constexpr):
    """Scores, times log2(e), as softcap * tanh(score / softcap), times that too; unless it is 0."""
    if SOFTCAP == 0.0:
        return s
    else:
        # tanh(x) = 1 - 2 / (1 + exp(2 x)), which is right where the power is 0 or infinite
        power = gl.exp2(s * (2.0 / SOFTCAP))
        return (SOFTCAP * LOG2_E) * (1.0 - 2.0 / (1.0 + power))


@gluon.jit
def block_biases(table, query0, t, seen, spec: gl.constexpr):
    """What is added to the scores [8 warps, 16 queries, 16] of positions t, times log2(e); zeros
    where they are not seen. table: f32 [positions, query heads].
    """
    row = gl.arange(0, MMA_M, layout=gl.SliceLayout(0, QUERY))
    # rows of queries past the last take the last again
    query = query0 + gl.minimum(row, spec.num_queries - 1)
    at = gl.expand_dims(t, 1) * spec.num_heads + gl.expand_dims(gl.expand_dims(query, 0), 2)
    seen = gl.expand_dims(seen, 1) & (at >= 0)
    return gl.load(table + at, mask=seen, other=0.0) * LOG2_E


@gluon.jit
def attend_block(
    q0,
    q1,
    ring,
    it,
    block,
    first,
    position,
    scale,
    table,
    query0,
    m,
    l,
    o0,
    o1,
    spec: gl.constexpr,
):
    """Online softmax over the 128 cached positions of one block, 16 a warp, each warp on its own;
    positions before `first` are out of sight, those from `position` on are stale, both masked.
    table: of biases of query heads, of which the first is number query0, None unless spec.biased.
    """
    HALVES: gl.constexpr = num_halves(spec.head_dim)
    STAGES: gl.constexpr = spec.stages
    view: gl.constexpr = [NUM_WARPS, POSITIONS, 64]
    warp = gl.arange(0, NUM_WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(1, MMA3)))
    column = gl.arange(0, POSITIONS, layout=gl.SliceLayout(0, gl.SliceLayout(1, MMA3)))
    if spec.biased:
        at = gl.expand_dims(warp * POSITIONS, 1) + gl.expand_dims(column, 0) + block * TILE_ROWS
        biases = block_biases(table, query0, at, (at >= first) & (at < position), spec)
    s = gl.zeros([NUM_WARPS, MMA_M, POSITIONS], gl.float32, layout=MMA3)
    for h in gl.static_range(HALVES):
        slot = (it + h) % STAGES
        mbarrier.wait(ring.ready.index(slot), ((it + h) // STAGES) & 1)
        k = ring.slots.index(slot).reshape(view).permute([0, 2, 1]).load(KV_DOT)
        mbarrier.arrive(ring.free.index(slot), count=1)
        s = mma_v2(q0 if h == 0 else q1, k, s)
    it += HALVES
    t = gl.expand_dims(warp * POSITIONS, 1) + gl.expand_dims(column, 0) + block * TILE_ROWS
    seen = (t >= first) & (t < position)
    s = capped(s * scale, spec.softcap)
    if spec.biased:
        s += biases
    s = gl.where(gl.expand_dims(seen, 1), s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, axis=2))
    m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = gl.exp2(m - m_safe)
    p = gl.exp2(s - gl.expand_dims(m_safe, 2))
    l = l * alpha + gl.sum(p, axis=2)
    p = gl.convert_layout(p.to(gl.bfloat16), Q_DOT)
    alpha = gl.expand_dims(alpha, 2)
    slot = it % STAGES
    mbarrier.wait(ring.ready.index(slot), (it // STAGES) & 1)
    v = ring.slots.index(slot).reshape(view).load(KV_DOT)
    mbarrier.arrive(ring.free.index(slot), count=1)
    o0 = mma_v2(p, v, o0 * alpha)
    if HALVES == 2:
        slot = (it + 1) % STAGES
        mbarrier.wait(ring.ready.index(slot), ((it + 1) // STAGES) & 1)
        v = ring.slots.index(slot).reshape(view).load(KV_DOT)
        mbarrier.arrive(ring.free.index(slot), count=1)
        o1 = mma_v2(p, v, o1 * alpha)
    it += HALVES
    return it, m_new, l, o0, o1


@gluon.jit
def begin_new(qs, scale, table, query0, position, spec: gl.constexpr):
    """State of the online softmax after the new position alone, held by the first warp. table: see
    attend_block.
    """
    G: gl.constexpr = spec.num_queries
    ROWS: gl.constexpr = head_rows(64, 4)
    warp = gl.arange(0, NUM_WARPS, layout=gl.SliceLayout(1, QUERY))
    mine = gl.expand_dims(warp, 1) == 0
    s = gl.zeros([MMA_M], gl.float32, layout=gl.SliceLayout(1, ROWS))
    for h in gl.static_range(num_halves(spec.head_dim)):
        q = qs.index(h).load(ROWS).to(gl.float32)
        k = qs.index(h).slice(G, 1, dim=0).load(ROWS).to(gl.float32)
        s += gl.sum(q * k, axis=1)
    s = capped(s * scale, spec.softcap)
    if spec.biased:
        row = gl.arange(0, MMA_M, layout=gl.SliceLayout(1, ROWS))
        query = query0 + gl.minimum(row, G - 1)
        s += gl.load(table + position * spec.num_heads + query) * LOG2_E
    s = gl.expand_dims(gl.convert_layout(s, gl.SliceLayout(0, QUERY)), 0)
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
