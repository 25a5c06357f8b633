"""The loader warp: walks the SM's queue and keeps the ring full, ahead of every dependency.

In: the queue, descriptors of the weight arena and of the KV cache. Out: ring slots, in the order in
which tasks take them. The only waits besides free slots are for the start of a step, before its
first cached keys are read, and for a choice of experts. Next on the walk: ptx/pieces.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from distmega.kernels.gluon_compat import reinterpret, tma_load
from distmega.kernels.hopper.one_row.route import (
    expert_of,
)
from distmega.kernels.hopper.plan.fields import (
    ATT_K_ROW,
    ATT_SPLIT,
    ATT_V_ROW,
    LIN_NUM_ROWS,
    LIN_NUM_TILES_K,
    LIN_PACKED,
    LIN_PAIR_ROW,
    LIN_ROW0,
    LIN_WEIGHT_ROW,
    MAX_EPILOGUES,
    MAX_SPLITS,
    NUM_UNITS,
    OP_ATTENTION,
    OP_ROUTE,
    OPCODE,
    ROW_EXPERT_COLUMNS,
    ROW_EXPERT_ROWS,
    ROW_MATRIX_SHIFT,
    ROW_PAIRED,
    ROW_STATE_POSITION,
    WINDOW,
)
from distmega.kernels.hopper.ptx.device import fetch, keep
from distmega.kernels.hopper.ptx.shapes import (
    SLICE_K,
    SLICES,
    TILE_BYTES,
    TILE_ROWS,
    TILE_SHARED,
    UNIT_ROWS,
    num_halves,
)


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
    # the copy engine writes by a proxy of its own: without this, reads that the barrier says are
    # done may still find what it brings
    fence_async_shared()
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
def unit_row(words, unit, slots, EXPERTS: gl.constexpr):
    """First weight row of a unit. Where rows are of experts, of the one whose slot the unit is in;
    behind its own rows come those of the next expert, which do not count.
    """
    row = words[LIN_WEIGHT_ROW] + unit * UNIT_ROWS
    if EXPERTS is not None and (words[LIN_PACKED] & ROW_EXPERT_ROWS) != 0:
        own = words[LIN_ROW0] // UNIT_ROWS + unit
        first = words[LIN_WEIGHT_ROW]
        if (words[LIN_PACKED] & ROW_PAIRED) != 0:
            first = gl.where(own % 2 == 0, first, words[LIN_PAIR_ROW])
            own = own // 2
        expert = expert_of(slots, own // EXPERTS.slot_units)
        row = first + expert * EXPERTS.width + own % EXPERTS.slot_units * UNIT_ROWS
    elif (words[LIN_PACKED] & ROW_PAIRED) != 0:
        first = gl.where(unit % 2 == 0, words[LIN_WEIGHT_ROW], words[LIN_PAIR_ROW])
        row = first + unit // 2 * UNIT_ROWS
    return row


@gluon.jit
def load_expert_columns(
    words, unit, slots, last_weights, bufs, ready, free, it, EXPERTS: gl.constexpr,
    STAGES: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """UNIT_ROWS rows of the last matrices of all slots' experts, side by side. A tile comes in
    parts, each of one expert; zeros behind the last slot.
    """
    SIZE: gl.constexpr = EXPERTS.copied_slices
    PARTS: gl.constexpr = SLICES // SIZE
    parts = reinterpret(bufs, gl.bfloat16, [STAGES * PARTS, SIZE * UNIT_ROWS, SLICE_K], TILE_SHARED)
    row = words[LIN_WEIGHT_ROW] + unit * UNIT_ROWS
    for k in range(keep(words[LIN_NUM_TILES_K])):
        at = next_slot(ready, free, it, STAGES, AHEAD)
        for part in range(keep(PARTS)):
            own = k * SLICES + part * SIZE
            slot = own // EXPERTS.slot_slices
            is_past = slot >= EXPERTS.num_chosen
            expert = expert_of(slots, gl.where(is_past, 0, slot))
            column = gl.where(is_past, EXPERTS.slot_slices, own % EXPERTS.slot_slices)
            tma_load(
                last_weights,
                [column, row + expert * words[LIN_NUM_ROWS], 0],
                ready.index(at),
                parts.index(at * PARTS + part).reshape([SIZE, UNIT_ROWS, SLICE_K]),
            )
        it += 1
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
    slots,
    chosen_bar,
    spec: gl.constexpr,
):
    """Partition of one warp, which alone fills the ring. weights: a tuple of descriptors, cache:
    one, as of run_row_steps; queue: int32 [num_instructions, 16], of this SM. state: int32, of
    which it reads the position. bufs, ready, free: the ring's slots and mbarriers. step_bar: the
    mbarrier at which the compute warps arrive once a step's cached keys may be read. slots,
    chosen_bar: see route_task.
    """
    EXPERTS: gl.constexpr = spec.experts
    HALVES: gl.constexpr = num_halves(spec.head_dim)
    NUM_MATRICES: gl.constexpr = spec.num_matrices
    STAGES: gl.constexpr = spec.stages
    AHEAD: gl.constexpr = spec.ahead
    it = 0
    num_choices = 0
    position0 = begin(state + ROW_STATE_POSITION, first_position)
    words = fetch(queue, 0)
    for step in range(num_steps):
        position = position0 + step
        for i in range(num_instructions):
            ahead = fetch(queue, gl.where(i + 1 == num_instructions, 0, i + 1))
            if spec.attends and words[OPCODE] == OP_ATTENTION:
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
            elif EXPERTS is not None and words[OPCODE] == OP_ROUTE:
                mbarrier.wait(chosen_bar.index(0), num_choices & 1)
                num_choices += 1
            elif EXPERTS is not None and (
                (words[OPCODE] < MAX_EPILOGUES) & ((words[LIN_PACKED] & ROW_EXPERT_COLUMNS) != 0)
            ):
                for unit in range(keep(words[NUM_UNITS])):
                    it = load_expert_columns(
                        words, unit, slots, weights[NUM_MATRICES], bufs, ready, free, it, EXPERTS,
                        STAGES, AHEAD,
                    )  # fmt: skip
            elif words[OPCODE] < MAX_EPILOGUES:
                matrix = words[LIN_PACKED] >> ROW_MATRIX_SHIFT
                for unit in range(keep(words[NUM_UNITS])):
                    row = unit_row(words, unit, slots, EXPERTS)
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
