"""Linear tasks of the kernel of several rows: the ring's weight tiles times x of 16 sequences, read
once for up to 64 weight rows, then the epilogue.

In: x in the order of device.py, weight tiles in the ring. Out: the op's output. The weight of
an rms norm is multiplied into x by whoever writes x, its factor into the result by whoever reads
it. The body stands once: epilogues are branches behind the products, specialised by the EPILOGUES
of the segment. Next on the walk: norms.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.runtime.jit import constexpr_function

from distmega.kernels.gluon_compat import reinterpret
from distmega.kernels.hopper.batch.bodies.experts import (
    group_from,
    is_of_columns,
    rows_of_chunk,
    rows_of_group,
    share_of,
    write_weighted,
)
from distmega.kernels.hopper.batch.bodies.limits import NO_ROW
from distmega.kernels.hopper.batch.bodies.products import ask_parts, sum_of_parts
from distmega.kernels.hopper.batch.device import load_some_x, load_x, of_rows, pair_index
from distmega.kernels.hopper.batch.team import (
    argmax_of_ranks,
    push_round,
    sum_round_of_ranks,
    symmetric_of,
)
from distmega.kernels.hopper.batch_plan.fields import (
    BATCH,
    BLOCK_MASK,
    BLOCK_NUMBERS,
    BY_SM,
    CARRY_SHIFT,
    COLUMNS,
    DST,
    EMB_FIRST_COLUMN,
    EMB_FIRST_TABLE_ROW,
    EMB_NUM_COLUMNS,
    EMB_NUM_TABLE_ROWS,
    GATHER_FIRST_COLUMN,
    GATHER_NUM_COLUMNS,
    GATHER_NUMBER,
    GATHER_SRC,
    GROUP_UNITS,
    IN_SHIFT,
    LENGTH_MASK,
    LENGTH_SHIFT,
    LIN_BIAS,
    LIN_CARRY2,
    LIN_NEXT_NORM,
    LIN_NUM_TILES_K,
    LIN_NUMBERS,
    LIN_ROW0,
    LOGITS_BIAS,
    MAX_EPILOGUES,
    MAX_SMS,
    NORMED,
    NUM_ROWS,
    NUM_UNITS,
    OPCODE,
    PACKED,
    PAIRS,
    PARTS,
    REST_MASK,
    REST_SHIFT,
    ROUND,
    ROUND_COLUMNS,
    ROUND_UNITS,
    ROW_MULTIPLE,
    ROW_PAIRS,
    SLOT_MASK,
    SRC,
    TWO_STREAMS,
)
from distmega.kernels.hopper.epilogues import (
    ENTRY,
    count,
    count_gathers,
    field,
    gathered,
)
from distmega.kernels.hopper.one_row.bodies.linear import next_vector
from distmega.kernels.hopper.one_row.team import read_alarm
from distmega.kernels.hopper.plan.fields import GREEDY, NO_REPORT, SAMPLED
from distmega.kernels.hopper.ptx.device import bf16_pair, fetch, keep, prefetch, single
from distmega.kernels.hopper.ptx.shapes import (
    MMA3,
    MMA_M,
    NUM_WARPS,
    SLICE_K,
    UNIT_ROWS,
    W_DOT,
    WEIGHT_SHARED,
)
from distmega.kernels.pipelined.pointwise.formula import evaluate


@gluon.jit
def multiply_tile(x0, x1, acc, ring, it, STAGES: gl.constexpr):
    """The next ring slot, 8 rows by 1024 columns, times x: [8 warps, 16, 8 rows] more sums."""
    slot = it % STAGES
    mbarrier.wait(ring.ready.index(slot), (it // STAGES) & 1)
    halves = reinterpret(
        ring.slots, gl.bfloat16, [2 * STAGES, NUM_WARPS, UNIT_ROWS, SLICE_K], WEIGHT_SHARED
    )
    w0 = halves.index(2 * slot).permute([0, 2, 1]).load(W_DOT)
    w1 = halves.index(2 * slot + 1).permute([0, 2, 1]).load(W_DOT)
    mbarrier.arrive(ring.free.index(slot), count=1)
    acc = mma_v2(x0, w0, acc)
    return mma_v2(x1, w1, acc), it + 1


@gluon.jit
def norm_factors(words, sums, eps, ROWS: gl.constexpr, WHOLE_SLICES: gl.constexpr):
    """Factor of each sequence's norm, [8 ROWS] columns, from every SM's part of the sum of squares.
    """
    length = 64 * ((words[PACKED] >> LENGTH_SHIFT) & LENGTH_MASK)
    if not WHOLE_SLICES:
        length += ROW_MULTIPLE * ((words[PACKED] >> REST_SHIFT) & REST_MASK)
    inv_length = 1.0 / length.to(gl.float32)
    sums += ((words[PACKED] >> IN_SHIFT) & SLOT_MASK) * (ROWS * MAX_SMS)
    squares = sums_of_sms(sums, ROWS)
    factors = gl.rsqrt(squares * inv_length + eps)
    return spread(factors, ROWS)


@gluon.jit
def sums_of_sms(sums, ROWS: gl.constexpr):
    """[ROWS] by sequence: the sums of what SMs have, f32 [ROWS, 256]."""
    b = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, BY_SM)), 1)
    sm = gl.expand_dims(gl.arange(0, MAX_SMS, layout=gl.SliceLayout(0, BY_SM)), 0)
    parts = gl.load(sums + b * MAX_SMS + sm, cache_modifier=".cg")
    return gl.sum(parts, axis=1)


@gluon.jit
def of_group(values, some, group, ROWS: gl.constexpr):
    """[ROWS] values by sequence with `some`, [16], in place of those of 16 sequences."""
    row = gl.expand_dims(gl.convert_layout(some, gl.SliceLayout(0, BY_SM)), 0)
    copies = row.broadcast_to([ROWS // BATCH, BATCH])
    copies = gl.convert_layout(gl.reshape(copies, [ROWS]), gl.SliceLayout(1, BY_SM))
    b = gl.arange(0, ROWS, layout=gl.SliceLayout(1, BY_SM))
    return gl.where(b // BATCH == group, copies, values)


@gluon.jit
def spread(values, ROWS: gl.constexpr):
    """[ROWS] by sequence to [8 ROWS] by column of a round."""
    wide = gl.expand_dims(values, 1).broadcast_to([ROWS, UNIT_ROWS])
    return gl.convert_layout(gl.reshape(wide, [ROWS * UNIT_ROWS]), ROUND_COLUMNS)


@gluon.jit
def sum_round(red):
    """[4 units, 128] sums over the warps."""
    parts = red.reshape([ROUND_UNITS * NUM_WARPS, COLUMNS]).load(PARTS)
    parts = gl.sum(gl.reshape(parts, [ROUND_UNITS, NUM_WARPS, COLUMNS]), axis=1)
    return gl.convert_layout(parts, ROUND)


@gluon.jit
def round_rows(words, unit, ROWS: gl.constexpr):
    """For a round from `unit` on: rows [4, 8 ROWS], sequences [1, 8 ROWS], and which rows are its
    own.
    """
    u = gl.expand_dims(gl.arange(0, ROUND_UNITS, layout=gl.SliceLayout(1, ROUND)), 1)
    c = gl.expand_dims(gl.arange(0, UNIT_ROWS * ROWS, layout=ROUND_COLUMNS), 0)
    row = words[LIN_ROW0] + (unit + u) * UNIT_ROWS + c % UNIT_ROWS
    limit = gl.minimum(words[LIN_ROW0] + words[NUM_UNITS] * UNIT_ROWS, words[NUM_ROWS])
    return row, c // UNIT_ROWS, row < limit


@gluon.jit
def store_pairs(acts, first, y, unit, words, ROWS: gl.constexpr):
    """bf16 pairs of a round into the activations that start at element `first` of 16 rows."""
    PAIRED_COLUMNS: gl.constexpr = UNIT_ROWS * ROWS // 2
    low, high = gl.split(gl.reshape(y, [ROUND_UNITS, PAIRED_COLUMNS, 2]))
    payload = gl.convert_layout(bf16_pair(low, high), PAIRS)
    u = gl.expand_dims(gl.arange(0, ROUND_UNITS, layout=gl.SliceLayout(1, PAIRS)), 1)
    c = gl.expand_dims(gl.arange(0, PAIRED_COLUMNS, layout=gl.SliceLayout(0, PAIRS)), 0) * 2
    row = words[LIN_ROW0] + (unit + u) * UNIT_ROWS + c % UNIT_ROWS
    limit = gl.minimum(words[LIN_ROW0] + words[NUM_UNITS] * UNIT_ROWS, words[NUM_ROWS])
    at = acts + of_rows(first // 2, ROWS) + pair_index(row, c // UNIT_ROWS, ROWS)
    gl.store(at, payload, mask=row < limit)


@gluon.jit
def next_weight(words, vectors, row, mine, WIDE: gl.constexpr):
    """The weights of the norm behind this op."""
    if WIDE:
        at = (vectors + words[LIN_NEXT_NORM]).to(gl.pointer_type(gl.float32), bitcast=True) + row
    else:
        at = vectors + words[LIN_NEXT_NORM] + row
    return gl.load(at, mask=mine, other=0.0).to(gl.float32)


@gluon.jit
def carried(words, numbers, row, b, num_rows, mine, NUM: gl.constexpr, ROWS: gl.constexpr):
    """The NUM operands of an epilogue besides products, of the rows of a round."""
    found = words[0:0]
    if NUM > 0:
        block = ((words[LIN_NUMBERS] >> CARRY_SHIFT) & BLOCK_MASK) - 1
        at = numbers + of_rows(block * BLOCK_NUMBERS, ROWS) + b * num_rows + row
        found += single(gl.load(at, mask=mine, other=0.0))
    if NUM > 1:
        at = numbers + of_rows(words[LIN_CARRY2], ROWS) + b * num_rows + row
        found += single(gl.load(at, mask=mine, other=0.0))
    return found


@gluon.jit
def keep_numbers(words, numbers, y, row, b, num_rows, mine, ROWS: gl.constexpr):
    """Stores results as float32."""
    block = (words[LIN_NUMBERS] & BLOCK_MASK) - 1
    at = numbers + of_rows(block * BLOCK_NUMBERS, ROWS) + b * num_rows + row
    gl.store(at, y, mask=mine)


@gluon.jit
def write_round(
    words, memory, y, unit, row, b, mine, EPILOGUES: gl.constexpr, NUMBER: gl.constexpr,
    ROWS: gl.constexpr, WIDE: gl.constexpr,
):
    """The results of a round: as numbers, and as x for linears; their squares."""
    if field(EPILOGUES, NUMBER, "keeps"):
        keep_numbers(words, memory.numbers, y, row, b, words[NUM_ROWS], mine, ROWS)
    if field(EPILOGUES, NUMBER, "scaled"):
        weight = next_weight(words, memory.vectors, row, mine, WIDE)
        store_pairs(memory.acts, words[DST], y * weight, unit, words, ROWS)
    elif field(EPILOGUES, NUMBER, "publishes"):
        store_pairs(memory.acts, words[DST], y, unit, words, ROWS)
    return gl.where(mine, y * y, 0.0)


@gluon.jit
def write_squares(sums, squares, sm, SLOT: gl.constexpr, ROWS: gl.constexpr):
    """This SM's part of each sequence's sum of squares."""
    by_column = gl.sum(squares, axis=0)
    by_sequence = gl.sum(gl.reshape(by_column, [ROWS, UNIT_ROWS]), axis=1)
    by_sequence = gl.convert_layout(by_sequence, gl.SliceLayout(1, BY_SM))
    b = gl.arange(0, ROWS, layout=gl.SliceLayout(1, BY_SM))
    gl.store(sums + SLOT * (ROWS * MAX_SMS) + b * MAX_SMS + sm, by_sequence)


@gluon.jit
def write_mixed(words, memory, y, unit, NUMBER: gl.constexpr, spec: gl.constexpr):
    """What becomes of a round of two pairs of units of two streams."""
    EPILOGUES: gl.constexpr = spec.epilogues
    ROWS: gl.constexpr = spec.rows
    FORMULA: gl.constexpr = field(EPILOGUES, NUMBER, "formula")
    CARRIES: gl.constexpr = field(EPILOGUES, NUMBER, "num_carried")
    MIXED: gl.constexpr = gl.SliceLayout(2, TWO_STREAMS)
    WIDTH: gl.constexpr = UNIT_ROWS * ROWS
    pairs = gl.permute(gl.reshape(y, [ROUND_UNITS // 2, 2, WIDTH]), [0, 2, 1])
    first, second = gl.split(gl.convert_layout(pairs, TWO_STREAMS))
    row0 = words[LIN_ROW0] // 2
    num_rows = words[NUM_ROWS] // 2
    num_own = gl.minimum(words[NUM_UNITS] * UNIT_ROWS // 2, num_rows - row0)
    u = gl.expand_dims(gl.arange(0, ROUND_UNITS // 2, layout=gl.SliceLayout(1, MIXED)), 1)
    c = gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(0, MIXED)), 0)
    own = (unit // 2 + u) * UNIT_ROWS + c % UNIT_ROWS
    if field(EPILOGUES, NUMBER, "biased"):
        first += bias_of(words[LIN_BIAS], memory.vectors, row0 + own, own < num_own)
        behind = num_rows if spec.whole_slices else next_vector(num_rows)
        second += bias_of(words[LIN_BIAS], memory.vectors, behind + row0 + own, own < num_own)
    given = (first, second)
    b = c // UNIT_ROWS
    mine = own < num_own
    given += carried(words, memory.numbers, row0 + own, b, num_rows, mine, CARRIES, ROWS)
    mixed = evaluate(FORMULA, given)
    if field(EPILOGUES, NUMBER, "keeps"):
        keep_numbers(words, memory.numbers, mixed, row0 + own, b, num_rows, mine, ROWS)
    if field(EPILOGUES, NUMBER, "publishes"):
        low, high = gl.split(gl.reshape(mixed, [ROUND_UNITS // 2, WIDTH // 2, 2]))
        payload = gl.convert_layout(bf16_pair(low, high), ROW_PAIRS)
        u = gl.expand_dims(gl.arange(0, ROUND_UNITS // 2, layout=gl.SliceLayout(1, ROW_PAIRS)), 1)
        c = gl.expand_dims(gl.arange(0, WIDTH // 2, layout=gl.SliceLayout(0, ROW_PAIRS)), 0) * 2
        own = (unit // 2 + u) * UNIT_ROWS + c % UNIT_ROWS
        at = memory.acts + of_rows(words[DST] // 2, ROWS)
        at += pair_index(row0 + own, c // UNIT_ROWS, ROWS)
        gl.store(at, payload, mask=own < num_own)


@gluon.jit
def bias_of(first, vectors, row, mine):
    """Biases of rows from element `first` on, zeros where the op has none."""
    given = mine & (first >= 0)
    return gl.load(vectors + first + row, mask=given, other=0.0).to(gl.float32)


@gluon.jit
def write_best(
    best, best_row, bests, best_rows, sm, CHOICE: gl.constexpr, ROWS: gl.constexpr
):
    """The highest logit of each sequence among this SM's rows and, where it is the id's, the
    lowest row among equals.
    """
    value = gl.max(gl.reshape(gl.max(best, axis=0), [ROWS, UNIT_ROWS]), axis=1)
    b = gl.arange(0, ROWS, layout=gl.SliceLayout(1, BY_SM))
    gl.store(bests + b * MAX_SMS + sm, gl.convert_layout(value, gl.SliceLayout(1, BY_SM)))
    if CHOICE == GREEDY:
        value_wide = gl.expand_dims(spread(value, ROWS), 0)
        row = gl.min(gl.where(best == value_wide, best_row, 0x7FFFFFFF), axis=0)
        row = gl.min(gl.reshape(row, [ROWS, UNIT_ROWS]), axis=1)
        gl.store(best_rows + b * MAX_SMS + sm, gl.convert_layout(row, gl.SliceLayout(1, BY_SM)))


@gluon.jit
def next_ids(
    words, memory, peers, after, sm, flag, CHOICE: gl.constexpr, RANKS: gl.constexpr,
    ROWS: gl.constexpr,
):
    """[ROWS] ids with the highest logits over all SMs' parts, of all ranks; the lowest id among
    equals. Those sampled within limits are the same on all ranks already. words, after: see
    argmax_of_ranks.
    """
    if ROWS == BATCH:
        values, lowest = ids_of_sms(memory.bests, memory.best_rows)
        if RANKS > 1 and CHOICE <= SAMPLED:
            value = gl.max(values, axis=1)
            symmetric = symmetric_of(memory.events)
            lowest = argmax_of_ranks(words, value, lowest, symmetric, peers, after, sm, flag, RANKS)
    else:
        lowest = gl.zeros([ROWS], gl.int32, layout=gl.SliceLayout(1, BY_SM))
        for group in range(keep(0), keep(ROWS // BATCH)):
            before = group * (BATCH * MAX_SMS)
            _, some = ids_of_sms(memory.bests + before, memory.best_rows + before)
            lowest = of_group(lowest, some, group, ROWS)
    return lowest


@gluon.jit
def ids_of_sms(bests, best_rows):
    """What SMs have found best, [16, 256], and of the highest of each sequence the lowest row."""
    b = gl.expand_dims(gl.arange(0, BATCH, layout=gl.SliceLayout(1, BY_SM)), 1)
    each = gl.expand_dims(gl.arange(0, MAX_SMS, layout=gl.SliceLayout(0, BY_SM)), 0)
    at = b * MAX_SMS + each
    values = gl.load(bests + at, cache_modifier=".cg")
    rows = gl.load(best_rows + at, cache_modifier=".cg")
    highest = gl.expand_dims(gl.max(values, axis=1), 1)
    lowest = gl.min(gl.where(values == highest, rows, NO_ROW), axis=1)
    return values, gl.where(lowest == NO_ROW, 0, lowest)  # where all logits are NaN or -inf


@gluon.jit
def embed_task(
    words, ids, memory, peers, sm, flag, EPILOGUES: gl.constexpr, RANKS: gl.constexpr,
    ROWS: gl.constexpr, WIDE: gl.constexpr,
):
    """This SM's columns of the row that comes in for every sequence: number `ids` of a table.

    words: of the instruction. ids: int32 [ROWS], in registers, of rows that the table has: nobody
    looks. peers: as of run_batch_steps. flag: of what ranks exchange in this instruction. Writes
    memory.acts, .numbers and .sums and, where ranks share the table, their events.
    """
    row_id = gl.expand_dims(spread(ids, ROWS), 0).to(gl.int64)
    if field(EPILOGUES, ENTRY, "summed"):
        push_embedding(words, row_id, memory.embed, memory.events, peers, flag, RANKS)
        squares = sum_results(words, memory, flag, EPILOGUES, ENTRY, RANKS, WIDE)
    else:
        squares = gl.zeros([ROUND_UNITS, UNIT_ROWS * ROWS], gl.float32, layout=ROUND)
        for unit in range(0, keep(words[NUM_UNITS]), ROUND_UNITS):
            row, b, mine = round_rows(words, unit, ROWS)
            at = memory.embed + row_id * words[NUM_ROWS] + row
            y = gl.load(at, mask=mine, other=0.0).to(gl.float32)
            squares += write_round(
                words, memory, y, unit, row, b, mine, EPILOGUES, ENTRY, ROWS, WIDE
            )
    if field(EPILOGUES, ENTRY, "scaled"):
        write_squares(memory.sums, squares, sm, field(EPILOGUES, ENTRY, "slot"), ROWS)


@gluon.jit
def push_embedding(words, row_id, embed, events, peers, flag, RANKS: gl.constexpr):
    """This rank's part of the table's rows `row_id`, [1, 128], as its part of a sum: zeros
    where other ranks have it.
    """
    alarm = read_alarm(symmetric_of(events))
    local = row_id - words[EMB_FIRST_TABLE_ROW]
    num_columns = words[EMB_NUM_COLUMNS]
    for unit in range(0, keep(words[NUM_UNITS]), ROUND_UNITS):
        row, _, mine = round_rows(words, unit, BATCH)
        column = row - words[EMB_FIRST_COLUMN]
        mine = mine & (local >= 0) & (local < words[EMB_NUM_TABLE_ROWS])
        mine = mine & (column >= 0) & (column < num_columns)
        y = gl.load(embed + local * num_columns + column, mask=mine, other=0.0).to(gl.float32)
        push_round(words, peers, y, unit, flag, alarm, RANKS)


@gluon.jit
def gather_task(
    words, memory, peers, sm, flag, EPILOGUES: gl.constexpr, RANKS: gl.constexpr,
    WIDE: gl.constexpr,
):
    """This SM's columns of what ranks have side by side: this rank's as its part of a sum.

    words, flag: of the instruction. peers: as of run_batch_steps. Reads and writes memory.numbers,
    writes .acts and .sums, and the events of all ranks.
    """
    push_columns(words, memory.numbers, memory.events, peers, flag, RANKS)
    for i in gl.static_range(count_gathers(EPILOGUES)):
        if words[GATHER_NUMBER] == i:
            NUMBER: gl.constexpr = gathered(i)
            squares = sum_results(words, memory, flag, EPILOGUES, NUMBER, RANKS, WIDE)
            if field(EPILOGUES, NUMBER, "scaled"):
                write_squares(memory.sums, squares, sm, field(EPILOGUES, NUMBER, "slot"), BATCH)


@gluon.jit
def push_columns(words, numbers, events, peers, flag, RANKS: gl.constexpr):
    """This rank's columns of the numbers as its part of a sum: zeros where others have them."""
    alarm = read_alarm(symmetric_of(events))
    num_columns = words[GATHER_NUM_COLUMNS]
    for unit in range(0, keep(words[NUM_UNITS]), ROUND_UNITS):
        row, b, mine = round_rows(words, unit, BATCH)
        column = row - words[GATHER_FIRST_COLUMN]
        mine = mine & (column >= 0) & (column < num_columns)
        at = numbers + words[GATHER_SRC] + b * num_columns + column
        y = gl.load(at, mask=mine, other=0.0, cache_modifier=".cg")
        push_round(words, peers, y, unit, flag, alarm, RANKS)


@gluon.jit
def sum_results(
    words, memory, flag, EPILOGUES: gl.constexpr, NUMBER: gl.constexpr, RANKS: gl.constexpr,
    WIDE: gl.constexpr,
):
    """The results of this SM's rows from the sums of all ranks' parts; squares."""
    squares = gl.zeros([ROUND_UNITS, COLUMNS], gl.float32, layout=ROUND)
    for unit in range(0, keep(words[NUM_UNITS]), ROUND_UNITS):
        row, b, mine = round_rows(words, unit, BATCH)
        # asked for before the wait
        if field(EPILOGUES, NUMBER, "scaled"):
            weight = next_weight(words, memory.vectors, row, mine, WIDE)
        CARRIES: gl.constexpr = field(EPILOGUES, NUMBER, "num_carried")
        given = carried(words, memory.numbers, row, b, words[NUM_ROWS], mine, CARRIES, BATCH)
        total = sum_round_of_ranks(words, symmetric_of(memory.events), unit, flag, RANKS)
        y = evaluate(field(EPILOGUES, NUMBER, "formula"), single(total) + given)
        if field(EPILOGUES, NUMBER, "keeps"):
            keep_numbers(words, memory.numbers, y, row, b, words[NUM_ROWS], mine, BATCH)
        if field(EPILOGUES, NUMBER, "scaled"):
            store_pairs(memory.acts, words[DST], y * weight, unit, words, BATCH)
            squares += gl.where(mine, y * y, 0.0)
        elif field(EPILOGUES, NUMBER, "publishes"):
            store_pairs(memory.acts, words[DST], y, unit, words, BATCH)
    return squares


@gluon.jit
def load_chunk(x, first, chunk, rows, chosen, of_columns, EXPERTS: gl.constexpr):
    """Both halves of chunk `chunk` behind the first; where there are experts, of rows that count
    (rows_of_chunk).
    """
    if EXPERTS is None:
        x0 = load_x(x, first + chunk, 0)
        x1 = load_x(x, first + chunk, 1)
    else:
        counted = rows_of_chunk(rows, chosen, chunk, of_columns, EXPERTS)
        x0 = load_some_x(x, first + chunk, 0, counted)
        x1 = load_some_x(x, first + chunk, 1, counted)
    return x0, x1


@gluon.jit
def multiply_group(
    x0, x1, x, first, num_chunks, num, red, ring, it, rows, chosen, of_columns,
    EXPERTS: gl.constexpr, STAGES: gl.constexpr,
):
    """num units, at most 8, times the x that starts at chunk `first`, which is x0 and x1; sums of
    the first 4 units in shared memory, of the others here. rows, chosen, of_columns: see
    load_chunk.
    """
    a0 = gl.zeros([NUM_WARPS, MMA_M, UNIT_ROWS], gl.float32, layout=MMA3)
    a1 = a0
    a2 = a0
    a3 = a0
    a4 = a0
    a5 = a0
    a6 = a0
    a7 = a0
    for chunk in range(keep(num_chunks)):
        ahead = gl.minimum(chunk + 1, num_chunks - 1)
        n0, n1 = load_chunk(x, first, ahead, rows, chosen, of_columns, EXPERTS)
        a0, it = multiply_tile(x0, x1, a0, ring, it, STAGES)
        if num > 1:
            a1, it = multiply_tile(x0, x1, a1, ring, it, STAGES)
        if num > 2:
            a2, it = multiply_tile(x0, x1, a2, ring, it, STAGES)
        if num > 3:
            a3, it = multiply_tile(x0, x1, a3, ring, it, STAGES)
        if num > 4:
            a4, it = multiply_tile(x0, x1, a4, ring, it, STAGES)
        if num > 5:
            a5, it = multiply_tile(x0, x1, a5, ring, it, STAGES)
        if num > 6:
            a6, it = multiply_tile(x0, x1, a6, ring, it, STAGES)
        if num > 7:
            a7, it = multiply_tile(x0, x1, a7, ring, it, STAGES)
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


@constexpr_function
def asks_early(epilogues, number):
    """Whether an epilogue takes more than products, of rows of one stream."""
    one = epilogues.each[number]
    return one.num_streams == 1 and (one.num_carried > 0 or one.scaled)


@gluon.jit
def ask_early(
    words, memory, EPILOGUES: gl.constexpr, NUMBER: gl.constexpr, ROWS: gl.constexpr
):
    """What an epilogue takes besides products has long left the second-level cache, through which
    all weights go: it comes while these are multiplied.
    """
    u = gl.expand_dims(gl.arange(0, ROUND_UNITS, layout=gl.SliceLayout(1, PAIRS)), 1)
    c = gl.expand_dims(gl.arange(0, UNIT_ROWS * ROWS // 2, layout=gl.SliceLayout(0, PAIRS)), 0) * 2
    num_own = words[NUM_UNITS]
    for unit in range(0, keep(num_own), ROUND_UNITS):
        row = words[LIN_ROW0] + (unit + u) * UNIT_ROWS + c % UNIT_ROWS
        mine = (unit + u < num_own) & (row < words[NUM_ROWS])
        if field(EPILOGUES, NUMBER, "num_carried") > 0:
            block = ((words[LIN_NUMBERS] >> CARRY_SHIFT) & BLOCK_MASK) - 1
            at = of_rows(block * BLOCK_NUMBERS, ROWS) + c // UNIT_ROWS * words[NUM_ROWS] + row
            prefetch(memory.numbers + at, mine)
        if field(EPILOGUES, NUMBER, "scaled"):
            prefetch(memory.vectors + words[LIN_NEXT_NORM] + row, mine & (c < UNIT_ROWS))


@gluon.jit
def group_task(
    words, queue, number, memory, peers, x, eps, factor, alarm, first, group, num_units, num_chunks,
    squares, best, best_row, red, ring, it, flag, rows, chosen, of_columns, spec: gl.constexpr,
):
    """Units from number `group` on, up to 8 before number num_units: products and epilogue; what
    the first group, number `first`, finds for all comes in and goes out. rows, chosen, of_columns:
    see load_chunk; the rest as of linear_task.
    """
    RANKS: gl.constexpr = spec.num_ranks
    EXPERTS: gl.constexpr = spec.experts
    EPILOGUES: gl.constexpr = spec.epilogues
    NUM: gl.constexpr = count(EPILOGUES)
    opcode = words[OPCODE]
    x0, x1 = load_chunk(x, words[SRC], 0, rows, chosen, of_columns, EXPERTS)
    if group == first:
        for i in gl.static_range(NUM):
            if RANKS == 1 and asks_early(EPILOGUES, i):  # noqa: SIM102  a constant
                if opcode == i:
                    ask_early(words, memory, EPILOGUES, i, BATCH)
        if (words[PACKED] & NORMED) != 0:
            factor = norm_factors(words, memory.sums, eps, BATCH, spec.whole_slices)
    a4, a5, a6, a7, it = multiply_group(
        x0, x1, x, words[SRC], num_chunks, num_units - group, red, ring, it, rows, chosen,
        of_columns, EXPERTS, spec.stages,
    )
    if RANKS > 1 and EXPERTS is not None:
        # here: no registers to keep what only the epilogue needs while weights are multiplied
        words = fetch(queue, keep(number))
    for unit in range(group, gl.minimum(group + GROUP_UNITS, num_units), ROUND_UNITS):
        if unit > group:
            store_round(red, a4, a5, a6, a7)
        y = sum_round(red) * gl.expand_dims(factor, 0)
        squares, best, best_row = finish_round(
            words, memory, peers, y, alarm, unit, num_units, squares, best, best_row, flag, chosen,
            spec,
        )
    return factor, squares, best, best_row, it


@gluon.jit
def finish_round(
    words, memory, peers, y, alarm, unit, num_units, squares, best, best_row, flag, chosen,
    spec: gl.constexpr, is_last=None,
):
    """What becomes of the products y, [4 units, 8 spec.rows], of a round from `unit` on; what it
    finds for all goes in and out. is_last: whether logits are written, None: they are.
    """
    ROWS: gl.constexpr = spec.rows
    CHOICE: gl.constexpr = spec.choice
    EXPERTS: gl.constexpr = spec.experts
    EPILOGUES: gl.constexpr = spec.epilogues
    opcode = words[OPCODE]
    row, b, mine = round_rows(words, unit, ROWS)
    for i in gl.static_range(count(EPILOGUES)):
        if opcode == i:
            if field(EPILOGUES, i, "weighted"):
                write_weighted(
                    words, memory.acts, y, unit, num_units, chosen, EXPERTS, EPILOGUES, i,
                )
            elif field(EPILOGUES, i, "num_streams") == 2:
                write_mixed(words, memory, y, unit, i, spec)
            else:
                z = y
                if field(EPILOGUES, i, "biased"):
                    at_bias = words[LIN_BIAS]
                    if field(EPILOGUES, i, "ranked"):
                        at_bias = words[LOGITS_BIAS]
                    z += bias_of(at_bias, memory.vectors, row, mine)
                if field(EPILOGUES, i, "summed"):
                    push_round(words, peers, z, unit, flag, alarm, spec.num_ranks)
                else:
                    CARRIES: gl.constexpr = field(EPILOGUES, i, "num_carried")
                    given = carried(
                        words, memory.numbers, row, b, words[NUM_ROWS], mine, CARRIES, ROWS
                    )
                    z = evaluate(field(EPILOGUES, i, "formula"), single(z) + given)
                    if field(EPILOGUES, i, "ranked"):
                        wanted = mine if is_last is None else mine & is_last
                        gl.store(memory.logits + b * words[NUM_ROWS] + row, z, mask=wanted)
                        better = mine & (z > best)
                        if CHOICE != SAMPLED:
                            best = gl.where(better, z, best)
                        if CHOICE == GREEDY:
                            best_row = gl.where(better, row, best_row)
                    else:
                        more = write_round(
                            words, memory, z, unit, row, b, mine, EPILOGUES, i, ROWS,
                            spec.wide_norms,
                        )
                        if field(EPILOGUES, i, "scaled"):
                            squares += more
    return squares, best, best_row


@gluon.jit
def linear_task(
    words, queue, number, memory, peers, sm, num_sms, eps, red, ring, it, flag, chosen,
    spec: gl.constexpr,
):
    """All rows of this SM, 64 at a time; returns the ring position.

    words: of instruction `number` of the SM's queue, int32 [num_instructions, 16]. peers, eps: as
    of run_batch_steps. red: f32 [32, 16, 8] in shared memory, sums of each warp, used by nothing
    else meanwhile. it: ring slots taken before. flag: of what ranks exchange in this instruction.
    chosen: the Choice of experts (route.py) that was made before, where there are some.
    spec.choice, see one_row/bodies/sample.py: samples at a temperature look at the logits again,
    those within limits take the highest alone. Writes what the epilogue says: memory.acts,
    .numbers, .sums, or .logits, .bests and .best_rows; events of all ranks, where they add up
    parts.
    """
    CHOICE: gl.constexpr = spec.choice
    EXPERTS: gl.constexpr = spec.experts
    EPILOGUES: gl.constexpr = spec.epilogues
    NUM: gl.constexpr = count(EPILOGUES)
    opcode = words[OPCODE]
    alarm = gl.to_tensor(NO_REPORT)
    for i in gl.static_range(NUM):
        if field(EPILOGUES, i, "summed"):  # noqa: SIM102  a constant, so that the rest is compiled then
            if opcode == i:
                alarm = read_alarm(symmetric_of(memory.events))
    x = memory.acts.to(gl.pointer_type(gl.bfloat16), bitcast=True)
    factor = gl.full([COLUMNS], 1.0, gl.float32, layout=ROUND_COLUMNS)
    squares = gl.zeros([ROUND_UNITS, COLUMNS], gl.float32, layout=ROUND)
    best = gl.full([ROUND_UNITS, COLUMNS], float("-inf"), gl.float32, layout=ROUND)
    best_row = gl.full([ROUND_UNITS, COLUMNS], 0x7FFFFFFF, gl.int32, layout=ROUND)
    if EXPERTS is None:
        num_units = keep(words[NUM_UNITS])
        for group in range(0, num_units, GROUP_UNITS):
            factor, squares, best, best_row, it = group_task(
                words, queue, number, memory, peers, x, eps, factor, alarm, 0, group, num_units,
                words[LIN_NUM_TILES_K], squares, best, best_row, red, ring, it, flag, 0, 0, False,
                spec,
            )
    else:
        first, stop, num_chunks = share_of(words, chosen, sm, num_sms, EXPERTS)
        of_columns = is_of_columns(words)
        group = first
        while group < stop:
            end, hit = group_from(words, group, stop, EXPERTS)
            rows = rows_of_group(words, chosen, hit)
            factor, squares, best, best_row, it = group_task(
                words, queue, number, memory, peers, x, eps, factor, alarm, first, group, end,
                num_chunks, squares, best, best_row, red, ring, it, flag, rows, chosen, of_columns,
                spec,
            )
            group = end
    for i in gl.static_range(NUM):
        if field(EPILOGUES, i, "summed"):  # noqa: SIM102  a constant
            if opcode == i:
                # again: no registers to keep what only the sum needs while weights are multiplied
                summed = fetch(queue, keep(number))
                squares = sum_results(
                    summed, memory, flag, EPILOGUES, i, spec.num_ranks, spec.wide_norms
                )
        if field(EPILOGUES, i, "scaled"):
            if opcode == i:
                write_squares(memory.sums, squares, sm, field(EPILOGUES, i, "slot"), BATCH)
        elif field(EPILOGUES, i, "ranked") and CHOICE != SAMPLED:  # noqa: SIM102  a constant
            if opcode == i:
                write_best(best, best_row, memory.bests, memory.best_rows, sm, CHOICE, BATCH)
    return it


@gluon.jit
def sum_factor(words, memory, eps, spec: gl.constexpr):
    """[8 spec.rows] columns of a round: what finish_task multiplies products by. It is known before
    these are, so nobody need wait for both; what the epilogue takes besides is asked for, too.
    """
    ROWS: gl.constexpr = spec.rows
    EPILOGUES: gl.constexpr = spec.epilogues
    factor = gl.full([UNIT_ROWS * ROWS], 1.0, gl.float32, layout=ROUND_COLUMNS)
    if words[OPCODE] < MAX_EPILOGUES:  # other instructions have no such flags
        for i in gl.static_range(count(EPILOGUES)):
            if asks_early(EPILOGUES, i):  # noqa: SIM102  a constant
                if words[OPCODE] == i:
                    ask_early(words, memory, EPILOGUES, i, ROWS)
        if (words[PACKED] & NORMED) != 0:
            factor = norm_factors(words, memory.sums, eps, ROWS, spec.whole_slices)
    return factor


@gluon.jit
def finish_task(words, memory, parts, factor, is_last, sm, num_sms, spec: gl.constexpr):
    """What becomes of this SM's rows of products of more than 16 rows, of which SMs have left parts
    (products.py). factor: see sum_factor. is_last: of the launch's steps; others leave no logits,
    of which 64 sequences have 33 MB. words and what is written: as of linear_task.
    """
    ROWS: gl.constexpr = spec.rows
    CHOICE: gl.constexpr = spec.choice
    EPILOGUES: gl.constexpr = spec.epilogues
    WIDTH: gl.constexpr = UNIT_ROWS * ROWS
    opcode = words[OPCODE]
    squares = gl.zeros([ROUND_UNITS, WIDTH], gl.float32, layout=ROUND)
    best = gl.full([ROUND_UNITS, WIDTH], float("-inf"), gl.float32, layout=ROUND)
    best_row = gl.full([ROUND_UNITS, WIDTH], 0x7FFFFFFF, gl.int32, layout=ROUND)
    num_units = words[NUM_UNITS]
    asked = ask_parts(words, parts, 0, num_sms, ROWS)
    for unit in range(0, keep(num_units), ROUND_UNITS):
        y = sum_of_parts(words, parts, asked, unit, num_sms, ROWS)
        y *= gl.expand_dims(factor, 0)
        # while this round is finished the next one's parts come
        asked = ask_parts(words, parts, unit + ROUND_UNITS, num_sms, ROWS)
        squares, best, best_row = finish_round(
            words, memory, None, y, 0, unit, num_units, squares, best, best_row, 0, 0, spec,
            is_last,
        )
    sm = keep(sm)  # as threads_here
    for i in gl.static_range(count(EPILOGUES)):
        if field(EPILOGUES, i, "scaled"):
            if opcode == i:
                write_squares(memory.sums, squares, sm, field(EPILOGUES, i, "slot"), ROWS)
        elif field(EPILOGUES, i, "ranked"):  # noqa: SIM102  a constant
            if opcode == i:
                write_best(best, best_row, memory.bests, memory.best_rows, sm, CHOICE, ROWS)
