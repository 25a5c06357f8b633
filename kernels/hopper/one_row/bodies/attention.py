"""Attention tasks on the compute warps: one kv head's query group over one split of the context.

In: flagged words of queries, keys and values, cached keys and values in the ring. Out: flagged
words of the split's outputs, maxima and sums, and the new position in the cache. Next on the walk:
splits.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from distmega.kernels.gluon_compat import cta_barrier
from distmega.kernels.hopper.one_row.bodies.blocks import (
    add_values,
    aim_block,
    aim_rows,
    insert_new,
    keep_all,
    score_block,
    stage_queries,
)
from distmega.kernels.hopper.one_row.loader import first_seen, num_active_splits
from distmega.kernels.hopper.plan.fields import (
    ATT_K_NORM,
    ATT_K_ROW,
    ATT_K_SRC,
    ATT_Q_NORM,
    ATT_QUERY0,
    ATT_SPLIT,
    ATT_TABLE,
    ATT_V_ROW,
    ATT_V_SRC,
    HEAD,
    MAX_SPLITS,
    PARTIAL,
    SRC,
    WINDOW,
)
from distmega.kernels.hopper.ptx.device import (
    as_float,
    clock,
    fence_all,
    flagged_float,
    keep,
)
from distmega.kernels.hopper.ptx.shapes import (
    PART_COLUMNS,
    PER_THREAD,
    ROW_PARTIAL_EXTRA,
    THREADS,
    TILE_ROWS,
    VECTOR_MULTIPLE,
    head_rows,
    is_padded,
    num_halves,
    num_parts,
    padded_half,
)
from distmega.kernels.hopper.ptx.spins import spin_rows


@constexpr_function
def columns_a_thread(head_dim: int, num_queries: int) -> int:
    """Of either half of a row; of 8 rows, one a warp, where queries, key and value are no more."""
    if head_dim > 128:
        return 4
    return 2 if num_queries <= 6 or head_dim <= 64 else 4


@constexpr_function
def num_rows(head_dim: int, num_queries: int) -> int:
    """Rows that the eight warps hold."""
    return 8 if num_queries <= 6 else 16


@gluon.jit
def half_rows(payloads, SIZE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """[n, d / 2] float32 from payloads, SIZE consecutive ones a thread."""
    joined = gl.join(payloads[0], payloads[1])
    if SIZE == 4:
        joined = gl.join(gl.join(payloads[0], payloads[2]), gl.join(payloads[1], payloads[3]))
    return gl.convert_layout(as_float(gl.reshape(joined, SHAPE)), LAYOUT)


@gluon.jit
def is_column(number, SIZE: gl.constexpr, D: gl.constexpr):
    """Which columns of a half of a head there are, SIZE of them having a number."""
    return (number * SIZE < D // 2) if is_padded(D) else (number >= 0)


@gluon.jit
def rotated_rows(
    words,
    symmetric,
    vectors,
    rope,
    position,
    flag,
    eps,
    D: gl.constexpr,
    G: gl.constexpr,
    H: gl.constexpr,
    KVH: gl.constexpr,
    QK_NORM: gl.constexpr,
    ROTATED: gl.constexpr,
    APART: gl.constexpr,
    WIDE: gl.constexpr,
):
    """Both halves [n, d / 2] of G queries and the new key, normed and rotated, and the value; with
    zeros behind d / 2 columns, up to a power of two.
    """
    half: gl.constexpr = D // 2
    COLUMNS: gl.constexpr = padded_half(D)
    SIZE: gl.constexpr = columns_a_thread(D, G)
    ROWS: gl.constexpr = num_rows(D, G)
    GROUP: gl.constexpr = head_rows(COLUMNS // SIZE, 1)
    PAIR: gl.constexpr = head_rows(COLUMNS, SIZE)
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, GROUP))
    c = gl.arange(0, COLUMNS // SIZE, layout=gl.SliceLayout(0, GROUP))
    head = words[HEAD]
    if APART:
        of_new = gl.where(r == G, words[ATT_K_SRC], words[ATT_V_SRC]) + head * D
        source = gl.where(r < G, words[SRC] + (words[ATT_QUERY0] + r) * D, of_new)
        at = symmetric + (gl.expand_dims(source, 1) + gl.expand_dims(c * SIZE, 0))
    else:
        source = gl.where(r < G, words[ATT_QUERY0] + r, gl.where(r == G, H + head, H + KVH + head))
        at = symmetric + (gl.expand_dims(words[SRC] + source * D, 1) + gl.expand_dims(c * SIZE, 0))
    wanted = gl.expand_dims(r < G + 2, 1) & gl.expand_dims(is_column(c, SIZE, D), 0)
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, PAIR))
    inside = is_column(columns, 1, D)
    if ROTATED:
        cos = gl.expand_dims(gl.load(rope + position * D + columns, mask=inside, other=0.0), 0)
        at_sin = rope + position * D + half + columns
        sin = gl.expand_dims(gl.load(at_sin, mask=inside, other=0.0), 0)
    rows = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, PAIR)), 1)
    if QK_NORM:
        weight = gl.where(rows < G, words[ATT_Q_NORM], words[ATT_K_NORM])
        inside = gl.expand_dims(inside, 0) & (rows >= 0)
        at_norm = vectors + weight + gl.expand_dims(columns, 0)
        if WIDE:
            at_norm = (vectors + weight).to(gl.pointer_type(gl.float32), bitcast=True)
            at_norm += gl.expand_dims(columns, 0)
        weight1 = gl.load(at_norm, mask=inside, other=0.0).to(gl.float32)
        weight2 = gl.load(at_norm + half, mask=inside, other=0.0).to(gl.float32)
    payloads = spin_rows(symmetric, at, flag, wanted, D, SIZE)
    a = half_rows(payloads[0:SIZE], SIZE, [ROWS, COLUMNS], PAIR)
    b = half_rows(payloads[SIZE : 2 * SIZE], SIZE, [ROWS, COLUMNS], PAIR)
    is_value = rows > G
    if QK_NORM:
        inv = gl.rsqrt(gl.expand_dims(gl.sum(a * a + b * b, axis=1), 1) / D + eps)
        a = gl.where(is_value, a, a * inv * weight1)
        b = gl.where(is_value, b, b * inv * weight2)
    if ROTATED:
        turned = gl.where(is_value, a, a * cos - b * sin)
        b = gl.where(is_value, b, b * cos + a * sin)
        a = turned
    return a, b


@gluon.jit
def append_position(words, cache, position, a, b, D: gl.constexpr, G: gl.constexpr):
    """Rows G (key) and G + 1 (value) of both halves into the cache at `position`."""
    half: gl.constexpr = D // 2
    COLUMNS: gl.constexpr = padded_half(D)
    PAIR: gl.constexpr = head_rows(COLUMNS, columns_a_thread(D, G))
    ROWS: gl.constexpr = num_rows(D, G)
    row = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, PAIR)), 1)
    columns = gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, PAIR)), 0)
    first = gl.where(row == G, words[ATT_K_ROW], words[ATT_V_ROW]) + position
    at = cache + first.to(gl.int64) * D + columns
    new = (row >= G) & (row < G + 2) & is_column(columns, 1, D)
    gl.store(at, a, mask=new)
    gl.store(at + half, b, mask=new)


@gluon.jit
def aim_partial(words, split, D: gl.constexpr):
    """Flagged words that a thread's first output and its maximum go to: see add_values."""
    thread = gl.arange(0, THREADS, layout=PER_THREAD)
    stride: gl.constexpr = D + ROW_PARTIAL_EXTRA
    first = words[PARTIAL] + (words[ATT_QUERY0] * words[MAX_SPLITS] + split) * stride
    step = words[MAX_SPLITS] * stride
    row = thread % 32 // 4
    outputs = first + thread % 4 * 2 * step + thread // 32 * 16 + row
    return keep_all(outputs), keep_all(first + row * step + D)


@gluon.jit
def write_partial(words, symmetric, aims, outputs, m, l, flag, D: gl.constexpr, G: gl.constexpr):
    """Outputs, maxima and sums of a split, as add_values leaves them in threads."""
    thread = gl.arange(0, THREADS, layout=PER_THREAD)
    query = thread % 4 * 2
    step = words[MAX_SPLITS] * (D + ROW_PARTIAL_EXTRA)
    for part in gl.static_range(num_parts(D)):
        at = symmetric + aims[0] + part * PART_COLUMNS
        column = thread // 32 * 16 + part * PART_COLUMNS
        inside = (query < G) & (column < D)
        right = inside if D % 16 == 0 else inside & (column + 8 < D)
        gl.store(at, flagged_float(outputs[4 * part], flag), mask=inside)
        gl.store(at + 8, flagged_float(outputs[4 * part + 2], flag), mask=right)
        inside = (query + 1 < G) & (column < D)
        right = inside if D % 16 == 0 else inside & (column + 8 < D)
        gl.store(at + step, flagged_float(outputs[4 * part + 1], flag), mask=inside)
        gl.store(at + step + 8, flagged_float(outputs[4 * part + 3], flag), mask=right)
    at = symmetric + aims[1]
    inside = (thread < 4 * G) & (query == 0)
    gl.store(at, flagged_float(m, flag), mask=inside)
    gl.store(at + 1, flagged_float(l, flag), mask=inside)


@gluon.jit
def load_biases(words, vectors, aims, block, position, H: gl.constexpr, G: gl.constexpr):
    """What is added to a thread's scores of a block: of its positions p, p, p + 8, p + 8, queries
    2 c, 2 c + 1, 2 c, 2 c + 1, as score_block has them; zeros after `position`.
    """
    thread = gl.arange(0, THREADS, layout=PER_THREAD)
    at = block * TILE_ROWS + aims[7]
    table = (vectors + words[ATT_TABLE].to(gl.int64) * VECTOR_MULTIPLE).to(
        gl.pointer_type(gl.float32), bitcast=True
    )
    # lanes of queries past the last take the last again
    left = at * H + (words[ATT_QUERY0] + gl.minimum(thread % 4 * 2, G - 1))
    right = at * H + (words[ATT_QUERY0] + gl.minimum(thread % 4 * 2 + 1, G - 1))
    b0 = gl.load(table + left, mask=at <= position, other=0.0)
    b1 = gl.load(table + right, mask=at <= position, other=0.0)
    b2 = gl.load(table + left + 8 * H, mask=at + 8 <= position, other=0.0)
    b3 = gl.load(table + right + 8 * H, mask=at + 8 <= position, other=0.0)
    return b0, b1, b2, b3


@gluon.jit
def attention_task(
    words, memory, position, flag, eps, scale, min_blocks, ring, it, stamps, spec: gl.constexpr
):
    """One split of one kv head, every `active`-th block of 128 positions from its first on; returns
    the ring position.

    words: int32, of the instruction. memory: see RowMemory; reads flagged words of queries, keys
    and values, writes those of the split's partials and, where the last block is its own, the new
    position in the cache. position: of the step; flag: of what is read and written; eps, scale
    (with log2(e)), min_blocks: as of run_row_steps. ring: RingAddresses, of which x gives room to
    queries and weights meanwhile; it: slots taken before. stamps: int64, of this instruction.
    """
    D: gl.constexpr = spec.head_dim
    G: gl.constexpr = spec.num_queries
    H: gl.constexpr = spec.num_heads
    KVH: gl.constexpr = spec.num_kv_heads
    STAGES: gl.constexpr = spec.stages
    HALVES: gl.constexpr = num_halves(D)
    COLUMNS: gl.constexpr = padded_half(D)
    SIZE: gl.constexpr = columns_a_thread(D, G)
    ROWS: gl.constexpr = num_rows(D, G)
    PAIR: gl.constexpr = head_rows(COLUMNS, SIZE)
    active = num_active_splits(position, words[WINDOW], words[MAX_SPLITS], min_blocks)
    split = words[ATT_SPLIT]
    if split < active:
        first = first_seen(position, words[WINDOW])
        last = keep(position // TILE_ROWS)
        block = keep(first // TILE_ROWS + split)
        num_blocks = keep((last - block) // active + 1)
        is_last = keep(((last - block) % active == 0).to(gl.int32))
        row = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, PAIR)), 1)
        column = gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, PAIR)), 0)
        aims = aim_block(ring, G, HALVES)
        row_aims = aim_rows(
            ring,
            it + (num_blocks - 1) * (2 * HALVES),
            position,
            row,
            column,
            G,
            SIZE,
            D,
            STAGES,
        )
        partial_aims = aim_partial(words, split, D)
        slot = keep(it % STAGES)
        phase = keep(it // STAGES % 2)
        it += HALVES
        value_slot = keep(it % STAGES)
        value_phase = keep(it // STAGES % 2)
        a, b = rotated_rows(
            words, memory.symmetric, memory.vectors, memory.rope, position, flag, eps, D, G, H, KVH,
            spec.qk_norm, spec.rotated, spec.apart, spec.wide_norms,
        )  # fmt: skip
        if spec.trace:
            gl.store(stamps + 1, clock())
        a = a.to(gl.bfloat16)
        b = b.to(gl.bfloat16)
        stage_queries(row_aims, a, b, SIZE, D)
        zero = gl.zeros([THREADS], gl.float32, layout=PER_THREAD)
        outputs = (zero, zero, zero, zero)
        if num_parts(D) == 2:
            outputs = outputs + outputs  # type: ignore[assignment]
        l = zero
        m = gl.full([THREADS], float("-inf"), gl.float32, layout=PER_THREAD)
        for i in range(num_blocks):
            number = keep(i)  # unknown to the compiler, which would copy the loop for the first
            holds_new = (number + 1 == num_blocks) & (is_last != 0)
            if holds_new:
                insert_new(row_aims, a, b, SIZE, D)
            if holds_new | (number == 0):
                cta_barrier()
            turn = number & 1
            biases = ()
            if spec.biased:
                biases = load_biases(words, memory.vectors, aims, block, position, H, G)
            score_block(
                ring, aims, turn, slot, phase, block, first, position, scale, biases, HALVES,
                STAGES, spec.softcap, spec.biased,
            )  # fmt: skip
            cta_barrier()
            outputs, m, l = add_values(
                ring, aims, turn, value_slot, value_phase, outputs, m, l, HALVES, STAGES
            )
            it += HALVES
            slot = it % STAGES
            phase = it // STAGES % 2
            it += HALVES
            value_slot = it % STAGES
            value_phase = it // STAGES % 2
            block += active
        it -= HALVES
        if spec.trace:
            gl.store(stamps + 2, clock())
        write_partial(words, memory.symmetric, partial_aims, outputs, m, l, flag, D, G)
        if is_last != 0:
            append_position(words, memory.cache, position, a, b, D, G)
            fence_all()
        cta_barrier()
    return it
