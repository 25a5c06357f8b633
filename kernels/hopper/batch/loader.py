"""The loader warp of the batched kernel: keeps the ring full, ahead of every dependency.

In: the queue, descriptors of the weight arena and of the KV cache, positions. Out: ring slots in
the order in which the tasks of linear.py and attention.py take them. The only waits besides free
slots are for the start of a step, before its first cached keys are read, and for a choice of
experts. Next on the walk: linear.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from distmega.kernels.hopper.batch.bodies.attention import blocks_of, count_blocks, first_piece
from distmega.kernels.hopper.batch.bodies.experts import (
    group_from,
    is_of_columns,
    is_of_rows,
    share_of,
    tiles_of,
    units_a_hit,
)
from distmega.kernels.hopper.batch.route import expert_of_hit, number_of_choice
from distmega.kernels.hopper.batch_plan.fields import (
    ATT_K_ROW,
    ATT_V_ROW,
    ATT_WINDOW,
    GROUP_UNITS,
    LIN_NUM_TILES_K,
    LIN_PAIR_ROW,
    LIN_WEIGHT_ROW,
    MATRIX_SHIFT,
    MAX_EPILOGUES,
    NUM_ROWS,
    NUM_UNITS,
    OP_ATTENTION,
    OPCODE,
    PACKED,
    PAIRED,
)
from distmega.kernels.hopper.one_row.loader import load_block, load_tile
from distmega.kernels.hopper.plan.types import MAX_MATRICES
from distmega.kernels.hopper.ptx.device import fetch, keep
from distmega.kernels.hopper.ptx.shapes import TILE_ROWS, UNIT_ROWS, num_halves

NUM_MATRICES = gl.constexpr(MAX_MATRICES)


@gluon.jit
def load_rows(words, weights, ring, it, STAGES: gl.constexpr, AHEAD: gl.constexpr):
    """The rows of a linear task: groups of units, each group tile by tile along k."""
    num_units = words[NUM_UNITS]
    for group in range(0, keep(num_units), GROUP_UNITS):
        stop = gl.minimum(group + GROUP_UNITS, num_units)
        for k in range(keep(words[LIN_NUM_TILES_K])):
            for unit in range(keep(group), keep(stop)):
                row = words[LIN_WEIGHT_ROW] + unit * UNIT_ROWS
                if (words[PACKED] & PAIRED) != 0:
                    first = gl.where(unit % 2 == 0, words[LIN_WEIGHT_ROW], words[LIN_PAIR_ROW])
                    row = first + unit // 2 * UNIT_ROWS
                it = load_tile(
                    weights, words[PACKED] >> MATRIX_SHIFT, row, k, ring.slots, ring.ready,
                    ring.free, it, NUM_MATRICES, STAGES, AHEAD,
                )
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
                if (words[PACKED] & PAIRED) != 0:
                    row = gl.where(unit % 2 == 0, first, second) + unit // 2 * UNIT_ROWS
                it = load_tile(
                    weights, words[PACKED] >> MATRIX_SHIFT, row + behind, k, ring.slots, ring.ready,
                    ring.free, it, NUM_MATRICES, STAGES, AHEAD,
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
    weights, cache, queue, num_instructions, num_steps, state, batch, num_sms, max_context, ring,
    step_bar, chosen, opened_bar, chosen_bar, spec: gl.constexpr,
):
    """Partition of one warp, which alone fills the ring. weights: a tuple of descriptors, cache:
    one, as of decode_batch; queue: int32 [num_instructions, 16], of this SM. step_bar: the mbarrier
    at which the compute warps arrive when the positions of a step are known. chosen, opened_bar,
    chosen_bar: see route_task.
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
            elif EXPERTS is None and words[OPCODE] < MAX_EPILOGUES:
                it = load_rows(words, weights, ring, it, spec.stages, spec.ahead)
            words = ahead
