"""Attention of the rows of a step over keys and values of the same rows, or over one cache that
they share, and the heads in the form in which it takes them.

Query heads of 16 rows are one SM's. Keys are looked at 64 at a time, with an online softmax; they
come straight into registers, from numbers or from the cache, since they were written in this step.

In: queries, keys and values as numbers, a cache. Out: numbers, the new positions in the cache; the
attention output as activations, as numbers, or both. Next on the walk: kernel.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.runtime.jit import constexpr_function

from distmega.kernels.hopper.batch.bodies.blocks import capped
from distmega.kernels.hopper.batch.bodies.limits import LOG2_E
from distmega.kernels.hopper.batch.bodies.norms import load_vector
from distmega.kernels.hopper.batch.bodies.wide import LEFT, MMA2, OF_POSITIONS, OF_QUERIES, RIGHT
from distmega.kernels.hopper.batch.device import of_rows, pair_index
from distmega.kernels.hopper.batch_plan.fields import (
    BATCH,
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
    STATE_POSITIONS,
)
from distmega.kernels.hopper.epilogues import count
from distmega.kernels.hopper.ptx.device import bf16_pair, keep, single
from distmega.kernels.hopper.ptx.shapes import num_halves

KEYS = gl.constexpr(64)
"""Keys at a time."""
WIDTH = gl.constexpr(64)
"""Columns of a head at a time."""
PAIRS = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [8, 1], [1, 0]))
"""[16 rows, 32 pairs of columns]."""
ONE_HEAD = gl.constexpr(256)
COLUMNS = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
"""[256 columns] of a head."""


@constexpr_function
def shape_of(shapes, number):
    """One of a segment's shapes, as a constant."""
    return shapes.each[number]


@gluon.jit
def attend_rows(
    words, memory, state, batch, step, sm, num_sms, eps, SHAPES: gl.constexpr, ROWS: gl.constexpr,
    WIDE: gl.constexpr,
):  # fmt: skip
    """The task of an instruction, of its shape; see heads_task and rows_task."""
    for i in gl.static_range(count(SHAPES)):
        if words[OPCODE] == OP_ROWS + i:
            rows_task(words, memory, state, batch, step, sm, num_sms, shape_of(SHAPES, i), ROWS)
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
        position = gl.load(state + STATE_POSITIONS + row) + step
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
def some_queries(at, length, num, column0, D: gl.constexpr):
    """[16, 64] columns from column0 on of the heads of `num` rows, zeros past the last column and
    row; `length` numbers from row to row.
    """
    row = gl.expand_dims(gl.arange(0, BATCH, layout=gl.SliceLayout(1, LEFT)), 1)
    column = column0 + gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LEFT)), 0)
    mine = (row < num) & (column < D)
    x = gl.load(at + row * length + column, mask=mine, other=0.0, cache_modifier=".cg")
    return x.to(gl.bfloat16)


@gluon.jit
def some_keys(at, length, key0, stop, column0, D: gl.constexpr):
    """[64 columns, 64 keys] likewise, of keys from key0 on and before `stop`."""
    column = column0 + gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(1, RIGHT)), 1)
    key = key0 + gl.expand_dims(gl.arange(0, KEYS, layout=gl.SliceLayout(0, RIGHT)), 0)
    mine = (key < stop) & (column < D)
    x = gl.load(at + key * length + column, mask=mine, other=0.0, cache_modifier=".cg")
    return x.to(gl.bfloat16)


@gluon.jit
def some_values(at, length, key0, start, stop, column0, D: gl.constexpr):
    """[64 keys, 64 columns] likewise; zeros before `start`, since what no row sees may be no
    number.
    """
    key = key0 + gl.expand_dims(gl.arange(0, KEYS, layout=gl.SliceLayout(1, RIGHT)), 1)
    column = column0 + gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(0, RIGHT)), 0)
    mine = (key >= start) & (key < stop) & (column < D)
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
    """[16, 64]: what the mask adds to scores, times log2(e)."""
    at = words[ROWS_MASK] + head * words[ROWS_HEAD_STEP]
    if SHAPE.num_queries > 0:
        at += row // SHAPE.num_queries * SHAPE.mask_step
        row = row % SHAPE.num_queries
        key = key % SHAPE.num_keys
    at += key * words[ROWS_KEY_STEP] + row * words[ROWS_ROW_STEP]
    inside = inside & (words[ROWS_MASK] >= 0)
    return gl.load(memory.numbers + at, mask=inside, other=0.0) * LOG2_E


@gluon.jit
def rows_task(
    words, memory, state, batch, step, sm, num_sms, SHAPE: gl.constexpr, ROWS: gl.constexpr
):
    """Every num_sms-th query head of 16 rows from number `sm` on; arguments as of heads_task, ROWS:
    that the kernel computes. Reads numbers and the cache, writes activations and numbers.
    """
    D: gl.constexpr = SHAPE.head_dim
    H: gl.constexpr = SHAPE.num_heads
    HALVES: gl.constexpr = num_halves(D)
    scale = words[ROWS_SCALE].to(gl.float32, bitcast=True) * LOG2_E
    num_keys = words[ROWS_NUM_KEYS]
    sees = words[ROWS_SEES]
    blocks = (keep(batch) + BATCH - 1) // BATCH
    for number in range(keep(sm), H * blocks, keep(num_sms)):
        head = number // blocks
        row0 = number % blocks * BATCH
        num = batch - row0
        kv_head = head * SHAPE.num_kv_heads // H
        k_at, k_step = first_of(
            words, memory, words[ROWS_K_SRC], words[ROWS_K_ROWS], kv_head, SHAPE
        )
        v_at, v_step = first_of(
            words, memory, words[ROWS_V_SRC], words[ROWS_V_ROWS], kv_head, SHAPE
        )
        q_at = memory.numbers + words[SRC] + row0 * words[NUM_ROWS] + head * D
        q = ()
        for h in gl.static_range(HALVES):
            q += single(some_queries(q_at, words[NUM_ROWS], num, h * WIDTH, D))
        row = gl.arange(0, BATCH, layout=OF_QUERIES)
        is_row = row < num
        position = gl.load(state + STATE_POSITIONS + row0 + row, mask=is_row, other=0) + step
        if SHAPE.num_queries > 0:
            first = (row0 + row) // SHAPE.num_queries * SHAPE.num_keys
            last = first + SHAPE.num_keys - 1
        else:
            last = gl.where(sees > 0, position, num_keys - 1)
            first = gl.where(sees > 0, position - sees + 1, 0)
        stop = gl.minimum(gl.max(gl.where(is_row, last, -1), axis=0) + 1, num_keys)
        start = gl.maximum(gl.min(gl.where(is_row, first, num_keys), axis=0), 0)
        m = gl.full([BATCH], float("-inf"), gl.float32, layout=OF_QUERIES)
        l = gl.zeros([BATCH], gl.float32, layout=OF_QUERIES)
        outputs = ()
        for _ in gl.static_range(HALVES):
            outputs += single(gl.zeros([BATCH, WIDTH], gl.float32, layout=MMA2))
        for key0 in range(start // KEYS * KEYS, stop, KEYS):
            s = gl.zeros([BATCH, KEYS], gl.float32, layout=MMA2)
            for h in gl.static_range(HALVES):
                s = mma_v2(q[h], some_keys(k_at, k_step, key0, stop, h * WIDTH, D), s)
            s = capped(s * scale, SHAPE.softcap)
            key = gl.expand_dims(key0 + gl.arange(0, KEYS, layout=OF_POSITIONS), 0)
            seen = (key < stop) & (key <= gl.expand_dims(last, 1))
            seen = seen & (key >= gl.expand_dims(first, 1))
            if SHAPE.masked:
                inside = seen & gl.expand_dims(is_row, 1)
                of_row = gl.expand_dims(row0 + row, 1)
                s += added_scores(words, memory, head, of_row, key, inside, SHAPE)
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
                v = some_values(v_at, v_step, key0, start, stop, h * WIDTH, D)
                found += single(mma_v2(p, v, outputs[h] * gl.expand_dims(alpha, 1)))
            outputs = found
        # a row that sees nothing is zero
        inv = gl.expand_dims(1.0 / gl.where(l == 0.0, 1.0, l), 1)
        for h in gl.static_range(HALVES):
            store_rows(words, memory, outputs[h] * inv, head, row0, num, h * WIDTH, SHAPE, ROWS)


@gluon.jit
def store_rows(words, memory, y, head, row0, num, column0, SHAPE: gl.constexpr, ROWS: gl.constexpr):
    """[16, 64] columns from column0 on of a head of `num` rows from row0 on."""
    D: gl.constexpr = SHAPE.head_dim
    if words[ROWS_KEEP] >= 0:
        row = gl.expand_dims(gl.arange(0, BATCH, layout=OF_QUERIES), 1)
        column = column0 + gl.expand_dims(gl.arange(0, WIDTH, layout=OF_POSITIONS), 0)
        at = memory.numbers + words[ROWS_KEEP] + ((row0 + row) * SHAPE.num_heads + head) * D
        gl.store(at + column, y, mask=(row < num) & (column < D))
    if words[DST] >= 0:
        low, high = gl.split(gl.reshape(y, [BATCH, WIDTH // 2, 2]))
        payload = gl.convert_layout(bf16_pair(low, high), PAIRS)
        b = gl.expand_dims(gl.arange(0, BATCH, layout=gl.SliceLayout(1, PAIRS)), 1)
        pair = 2 * gl.expand_dims(gl.arange(0, WIDTH // 2, layout=gl.SliceLayout(0, PAIRS)), 0)
        column = column0 + pair
        to = memory.acts + of_rows(words[DST] // 2, ROWS)
        to += pair_index(head * D + column, row0 + b, ROWS)
        gl.store(to, payload, mask=(b < num) & (column < D))
