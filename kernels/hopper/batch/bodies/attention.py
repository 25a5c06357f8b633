"""Attention tasks of the batched kernel: every SM attends to the same number of cached blocks.

The cached positions of all sequences, in blocks of 128, and of all kv heads lie in one line:
sequence, head, block. SM i of n takes the i-th n-th of it, at the positions of this step, so
nothing is compiled or queued for a length. A piece is what of it belongs to one sequence and head.
Where several SMs share a sequence and head, each leaves a partial, and the last to arrive sums them
in the order of the SMs.

In: queries, keys and values as numbers, cached keys and values in the ring. Out: the attention
output as activations, and the new position in the cache. Next on the walk: kernel.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from distmega.kernels.gluon_compat import cta_barrier
from distmega.kernels.hopper.batch.bodies.blocks import (
    attend_block,
    begin_new,
    new_value,
    queries,
    store_halves,
)
from distmega.kernels.hopper.batch.bodies.wide import (
    attend_wide_block,
    begin_wide,
    numbers_of_queries,
    rows_of_queries,
)
from distmega.kernels.hopper.batch.device import of_rows, pair_index
from distmega.kernels.hopper.batch_plan.fields import (
    ATT_K_NORM,
    ATT_K_ROW,
    ATT_K_SRC,
    ATT_Q_NORM,
    ATT_TABLE,
    ATT_V_ROW,
    ATT_V_SRC,
    ATT_WINDOW,
    BATCH,
    BATCH_PARTIAL_EXTRA,
    BATCH_STATE_POSITIONS,
    DST,
    NUM_ROWS,
    SRC,
)
from distmega.kernels.hopper.one_row.loader import first_seen
from distmega.kernels.hopper.ptx.device import bf16_pair, fence_all, join_lanes, keep
from distmega.kernels.hopper.ptx.shapes import (
    GROUP_LIMIT,
    MMA3,
    MMA_M,
    NUM_WARPS,
    PAIR_OUT,
    QUERY,
    TILE_ROWS,
    VECTOR_MULTIPLE,
    WARP_SUM,
    head_rows,
    is_padded,
    num_halves,
    padded_columns,
)

SPARE_BLOCKS = gl.constexpr(2)
"""Blocks that an SM may have more than others where it has whole pieces."""


@constexpr_function
def in_each_warp(num: int, num_warps: int) -> gl.BlockedLayout:
    """[num], a multiple of 32, of which each of num_warps warps has all."""
    return gl.BlockedLayout([num // 32], [32], [num_warps], [0])


@gluon.jit
def blocks_of(state, sequence, step, window):
    """The first block of cached positions that a sequence's query sees, and how many from there on;
    one, all masked, where it sees none.
    """
    position = gl.load(state + BATCH_STATE_POSITIONS + sequence) + step
    first = first_seen(position, window) // TILE_ROWS
    return first, gl.maximum((position + TILE_ROWS - 1) // TILE_ROWS - first, 1)


@gluon.jit
def count_blocks(state, batch, step, window, HEADS: gl.constexpr):
    """Blocks of all sequences and heads."""
    total = 0
    for sequence in range(batch):
        _, num_blocks = blocks_of(state, sequence, step, window)
        total += num_blocks
    return total * HEADS


@gluon.jit
def first_piece(state, batch, step, window, total, sm, num_sms, HEADS: gl.constexpr):
    """Where the share of an SM begins: (sequence, head, block), the blocks in it, and its place in
    the line. Where that gives no SM more than SPARE_BLOCKS more than others, as many SMs as there
    are have each sequence and head, an equal part of its blocks each, and what stands for the place
    is their number, less than 0: a second piece takes an SM longer than a few more blocks.
    """
    sharing = gl.minimum(total, num_sms)
    start = sm * total // sharing
    left = gl.where(sm < sharing, (sm + 1) * total // sharing - start, 0)
    sequence = 0
    before = 0
    passed = 0
    longest = 0
    for s in range(batch):
        _, num_blocks = blocks_of(state, s, step, window)
        longest = gl.maximum(longest, num_blocks)
        passed += num_blocks * HEADS
        is_past = (passed <= start) & (s + 1 < batch)
        sequence = gl.where(is_past, s + 1, sequence)
        before = gl.where(is_past, passed, before)
    each = num_sms // (batch * HEADS)
    shared = gl.maximum(each, 1)
    is_even = (each > 0) & (part_of(longest, shared) - total // num_sms <= SPARE_BLOCKS)
    pair = sm // shared
    is_used = pair < batch * HEADS
    of_pair = gl.where(is_used, pair // HEADS, 0)
    sequence = gl.where(is_even, of_pair, sequence)
    _, num_blocks = blocks_of(state, sequence, step, window)
    part = part_of(num_blocks, shared)
    own = sm % shared * part
    most = gl.where(is_used, gl.maximum(gl.minimum(num_blocks - own, part), 0), 0)
    head = gl.where(is_even, pair % HEADS, (start - before) // num_blocks)
    block = gl.where(is_even, own, (start - before) % num_blocks)
    left = gl.where(is_even, most, left)
    return sequence, head, block, left, gl.where(is_even, -shared, start)


@gluon.jit
def part_of(num_blocks, sharing):
    """Blocks that each of `sharing` SMs has of a sequence and head, but for the last that has some.
    """
    return (num_blocks + sharing - 1) // sharing


@gluon.jit
def sms_of_piece(start, block, num_blocks, sm, sharing, total):
    """The first and the last SM that have some of a sequence and head's num_blocks blocks, of which
    this one has a piece from `block` on. start, total: as of attention_task; sharing: SMs that
    share the line.
    """
    pair = start - block
    first_sm = ((pair + 1) * sharing - 1) // total
    last_sm = ((pair + num_blocks) * sharing - 1) // total
    if start < 0:
        part = part_of(num_blocks, -start)
        first_sm = sm - block // part
        last_sm = first_sm + part_of(num_blocks, part) - 1
    return first_sm, last_sm


@gluon.jit
def add(a, b):
    """a + b."""
    return a + b


@gluon.jit
def first_piece_of_many(
    state, batch, step, window, sm, num_sms, HEADS: gl.constexpr, ROWS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """The number of all blocks, and what first_piece gives: sequences side by side in the lanes of
    a warp, since one after the other takes longer than a task waits for its first block. Shares are
    whole pieces where no SM has then more than SPARE_BLOCKS more than others: what a part of a
    piece costs besides, to leave it and to sum up, takes longer.
    """
    s = gl.arange(0, ROWS, layout=in_each_warp(ROWS, WARPS))
    position = gl.load(state + BATCH_STATE_POSITIONS + s) + step
    first = first_seen(position, window) // TILE_ROWS
    num = gl.maximum((position + TILE_ROWS - 1) // TILE_ROWS - first, 1)
    num = gl.where(s < batch, num, 0)
    passed = gl.associative_scan(num * HEADS, 0, add)
    total = gl.max(passed, 0)
    sharing = gl.minimum(total, num_sms)
    start = sm * total // sharing
    stop = (sm + 1) * total // sharing
    longest = gl.max(num, 0)
    most = (total + sharing * longest - 1) // (sharing * longest) * longest
    sequence, head, block = piece_at(passed, start, s, state, batch, step, window)
    if most - total // sharing <= SPARE_BLOCKS:
        _, _, behind = piece_at(passed, stop, s, state, batch, step, window)
        start -= block
        stop -= gl.where(sm + 1 < sharing, behind, 0)
        block = 0
    left = gl.where(sm < sharing, stop - start, 0)
    return total, sequence, head, block, left, start


@gluon.jit
def piece_at(passed, at, s, state, batch, step, window):
    """Sequence, head and block of place `at` in the line. passed: where sequences s end there."""
    is_past = (passed <= at) & (s + 1 < batch)
    sequence = gl.sum(is_past.to(gl.int32), 0)
    behind = at - gl.max(gl.where(is_past, passed, 0), 0)
    _, num_blocks = blocks_of(state, sequence, step, window)
    return sequence, behind // num_blocks, behind % num_blocks


@gluon.jit
def rotated_rows(
    words, numbers, vectors, rope, sequence, head, query0, position, eps, D: gl.constexpr,
    G: gl.constexpr, H: gl.constexpr, KVH: gl.constexpr, QK_NORM: gl.constexpr,
    ROTATED: gl.constexpr, APART: gl.constexpr, ROWS: gl.constexpr, WIDE: gl.constexpr,
):
    """Both halves [16, d / 2] of G queries and the new key, normed and rotated where the segment
    does that, and the value.
    """
    asked = ask_rows(
        words, numbers, rope, sequence, head, query0, position, D, G, H, KVH, ROTATED, APART, ROWS
    )
    return turned_rows(words, vectors, asked, eps, D, G, QK_NORM, ROTATED, WIDE)


@gluon.jit
def ask_rows(
    words, numbers, rope, sequence, head, query0, position, D: gl.constexpr, G: gl.constexpr,
    H: gl.constexpr, KVH: gl.constexpr, ROTATED: gl.constexpr, APART: gl.constexpr,
    ROWS: gl.constexpr,
):
    """What turned_rows takes: both halves as they are, and where they are rotated cosines and
    sines.
    """
    half: gl.constexpr = D // 2
    PAIR: gl.constexpr = head_rows(half, 4)
    rows = gl.expand_dims(gl.arange(0, MMA_M, layout=gl.SliceLayout(1, PAIR)), 1)
    columns = gl.expand_dims(gl.arange(0, half, layout=gl.SliceLayout(0, PAIR)), 0)
    at = head_rows_at(words, numbers, sequence, head, query0, rows, D, G, H, KVH, APART, ROWS)
    at += columns
    wanted = (rows < G + 2) & (columns >= 0)
    a = gl.load(at, mask=wanted, other=0.0, cache_modifier=".cg")
    b = gl.load(at + half, mask=wanted, other=0.0, cache_modifier=".cg")
    if ROTATED:
        cos = gl.load(rope + position * D + columns)
        sin = gl.load(rope + position * D + half + columns)
        return a, b, cos, sin
    else:
        return a, b


@gluon.jit
def turned_rows(
    words, vectors, asked, eps, D: gl.constexpr, G: gl.constexpr, QK_NORM: gl.constexpr,
    ROTATED: gl.constexpr, WIDE: gl.constexpr,
):
    """What rotated_rows gives, of what ask_rows has asked for."""
    half: gl.constexpr = D // 2
    PAIR: gl.constexpr = head_rows(half, 4)
    rows = gl.expand_dims(gl.arange(0, MMA_M, layout=gl.SliceLayout(1, PAIR)), 1)
    columns = gl.expand_dims(gl.arange(0, half, layout=gl.SliceLayout(0, PAIR)), 0)
    a = asked[0]
    b = asked[1]
    is_value = rows > G
    if QK_NORM:
        weight = gl.where(rows < G, words[ATT_Q_NORM], words[ATT_K_NORM])
        if WIDE:
            at_norm = (vectors + weight).to(gl.pointer_type(gl.float32), bitcast=True) + columns
        else:
            at_norm = vectors + weight + columns
        weight1 = gl.load(at_norm).to(gl.float32)
        weight2 = gl.load(at_norm + half).to(gl.float32)
        inv = gl.rsqrt(gl.expand_dims(gl.sum(a * a + b * b, axis=1), 1) / D + eps)
        a = gl.where(is_value, a, a * inv * weight1)
        b = gl.where(is_value, b, b * inv * weight2)
    if ROTATED:
        turned = a * asked[2] - b * asked[3]
        b = gl.where(is_value, b, b * asked[2] + a * asked[3])
        a = gl.where(is_value, a, turned)
    return a, b


@gluon.jit
def head_rows_at(
    words, numbers, sequence, head, query0, rows, D: gl.constexpr, G: gl.constexpr, H: gl.constexpr,
    KVH: gl.constexpr, APART: gl.constexpr, ROWS: gl.constexpr,
):
    """Where the numbers of G queries, the new key and the new value begin."""
    if APART:
        of_new = of_rows(gl.where(rows == G, words[ATT_K_SRC], words[ATT_V_SRC]), ROWS)
        of_new += (sequence * KVH + head) * D
        of_query = of_rows(words[SRC], ROWS) + (sequence * H + query0 + rows) * D
        at = numbers + gl.where(rows < G, of_query, of_new)
    else:
        source = gl.where(rows < G, query0 + rows, gl.where(rows == G, H + head, H + KVH + head))
        at = numbers + of_rows(words[SRC], ROWS) + sequence * words[NUM_ROWS] + source * D
    return at


@gluon.jit
def norm_vector(words, vectors, rows, columns, inside, G: gl.constexpr, WIDE: gl.constexpr):
    """Weights of the norms of queries and the new key."""
    weight = gl.where(rows < G, words[ATT_Q_NORM], words[ATT_K_NORM])
    if WIDE:
        at = (vectors + weight).to(gl.pointer_type(gl.float32), bitcast=True) + columns
    else:
        at = vectors + weight + columns
    return gl.load(at, mask=inside, other=0.0).to(gl.float32)


@gluon.jit
def head_factors(words, memory, sequence, head, query0, eps, spec: gl.constexpr):
    """[16, 1]: factors of the norms of rows, where there are norms."""
    D: gl.constexpr = spec.head_dim
    G: gl.constexpr = spec.num_queries
    PAIR: gl.constexpr = head_rows(64, 4)
    rows = gl.expand_dims(gl.arange(0, MMA_M, layout=gl.SliceLayout(1, PAIR)), 1)
    squares = gl.zeros([MMA_M], gl.float32, layout=gl.SliceLayout(1, PAIR))
    if spec.qk_norm:
        lanes = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, PAIR)), 0)
        at = head_rows_at(
            words, memory.numbers, sequence, head, query0, rows, D, G, spec.num_heads,
            spec.num_kv_heads, spec.apart, spec.rows,
        )
        for h in gl.static_range(num_halves(D)):
            columns = h * 64 + lanes
            seen = (rows < G + 2) & (columns < D)
            z = gl.load(at + columns, mask=seen, other=0.0, cache_modifier=".cg")
            squares += gl.sum(z * z, axis=1)
    return gl.rsqrt(gl.expand_dims(squares, 1) / D + eps)


@gluon.jit
def rotated_columns(
    words, memory, sequence, head, query0, position, inv, h, spec: gl.constexpr
):
    """Columns [16, 64] from 64 h on of what rotated_rows gives, for heads whose halves are no
    powers of two: each column with the one that it is rotated with; zeros past the last. inv:
    factors of norms.
    """
    D: gl.constexpr = spec.head_dim
    G: gl.constexpr = spec.num_queries
    half: gl.constexpr = D // 2
    PAIR: gl.constexpr = head_rows(64, 4)
    rows = gl.expand_dims(gl.arange(0, MMA_M, layout=gl.SliceLayout(1, PAIR)), 1)
    lanes = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, PAIR)), 0)
    columns = h * 64 + lanes
    others = gl.where(columns < half, columns + half, columns - half)
    at = head_rows_at(
        words, memory.numbers, sequence, head, query0, rows, D, G, spec.num_heads,
        spec.num_kv_heads, spec.apart, spec.rows,
    )
    inside = (rows < G + 2) & (columns < D)
    x = gl.load(at + columns, mask=inside, other=0.0, cache_modifier=".cg")
    y = x
    if spec.rotated:
        y = gl.load(at + others, mask=inside, other=0.0, cache_modifier=".cg")
    is_value = rows > G
    if spec.qk_norm:
        of_x = norm_vector(words, memory.vectors, rows, columns, inside, G, spec.wide_norms)
        x = gl.where(is_value, x, x * inv * of_x)
        if spec.rotated:
            of_y = norm_vector(words, memory.vectors, rows, others, inside, G, spec.wide_norms)
            y = y * inv * of_y
    if spec.rotated:
        angle = gl.where(columns < half, columns, others)
        cos = gl.load(memory.rope + position * D + angle, mask=columns < D, other=0.0)
        sin = gl.load(memory.rope + position * D + half + angle, mask=columns < D, other=0.0)
        turned = x * cos + y * gl.where(columns < half, -sin, sin)
        x = gl.where(is_value, x, turned)
    return x


@gluon.jit
def append_columns(cache, k_row, v_row, x, h, D: gl.constexpr, G: gl.constexpr):
    """64 columns of rows G (key) and G + 1 (value) into the cache."""
    PAIR: gl.constexpr = head_rows(64, 4)
    row = gl.expand_dims(gl.arange(0, MMA_M, layout=gl.SliceLayout(1, PAIR)), 1)
    columns = h * 64 + gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, PAIR)), 0)
    at = cache + gl.where(row == G, k_row, v_row).to(gl.int64) * D + columns
    gl.store(at, x, mask=(row >= G) & (row < G + 2) & (columns < D))


@gluon.jit
def append_rows(cache, k_row, v_row, a, b, D: gl.constexpr, G: gl.constexpr):
    """Rows G (key) and G + 1 (value) of both halves into the cache."""
    half: gl.constexpr = D // 2
    PAIR: gl.constexpr = head_rows(half, 4)
    row = gl.expand_dims(gl.arange(0, MMA_M, layout=gl.SliceLayout(1, PAIR)), 1)
    columns = gl.expand_dims(gl.arange(0, half, layout=gl.SliceLayout(0, PAIR)), 0)
    at = cache + gl.where(row == G, k_row, v_row).to(gl.int64) * D + columns
    new = (row >= G) & (row < G + 2) & (columns >= 0)
    gl.store(at, a, mask=new)
    gl.store(at + half, b, mask=new)


@gluon.jit
def sum_half(o, ml, scratch):
    """64 columns summed over the warps: [8 queries, 64] in the layout of WARP_SUM's rows."""
    low, _ = gl.split(gl.permute(gl.reshape(o, [NUM_WARPS, 2, GROUP_LIMIT, 64]), [0, 2, 3, 1]))
    scratch.store(low)
    slim: gl.constexpr = gl.SliceLayout(2, WARP_SUM)
    m = ml.index(0).slice(0, GROUP_LIMIT, dim=1).load(slim)
    highest = gl.max(m, axis=0)
    weight = gl.exp2(m - gl.expand_dims(highest, 0))
    sums = gl.sum(weight * ml.index(1).slice(0, GROUP_LIMIT, dim=1).load(slim), axis=0)
    y = gl.sum(scratch.load(WARP_SUM) * gl.expand_dims(weight, 2), axis=0)
    OUT: gl.constexpr = gl.SliceLayout(0, WARP_SUM)
    ROWS: gl.constexpr = gl.SliceLayout(1, OUT)
    return y, gl.convert_layout(highest, ROWS), gl.convert_layout(sums, ROWS)


@gluon.jit
def are_stored(r, head, spec: gl.constexpr):
    """Which queries r of number `head` of the heads it stores. The last part of a kv head leaves
    out those that the one before has, too: the line cuts its blocks elsewhere, so that their sums
    round to other bits.
    """
    G: gl.constexpr = spec.num_queries
    PARTS: gl.constexpr = spec.num_parts
    GROUP: gl.constexpr = spec.num_heads // spec.num_kv_heads
    mine = r < G
    if PARTS * G > GROUP:
        mine = mine & ((r >= PARTS * G - GROUP) | (head % PARTS + 1 < PARTS))
    return mine


@gluon.jit
def store_output(acts, first, y, head, query0, sequence, h: gl.constexpr, spec: gl.constexpr):
    """bf16 pairs of 64 columns of outputs into the activations from element `first`: of the queries
    of number `head` of the heads, from query0 on.
    """
    D: gl.constexpr = spec.head_dim
    ROWS: gl.constexpr = spec.rows
    a, b = gl.split(gl.reshape(y, [GROUP_LIMIT, 32, 2]))
    payload = gl.convert_layout(bf16_pair(a, b), PAIR_OUT)
    r = gl.expand_dims(gl.arange(0, GROUP_LIMIT, layout=gl.SliceLayout(1, PAIR_OUT)), 1)
    pair = gl.expand_dims(gl.arange(0, 32, layout=gl.SliceLayout(0, PAIR_OUT)), 0)
    column = (query0 + r) * D + h * 64 + pair * 2
    mine = are_stored(r, head, spec)
    if is_padded(D):
        mine = mine & (h * 64 + pair * 2 < D)
    at = acts + of_rows(first // 2, ROWS) + pair_index(column, sequence, ROWS)
    gl.store(at, payload, mask=mine)
    if is_padded(D):
        join_lanes()


@gluon.jit
def store_partial(partials, slot, y, highest, sums, h: gl.constexpr, D: gl.constexpr):
    """64 columns of 8 queries' unscaled outputs, their maxima and sums, as float32. D: elements of
    a head, zeros up to whole slots included.
    """
    OUT: gl.constexpr = gl.SliceLayout(0, WARP_SUM)
    r = gl.arange(0, GROUP_LIMIT, layout=gl.SliceLayout(1, OUT))
    c = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, OUT)), 0)
    base = partials + slot * (GROUP_LIMIT * D + BATCH_PARTIAL_EXTRA)
    gl.store(base + gl.expand_dims(r, 1) * D + h * 64 + c, y)
    if h == 0:
        gl.store(base + GROUP_LIMIT * D + r, highest)
        gl.store(base + GROUP_LIMIT * D + GROUP_LIMIT + r, sums)


@gluon.jit
def load_partial(partials, first_sm, i, num, D: gl.constexpr, OUT: gl.constexpr):
    """Number i of the partials that `combine` joins: outputs, their maxima and sums; of i >= num
    what changes nothing.
    """
    WIDTH: gl.constexpr = 64 * num_halves(D)
    SPAN: gl.constexpr = padded_columns(D)
    r = gl.arange(0, GROUP_LIMIT, layout=gl.SliceLayout(1, OUT))
    c = gl.arange(0, SPAN, layout=gl.SliceLayout(0, OUT))
    slot = (first_sm + i) * 2 + gl.where(i == 0, 1, 0)
    base = partials + slot * (GROUP_LIMIT * WIDTH + BATCH_PARTIAL_EXTRA)
    extra = base + GROUP_LIMIT * WIDTH + r
    there = (r >= 0) & (i < num)
    inside = gl.expand_dims(c < WIDTH, 0) & gl.expand_dims(there, 1)
    at = base + gl.expand_dims(r * WIDTH, 1) + gl.expand_dims(c, 0)
    y = gl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
    highest = gl.load(extra, mask=there, other=float("-inf"), cache_modifier=".cg")
    sums = gl.load(extra + GROUP_LIMIT, mask=there, other=0.0, cache_modifier=".cg")
    return y, highest, sums


@gluon.jit
def join_partial(o, m, l, y, highest, sums):
    """Outputs so far, their maxima and sums, with those of one more."""
    m_new = gl.maximum(m, highest)
    alpha = gl.exp2(m - m_new)
    beta = gl.exp2(highest - m_new)
    o = o * gl.expand_dims(alpha, 1) + y * gl.expand_dims(beta, 1)
    return o, m_new, l * alpha + sums * beta


@gluon.jit
def combine(
    acts, first, partials, head, query0, sequence, first_sm, num, spec: gl.constexpr
):
    """The output from the partials of SMs first_sm on: the first's second, the others' first. Four
    are asked for at a time, and join in the SMs' order. head, query0: as of store_output.
    """
    D: gl.constexpr = spec.head_dim
    ROWS: gl.constexpr = spec.rows
    OUT: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [8, 1], [1, 0])
    SPAN: gl.constexpr = padded_columns(D)
    o = gl.zeros([GROUP_LIMIT, SPAN], gl.float32, layout=OUT)
    m = gl.full([GROUP_LIMIT], float("-inf"), gl.float32, layout=gl.SliceLayout(1, OUT))
    l = gl.zeros([GROUP_LIMIT], gl.float32, layout=gl.SliceLayout(1, OUT))
    for i in range(0, keep(num), 4):
        a, highest_a, sums_a = load_partial(partials, first_sm, i, num, D, OUT)
        b, highest_b, sums_b = load_partial(partials, first_sm, i + 1, num, D, OUT)
        c, highest_c, sums_c = load_partial(partials, first_sm, i + 2, num, D, OUT)
        d, highest_d, sums_d = load_partial(partials, first_sm, i + 3, num, D, OUT)
        o, m, l = join_partial(o, m, l, a, highest_a, sums_a)
        o, m, l = join_partial(o, m, l, b, highest_b, sums_b)
        o, m, l = join_partial(o, m, l, c, highest_c, sums_c)
        o, m, l = join_partial(o, m, l, d, highest_d, sums_d)
    o = o / gl.expand_dims(l, 1)
    even, odd = gl.split(gl.reshape(o, [GROUP_LIMIT, SPAN // 2, 2]))
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [8, 1], [1, 0])
    payload = gl.convert_layout(bf16_pair(even, odd), PAIRS)
    r = gl.expand_dims(gl.arange(0, GROUP_LIMIT, layout=gl.SliceLayout(1, PAIRS)), 1)
    pair = gl.expand_dims(gl.arange(0, SPAN // 2, layout=gl.SliceLayout(0, PAIRS)), 0)
    column = (query0 + r) * D + pair * 2
    mine = are_stored(r, head, spec)
    if is_padded(D):
        mine = mine & (pair * 2 < D)
    at = acts + of_rows(first // 2, ROWS) + pair_index(column, sequence, ROWS)
    gl.store(at, payload, mask=mine)
    if is_padded(D):
        join_lanes()


@gluon.jit
def table_of(words, vectors):
    """The f32 table that is added to scores, in the weight arena."""
    first = words[ATT_TABLE].to(gl.int64) * VECTOR_MULTIPLE
    return (vectors + first).to(gl.pointer_type(gl.float32), bitcast=True)


@constexpr_function
def asks_ahead(spec) -> bool:
    """Whether the rows of a piece are asked for while the one before it is attended to: of few
    sequences an SM has hardly more than one piece.
    """
    return bool(spec.rows > BATCH.value and spec.head_dim in (64, 128))


@gluon.jit
def ask_piece(words, memory, sequence, head, position, spec: gl.constexpr):
    """ask_rows of number `head` of the heads of a sequence, as attention_task counts them."""
    kv_head, query0 = queries_of(head, spec)
    return ask_rows(
        words, memory.numbers, memory.rope, sequence, kv_head, query0, position, spec.head_dim,
        spec.num_queries, spec.num_heads, spec.num_kv_heads, spec.rotated, spec.apart, spec.rows,
    )


@gluon.jit
def queries_of(head, spec: gl.constexpr):
    """The kv head of a head as attention_task counts them, and its first query head."""
    G: gl.constexpr = spec.num_queries
    GROUP: gl.constexpr = spec.num_heads // spec.num_kv_heads
    kv_head = head // spec.num_parts
    return kv_head, kv_head * GROUP + gl.minimum(head % spec.num_parts * G, GROUP - G)


@gluon.jit
def piece_rows(
    words, memory, sequence, head, query0, position, eps, qs, spec: gl.constexpr
):
    """Both halves of the queries, the new key and value of a piece, which go into qs as well."""
    D: gl.constexpr = spec.head_dim
    G: gl.constexpr = spec.num_queries
    HALVES: gl.constexpr = num_halves(D)
    if is_padded(D):
        inv = head_factors(words, memory, sequence, head, query0, eps, spec)
        a = rotated_columns(words, memory, sequence, head, query0, position, inv, 0, spec)
        a = a.to(gl.bfloat16)
        b = a
        qs.index(0).store(a)
        if HALVES == 2:
            b = rotated_columns(words, memory, sequence, head, query0, position, inv, 1, spec)
            b = b.to(gl.bfloat16)
            qs.index(1).store(b)
    else:
        a, b = rotated_rows(
            words, memory.numbers, memory.vectors, memory.rope, sequence, head, query0, position,
            eps, D, G, spec.num_heads, spec.num_kv_heads, spec.qk_norm, spec.rotated, spec.apart,
            spec.rows, spec.wide_norms,
        )
        a = a.to(gl.bfloat16)
        b = b.to(gl.bfloat16)
        store_halves(qs, a, b, D)
    return a, b


@gluon.jit
def attend_piece(
    words, memory, a, b, query0, position, first, block0, num, scale, row0, qs, ring, it,
    spec: gl.constexpr,
):
    """num blocks from block0 on, counted from the first that the query sees, which brings the new
    position. a, b: see piece_rows. `scale` includes log2(e).
    """
    D: gl.constexpr = spec.head_dim
    G: gl.constexpr = spec.num_queries
    HALVES: gl.constexpr = num_halves(D)
    table = None
    if spec.biased:
        table = table_of(words, memory.vectors)
    q0 = queries(qs, 0)
    q1 = queries(qs, HALVES - 1)
    m = gl.full([NUM_WARPS, MMA_M], float("-inf"), gl.float32, layout=QUERY)
    l = gl.zeros([NUM_WARPS, MMA_M], gl.float32, layout=QUERY)
    o0 = gl.zeros([NUM_WARPS, MMA_M, 64], gl.float32, layout=MMA3)
    o1 = o0
    if block0 == 0:
        new = row0 + position
        k_row = words[ATT_K_ROW] + new
        v_row = words[ATT_V_ROW] + new
        if is_padded(D):
            append_columns(memory.cache, k_row, v_row, a, 0, D, G)
            if HALVES == 2:
                append_columns(memory.cache, k_row, v_row, b, 1, D, G)
        else:
            append_rows(memory.cache, k_row, v_row, a, b, D, G)
        m, l = begin_new(qs, scale, table, query0, position, spec)
        o0 = new_value(qs, 0, G)
        o1 = new_value(qs, HALVES - 1, G)
    begin = first // TILE_ROWS + block0
    for block in range(keep(begin), begin + num):
        it, m, l, o0, o1 = attend_block(
            q0, q1, ring, it, block, first, position, scale, table, query0, m, l, o0, o1, spec,
        )
    return it, m, l, o0, o1


@gluon.jit
def attend_wide_piece(
    words, memory, sequence, head, query0, position, first, block0, num, eps, scale, row0, qs, ring,
    it, spec: gl.constexpr,
):
    """As attend_piece, of heads of more than 128 elements; maxima, sums and outputs as wide.py has
    them.
    """
    D: gl.constexpr = spec.head_dim
    G: gl.constexpr = spec.num_queries
    inv = head_factors(words, memory, sequence, head, query0, eps, spec)
    new = row0 + position
    for h in range(keep(num_halves(D))):
        x = rotated_columns(words, memory, sequence, head, query0, position, inv, h, spec)
        x = x.to(gl.bfloat16)
        qs.index(h).store(x)
        if block0 == 0:
            append_columns(memory.cache, words[ATT_K_ROW] + new, words[ATT_V_ROW] + new, x, h, D, G)
    table = None
    if spec.biased:
        table = table_of(words, memory.vectors)
    m, l, outputs = begin_wide(qs, scale, table, query0, position, block0 == 0, spec)
    begin = first // TILE_ROWS + block0
    for block in range(keep(begin), begin + num):
        it, m, l, outputs = attend_wide_block(
            qs, ring, it, block, first, position, scale, table, query0, m, l, outputs, spec
        )
    return it, numbers_of_queries(m), numbers_of_queries(l), outputs


@gluon.jit
def attention_task(
    words, memory, state, batch, step, sm, num_sms, max_context, eps, scale, qs, ml, scratch, ring,
    it, sequence, head, block, left, start, total, spec: gl.constexpr,
):
    """This SM's share from (sequence, head, block) on, `left` blocks; returns the ring position.

    words: of the instruction. state, num_sms, max_context, eps, scale: as of run_batch_steps.
    batch, step: sequences, and the number of the step in this launch. qs: bf16 [num_halves, 16,
    64], ml: f32 [2, 8 warps, 16], scratch: f32 [8 warps, 8, 64], shared memory for the queries,
    maxima and sums, outputs, which nothing else uses meanwhile. it: ring slots taken before. start,
    total: where the share begins in the line of all blocks, and the length of that. Writes
    memory.acts, .cache, .partials and .arrivals.

    A head here is num_queries queries of a kv head; the last of its num_parts begins early enough
    to have as many.
    """
    D: gl.constexpr = spec.head_dim
    G: gl.constexpr = spec.num_queries
    KVH: gl.constexpr = spec.num_kv_heads
    PARTS: gl.constexpr = spec.num_parts
    HALVES: gl.constexpr = num_halves(D)
    HEADS: gl.constexpr = KVH * PARTS
    GROUP: gl.constexpr = spec.num_heads // KVH
    sharing = gl.minimum(total, num_sms)
    if asks_ahead(spec):
        position = gl.load(state + BATCH_STATE_POSITIONS + sequence) + step
        asked = ask_piece(words, memory, sequence, head, position, spec)
    while left > 0:
        position = gl.load(state + BATCH_STATE_POSITIONS + sequence) + step
        _, num_blocks = blocks_of(state, sequence, step, words[ATT_WINDOW])
        first = first_seen(position, words[ATT_WINDOW])
        num = gl.minimum(left, num_blocks - block)
        kv_head = head // PARTS
        query0 = kv_head * GROUP + gl.minimum(head % PARTS * G, GROUP - G)
        row0 = (sequence * KVH + kv_head) * max_context
        if HALVES > 2:
            it, highest, sums, outputs = attend_wide_piece(
                words, memory, sequence, kv_head, query0, position, first, block, num, eps, scale,
                row0, qs, ring, it, spec,
            )
        else:
            if asks_ahead(spec):
                a, b = turned_rows(
                    words, memory.vectors, asked, eps, D, G, spec.qk_norm, spec.rotated,
                    spec.wide_norms,
                )
                a = a.to(gl.bfloat16)
                b = b.to(gl.bfloat16)
                store_halves(qs, a, b, D)
                then = gl.minimum(gl.where(head + 1 == HEADS, sequence + 1, sequence), batch - 1)
                then_at = gl.load(state + BATCH_STATE_POSITIONS + then) + step
                then_head = gl.where(head + 1 == HEADS, 0, head + 1)
                asked = ask_piece(words, memory, then, then_head, then_at, spec)
            else:
                a, b = piece_rows(
                    words, memory, sequence, kv_head, query0, position, eps, qs, spec
                )
            it, m, l, o0, o1 = attend_piece(
                words, memory, a, b, query0, position, first, block, num, scale, row0, qs, ring, it,
                spec,
            )
            ml.index(0).store(m)
            ml.index(1).store(l)
        is_whole = num == num_blocks
        slot = sm * 2 + gl.where(block == 0, 1, 0)
        for h in gl.static_range(HALVES):
            if HALVES > 2:
                y = rows_of_queries(outputs[h])
            else:
                y, highest, sums = sum_half(o0 if h == 0 else o1, ml, scratch)
            if is_whole:
                y = y / gl.expand_dims(sums, 1)
                store_output(memory.acts, words[DST], y, head, query0, sequence, h, spec)
            else:
                store_partial(memory.partials, slot, y, highest, sums, h, 64 * HALVES)
        if spec.rows == BATCH:  # noqa: SIM102  a constant
            if block == 0:
                fence_all()
        if is_whole == 0:
            cta_barrier()
            arrival = memory.arrivals + sequence * HEADS + head
            seen = gl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu")
            first_sm, last_sm = sms_of_piece(start, block, num_blocks, sm, sharing, total)
            if seen == last_sm - first_sm:
                cta_barrier()
                gl.store(arrival, 0)
                num_partials = last_sm - first_sm + 1
                combine(
                    memory.acts, words[DST], memory.partials, head, query0, sequence, first_sm,
                    num_partials, spec,
                )
        start += num
        left -= num
        block = 0
        is_next = head + 1 == HEADS
        sequence = gl.where(is_next, sequence + 1, sequence)
        head = gl.where(is_next, 0, head + 1)
    if spec.rows > BATCH:
        fence_all()
    return it
