"""Linear tasks on the compute warps: stage x, multiply the ring's tiles by it, write the epilogue.

In: flagged words of x and weight tiles in the ring. Out: flagged words of the op's output, what the
SM keeps of it. An rms norm before a linear is folded in: its weight into x, its factor into the
result; a layer norm is done while x is staged. The body stands once: epilogues are branches behind
the products, specialised by the EPILOGUES of the segment. One row. Next on the walk: ptx/blocks.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from distmega.kernels.gluon_compat import cta_barrier
from distmega.kernels.hopper.epilogues import count, field
from distmega.kernels.hopper.one_row.bodies.products import (
    CHUNK_BYTES,
    aim,
    multiply_tiles,
    own_word,
    store_x,
    take_tiles,
)
from distmega.kernels.hopper.one_row.route import weight_of
from distmega.kernels.hopper.one_row.team import (
    push_best,
    push_logits,
    push_partial,
    read_alarm,
    sum_partials,
)
from distmega.kernels.hopper.plan.fields import (
    CARRY_EMBEDDED,
    CARRY_TWO,
    DELTA_SHIFT,
    DST,
    EMBEDDED,
    FROM_EMBEDDING,
    GENERATION,
    GREEDY,
    KEEP_NORMED,
    KEEP_X,
    LAYER_NORM,
    LIN_BIAS,
    LIN_CARRY,
    LIN_KEEP,
    LIN_NORM,
    LIN_NUM_ROWS,
    LIN_NUM_SRC_WORDS,
    LIN_NUM_TILES_K,
    LIN_PACKED,
    LIN_PAIR_ROW,
    LIN_ROW0,
    NO_REPORT,
    NUM_UNITS,
    OPCODE,
    ROW_MATRIX_SHIFT,
    ROW_PAIRED,
    SAMPLED,
    SRC,
    X_PARTS,
)
from distmega.kernels.hopper.ptx.device import (
    bf16_pair,
    clock,
    flagged,
    flagged_float,
    high_half,
    keep,
    low_half,
    single,
)
from distmega.kernels.hopper.ptx.shapes import (
    EVERY_WARP,
    GROUP_ROWS,
    GROUP_UNITS,
    PER_THREAD,
    REDUCE,
    STAGE_CHUNKS,
    THREADS,
    TWO_STREAMS,
    TWOS,
    UNIT_ROWS,
    VECTOR_MULTIPLE,
    WORDS_A_CHUNK,
)
from distmega.kernels.hopper.ptx.spins import spin2, spin_chunks, spin_parts
from distmega.kernels.pipelined.pointwise.formula import evaluate


@constexpr_function
def has_pairs(epilogues):
    """Whether products of two streams meet in one."""
    return any(one.num_streams == 2 for one in epilogues.each)


@constexpr_function
def most_carried(epilogues):
    """Vectors that one of them takes, at most."""
    return max(one.num_carried for one in epilogues.each)


@constexpr_function
def is_pushed(epilogues, number, pushes):
    """Whether other ranks get what it writes, and all of them see a void x by an alarm."""
    one = epilogues.each[number]
    return one.summed or one.gathered or (pushes and one.ranked)


@constexpr_function
def has_deferred(epilogues):
    """Whether ranks' parts of some sums are added up by who reads them."""
    return any(one.deferred for one in epilogues.each)


@constexpr_function
def part_chunks(num_ranks):
    """Chunks of x of which all ranks' parts are polled and staged together."""
    return max(1, STAGE_CHUNKS // num_ranks)


@gluon.jit
def flag_delta(words):
    """How many generations ago x was written."""
    return (words[LIN_PACKED] << (32 - ROW_MATRIX_SHIFT)) >> (32 - ROW_MATRIX_SHIFT + DELTA_SHIFT)


@gluon.jit
def next_vector(num):
    """How far behind a vector of `num` elements the next one begins."""
    return (num + VECTOR_MULTIPLE - 1) // VECTOR_MULTIPLE * VECTOR_MULTIPLE


@gluon.jit
def pairs_at(source, first, word, num_words):
    """Two words (pairs of columns) from `word` on of the bf16 vector that begins at element `first`
    of source, a multiple of 8; zeros past the last.
    """
    fours = source.to(gl.pointer_type(gl.int64), bitcast=True)
    both = gl.load(fours + (first // 4 + word // 2), mask=word < num_words, other=0)
    return both.to(gl.int32), (both >> 32).to(gl.int32)


@gluon.jit
def wide_at(source, first, word, num_words):
    """As pairs_at of f32 vectors that begin at byte 2 * `first`: four numbers of two words."""
    at = (source + first).to(gl.pointer_type(gl.float32), bitcast=True) + 2 * word
    wanted = word < num_words
    return (
        gl.load(at, mask=wanted, other=0.0), gl.load(at + 1, mask=wanted, other=0.0),
        gl.load(at + 2, mask=wanted, other=0.0), gl.load(at + 3, mask=wanted, other=0.0),
    )  # fmt: skip


@gluon.jit
def weights_at(vectors, first, word, num_words, WIDE: gl.constexpr):
    """The weights of two pairs of x, from word `word` on of the vector from element `first` on: two
    pairs of bf16, or four numbers.
    """
    if WIDE:
        return wide_at(vectors, first, word, num_words)
    else:
        return pairs_at(vectors, first, word, num_words)


@gluon.jit
def scale_nth(word, weights, nth: gl.constexpr, ss, WIDE: gl.constexpr):
    """A pair of x times number `nth` of the pairs of weights that weights_at gave, and its squares
    added to ss.
    """
    if WIDE:
        a = low_half(word)
        b = high_half(word)
        return bf16_pair(a * weights[2 * nth], b * weights[2 * nth + 1]), ss + a * a + b * b
    else:
        return scale_pair(word, weights[nth], ss)


@gluon.jit
def scale_pair(word, weight, ss):
    """A pair of x times its norm weights, and its squares added to ss."""
    a = low_half(word)
    b = high_half(word)
    return bf16_pair(a * low_half(weight), b * high_half(weight)), ss + a * a + b * b


@gluon.jit
def first_unit(num_rows, sm):
    """The first unit that an SM keeps of a row of so many elements."""
    units = (num_rows + UNIT_ROWS - 1) // UNIT_ROWS
    return units * sm // gl.num_programs(0)


@gluon.jit
def one_of_four(even, odd, row):
    """The element of a row's number in two pairs, which begin at a multiple of four."""
    pair = gl.where(row % 4 < 2, even, odd)
    return gl.where(row % 2 == 0, low_half(pair), high_half(pair))


@gluon.jit
def part_stride(words):
    """Bytes from one rank's part of x to the next one's."""
    return words[LIN_NUM_SRC_WORDS].to(gl.int64) * 8


@gluon.jit
def add_halves(parts, i: gl.constexpr, STEP: gl.constexpr, RANKS: gl.constexpr):
    """Both numbers of pair i of each rank's part, STEP pairs apart, added up in rank order."""
    low = low_half(parts[i])
    high = high_half(parts[i])
    for rank in gl.static_range(1, RANKS):
        low += low_half(parts[STEP * rank + i])
        high += high_half(parts[STEP * rank + i])
    return low, high


@gluon.jit
def sum_parts(words, symmetric, kept, at, flag, first, sm, NUM: gl.constexpr, RANKS: gl.constexpr):
    """Pairs of NUM chunks of x, all ranks' parts added up in rank order. Where the SM keeps its
    rows of x, it adds the other ranks' to them.

    at: of a thread's first word of the first rank's part, word `first` of it.
    """
    num_words = words[LIN_NUM_SRC_WORDS]
    num_left = num_words - first
    parts = spin_parts(symmetric, at, part_stride(words), flag, num_left, NUM, RANKS)
    if (words[LIN_PACKED] & KEEP_X) != 0:
        begin = first_unit(2 * num_words, sm) * (UNIT_ROWS // 2)
        end = gl.minimum(first_unit(2 * num_words, sm + 1) * (UNIT_ROWS // 2), num_words)
        for i in gl.static_range(2 * NUM):
            word = first + i // 2 * WORDS_A_CHUNK + i % 2
            mine = (word >= begin) & (word < end)
            own = kept + words[LIN_CARRY] + 2 * word
            # not loaded and stored: nobody waits for what memory adds
            for rank in gl.static_range(1, RANKS):
                pair = parts[2 * NUM * rank + i]
                gl.atomic_add(own, low_half(pair), mask=mine, sem="relaxed", scope="cta")
                gl.atomic_add(own + 1, high_half(pair), mask=mine, sem="relaxed", scope="cta")
    pairs = ()
    for i in gl.static_range(2 * NUM):
        low, high = add_halves(parts, i, 2 * NUM, RANKS)
        pairs += single(bf16_pair(low, high))
    return pairs


@gluon.jit
def stage_chunks(
    words, symmetric, vectors, kept, flag, staged_at, ss, chunk, sm, NUM: gl.constexpr,
    RANKS: gl.constexpr, WIDE: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """NUM chunks of x from flagged words into shared memory, zeros past the last; adds each
    thread's part of their sum of squares. PARTS: whether x is the sum of all ranks' parts.
    """
    norm = words[LIN_NORM]
    num_words = words[LIN_NUM_SRC_WORDS]
    num_weights = gl.where(norm >= 0, num_words, 0)
    first = chunk * WORDS_A_CHUNK + own_word()
    factors = ()
    for i in gl.static_range(NUM):
        factors += weights_at(vectors, norm, first + i * WORDS_A_CHUNK, num_weights, WIDE)
    at = symmetric + (words[SRC] + first)
    if PARTS:
        pairs = sum_parts(words, symmetric, kept, at, flag, first, sm, NUM, RANKS)
    else:
        pairs = spin_chunks(symmetric, at, flag, num_words - first, NUM, RANKS)
    if norm >= 0:
        scaled = pairs[0:0]
        for i in gl.static_range(2 * NUM):
            pair, ss = scale_nth(pairs[i], factors, i, ss, WIDE)
            scaled += (pair,)
        store_x(staged_at, scaled, NUM)
    else:
        store_x(staged_at, pairs, NUM)
    return ss


@gluon.jit
def stage_flagged(
    words, symmetric, vectors, kept, flag, staged_at, sm, RANKS: gl.constexpr, WIDE: gl.constexpr,
    DEFERRED: gl.constexpr,
):  # fmt: skip
    """x from flagged words into shared memory; returns each thread's part of its sum of squares.
    DEFERRED: whether x may be the sum of all ranks' parts.
    """
    ss = gl.zeros([THREADS], gl.float32, layout=PER_THREAD)
    num_chunks = keep(words[LIN_NUM_TILES_K])
    if DEFERRED and (words[LIN_PACKED] & X_PARTS) != 0:
        NUM: gl.constexpr = part_chunks(RANKS)
        for chunk in range(0, num_chunks, NUM):
            to = staged_at + chunk * CHUNK_BYTES
            ss = stage_chunks(
                words, symmetric, vectors, kept, flag, to, ss, chunk, sm, NUM, RANKS, WIDE, True
            )
    elif num_chunks == 1:
        ss = stage_chunks(
            words, symmetric, vectors, kept, flag, staged_at, ss, 0, sm, 1, RANKS, WIDE, False
        )
    elif num_chunks == 2:
        ss = stage_chunks(
            words, symmetric, vectors, kept, flag, staged_at, ss, 0, sm, 2, RANKS, WIDE, False
        )
    else:
        for chunk in range(0, num_chunks, STAGE_CHUNKS):
            to = staged_at + chunk * CHUNK_BYTES
            ss = stage_chunks(
                words, symmetric, vectors, kept, flag, to, ss, chunk, sm, STAGE_CHUNKS, RANKS, WIDE,
                False,
            )  # fmt: skip
    return ss


@gluon.jit
def stage_embedding(words, embed, row_id, vectors, staged_at, WIDE: gl.constexpr):
    """As stage_flagged, x being the id's row of the embedding matrix."""
    ss = gl.zeros([THREADS], gl.float32, layout=PER_THREAD)
    num_words = words[LIN_NUM_SRC_WORDS]
    num_weights = gl.where(words[LIN_NORM] >= 0, num_words, 0)
    row = embed + row_id.to(gl.int64) * (num_words * 2)
    for chunk in range(keep(words[LIN_NUM_TILES_K])):
        word = chunk * WORDS_A_CHUNK + own_word()
        factors = weights_at(vectors, words[LIN_NORM], word, num_weights, WIDE)
        w0, w1 = pairs_at(row, 0, word, num_words)
        if words[LIN_NORM] >= 0:
            w0, ss = scale_nth(w0, factors, 0, ss, WIDE)
            w1, ss = scale_nth(w1, factors, 1, ss, WIDE)
        store_x(staged_at + chunk * CHUNK_BYTES, (w0, w1), 1)
    return ss


@gluon.jit
def row_sum(values, inv_length):
    """Mean of what all threads hold, the same in each of them."""
    return gl.sum(values, axis=0) * inv_length


@gluon.jit
def keep_normed(words, vectors, kept, sm, mean, factor, HAS_BIAS: gl.constexpr):
    """Normalises this SM's rows of x where it keeps them, an element a thread. HAS_BIAS: whether
    there is a mean to take off and a bias to add.
    """
    num_rows = 2 * words[LIN_NUM_SRC_WORDS]
    row = first_unit(num_rows, sm) * UNIT_ROWS + gl.arange(0, THREADS, layout=PER_THREAD)
    wanted = row < gl.minimum(first_unit(num_rows, sm + 1) * UNIT_ROWS, num_rows)
    weights = vectors + words[LIN_NORM] + row
    own = kept + words[LIN_CARRY] + row
    y = (gl.load(own, mask=wanted, other=0.0) - mean) * factor
    y = y * gl.load(weights, mask=wanted, other=0.0).to(gl.float32)
    if HAS_BIAS:
        y += gl.load(weights + next_vector(num_rows), mask=wanted, other=0.0).to(gl.float32)
    gl.store(own, y, mask=wanted)


@gluon.jit
def stage_layer_norm(
    words, memory, row_id, sm, flag, eps, inv_length, staged_at, KEEPS_NORMED: gl.constexpr,
    DEFERRED: gl.constexpr, RANKS: gl.constexpr,
):  # fmt: skip
    """x after its layer norm into shared memory, zeros past the last; at most STAGE_CHUNKS chunks.
    The mean is taken off before squares are summed, and before x is rounded.
    """
    num_words = words[LIN_NUM_SRC_WORDS]
    first = own_word()
    weights = words[LIN_NORM]
    scales = ()
    shifts = ()
    for i in gl.static_range(STAGE_CHUNKS):
        word = first + i * WORDS_A_CHUNK
        scales += pairs_at(memory.vectors, weights, word, num_words)
        shifts += pairs_at(memory.vectors, weights + next_vector(2 * num_words), word, num_words)
    if RANKS == 1 and (words[LIN_PACKED] & FROM_EMBEDDING) != 0:
        row = memory.embed + row_id.to(gl.int64) * (num_words * 2)
        pairs = ()
        for i in gl.static_range(STAGE_CHUNKS):
            pairs += pairs_at(row, 0, first + i * WORDS_A_CHUNK, num_words)
    elif DEFERRED and (words[LIN_PACKED] & X_PARTS) != 0:
        pairs = ()
        NUM: gl.constexpr = part_chunks(RANKS)
        for i in gl.static_range(0, STAGE_CHUNKS, NUM):
            word = first + i * WORDS_A_CHUNK
            at = memory.symmetric + (words[SRC] + word)
            pairs += sum_parts(words, memory.symmetric, memory.kept, at, flag, word, sm, NUM, RANKS)
    else:
        at = memory.symmetric + (words[SRC] + first)
        pairs = spin_chunks(memory.symmetric, at, flag, num_words - first, STAGE_CHUNKS, RANKS)
    total = gl.zeros([THREADS], gl.float32, layout=PER_THREAD)
    for i in gl.static_range(2 * STAGE_CHUNKS):
        total += low_half(pairs[i]) + high_half(pairs[i])
    mean = row_sum(total, inv_length)
    squares = gl.zeros([THREADS], gl.float32, layout=PER_THREAD)
    for i in gl.static_range(2 * STAGE_CHUNKS):
        inside = first + i // 2 * WORDS_A_CHUNK < num_words
        a = gl.where(inside, low_half(pairs[i]) - mean, 0.0)
        b = gl.where(inside, high_half(pairs[i]) - mean, 0.0)
        squares += a * a + b * b
    factor = gl.rsqrt(row_sum(squares, inv_length) + eps)
    staged = pairs[0:0]
    for i in gl.static_range(2 * STAGE_CHUNKS):
        a = (low_half(pairs[i]) - mean) * factor * low_half(scales[i]) + low_half(shifts[i])
        b = (high_half(pairs[i]) - mean) * factor * high_half(scales[i]) + high_half(shifts[i])
        staged += single(bf16_pair(a, b))
    store_x(staged_at, staged, STAGE_CHUNKS)
    if KEEPS_NORMED:  # noqa: SIM102  a constant
        if (words[LIN_PACKED] & KEEP_NORMED) != 0:
            keep_normed(words, memory.vectors, memory.kept, sm, mean, factor, True)


@gluon.jit
def sum_warps(red):
    """[64] row sums of a group, from red [8 warps, 64]."""
    return gl.convert_layout(gl.sum(red.load(REDUCE), axis=0), TWOS)


@gluon.jit
def store_pairs(symmetric, first, y, flag, num_words, N: gl.constexpr):
    """The first num_words of N / 2 flagged words of bf16 pairs, from word `first` on."""
    low, high = gl.split(gl.reshape(y, [N // 2, 2]))
    payload = gl.convert_layout(bf16_pair(low, high), PER_THREAD)
    at = gl.arange(0, N // 2, layout=PER_THREAD)
    gl.store(symmetric + (first + at), flagged(payload, flag), mask=at < num_words)


@gluon.jit
def group_rows(words, group):
    """Rows of the units from number `group` on: [64]."""
    return words[LIN_ROW0] + group * UNIT_ROWS + gl.arange(0, GROUP_ROWS, layout=TWOS)


@gluon.jit
def bias_of(words, vectors, group, row, wanted, PAIRS: gl.constexpr):
    """Biases of the rows of a group, zeros where there are none; asked for early."""
    at = row
    if PAIRS:
        unit = group + gl.arange(0, GROUP_ROWS, layout=TWOS) // UNIT_ROWS
        own = words[LIN_ROW0] // 2 + unit // 2 * UNIT_ROWS + row % UNIT_ROWS
        second = own + unit % 2 * next_vector(words[LIN_NUM_ROWS] // 2)
        at = gl.where((words[LIN_PACKED] & ROW_PAIRED) != 0, second, row)
    given = wanted & (words[LIN_BIAS] >= 0)
    return gl.load(vectors + words[LIN_BIAS] + at, mask=given, other=0.0).to(gl.float32)


@gluon.jit
def carried(
    words, symmetric, embed, row_id, kept, row, wanted, flag0, KEEPS_NORMED: gl.constexpr,
    DEFERRED: gl.constexpr, GIVEN: gl.constexpr, RANKS: gl.constexpr,
):  # fmt: skip
    """What the SM keeps of the rows of another op, or the embedding's; asked for early. Where ranks
    share the embedding, sum_partials asks for its row, unless readers add up.

    flag0: of the embedded id. DEFERRED: whether readers add up some sums. GIVEN: see sum_partials.
    """
    if DEFERRED and (words[LIN_PACKED] & CARRY_EMBEDDED) != 0:
        if GIVEN:
            value = gl.load(embed + row, mask=wanted, other=0.0).to(gl.float32)
        else:
            four = symmetric + (EMBEDDED + row // 4 * 2)
            even, odd = spin2(symmetric, four, flag0, wanted, RANKS)
            value = one_of_four(even, odd, row)
    elif RANKS == 1 and (words[LIN_PACKED] & CARRY_EMBEDDED) != 0:
        at = embed + row_id.to(gl.int64) * words[LIN_NUM_ROWS] + row
        value = gl.load(at, mask=wanted, other=0.0).to(gl.float32)
    else:
        given = wanted & (words[LIN_CARRY] >= 0)
        if KEEPS_NORMED or DEFERRED:
            given = given & ((words[LIN_PACKED] & (KEEP_NORMED | KEEP_X)) == 0)
        value = gl.load(kept + words[LIN_CARRY] + row, mask=given, other=0.0)
    return value


@gluon.jit
def weighted(
    slots, row0, products, STREAMS: gl.constexpr, TREE: gl.constexpr, EXPERTS: gl.constexpr
):
    """The formula of products of rows of chosen experts, from row0 on, and of what these weigh;
    zeros in what stands between an expert's last row and the next slot.
    """
    row = row0 + gl.arange(0, GROUP_ROWS // STREAMS, layout=TWOS)
    SIZE: gl.constexpr = EXPERTS.slot_units * UNIT_ROWS
    weight = weight_of(slots, gl.minimum(row // SIZE, EXPERTS.num_chosen - 1))
    if STREAMS == 2:
        y = evaluate(TREE, (products[0], products[1], weight))
    else:
        y = evaluate(TREE, (products[0], weight))
    return gl.where(row % SIZE < EXPERTS.width, y, 0.0)


@gluon.jit
def write_result(
    words,
    symmetric,
    peers,
    kept,
    row0,
    row,
    limit,
    y,
    flag,
    alarm,
    KIND: gl.constexpr,
    GATHERED: gl.constexpr,
    N: gl.constexpr,
    RANKS: gl.constexpr,
):
    """N results, of which those below `limit` count, to where they are kept and polled: where ranks
    gather them, into this rank's part on each of them, none that are void (push_partial).
    """
    wanted = row < limit
    gl.store(kept + words[LIN_KEEP] + row, y, mask=wanted & (words[LIN_KEEP] >= 0))
    if GATHERED:
        num = gl.where(keep(alarm) == NO_REPORT, limit - row0, 0)
        for rank in gl.static_range(RANKS):
            if KIND == "numbers":
                at = peers[rank] + words[DST] + row
                gl.store(at, flagged_float(y, flag), mask=row - row0 < num)
            elif KIND == "pairs":
                store_pairs(peers[rank], words[DST] + row0 // 2, y, flag, num // 2, N)
    elif KIND == "numbers":
        gl.store(symmetric + words[DST] + row, flagged_float(y, flag), mask=wanted)
    elif KIND == "pairs":
        store_pairs(symmetric, words[DST] + row0 // 2, y, flag, (limit - row0) // 2, N)


@gluon.jit
def linear_task(
    words, memory, team, row_id, flag, sm, eps, sums, ring, slots, it, stamps, spec: gl.constexpr
):
    """Stages x, then for each group of units multiplies and writes; returns the ring position.

    words: int32, of the instruction. memory: see RowMemory; reads flagged words of x and writes
    those of the result, and rows of `kept` that are this SM's. team: parts of sums, logits and
    candidates go to all ranks. row_id: of this step. flag: of what is written. eps: as of
    run_row_steps. sums: see WarpSums. ring: RingAddresses; it: slots taken before; slots: see
    route_task. stamps: int64, of this instruction.

    Where ids are sampled, a ranked linear only writes its logits, for SAMPLE.
    """
    RANKS: gl.constexpr = spec.num_ranks
    CHOICE: gl.constexpr = spec.choice
    STAGES: gl.constexpr = spec.stages
    EXPERTS: gl.constexpr = spec.experts
    EPILOGUES: gl.constexpr = spec.epilogues
    PUSHES: gl.constexpr = RANKS > 1 and CHOICE != GREEDY and CHOICE != SAMPLED
    NUM: gl.constexpr = count(EPILOGUES)
    opcode = words[OPCODE]
    num_tiles_k = words[LIN_NUM_TILES_K]
    num_units = keep(words[NUM_UNITS])
    limit = gl.minimum(words[LIN_ROW0] + num_units * UNIT_ROWS, words[LIN_NUM_ROWS])
    inv_length = 1.0 / (2 * words[LIN_NUM_SRC_WORDS]).to(gl.float32)
    is_folded = (words[LIN_NORM] >= 0) & ((words[LIN_PACKED] & LAYER_NORM) == 0)
    ss = gl.zeros([THREADS], gl.float32, layout=PER_THREAD)
    best = gl.full([GROUP_ROWS], float("-inf"), gl.float32, layout=TWOS)
    best_row = gl.full([GROUP_ROWS], 0, gl.int32, layout=TWOS)
    for group in range(0, num_units, GROUP_UNITS):
        number = keep(group)  # unknown to the compiler, which would copy the loop for the first
        row0 = words[LIN_ROW0] + number * UNIT_ROWS
        row = group_rows(words, number)
        wanted = row < limit
        num_tiles = keep(gl.minimum(num_units - number, GROUP_UNITS) * num_tiles_k)
        aims = aim(ring, it % STAGES)
        bias = bias_of(words, memory.vectors, number, row, wanted, has_pairs(EPILOGUES))
        carry = carried(
            words, memory.symmetric, memory.embed, row_id, memory.kept, row, wanted,
            flag - words[GENERATION], spec.keeps_normed, has_deferred(EPILOGUES), spec.given, RANKS,
        )  # fmt: skip
        if most_carried(EPILOGUES) == 2:
            is_two = wanted & ((words[LIN_PACKED] & CARRY_TWO) != 0)
            carry2 = gl.load(memory.kept + words[LIN_PAIR_ROW] + row, mask=is_two, other=0.0)
        taken = take_tiles(ring, aims, num_tiles, (it // STAGES) & 1, STAGES)
        if number == 0:
            before = flag - flag_delta(words)
            if spec.layer_norms and (words[LIN_PACKED] & LAYER_NORM) != 0:
                stage_layer_norm(
                    words, memory, row_id, sm, before, eps, inv_length, aims[0], spec.keeps_normed,
                    has_deferred(EPILOGUES), RANKS,
                )  # fmt: skip
            elif RANKS == 1 and (words[LIN_PACKED] & FROM_EMBEDDING) != 0:
                ss = stage_embedding(
                    words, memory.embed, row_id, memory.vectors, aims[0], spec.wide_norms
                )
            else:
                ss = stage_flagged(
                    words, memory.symmetric, memory.vectors, memory.kept, before, aims[0], sm,
                    RANKS, spec.wide_norms, has_deferred(EPILOGUES),
                )  # fmt: skip
            if spec.trace:
                gl.store(stamps + 1, clock())
        alarm = gl.to_tensor(NO_REPORT)
        if RANKS > 1:
            for i in gl.static_range(NUM):
                if is_pushed(EPILOGUES, i, PUSHES):  # noqa: SIM102  a constant
                    if opcode == i:
                        alarm = read_alarm(memory.symmetric)
        folded = gl.where((number == 0) & is_folded, 0, -1)
        multiply_tiles(ring, aims, taken, num_tiles, num_tiles_k, ss, folded, STAGES)
        it += num_tiles
        cta_barrier()
        if PUSHES:
            for i in gl.static_range(NUM):
                if field(EPILOGUES, i, "ranked"):  # noqa: SIM102  a constant
                    # logits are the last that others get, so none may follow from an x that is void
                    if (opcode == i) & (number == 0):
                        alarm = read_alarm(memory.symmetric)
        if spec.trace:  # noqa: SIM102  a constant
            if number == 0:
                gl.store(stamps + 2, clock())
        y = sum_warps(sums.rows)
        factor = gl.rsqrt(gl.sum(sums.squares.load(EVERY_WARP), axis=0) * inv_length + eps)
        y = y * gl.where(is_folded, factor, 1.0) + bias
        if spec.keeps_normed:  # noqa: SIM102  a constant
            if is_folded & (number == 0) & ((words[LIN_PACKED] & KEEP_NORMED) != 0):
                keep_normed(words, memory.vectors, memory.kept, sm, 0.0, factor, False)
        for i in gl.static_range(NUM):
            if opcode == i:
                STREAMS: gl.constexpr = field(EPILOGUES, i, "num_streams")
                TREE: gl.constexpr = field(EPILOGUES, i, "formula")
                if field(EPILOGUES, i, "summed"):
                    part = y
                    if field(EPILOGUES, i, "first_carries"):
                        part = evaluate(TREE, (y, carry))
                    push_partial(
                        words, team.peers, team.rank, row0, limit, part, flag, alarm, RANKS
                    )
                elif STREAMS == 2:
                    pairs = gl.reshape(y, [GROUP_UNITS // 2, 2, UNIT_ROWS])
                    first, second = gl.split(
                        gl.convert_layout(gl.permute(pairs, [0, 2, 1]), TWO_STREAMS)
                    )
                    if field(EPILOGUES, i, "weighted"):
                        first = gl.convert_layout(gl.reshape(first, [GROUP_ROWS // 2]), TWOS)
                        second = gl.convert_layout(gl.reshape(second, [GROUP_ROWS // 2]), TWOS)
                        mixed = weighted(slots, row0 // 2, (first, second), 2, TREE, EXPERTS)
                    else:
                        mixed = gl.reshape(evaluate(TREE, (first, second)), [GROUP_ROWS // 2])
                        mixed = gl.convert_layout(mixed, TWOS)
                    half = gl.arange(0, GROUP_ROWS // 2, layout=TWOS) + row0 // 2
                    write_result(
                        words,
                        memory.symmetric,
                        team.peers,
                        memory.kept,
                        row0 // 2,
                        half,
                        limit // 2,
                        mixed,
                        flag,
                        alarm,
                        field(EPILOGUES, i, "publishes"),
                        field(EPILOGUES, i, "gathered"),
                        GROUP_ROWS // 2,
                        RANKS,
                    )
                else:
                    if field(EPILOGUES, i, "weighted"):
                        y1 = weighted(slots, row0, (y,), 1, TREE, EXPERTS)
                    elif field(EPILOGUES, i, "num_carried") == 2:
                        y1 = evaluate(TREE, (y, carry, carry2))
                    else:
                        y1 = evaluate(TREE, (y, carry))
                    if field(EPILOGUES, i, "ranked"):
                        gl.store(memory.kept + words[LIN_KEEP] + row, y1, mask=wanted)
                        if CHOICE == GREEDY:
                            better = wanted & (y1 > best)
                            best = gl.where(better, y1, best)
                            best_row = gl.where(better, row, best_row)
                        elif PUSHES:
                            num_rows = gl.minimum(num_units - number, GROUP_UNITS) * UNIT_ROWS
                            push_logits(
                                words, team.peers, row0, num_rows, wanted, y1, flag, alarm, RANKS
                            )
                    else:
                        write_result(
                            words,
                            memory.symmetric,
                            team.peers,
                            memory.kept,
                            row0,
                            row,
                            limit,
                            y1,
                            flag,
                            alarm,
                            field(EPILOGUES, i, "publishes"),
                            field(EPILOGUES, i, "gathered"),
                            GROUP_ROWS,
                            RANKS,
                        )
        cta_barrier()
    for i in gl.static_range(NUM):
        if field(EPILOGUES, i, "ranked"):
            if CHOICE == GREEDY:  # noqa: SIM102  a constant
                if opcode == i:
                    value = gl.max(best, axis=0)
                    index = gl.min(gl.where(best == value, best_row, 0x7FFFFFFF), axis=0)
                    push_best(
                        memory.symmetric,
                        team.peers,
                        team.rank,
                        team.best_words,
                        team.num_sms,
                        sm,
                        value,
                        team.first_id + index,
                        flag,
                        RANKS,
                    )
        elif field(EPILOGUES, i, "summed"):  # noqa: SIM102  a constant
            if opcode == i:
                sum_partials(
                    words,
                    memory.symmetric,
                    memory.embed,
                    memory.kept,
                    flag,
                    flag - words[GENERATION],
                    field(EPILOGUES, i, "formula"),
                    field(EPILOGUES, i, "num_carried"),
                    field(EPILOGUES, i, "first_carries"),
                    field(EPILOGUES, i, "publishes"),
                    spec.given,
                    RANKS,
                )
    return it
