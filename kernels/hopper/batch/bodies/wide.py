"""Attention of the batched kernel with heads of more than 128 elements.

In: queries, the new key and value in shared memory, keys and values in the ring. Out: as of
attention.attend_piece, in another form. A warp that had all columns of its own positions would need
more registers than there are: here scores of a block are shared, and a warp has 8 of each 64
columns of the outputs, of all positions. Next on the walk: attention.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from distmega.kernels.hopper.batch.bodies.blocks import capped
from distmega.kernels.hopper.plan.fields import LOG2_E
from distmega.kernels.hopper.ptx.device import single
from distmega.kernels.hopper.ptx.shapes import (
    GROUP_LIMIT,
    MMA_M,
    TILE_ROWS,
    WARP_SUM,
    head_rows,
    num_halves,
)

MMA2 = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 8], [16, 8]))
"""[16 queries, columns or positions], 8 a warp."""
LEFT = gl.constexpr(gl.DotOperandLayout(0, MMA2.value, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, MMA2.value, 2))
OF_QUERIES = gl.constexpr(gl.SliceLayout(1, MMA2.value))
OF_POSITIONS = gl.constexpr(gl.SliceLayout(0, MMA2.value))


@gluon.jit
def wide_biases(table, query0, t, seen, spec: gl.constexpr):
    """What is added to the scores [16 queries, 128] of positions t, times log2(e); zeros where they
    are not seen. table: f32 [positions, query heads].
    """
    row = gl.arange(0, MMA_M, layout=OF_QUERIES)
    # rows of queries past the last take the last again
    query = query0 + gl.minimum(row, spec.num_queries - 1)
    at = gl.expand_dims(t, 0) * spec.num_heads + gl.expand_dims(query, 1)
    return gl.load(table + at, mask=gl.expand_dims(seen, 0) & (at >= 0), other=0.0) * LOG2_E


@gluon.jit
def attend_wide_block(
    qs, ring, it, block, first, position, scale, table, query0, m, l, outputs, spec: gl.constexpr
):
    """Online softmax over the 128 cached positions of one block; positions before `first` are out
    of sight, those from `position` on are stale, both masked. qs: bf16 [slots, 16, 64], the
    queries. m, l: f32 [16]; outputs: f32 [16, 64] of each 64 columns. table: see
    blocks.attend_block.
    """
    HALVES: gl.constexpr = num_halves(spec.head_dim)
    STAGES: gl.constexpr = spec.stages
    t = block * TILE_ROWS + gl.arange(0, TILE_ROWS, layout=OF_POSITIONS)
    seen = (t >= first) & (t < position)
    if spec.biased:
        biases = wide_biases(table, query0, t, seen, spec)
    s = gl.zeros([MMA_M, TILE_ROWS], gl.float32, layout=MMA2)
    for h in gl.static_range(HALVES):
        slot = (it + h) % STAGES
        mbarrier.wait(ring.ready.index(slot), ((it + h) // STAGES) & 1)
        k = ring.slots.index(slot).permute([1, 0]).load(RIGHT)
        mbarrier.arrive(ring.free.index(slot), count=1)
        s = mma_v2(qs.index(h).load(LEFT), k, s)
    it += HALVES
    s = capped(s * scale, spec.softcap)
    if spec.biased:
        s += biases
    s = gl.where(gl.expand_dims(seen, 0), s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, axis=1))
    m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = gl.exp2(m - m_safe)
    p = gl.exp2(s - gl.expand_dims(m_safe, 1))
    l = l * alpha + gl.sum(p, axis=1)
    p = gl.convert_layout(p.to(gl.bfloat16), LEFT)
    alpha = gl.expand_dims(alpha, 1)
    found = ()
    for h in gl.static_range(HALVES):
        slot = (it + h) % STAGES
        mbarrier.wait(ring.ready.index(slot), ((it + h) // STAGES) & 1)
        v = ring.slots.index(slot).load(RIGHT)
        mbarrier.arrive(ring.free.index(slot), count=1)
        found += single(mma_v2(p, v, outputs[h] * alpha))
    it += HALVES
    return it, m_new, l, found


@gluon.jit
def begin_wide(qs, scale, table, query0, position, is_first, spec: gl.constexpr):
    """State of the online softmax after the new position alone, or before all where not is_first:
    maxima and sums [16], outputs [16, 64] of each 64 columns.
    """
    G: gl.constexpr = spec.num_queries
    ROWS: gl.constexpr = head_rows(64, 4)
    s = gl.zeros([MMA_M], gl.float32, layout=gl.SliceLayout(1, ROWS))
    zeros = gl.zeros([MMA_M, 64], gl.float32, layout=MMA2)
    outputs = ()
    for h in gl.static_range(num_halves(spec.head_dim)):
        q = qs.index(h).load(ROWS).to(gl.float32)
        k = qs.index(h).slice(G, 1, dim=0).load(ROWS).to(gl.float32)
        s += gl.sum(q * k, axis=1)
        v = qs.index(h).slice(G + 1, 1, dim=0).load(MMA2)
        outputs += single(gl.where(is_first, v.to(gl.float32) + zeros, 0.0))
    s = capped(s * scale, spec.softcap)
    if spec.biased:
        row = gl.arange(0, MMA_M, layout=gl.SliceLayout(1, ROWS))
        query = query0 + gl.minimum(row, G - 1)
        s += gl.load(table + position * spec.num_heads + query) * LOG2_E
    s = gl.convert_layout(s, OF_QUERIES)
    m = gl.where(is_first, s, float("-inf"))
    l = gl.where(is_first & (s == s), 1.0, 0.0)
    return m, l, outputs


@gluon.jit
def rows_of_queries(x):
    """The rows [8, 64] of queries among 16, in the layout of WARP_SUM's rows."""
    low, _ = gl.split(gl.permute(gl.reshape(x, [2, GROUP_LIMIT, 64]), [1, 2, 0]))
    return gl.convert_layout(low, gl.SliceLayout(0, WARP_SUM))


@gluon.jit
def numbers_of_queries(x):
    """Likewise of a number [16] of each."""
    low, _ = gl.split(gl.permute(gl.reshape(x, [2, GROUP_LIMIT]), [1, 0]))
    return gl.convert_layout(low, gl.SliceLayout(1, gl.SliceLayout(0, WARP_SUM)))
