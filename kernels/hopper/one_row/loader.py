"""The loader warp: walks the SM's queue and keeps the ring full, ahead of every dependency.

In: the queue, descriptors of the weight arena and of the KV cache. Out: ring slots, in the order in
which tasks take them. The only wait besides free slots is for the start of a step, before its
first cached keys are read. Next on the walk: ptx/pieces.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from distmega.kernels.gluon_compat import tma_load
from distmega.kernels.hopper.plan.fields import (
    ATT_K_ROW,
    ATT_SPLIT,
    ATT_V_ROW,
    LIN_NUM_TILES_K,
    LIN_PACKED,
    LIN_PAIR_ROW,
    LIN_WEIGHT_ROW,
    MATRIX_SHIFT,
    MAX_EPILOGUES,
    MAX_SPLITS,
    NUM_UNITS,
    OP_ATTENTION,
    OPCODE,
    PAIRED,
    STATE_POSITION,
    WINDOW,
)
from distmega.kernels.hopper.ptx.device import fetch, keep
from distmega.kernels.hopper.ptx.shapes import SLICE_K, SLICES, TILE_BYTES, TILE_ROWS, UNIT_ROWS


@gluon.jit
def begin(state, given):
    """What a launch begins with: given with it, or -1 for the word of the state."""
    return gl.where(given >= 0, given, gl.load(state))


@gluon.jit
def first_seen(position, window):
    """First cached position that the query at `position` sees."""
    return gl.maximum(position + 1 - window, 0)


@gluon.jit
def num_active_splits(position, window, max_splits, min_blocks):
    """Splits that have work, the new position included: at least one, at most max_splits, each of
    at least min_blocks blocks where there are several.
    """
    blocks = position // TILE_ROWS + 1 - first_seen(position, window) // TILE_ROWS
    return gl.maximum(gl.minimum(blocks // min_blocks, max_splits), 1)


@gluon.jit
def next_slot(ready, free, it, STAGES: gl.constexpr, AHEAD: gl.constexpr):
    """The ring slot that `it` means, once it is free, its barrier set for a tile.

    No more than AHEAD loads are under way at a time: that many fill the memory's pipe, and more
    would only stand in a queue that every poll of a flagged word has to pass.
    """
    slot = it % STAGES
    mbarrier.wait(free.index(slot), ((it // STAGES) & 1) ^ 1)
    if AHEAD < STAGES:
        before = gl.maximum(it - AHEAD, 0)
        landed = ready.index(before % STAGES)
        mbarrier.wait(landed, (before // STAGES) & 1, pred=it >= AHEAD)
    mbarrier.expect(ready.index(slot), TILE_BYTES)
    return slot


@gluon.jit
def load_tile(
    weights,
    matrix,
    row,
    k,
    bufs,
    ready,
    free,
    it,
    NUM_MATRICES: gl.constexpr,
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """UNIT_ROWS rows of a weight matrix, TILE_K columns; zeros past the last."""
    slot = next_slot(ready, free, it, STAGES, AHEAD)
    tile = bufs.index(slot).reshape([SLICES, UNIT_ROWS, SLICE_K])
    for i in gl.static_range(NUM_MATRICES):
        if matrix == i:
            tma_load(weights[i], [k * SLICES, row, 0], ready.index(slot), tile)
    return it + 1


@gluon.jit
def load_unit(
    weights,
    matrix,
    row,
    num_tiles_k,
    bufs,
    ready,
    free,
    it,
    NUM_MATRICES: gl.constexpr,
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """UNIT_ROWS rows of a weight matrix, a tile of TILE_K columns a slot; zeros past the last."""
    for k in range(keep(num_tiles_k)):
        it = load_tile(weights, matrix, row, k, bufs, ready, free, it, NUM_MATRICES, STAGES, AHEAD)
    return it


@gluon.jit
def load_block(
    cache,
    row,
    bufs,
    ready,
    free,
    it,
    HALVES: gl.constexpr,
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """TILE_ROWS cached positions, 64 columns a slot."""
    for half in gl.static_range(HALVES):
        slot = next_slot(ready, free, it, STAGES, AHEAD)
        tma_load(cache, [row, half * SLICE_K], ready.index(slot), bufs.index(slot))
        it += 1
    return it


@gluon.jit
def loader(
    weights,
    cache,
    queue,
    num_instructions,
    num_steps,
    first_position,
    state,
    min_blocks,
    bufs,
    ready,
    free,
    step_bar,
    ATTENDS: gl.constexpr,
    HALVES: gl.constexpr,
    NUM_MATRICES: gl.constexpr,
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """Partition of one warp. ATTENDS: whether the segment has attention. HALVES: ring slots a block
    of keys takes (head dim / 64).
    """
    it = 0
    position0 = begin(state + STATE_POSITION, first_position)
    words = fetch(queue, 0)
    for step in range(num_steps):
        position = position0 + step
        for i in range(num_instructions):
            ahead = fetch(queue, gl.where(i + 1 == num_instructions, 0, i + 1))
            if ATTENDS and words[OPCODE] == OP_ATTENTION:
                mbarrier.wait(step_bar.index(0), step & 1)
                active = num_active_splits(position, words[WINDOW], words[MAX_SPLITS], min_blocks)
                first = first_seen(position, words[WINDOW]) // TILE_ROWS
                num_blocks = position // TILE_ROWS + 1
                if words[ATT_SPLIT] < active:
                    for block in range(keep(first + words[ATT_SPLIT]), num_blocks, active):
                        row = block * TILE_ROWS
                        it = load_block(
                            cache,
                            words[ATT_K_ROW] + row,
                            bufs,
                            ready,
                            free,
                            it,
                            HALVES,
                            STAGES,
                            AHEAD,
                        )
                        it = load_block(
                            cache,
                            words[ATT_V_ROW] + row,
                            bufs,
                            ready,
                            free,
                            it,
                            HALVES,
                            STAGES,
                            AHEAD,
                        )
            elif words[OPCODE] < MAX_EPILOGUES:
                matrix = words[LIN_PACKED] >> MATRIX_SHIFT
                for unit in range(keep(words[NUM_UNITS])):
                    row = words[LIN_WEIGHT_ROW] + unit * UNIT_ROWS
                    if (words[LIN_PACKED] & PAIRED) != 0:
                        first = gl.where(unit % 2 == 0, words[LIN_WEIGHT_ROW], words[LIN_PAIR_ROW])
                        row = first + unit // 2 * UNIT_ROWS
                    it = load_unit(
                        weights,
                        matrix,
                        row,
                        words[LIN_NUM_TILES_K],
                        bufs,
                        ready,
                        free,
                        it,
                        NUM_MATRICES,
                        STAGES,
                        AHEAD,
                    )
            words = ahead
