"""Linear tasks of the batched kernel: the ring's weight tiles times x of 16 sequences, read once
for up to 64 rows, then the epilogue.

In: x in the order of batch_device.py, weight tiles in the ring. Out: the op's output. The weight of
a norm is multiplied into x by whoever writes x, its factor into the result by whoever reads it.
Next on the walk: batch_attention.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from distmega.kernels.gluon_compat import reinterpret
from distmega.kernels.hopper.batch_device import load_x, pair_index
from distmega.kernels.hopper.batch_fields import (
    BATCH,
    BY_SM,
    COLUMNS,
    DST,
    EMB_FIRST_COLUMN,
    EMB_FIRST_TOKEN,
    EMB_NUM_COLUMNS,
    EMB_NUM_TOKENS,
    GATE_PAIRS,
    GATE_UP,
    GROUP_UNITS,
    LIN_BIAS,
    LIN_NEXT_NORM,
    LIN_NORM,
    LIN_NUM_TILES_K,
    LIN_ROW0,
    LIN_SRC,
    MAX_SMS,
    NUM_ROWS,
    NUM_UNITS,
    OP_GATED,
    OP_HEAD,
    OP_QKV,
    OP_RESIDUAL,
    OPCODE,
    PAIRS,
    PARTS,
    ROUND,
    ROUND_COLUMNS,
    ROUND_UNITS,
)
from distmega.kernels.hopper.batch_limits import NO_ROW
from distmega.kernels.hopper.batch_team import (
    exchange_of,
    likeliest,
    push_round,
    sum_round_of_ranks,
)
from distmega.kernels.hopper.device import bf16_pair, keep
from distmega.kernels.hopper.fields import DRAWN, NO_REPORT
from distmega.kernels.hopper.shapes import (
    MMA3,
    MMA_M,
    NUM_WARPS,
    SLICE_K,
    UNIT_ROWS,
    W_DOT,
    WEIGHT_SHARED,
)
from distmega.kernels.hopper.team import read_alarm


@gluon.jit
def multiply_tile(x0, x1, acc, bufs, ready, free, it, STAGES: gl.constexpr):
    """The next ring slot, 8 rows by 1024 columns, times x: [8 warps, 16, 8 rows] more sums."""
    slot = it % STAGES
    mbarrier.wait(ready.index(slot), (it // STAGES) & 1)
    halves = reinterpret(
        bufs, gl.bfloat16, [2 * STAGES, NUM_WARPS, UNIT_ROWS, SLICE_K], WEIGHT_SHARED
    )
    w0 = halves.index(2 * slot).permute([0, 2, 1]).load(W_DOT)
    w1 = halves.index(2 * slot + 1).permute([0, 2, 1]).load(W_DOT)
    mbarrier.arrive(free.index(slot), count=1)
    acc = mma_v2(x0, w0, acc)
    return mma_v2(x1, w1, acc), it + 1


@gluon.jit
def norm_factors(sums, inv_hidden, eps):
    """Factor of each sequence's norm, [128] columns, from every SM's part of the sum of squares."""
    b = gl.expand_dims(gl.arange(0, BATCH, layout=gl.SliceLayout(1, BY_SM)), 1)
    sm = gl.expand_dims(gl.arange(0, MAX_SMS, layout=gl.SliceLayout(0, BY_SM)), 0)
    parts = gl.load(sums + b * MAX_SMS + sm, cache_modifier=".cg")
    factors = gl.rsqrt(gl.sum(parts, axis=1) * inv_hidden + eps)
    return spread(factors)


@gluon.jit
def spread(values):
    """[16] by sequence to [128] by column of a round."""
    wide = gl.expand_dims(values, 1).broadcast_to([BATCH, UNIT_ROWS])
    return gl.convert_layout(gl.reshape(wide, [COLUMNS]), ROUND_COLUMNS)


@gluon.jit
def sum_round(red):
    """[4 units, 128] sums over the warps."""
    parts = red.reshape([ROUND_UNITS * NUM_WARPS, COLUMNS]).load(PARTS)
    parts = gl.sum(gl.reshape(parts, [ROUND_UNITS, NUM_WARPS, COLUMNS]), axis=1)
    return gl.convert_layout(parts, ROUND)


@gluon.jit
def round_rows(words, unit):
    """For a round from `unit` on: rows [4, 128], sequences [1, 128], and which rows are its own."""
    u = gl.expand_dims(gl.arange(0, ROUND_UNITS, layout=gl.SliceLayout(1, ROUND)), 1)
    c = gl.expand_dims(gl.arange(0, COLUMNS, layout=ROUND_COLUMNS), 0)
    row = words[LIN_ROW0] + (unit + u) * UNIT_ROWS + c % UNIT_ROWS
    limit = gl.minimum(words[LIN_ROW0] + words[NUM_UNITS] * UNIT_ROWS, words[NUM_ROWS])
    return row, c // UNIT_ROWS, row < limit


@gluon.jit
def store_pairs(acts, first, y, unit, words):
    """bf16 pairs of a round into the activations that start at element `first`."""
    low, high = gl.split(gl.reshape(y, [ROUND_UNITS, COLUMNS // 2, 2]))
    payload = gl.convert_layout(bf16_pair(low, high), PAIRS)
    u = gl.expand_dims(gl.arange(0, ROUND_UNITS, layout=gl.SliceLayout(1, PAIRS)), 1)
    c = gl.expand_dims(gl.arange(0, COLUMNS // 2, layout=gl.SliceLayout(0, PAIRS)), 0) * 2
    row = words[LIN_ROW0] + (unit + u) * UNIT_ROWS + c % UNIT_ROWS
    limit = gl.minimum(words[LIN_ROW0] + words[NUM_UNITS] * UNIT_ROWS, words[NUM_ROWS])
    gl.store(acts + first // 2 + pair_index(row, c // UNIT_ROWS), payload, mask=row < limit)


@gluon.jit
def next_weight(words, vectors, row, mine):
    """The weights of the norm behind this op."""
    return gl.load(vectors + words[LIN_NEXT_NORM] + row, mask=mine, other=0.0).to(gl.float32)


@gluon.jit
def write_residual(words, residual, acts, vectors, y, unit, row, b, mine, hidden):
    """The residual stream after a round: itself, x for the next linear, and squares."""
    gl.store(residual + b * hidden + row, y, mask=mine)
    weight = next_weight(words, vectors, row, mine)
    store_pairs(acts, words[DST], y * weight, unit, words)
    return gl.where(mine, y * y, 0.0)


@gluon.jit
def write_squares(sums, squares, sm):
    """This SM's part of each sequence's sum of squares."""
    by_column = gl.sum(squares, axis=0)
    by_sequence = gl.sum(gl.reshape(by_column, [BATCH, UNIT_ROWS]), axis=1)
    by_sequence = gl.convert_layout(by_sequence, gl.SliceLayout(1, BY_SM))
    b = gl.arange(0, BATCH, layout=gl.SliceLayout(1, BY_SM))
    gl.store(sums + b * MAX_SMS + sm, by_sequence)


@gluon.jit
def write_gated(words, acts, y, unit):
    """silu(gate) * up of a round of two pairs of units."""
    pairs = gl.permute(gl.reshape(y, [ROUND_UNITS // 2, 2, COLUMNS]), [0, 2, 1])
    gate, up = gl.split(gl.convert_layout(pairs, GATE_UP))
    mixed = gate / (1.0 + gl.exp(-gate)) * up
    low, high = gl.split(gl.reshape(mixed, [ROUND_UNITS // 2, COLUMNS // 2, 2]))
    payload = gl.convert_layout(bf16_pair(low, high), GATE_PAIRS)
    u = gl.expand_dims(gl.arange(0, ROUND_UNITS // 2, layout=gl.SliceLayout(1, GATE_PAIRS)), 1)
    c = gl.expand_dims(gl.arange(0, COLUMNS // 2, layout=gl.SliceLayout(0, GATE_PAIRS)), 0) * 2
    own = (unit // 2 + u) * UNIT_ROWS + c % UNIT_ROWS
    first = words[LIN_ROW0] // 2
    limit = gl.minimum(words[NUM_UNITS] * UNIT_ROWS, words[NUM_ROWS] - words[LIN_ROW0]) // 2
    at = acts + words[DST] // 2 + pair_index(first + own, c // UNIT_ROWS)
    gl.store(at, payload, mask=own < limit)


@gluon.jit
def write_best(best, best_row, bests, best_rows, sm):
    """The highest logit of each sequence among this SM's rows, the lowest row among equals."""
    value = gl.max(gl.reshape(gl.max(best, axis=0), [BATCH, UNIT_ROWS]), axis=1)
    value_wide = gl.expand_dims(spread(value), 0)
    row = gl.min(gl.where(best == value_wide, best_row, 0x7FFFFFFF), axis=0)
    row = gl.min(gl.reshape(row, [BATCH, UNIT_ROWS]), axis=1)
    b = gl.arange(0, BATCH, layout=gl.SliceLayout(1, BY_SM))
    gl.store(bests + b * MAX_SMS + sm, gl.convert_layout(value, gl.SliceLayout(1, BY_SM)))
    gl.store(best_rows + b * MAX_SMS + sm, gl.convert_layout(row, gl.SliceLayout(1, BY_SM)))


@gluon.jit
def next_tokens(
    words, bests, best_rows, events, peers, after, sm, tag, CHOICE: gl.constexpr,
    RANKS: gl.constexpr,
):
    """[16] tokens with the highest logits over all SMs' parts, of all ranks; the lowest id among
    equals. Those drawn within limits are the same on all ranks already. words, after: see
    likeliest.
    """
    b = gl.expand_dims(gl.arange(0, BATCH, layout=gl.SliceLayout(1, BY_SM)), 1)
    each = gl.expand_dims(gl.arange(0, MAX_SMS, layout=gl.SliceLayout(0, BY_SM)), 0)
    at = b * MAX_SMS + each
    values = gl.load(bests + at, cache_modifier=".cg")
    rows = gl.load(best_rows + at, cache_modifier=".cg")
    highest = gl.expand_dims(gl.max(values, axis=1), 1)
    lowest = gl.min(gl.where(values == highest, rows, NO_ROW), axis=1)
    lowest = gl.where(lowest == NO_ROW, 0, lowest)  # where all logits are NaN or -inf
    if RANKS > 1 and CHOICE <= DRAWN:
        value = gl.max(values, axis=1)
        exchange = exchange_of(events)
        lowest = likeliest(words, value, lowest, exchange, peers, after, sm, tag, RANKS)
    return lowest


@gluon.jit
def embed_task(
    words, tokens, embed, residual, acts, vectors, sums, events, peers, sm, hidden, tag,
    RANKS: gl.constexpr,
):
    """This SM's columns of every sequence's embedding row, as the residual stream."""
    token = gl.expand_dims(spread(tokens), 0).to(gl.int64)
    if RANKS > 1:
        push_embedding(words, token, embed, events, peers, tag, RANKS)
        squares = sum_residual(words, residual, acts, vectors, events, hidden, tag, False, RANKS)
    else:
        squares = gl.zeros([ROUND_UNITS, COLUMNS], gl.float32, layout=ROUND)
        for unit in range(0, keep(words[NUM_UNITS]), ROUND_UNITS):
            row, b, mine = round_rows(words, unit)
            y = gl.load(embed + token * hidden + row, mask=mine, other=0.0).to(gl.float32)
            squares += write_residual(words, residual, acts, vectors, y, unit, row, b, mine, hidden)
    write_squares(sums, squares, sm)


@gluon.jit
def push_embedding(words, token, embed, events, peers, tag, RANKS: gl.constexpr):
    """This rank's part of the embedding rows of `token`, [1, 128], as its part of a sum: zeros
    where other ranks have it.
    """
    alarm = read_alarm(exchange_of(events))
    local = token - words[EMB_FIRST_TOKEN]
    num_columns = words[EMB_NUM_COLUMNS]
    for unit in range(0, keep(words[NUM_UNITS]), ROUND_UNITS):
        row, _, mine = round_rows(words, unit)
        column = row - words[EMB_FIRST_COLUMN]
        mine = mine & (local >= 0) & (local < words[EMB_NUM_TOKENS])
        mine = mine & (column >= 0) & (column < num_columns)
        y = gl.load(embed + local * num_columns + column, mask=mine, other=0.0).to(gl.float32)
        push_round(words, peers, y, unit, tag, alarm, RANKS)


@gluon.jit
def sum_residual(
    words, residual, acts, vectors, events, hidden, tag, ADDS: gl.constexpr, RANKS: gl.constexpr
):
    """The residual stream of this SM's rows from all ranks' parts, added to what it was if ADDS;
    squares.
    """
    squares = gl.zeros([ROUND_UNITS, COLUMNS], gl.float32, layout=ROUND)
    for unit in range(0, keep(words[NUM_UNITS]), ROUND_UNITS):
        row, b, mine = round_rows(words, unit)
        # asked for before the wait
        weight = next_weight(words, vectors, row, mine)
        y = gl.zeros([ROUND_UNITS, COLUMNS], gl.float32, layout=ROUND)
        if ADDS:
            y = gl.load(residual + b * hidden + row, mask=mine, other=0.0)
        y += sum_round_of_ranks(words, exchange_of(events), unit, tag, RANKS)
        gl.store(residual + b * hidden + row, y, mask=mine)
        store_pairs(acts, words[DST], y * weight, unit, words)
        squares += gl.where(mine, y * y, 0.0)
    return squares


@gluon.jit
def multiply_group(x, first, num_chunks, num, red, bufs, ready, free, it, STAGES: gl.constexpr):
    """num units, at most 8, times the x that starts at chunk `first`; sums of the first 4 units in
    shared memory, of the others here.
    """
    a0 = gl.zeros([NUM_WARPS, MMA_M, UNIT_ROWS], gl.float32, layout=MMA3)
    a1 = a0
    a2 = a0
    a3 = a0
    a4 = a0
    a5 = a0
    a6 = a0
    a7 = a0
    x0 = load_x(x, first, 0)
    x1 = load_x(x, first, 1)
    for chunk in range(keep(num_chunks)):
        ahead = first + gl.minimum(chunk + 1, num_chunks - 1)
        n0 = load_x(x, ahead, 0)
        n1 = load_x(x, ahead, 1)
        a0, it = multiply_tile(x0, x1, a0, bufs, ready, free, it, STAGES)
        if num > 1:
            a1, it = multiply_tile(x0, x1, a1, bufs, ready, free, it, STAGES)
        if num > 2:
            a2, it = multiply_tile(x0, x1, a2, bufs, ready, free, it, STAGES)
        if num > 3:
            a3, it = multiply_tile(x0, x1, a3, bufs, ready, free, it, STAGES)
        if num > 4:
            a4, it = multiply_tile(x0, x1, a4, bufs, ready, free, it, STAGES)
        if num > 5:
            a5, it = multiply_tile(x0, x1, a5, bufs, ready, free, it, STAGES)
        if num > 6:
            a6, it = multiply_tile(x0, x1, a6, bufs, ready, free, it, STAGES)
        if num > 7:
            a7, it = multiply_tile(x0, x1, a7, bufs, ready, free, it, STAGES)
        x0 = n0
        x1 = n1
    store_round(red, a0, a1, a2, a3)
    return a4, a5, a6, a7, it


@gluon.jit
def store_round(red, a0, a1, a2, a3):
    """Four units' sums of every warp into shared memory [32, 16, 8]."""
    red.slice(0, NUM_WARPS, dim=0).store(a0)
    red.slice(NUM_WARPS, NUM_WARPS, dim=0).store(a1)
    red.slice(2 * NUM_WARPS, NUM_WARPS, dim=0).store(a2)
    red.slice(3 * NUM_WARPS, NUM_WARPS, dim=0).store(a3)


@gluon.jit
def linear_task(
    words, acts, qkv, residual, logits, vectors, sums, bests, best_rows, events, peers, sm, hidden,
    eps, inv_hidden, red, bufs, ready, free, it, tag, RANKS: gl.constexpr, STAGES: gl.constexpr,
):
    """All rows of this SM, 64 at a time; returns the ring position."""
    opcode = words[OPCODE]
    alarm = gl.to_tensor(NO_REPORT)
    if RANKS > 1:  # noqa: SIM102  a constant, so that the rest is compiled only then
        if opcode == OP_RESIDUAL:
            alarm = read_alarm(exchange_of(events))
    x = acts.to(gl.pointer_type(gl.bfloat16), bitcast=True)
    factor = gl.full([COLUMNS], 1.0, gl.float32, layout=ROUND_COLUMNS)
    if words[LIN_NORM] > 0:
        factor = norm_factors(sums, inv_hidden, eps)
    factor = gl.expand_dims(factor, 0)
    squares = gl.zeros([ROUND_UNITS, COLUMNS], gl.float32, layout=ROUND)
    best = gl.full([ROUND_UNITS, COLUMNS], float("-inf"), gl.float32, layout=ROUND)
    best_row = gl.full([ROUND_UNITS, COLUMNS], 0x7FFFFFFF, gl.int32, layout=ROUND)
    num_units = keep(words[NUM_UNITS])
    for group in range(0, num_units, GROUP_UNITS):
        a4, a5, a6, a7, it = multiply_group(
            x, words[LIN_SRC], words[LIN_NUM_TILES_K], num_units - group, red, bufs, ready, free,
            it, STAGES,
        )
        for unit in range(group, gl.minimum(group + GROUP_UNITS, num_units), ROUND_UNITS):
            if unit > group:
                store_round(red, a4, a5, a6, a7)
            y = sum_round(red) * factor
            row, b, mine = round_rows(words, unit)
            if opcode == OP_QKV:
                if words[LIN_BIAS] >= 0:
                    bias = gl.load(vectors + words[LIN_BIAS] + row, mask=mine, other=0.0)
                    y += bias.to(gl.float32)
                gl.store(qkv + b * words[NUM_ROWS] + row, y, mask=mine)
            elif opcode == OP_RESIDUAL:
                if RANKS > 1:
                    push_round(words, peers, y, unit, tag, alarm, RANKS)
                else:
                    y += gl.load(residual + b * hidden + row, mask=mine, other=0.0)
                    squares += write_residual(
                        words, residual, acts, vectors, y, unit, row, b, mine, hidden
                    )
            elif opcode == OP_GATED:
                write_gated(words, acts, y, unit)
            else:
                gl.store(logits + b * words[NUM_ROWS] + row, y, mask=mine)
                better = mine & (y > best)
                best = gl.where(better, y, best)
                best_row = gl.where(better, row, best_row)
    if opcode == OP_RESIDUAL:
        if RANKS > 1:
            squares = sum_residual(words, residual, acts, vectors, events, hidden, tag, True, RANKS)
        write_squares(sums, squares, sm)
    elif opcode == OP_HEAD:
        write_best(best, best_row, bests, best_rows, sm)
    return it
