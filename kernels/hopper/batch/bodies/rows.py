"""Attention of the rows of a step over keys and values of the same rows, or over one cache that
they share, and the heads in the form in which it takes them.

A task is 16 queries of a kv head, rows and the query heads of a row; it is one SM's, or that of
several where there are SMs enough: each has a part of the keys then and leaves a partial, and the
last to arrive sums them in their order. Keys are looked at 64 or 128 at a time, with an online
softmax; they come through registers, from numbers or from the cache, since they were written in
this step, into shared memory, which gives them in the order of products.

In: queries, keys and values as numbers, a cache. Out: numbers, the new positions in the cache; the
attention output as activations, as numbers, or both. Next on the walk: kernel.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.runtime.jit import constexpr_function

from distmega.kernels.gluon_compat import cta_barrier, reinterpret
from distmega.kernels.hopper.batch.bodies.blocks import capped
from distmega.kernels.hopper.batch.bodies.norms import load_vector
from distmega.kernels.hopper.batch.bodies.wide import LEFT, MMA2, OF_POSITIONS, OF_QUERIES, RIGHT
from distmega.kernels.hopper.batch.device import of_rows, pair_index
from distmega.kernels.hopper.batch_plan.fields import (
    BATCH,
    BATCH_STATE_POSITIONS,
    DST,
    HEADS_K_DST,
    HEADS_K_NORM,
    HEADS_K_ROWS,
    HEADS_K_SRC,
    HEADS_NUM_KEYS,
    HEADS_Q_NORM,
    HEADS_V_DST,
    HEADS_V_ROWS,
    HEADS_V_SRC,
    NUM_ROWS,
    OP_HEADS,
    OP_ROWS,
    OPCODE,
    ROWS_HEAD_STEP,
    ROWS_K_ROWS,
    ROWS_K_SRC,
    ROWS_KEEP,
    ROWS_KEY_STEP,
    ROWS_MASK,
    ROWS_NUM_KEYS,
    ROWS_ROW_STEP,
    ROWS_SCALE,
    ROWS_SEES,
    ROWS_V_ROWS,
    ROWS_V_SRC,
    SRC,
)
from distmega.kernels.hopper.epilogues import count
from distmega.kernels.hopper.plan.fields import LOG2_E
from distmega.kernels.hopper.ptx.device import bf16_pair, keep, single
from distmega.kernels.hopper.ptx.shapes import TILE_ROWS, TILE_SHARED, num_halves

WIDTH = gl.constexpr(64)
"""Columns of a head at a time."""
AT_ONCE = gl.constexpr(4)
"""Partials that are asked for at a time."""
PAIRS = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [8, 1], [1, 0]))
"""[16 queries, 32 pairs of columns]."""
LOADED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
"""[keys, 64 columns]: 8 columns a load."""
ONE_HEAD = gl.constexpr(256)
COLUMNS = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
"""[256 columns] of a head."""


@constexpr_function
def shape_of(shapes, number):
    """One of a segment's shapes, as a constant."""
    return shapes.each[number]


@gluon.jit
def attend_rows(
    words, memory, buffer, state, batch, step, sm, num_sms, eps, SHAPES: gl.constexpr,
    ROWS: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """The task of an instruction, of its shape; see heads_task and rows_task."""
    for i in gl.static_range(count(SHAPES)):
        if words[OPCODE] == OP_ROWS + i:
            rows_task(
                words, memory, buffer, state, batch, step, sm, num_sms, shape_of(SHAPES, i), ROWS
            )
        if prepares(SHAPES, i):  # noqa: SIM102  a constant
            if words[OPCODE] == OP_HEADS + i:
                heads_task(
                    words, memory, state, batch, step, sm, num_sms, eps, shape_of(SHAPES, i), WIDE
                )


@constexpr_function
def prepares(shapes, number):
    """Whether heads of a shape change, or are stored in a cache, before rows see them."""
    shape = shapes.each[number]
    return shape.cached or shape.normed or shape.rotated


@gluon.jit
def heads_task(
    words, memory, state, batch, step, sm, num_sms, eps, SHAPE: gl.constexpr, WIDE: gl.constexpr
):
    """Every num_sms-th head of all rows from number `sm` on.

    words: int32, of the instruction. memory: see BatchMemory; reads numbers, norms in the weight
    arena and angles, writes numbers and the cache. state: int32, positions of the rows. batch: rows
    in use; step: number of the step in this launch. SHAPE: RowAttentionShape. WIDE: whether weights
    of norms are f32.
    """
    D: gl.constexpr = SHAPE.head_dim
    H: gl.constexpr = SHAPE.num_heads
    KVH: gl.constexpr = SHAPE.num_kv_heads
    EACH: gl.constexpr = H + 2 * KVH if SHAPE.cached else H + KVH
    half: gl.constexpr = D // 2
    column = gl.arange(0, ONE_HEAD, layout=COLUMNS)
    mine = column < D
    other = gl.where(column < half, column + half, column - half)
    for number in range(keep(sm), keep(batch) * EACH, keep(num_sms)):
        row = number // EACH
        head = number % EACH
        is_query = head < H
        is_key = (head >= H) & (head < H + KVH)
        of_query = words[SRC] + row * words[NUM_ROWS] + head * D
        of_key = words[HEADS_K_SRC] + row * words[HEADS_K_ROWS] + (head - H) * D
        of_value = words[HEADS_V_SRC] + row * words[HEADS_V_ROWS] + (head - H - KVH) * D
        at = memory.numbers + gl.where(is_query, of_query, gl.where(is_key, of_key, of_value))
        position = gl.load(state + BATCH_STATE_POSITIONS + row) + step
        changes = is_query | is_key
        x = gl.load(at + column, mask=mine, other=0.0, cache_modifier=".cg")
        y = x
        if SHAPE.rotated:
            y = gl.load(at + other, mask=mine, other=0.0, cache_modifier=".cg")
        if SHAPE.normed:
            first = gl.where(is_query, words[HEADS_Q_NORM], words[HEADS_K_NORM])
            factor = gl.rsqrt(gl.sum(x * x, axis=0) / D + eps)
            of_x = load_vector(memory.vectors, first, column, mine, 0.0, WIDE).to(gl.float32)
            x = gl.where(changes, x * factor * of_x, x)
            if SHAPE.rotated:
                of_y = load_vector(memory.vectors, first, other, mine, 0.0, WIDE).to(gl.float32)
                y = y * factor * of_y
        if SHAPE.rotated:
            angle = gl.where(column < half, column, other)
            cos = gl.load(memory.rope + position * D + angle, mask=mine, other=0.0)
            sin = gl.load(memory.rope + position * D + half + angle, mask=mine, other=0.0)
            turned = x * cos + y * gl.where(column < half, -sin, sin)
            x = gl.where(changes, turned, x)
        to_query = words[DST] + (row * H + head) * D
        if SHAPE.cached:
            gl.store(memory.numbers + to_query + column, x, mask=mine & is_query)
            kv_head = gl.where(is_key, head - H, head - H - KVH)
            first_row = gl.where(is_key, words[HEADS_K_DST], words[HEADS_V_DST])
            cached_row = (first_row + kv_head * words[HEADS_NUM_KEYS] + position).to(gl.int64)
            to = memory.cache + cached_row * D + column
            gl.store(to, x.to(gl.bfloat16), mask=mine & (head >= H))
        else:
            to_key = words[HEADS_K_DST] + (row * KVH + head - H) * D
            gl.store(memory.numbers + gl.where(is_query, to_query, to_key) + column, x, mask=mine)


@gluon.jit
def row_and_head(query0, kv_head, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """int32 [16]: rows and query heads of a kv head's queries from query0 on, a row's heads one
    after the other.
    """
    GROUP: gl.constexpr = SHAPE.group
    query = query0 + gl.arange(0, BATCH, layout=LAYOUT)
    return query // GROUP, kv_head * GROUP + query % GROUP


@gluon.jit
def some_queries(words, memory, batch, query0, kv_head, column0, SHAPE: gl.constexpr):
    """bf16 [16, 64] columns from column0 on of queries from query0 on, zeros past the last column
    and row.
    """
    D: gl.constexpr = SHAPE.head_dim
    row, head = row_and_head(query0, kv_head, SHAPE, gl.SliceLayout(1, LEFT))
    column = column0 + gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LEFT)), 0)
    mine = gl.expand_dims(row < batch, 1) & (column < D)
    at = memory.numbers + words[SRC] + gl.expand_dims(row * words[NUM_ROWS] + head * D, 1)
    x = gl.load(at + column, mask=mine, other=0.0, cache_modifier=".cg")
    return x.to(gl.bfloat16)


@gluon.jit
def some_columns(at, length, key0, start, stop, column0, SHAPE: gl.constexpr):
    """bf16 [keys of a turn, 64 columns] from column0 on, of keys or values from key0 on, `length`
    elements from each other; zeros past the last column, before `start` and from `stop` on, since
    what no row sees may be no number.
    """
    key = key0 + gl.expand_dims(gl.arange(0, SHAPE.turn_keys, layout=gl.SliceLayout(1, LOADED)), 1)
    column = column0 + gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LOADED)), 0)
    mine = (key >= start) & (key < stop) & (column < SHAPE.head_dim)
    x = gl.load(at + key * length + column, mask=mine, other=0.0, cache_modifier=".cg")
    return x.to(gl.bfloat16)


@gluon.jit
def first_of(words, memory, src, length, kv_head, SHAPE: gl.constexpr):
    """Where the keys, or values, of a head begin, and the elements from one to the next."""
    D: gl.constexpr = SHAPE.head_dim
    if SHAPE.cached:
        return memory.cache + (src + kv_head * words[ROWS_NUM_KEYS]).to(gl.int64) * D, gl.to_tensor(
            D
        )
    else:
        return memory.numbers + src + kv_head * D, length


@gluon.jit
def added_scores(words, memory, head, row, key, inside, SHAPE: gl.constexpr):
    """[16, keys of a turn]: what the mask adds to scores, times log2(e)."""
    at = words[ROWS_MASK] + head * words[ROWS_HEAD_STEP]
    if SHAPE.num_queries > 0:
        at += row // SHAPE.num_queries * SHAPE.mask_step
        row = row % SHAPE.num_queries
        key = key % SHAPE.num_keys
    at += key * words[ROWS_KEY_STEP] + row * words[ROWS_ROW_STEP]
    inside = inside & (words[ROWS_MASK] >= 0)
    return gl.load(memory.numbers + at, mask=inside, other=0.0) * LOG2_E


@gluon.jit
def all_columns(at, length, key0, start, stop, SHAPE: gl.constexpr):
    """some_columns of the whole head, as a tuple."""
    found = ()
    for h in gl.static_range(num_halves(SHAPE.head_dim)):
        found += single(some_columns(at, length, key0, start, stop, h * WIDTH, SHAPE))
    return found


@gluon.jit
def rows_task(
    words, memory, buffer, state, batch, step, sm, num_sms, SHAPE: gl.constexpr, ROWS: gl.constexpr
):
    """Every num_sms-th 16 queries of a kv head from number `sm` on, or this SM's part of the keys
    of one; arguments as of heads_task. buffer: 16 KB of shared memory, which nothing else uses
    meanwhile; ROWS: that the kernel computes. Reads numbers and the cache, writes activations,
    numbers, partials and arrivals.
    """
    KEYS: gl.constexpr = SHAPE.turn_keys
    num_keys = words[ROWS_NUM_KEYS]
    sees = words[ROWS_SEES]
    blocks = (keep(batch) * SHAPE.group + BATCH - 1) // BATCH
    tasks = SHAPE.num_kv_heads * blocks
    most = gl.maximum(keep(num_sms) // tasks, 1)
    for number in range(keep(sm), tasks * most, keep(num_sms)):
        kv_head = number % tasks // blocks
        query0 = number % tasks % blocks * BATCH
        row, _ = row_and_head(query0, kv_head, SHAPE, OF_QUERIES)
        is_row = row < batch
        position = gl.load(state + BATCH_STATE_POSITIONS + row, mask=is_row, other=0) + step
        if SHAPE.num_queries > 0:
            first = row // SHAPE.num_queries * SHAPE.num_keys
            last = first + SHAPE.num_keys - 1
        else:
            last = gl.where(sees > 0, position, num_keys - 1)
            first = gl.where(sees > 0, position - sees + 1, 0)
        stop = gl.minimum(gl.max(gl.where(is_row, last, -1), axis=0) + 1, num_keys)
        start = gl.maximum(gl.min(gl.where(is_row, first, num_keys), axis=0), 0)
        turn0 = start // KEYS
        turns = (stop + KEYS - 1) // KEYS - turn0
        each = gl.maximum((turns + most - 1) // most, SHAPE.least_turns)
        parts = gl.maximum((turns + each - 1) // each, 1)
        part = number // tasks
        if part < parts:
            key0 = (turn0 + part * each) * KEYS
            m, l, outputs = attend_keys(
                words, memory, buffer, batch, query0, kv_head, first, last, start, stop, key0,
                gl.minimum(key0 + each * KEYS, stop), SHAPE,
            )  # fmt: skip
            is_last = parts == 1
            if parts > 1:
                store_partial_rows(memory.partials, sm, m, l, outputs, SHAPE)
                cta_barrier()
                arrival = memory.arrivals + number % tasks
                is_last = gl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") == parts - 1
                if is_last:
                    cta_barrier()
                    gl.store(arrival, 0)
                    l, outputs = joined_partials(
                        memory.partials, number % tasks, tasks, parts, SHAPE
                    )
            if is_last:
                # a row that sees nothing is zero
                inv = gl.expand_dims(1.0 / gl.where(l == 0.0, 1.0, l), 1)
                for h in gl.static_range(num_halves(SHAPE.head_dim)):
                    store_queries(
                        words,
                        memory,
                        batch,
                        outputs[h] * inv,
                        query0,
                        kv_head,
                        h * WIDTH,
                        SHAPE,
                        ROWS,
                    )


@gluon.jit
def attend_keys(
    words, memory, buffer, batch, query0, kv_head, first, last, start, stop, begin, end,
    SHAPE: gl.constexpr,
):  # fmt: skip
    """Online softmax of 16 queries from query0 on over keys `begin`, where a turn begins, to `end`:
    f32 [16] maxima and sums, a tuple of unscaled outputs, f32 [16, 64]. first, last: int32 [16],
    keys that a query sees; none sees keys before `start` or from `stop` on.
    """
    D: gl.constexpr = SHAPE.head_dim
    KEYS: gl.constexpr = SHAPE.turn_keys
    HALVES: gl.constexpr = num_halves(D)
    # longer heads leave no registers for what is asked for ahead
    KEYS_AHEAD: gl.constexpr = HALVES == 1
    VALUES_AHEAD: gl.constexpr = HALVES <= 2
    TILES: gl.constexpr = TILE_ROWS // KEYS
    tiles = reinterpret(buffer, gl.bfloat16, [TILES, KEYS, WIDTH], TILE_SHARED)
    scale = words[ROWS_SCALE].to(gl.float32, bitcast=True) * LOG2_E
    k_at, k_step = first_of(words, memory, words[ROWS_K_SRC], words[ROWS_K_ROWS], kv_head, SHAPE)
    v_at, v_step = first_of(words, memory, words[ROWS_V_SRC], words[ROWS_V_ROWS], kv_head, SHAPE)
    q = ()
    for h in gl.static_range(HALVES):
        q += single(some_queries(words, memory, batch, query0, kv_head, h * WIDTH, SHAPE))
    m = gl.full([BATCH], float("-inf"), gl.float32, layout=OF_QUERIES)
    l = gl.zeros([BATCH], gl.float32, layout=OF_QUERIES)
    outputs = ()
    for _ in gl.static_range(HALVES):
        outputs += single(gl.zeros([BATCH, WIDTH], gl.float32, layout=MMA2))
    if KEYS_AHEAD:
        following = all_columns(k_at, k_step, begin, start, end, SHAPE)
    for key0 in range(begin, end, KEYS):
        if VALUES_AHEAD:
            values = all_columns(v_at, v_step, key0, start, stop, SHAPE)
        if KEYS_AHEAD:
            keys = following
            following = all_columns(k_at, k_step, key0 + KEYS, start, end, SHAPE)
        s = gl.zeros([BATCH, KEYS], gl.float32, layout=MMA2)
        for h in gl.static_range(HALVES):
            if KEYS_AHEAD:
                k = keys[h]
            else:
                k = some_columns(k_at, k_step, key0, start, end, h * WIDTH, SHAPE)
            slot = tiles.index(h % TILES)
            slot.store(k)
            s = mma_v2(q[h], slot.permute([1, 0]).load(RIGHT), s)
        s = capped(s * scale, SHAPE.softcap)
        key = gl.expand_dims(key0 + gl.arange(0, KEYS, layout=OF_POSITIONS), 0)
        seen = (key < stop) & (key <= gl.expand_dims(last, 1))
        seen = seen & (key >= gl.expand_dims(first, 1))
        if SHAPE.masked:
            row, head = row_and_head(query0, kv_head, SHAPE, OF_QUERIES)
            inside = seen & gl.expand_dims(row < batch, 1)
            row, head = gl.expand_dims(row, 1), gl.expand_dims(head, 1)
            s += added_scores(words, memory, head, row, key, inside, SHAPE)
        s = gl.where(seen, s, float("-inf"))
        m_new = gl.maximum(m, gl.max(s, axis=1))
        m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = gl.exp2(m - m_safe)
        p = gl.exp2(s - gl.expand_dims(m_safe, 1))
        l = l * alpha + gl.sum(p, axis=1)
        m = m_new
        p = gl.convert_layout(p.to(gl.bfloat16), LEFT)
        found = ()
        for h in gl.static_range(HALVES):
            if VALUES_AHEAD:
                v = values[h]
            else:
                v = some_columns(v_at, v_step, key0, start, stop, h * WIDTH, SHAPE)
            slot = tiles.index((HALVES + h) % TILES)
            slot.store(v)
            found += single(mma_v2(p, slot.load(RIGHT), outputs[h] * gl.expand_dims(alpha, 1)))
        outputs = found
    return m, l, outputs


@gluon.jit
def store_partial_rows(partials, slot, m, l, outputs, SHAPE: gl.constexpr):
    """What attend_keys gives, as float32: SM `slot`'s."""
    HALVES: gl.constexpr = num_halves(SHAPE.head_dim)
    NUM_COLUMNS: gl.constexpr = HALVES * WIDTH
    base = partials + slot * SHAPE.partial_words
    row = gl.arange(0, BATCH, layout=OF_QUERIES)
    column = gl.expand_dims(gl.arange(0, WIDTH, layout=OF_POSITIONS), 0)
    for h in gl.static_range(HALVES):
        at = base + gl.expand_dims(row * NUM_COLUMNS, 1) + (h * WIDTH + column)
        gl.store(at, outputs[h])
    gl.store(base + BATCH * NUM_COLUMNS + row, m)
    gl.store(base + BATCH * NUM_COLUMNS + BATCH + row, l)


@gluon.jit
def joined_partials(partials, slot0, step, num, SHAPE: gl.constexpr):
    """f32 [16] sums and the outputs of `num` partials, those of SMs slot0, slot0 + step and on, in
    their order.
    """
    HALVES: gl.constexpr = num_halves(SHAPE.head_dim)
    NUM_COLUMNS: gl.constexpr = HALVES * WIDTH
    row = gl.arange(0, BATCH, layout=OF_QUERIES)
    column = gl.expand_dims(gl.arange(0, WIDTH, layout=OF_POSITIONS), 0)
    m = gl.full([BATCH], float("-inf"), gl.float32, layout=OF_QUERIES)
    l = gl.zeros([BATCH], gl.float32, layout=OF_QUERIES)
    outputs = ()
    for _ in gl.static_range(HALVES):
        outputs += single(gl.zeros([BATCH, WIDTH], gl.float32, layout=MMA2))
    for i0 in range(0, num, AT_ONCE):
        for j in gl.static_range(AT_ONCE):
            i = i0 + j
            base = partials + (slot0 + i * step) * SHAPE.partial_words
            extra = base + BATCH * NUM_COLUMNS + row
            there = (row >= 0) & (i < num)
            highest = gl.load(extra, mask=there, other=float("-inf"), cache_modifier=".cg")
            sums = gl.load(extra + BATCH, mask=there, other=0.0, cache_modifier=".cg")
            m_new = gl.maximum(m, highest)
            m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
            alpha = gl.exp2(m - m_safe)
            beta = gl.exp2(highest - m_safe)
            found = ()
            for h in gl.static_range(HALVES):
                at = base + gl.expand_dims(row * NUM_COLUMNS, 1) + (h * WIDTH + column)
                inside = gl.expand_dims(there, 1) & (column >= 0)
                y = gl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
                y = outputs[h] * gl.expand_dims(alpha, 1) + y * gl.expand_dims(beta, 1)
                found += single(y)
            outputs = found
            l = l * alpha + sums * beta
            m = m_new
    return l, outputs


@gluon.jit
def store_queries(
    words, memory, batch, y, query0, kv_head, column0, SHAPE: gl.constexpr, ROWS: gl.constexpr
):
    """[16, 64] columns from column0 on of the outputs of queries from query0 on."""
    D: gl.constexpr = SHAPE.head_dim
    if words[ROWS_KEEP] >= 0:
        row, head = row_and_head(query0, kv_head, SHAPE, OF_QUERIES)
        column = column0 + gl.expand_dims(gl.arange(0, WIDTH, layout=OF_POSITIONS), 0)
        first = gl.expand_dims((row * SHAPE.num_heads + head) * D, 1)
        mine = gl.expand_dims(row < batch, 1) & (column < D)
        gl.store(memory.numbers + words[ROWS_KEEP] + first + column, y, mask=mine)
    if words[DST] >= 0:
        low, high = gl.split(gl.reshape(y, [BATCH, WIDTH // 2, 2]))
        payload = gl.convert_layout(bf16_pair(low, high), PAIRS)
        row, head = row_and_head(query0, kv_head, SHAPE, gl.SliceLayout(1, PAIRS))
        pair = 2 * gl.expand_dims(gl.arange(0, WIDTH // 2, layout=gl.SliceLayout(0, PAIRS)), 0)
        column = column0 + pair
        to = memory.acts + of_rows(words[DST] // 2, ROWS)
        to += pair_index(gl.expand_dims(head * D, 1) + column, gl.expand_dims(row, 1), ROWS)
        gl.store(to, payload, mask=gl.expand_dims(row < batch, 1) & (column < D))
