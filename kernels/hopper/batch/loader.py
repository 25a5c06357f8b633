"""The loader warp of the batched kernel: keeps the ring full, ahead of every dependency.

In: the queue, descriptors of the weight arena and of the KV cache, positions. Out: ring slots in
the order in which the tasks of linear.py and attention.py take them. The only waits besides free
slots are for the start of a step, before its first cached keys are read, and for a choice of
experts. Next on the walk: linear.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from distmega.kernels.gluon_compat import reinterpret, tma_load
from distmega.kernels.hopper.batch.bodies.attention import (
    blocks_of,
    count_blocks,
    first_piece,
    first_piece_of_many,
)
from distmega.kernels.hopper.batch.bodies.experts import (
    group_from,
    is_of_columns,
    is_of_rows,
    share_of,
    tiles_of,
    units_a_hit,
)
from distmega.kernels.hopper.batch.device import stamp
from distmega.kernels.hopper.batch.route import expert_of_hit, number_of_choice
from distmega.kernels.hopper.batch_plan.fields import (
    ATT_K_ROW,
    ATT_V_ROW,
    ATT_WINDOW,
    BATCH,
    BATCH_MATRIX_SHIFT,
    BATCH_PAIRED,
    GROUP_UNITS,
    LIN_NUM_TILES_K,
    LIN_PAIR_ROW,
    LIN_WEIGHT_ROW,
    MAX_EPILOGUES,
    NUM_ROWS,
    NUM_UNITS,
    OP_ATTENTION,
    OP_PRODUCT,
    OPCODE,
    PACKED,
    PROD_FIRST,
    STAMP_LOADED,
)
from distmega.kernels.hopper.one_row.loader import load_block, load_tile, next_slot
from distmega.kernels.hopper.plan.types import MAX_MATRICES
from distmega.kernels.hopper.ptx.device import fetch, keep
from distmega.kernels.hopper.ptx.shapes import (
    SLICE_K,
    TILE_ROWS,
    UNIT_ROWS,
    WEIGHT_SHARED,
    num_halves,
)

NUM_MATRICES = gl.constexpr(MAX_MATRICES)
HALF_ROWS = gl.constexpr(64)
"""Rows of half a tile of a product."""


@gluon.jit
def load_rows(words, weights, ring, it, STAGES: gl.constexpr, AHEAD: gl.constexpr):
    """The rows of a linear task: groups of units, each group tile by tile along k."""
    num_units = words[NUM_UNITS]
    for group in range(0, keep(num_units), GROUP_UNITS):
        stop = gl.minimum(group + GROUP_UNITS, num_units)
        for k in range(keep(words[LIN_NUM_TILES_K])):
            for unit in range(keep(group), keep(stop)):
                row = words[LIN_WEIGHT_ROW] + unit * UNIT_ROWS
                if (words[PACKED] & BATCH_PAIRED) != 0:
                    first = gl.where(unit % 2 == 0, words[LIN_WEIGHT_ROW], words[LIN_PAIR_ROW])
                    row = first + unit // 2 * UNIT_ROWS
                it = load_tile(
                    weights, words[PACKED] >> BATCH_MATRIX_SHIFT, row, k, ring.slots, ring.ready,
                    ring.free, it, NUM_MATRICES, STAGES, AHEAD,
                )
    return it


@gluon.jit
def load_steps(words, weights, ring, it, STAGES: gl.constexpr, AHEAD: gl.constexpr):
    """The steps of a product of more than 16 rows: of each 64 columns of two halves of a tile, each
    the half of another stream where there are two.
    """
    halves = reinterpret(
        ring.slots, gl.bfloat16, [2 * STAGES, 1, HALF_ROWS, SLICE_K], WEIGHT_SHARED
    )
    steps = words[LIN_NUM_TILES_K]
    start = words[PROD_FIRST]
    for step in range(keep(start), keep(start + words[NUM_UNITS])):
        tile = step // steps
        if (words[PACKED] & BATCH_PAIRED) != 0:
            row0 = words[LIN_WEIGHT_ROW] + tile * HALF_ROWS
            row1 = words[LIN_PAIR_ROW] + tile * HALF_ROWS
        else:
            row0 = words[LIN_WEIGHT_ROW] + tile * (2 * HALF_ROWS)
            row1 = row0 + HALF_ROWS
        for half in gl.static_range(2):
            slot = next_slot(ring.ready, ring.free, it, STAGES, AHEAD)
            k = step % steps * 2 + half
            for i in gl.static_range(NUM_MATRICES):
                if words[PACKED] >> BATCH_MATRIX_SHIFT == i:
                    ready = ring.ready.index(slot)
                    tma_load(weights[i], [k, row0, 0], ready, halves.index(2 * slot))
                    tma_load(weights[i], [k, row1, 0], ready, halves.index(2 * slot + 1))
            it += 1
    return it


@gluon.jit
def load_expert_rows(
    words, weights, ring, it, sm, num_sms, chosen, EXPERTS: gl.constexpr, STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """The same where there are experts, in the order of linear.py: of first matrices the units of
    this SM, of last ones those of all experts that are hit, one after the other along k.
    """
    group, stop, chunks = share_of(words, chosen, sm, num_sms, EXPERTS)
    of_columns = is_of_columns(words)
    while group < stop:
        end, hit = group_from(words, group, stop, EXPERTS)
        first = words[LIN_WEIGHT_ROW]
        second = words[LIN_PAIR_ROW]
        start = gl.to_tensor(0)
        if is_of_rows(words):
            expert = expert_of_hit(chosen, hit)
            first += expert * EXPERTS.width
            second += expert * EXPERTS.width
            start = hit * units_a_hit(words, EXPERTS)
        for chunk in range(keep(chunks)):
            k = chunk
            behind = gl.to_tensor(0)
            if of_columns:
                k = chunk % tiles_of(EXPERTS)
                expert = expert_of_hit(chosen, chunk // tiles_of(EXPERTS))
                behind = expert * words[NUM_ROWS]
            for unit in range(keep(group - start), keep(end - start)):
                row = first + unit * UNIT_ROWS
                if (words[PACKED] & BATCH_PAIRED) != 0:
                    row = gl.where(unit % 2 == 0, first, second) + unit // 2 * UNIT_ROWS
                it = load_tile(
                    weights, words[PACKED] >> BATCH_MATRIX_SHIFT, row + behind, k, ring.slots,
                    ring.ready, ring.free, it, NUM_MATRICES, STAGES, AHEAD,
                )
        group = end
    return it


@gluon.jit
def load_share(
    words, cache, state, batch, step, sm, num_sms, max_context, ring, it, spec: gl.constexpr
):
    """The cached blocks of this SM's share, keys and values of a block in turn."""
    window = words[ATT_WINDOW]
    PARTS: gl.constexpr = spec.num_parts
    HEADS: gl.constexpr = spec.num_kv_heads * PARTS
    HALVES: gl.constexpr = num_halves(spec.head_dim)
    if spec.rows > BATCH:
        _, sequence, head, block, left, _ = first_piece_of_many(
            state, batch, step, window, sm, num_sms, HEADS, spec.rows, 1
        )
    else:
        total = count_blocks(state, batch, step, window, HEADS)
        sequence, head, block, left, _ = first_piece(
            state, batch, step, window, total, sm, num_sms, HEADS
        )
    while left > 0:
        first, num_blocks = blocks_of(state, sequence, step, window)
        num = gl.minimum(left, num_blocks - block)
        row0 = (sequence * spec.num_kv_heads + head // PARTS) * max_context
        for i in range(keep(first + block), keep(first + block + num)):
            row = row0 + i * TILE_ROWS
            it = load_block(
                cache, words[ATT_K_ROW] + row, ring.slots, ring.ready, ring.free, it, HALVES,
                spec.stages, spec.ahead,
            )
            it = load_block(
                cache, words[ATT_V_ROW] + row, ring.slots, ring.ready, ring.free, it, HALVES,
                spec.stages, spec.ahead,
            )
        left -= num
        block = 0
        is_next = head + 1 == HEADS
        sequence = gl.where(is_next, sequence + 1, sequence)
        head = gl.where(is_next, 0, head + 1)
    return it


@gluon.jit
def loader(
    weights, cache, queue, num_instructions, num_steps, state, batch, num_sms, max_context, trace,
    ring, step_bar, chosen, opened_bar, chosen_bar, spec: gl.constexpr,
):
    """Partition of one warp, which alone fills the ring. weights: a tuple of descriptors, cache:
    one, trace, as of run_batch_steps; queue: int32 [num_instructions, 16], of this SM. step_bar:
    the mbarrier at which the compute warps arrive when the positions of a step are known. chosen,
    opened_bar, chosen_bar: see route_task.
    """
    EXPERTS: gl.constexpr = spec.experts
    sm = gl.program_id(0)
    it = 0
    words = fetch(queue, 0)
    for step in range(num_steps):
        for i in range(num_instructions):
            ahead = fetch(queue, gl.where(i + 1 == num_instructions, 0, i + 1))
            if spec.attends and words[OPCODE] == OP_ATTENTION:
                mbarrier.wait(step_bar.index(0), step & 1)
                it = load_share(
                    words, cache, state, batch, step, sm, num_sms, max_context, ring, it, spec
                )
            elif EXPERTS is not None and words[OPCODE] < MAX_EPILOGUES:
                if is_of_rows(words):
                    mbarrier.arrive(opened_bar.index(0), count=1)
                    mbarrier.wait(chosen_bar.index(0), number_of_choice(words, step) & 1)
                it = load_expert_rows(
                    words, weights, ring, it, sm, num_sms, chosen, EXPERTS, spec.stages, spec.ahead
                )
            elif spec.rows > BATCH and words[OPCODE] == OP_PRODUCT:
                it = load_steps(words, weights, ring, it, spec.stages, spec.ahead)
            elif spec.rows == BATCH and EXPERTS is None and words[OPCODE] < MAX_EPILOGUES:
                it = load_rows(words, weights, ring, it, spec.stages, spec.ahead)
            stamp(trace, step, num_instructions, i, STAMP_LOADED)
            words = ahead
