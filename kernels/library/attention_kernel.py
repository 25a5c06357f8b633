"""Attention of packed prompts for Hopper: one program an SM, two warp groups, one loader.

In: queries of rows that lie end to end, caches, where each sequence's rows begin. Out: a result for
each query. An item is 64 rows of a sequence and two query heads that share keys, one a warp group;
or, where heads do not share keys in pairs, 128 rows of one head. Both groups multiply with what one
loader warp streams through a ring. A group starts the next block's scores beside the values of the
block before, so that exponentials run beside its own products and the other group's. Blocks come
from a row's own position down, so the masked ones are first. Which items there are a loader finds
from `starts`. It takes them one after the other, by an atomic head: they take a block's time or
hundreds, and where a sequence ends short ones stand beside the longest of the next. Next:
packed_attention.py.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, misc"

from dataclasses import dataclass
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from distmega.kernels.gluon_compat import cta_barrier, tma_load
from distmega.kernels.runtime.mbarriers import make_barriers

ROWS = gl.constexpr(64)
"""That one warp group multiplies."""
KEYS = gl.constexpr(128)
"""Of a block."""
GROUPS = gl.constexpr(2)
QUERIES = gl.constexpr(2)
"""Tiles of queries that a warp group has room for: the next item's come beside this one's work."""
LANES = gl.constexpr(8)
"""Sums of a row that are kept apart, each of every eighth weight: a thread has two of them, and
they are added up once an item."""
CLEARED = gl.constexpr(32)
"""Rows of values at a time, of those that are looked through for keys that no row sees."""
FIELDS = gl.constexpr(6)
"""Numbers by which the loader tells a warp group its part of an item."""
NUMBERS = ("num_sequences", "context", "kv_heads", "window")
"""Arguments that one compiled kernel takes at any value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """What the kernel is specialised for.

    dim: of a head, 64 or 128. group: query heads that share keys. windowed: a row sees no more than
    `window` keys. stages: slots of the ring.
    """

    dim: int
    group: int
    windowed: bool = False
    stages: int = 2

    @property
    def is_paired(self) -> bool:
        """Whether the warp groups have two heads of the same rows."""
        return self.group % 2 == 0

    @property
    def item_rows(self) -> int:
        return int(ROWS.value) * (1 if self.is_paired else 2)

    @property
    def item_heads(self) -> int:
        return 2 if self.is_paired else 1


class Packed(NamedTuple):
    """Where sequences lie. starts: i64 [num_sequences + 1], of their rows; positions: i64 [m], one
    after the other in a sequence; context: rows of a cache; window: keys that a row sees.
    """

    starts: object
    positions: object
    num_sequences: object
    context: object
    kv_heads: object
    window: object


class AttentionRing(NamedTuple):
    """In shared memory, filled by TMA. query_tiles: [GROUPS * QUERIES, 64, dim]; key_slots,
    value_slots: [stages, 128, dim]; each with mbarriers of what came and of what was read. items:
    i32 [GROUPS * QUERIES * FIELDS, 1], whose queries these are, written by the loader.
    """

    query_tiles: object
    key_slots: object
    value_slots: object
    queries_ready: object
    queries_free: object
    items: object
    keys_ready: object
    keys_free: object
    values_ready: object
    values_free: object


@gluon.jit
def number_items(length, spec: gl.constexpr):
    """Tiles of rows of a sequence."""
    return (length + spec.item_rows - 1) // spec.item_rows


@gluon.jit
def find_item(item, packed, spec: gl.constexpr):
    """(tile of rows, of all sequences; first query head) of an item."""
    columns = packed.kv_heads * spec.group // spec.item_heads
    return item // columns, item % columns * spec.item_heads


@gluon.jit
def find_sequence(tile, sequence, before, begin, length, packed, spec: gl.constexpr):
    """The sequence that has a tile, from a sequence of an earlier one on: its number, the tiles
    before it, its first row and rows. num_sequences behind the last tile.
    """
    while (sequence < packed.num_sequences) & (tile >= before + number_items(length, spec)):
        before += number_items(length, spec)
        begin += length
        sequence += 1
        inside = sequence < packed.num_sequences
        length = gl.load(packed.starts + sequence + inside.to(gl.int32)).to(gl.int32) - begin
    return sequence, before, begin, length


@gluon.jit
def first_length(packed):
    """Rows of the first sequence, which begin at row 0."""
    return gl.load(packed.starts + 1).to(gl.int32)


@gluon.jit
def find_origin(sequence, begin, packed):
    """Position of a sequence's first row; anything behind the last sequence."""
    inside = (sequence < packed.num_sequences).to(gl.int32)
    return gl.load(packed.positions + begin * inside).to(gl.int32)


@gluon.jit
def find_blocks(tile, before, length, origin, packed, spec: gl.constexpr):
    """(first row of the item in its sequence, its position, first block of keys, last one). There
    is a block of an item that sees nothing, too.
    """
    inner = (number_items(length, spec) - 1 - (tile - before)) * spec.item_rows
    near = origin + inner
    behind = min(origin + min(inner + spec.item_rows, length), packed.context)
    last = max(behind - 1, 0) // KEYS
    return inner, near, min(find_lowest(near, packed, spec) // KEYS, last), last


@gluon.jit
def find_lowest(near, packed, spec: gl.constexpr):
    """The first key that a row at position `near` sees."""
    lowest = near * 0
    if spec.windowed:
        lowest = max(near - packed.window + 1, 0)
    return lowest


@gluon.jit
def load_block(cache, row, it, slots, ready, free, spec: gl.constexpr):
    """A block of keys or values into the ring's slot for number `it`."""
    slot = it % spec.stages
    mbarrier.wait(free.index(slot), ((it // spec.stages) & 1) ^ 1)
    bar = ready.index(slot)
    mbarrier.expect(bar, 2 * KEYS * spec.dim)
    tma_load(cache, [row, 0], bar, slots.index(slot))


@gluon.jit
def tell_item(ring, slot, line, num_rows, near, first, last, head):
    """What read_item gives a warp group once the mbarrier of its queries has completed its phase:
    written before the loader arrives there.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    fields = line, num_rows, near, first, last, head
    for i in gl.static_range(FIELDS):
        ring.items.index(slot * FIELDS + i).store(gl.full([1], fields[i], gl.int32, layout=layout))
    cta_barrier()


@gluon.jit
def read_field(ring, number):
    """A number that tell_item wrote."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.sum(ring.items.index(number).load(layout), 0)


@gluon.jit
def read_item(ring, turn, half: gl.constexpr):
    """A warp group's part of its item number `turn`, when its queries are there: (first row, of all
    sequences; rows of the sequence from there on, position of the first, first block of keys, last
    one, query head). The head is -1 behind the last item.
    """
    slot = GROUPS * (turn % QUERIES) + half
    mbarrier.wait(ring.queries_ready.index(slot), (turn // QUERIES) & 1)
    at = slot * FIELDS
    line, num_rows, near = read_field(ring, at), read_field(ring, at + 1), read_field(ring, at + 2)
    first, last, head = read_field(ring, at + 3), read_field(ring, at + 4), read_field(ring, at + 5)
    return line, num_rows, near, first, last, head


@gluon.jit
def load_items(q, keys, values, taken, packed, ring, spec: gl.constexpr):
    """The loader's partition, of one warp. Arguments as attend_kernel."""
    turn = 0
    it = 0
    sequence = 0
    before = 0
    begin = 0
    length = first_length(packed)
    tile, head = find_item(gl.program_id(0), packed, spec)
    sequence, before, begin, length = find_sequence(tile, sequence, before, begin, length, packed,
                                                    spec)  # fmt: skip
    while sequence < packed.num_sequences:
        origin = find_origin(sequence, begin, packed)
        inner, near, first, last = find_blocks(tile, before, length, origin, packed, spec)
        cache = (sequence * packed.kv_heads + head // spec.group) * packed.context
        for half in gl.static_range(GROUPS):
            slot = GROUPS * (turn % QUERIES) + half
            mbarrier.wait(ring.queries_free.index(slot), ((turn // QUERIES) & 1) ^ 1)
            bar = ring.queries_ready.index(slot)
            skipped = 0
            mine = head
            if spec.is_paired:
                mine += half
            else:
                skipped += half * ROWS
            top = begin + inner + skipped
            tell_item(ring, slot, top, length - inner - skipped, near + skipped, first, last, mine)
            mbarrier.expect(bar, 2 * ROWS * spec.dim)
            tma_load(q, [top, mine * spec.dim], bar, ring.query_tiles.index(slot))
        for back in range(last - first + 1):
            row = cache + (last - back) * KEYS
            load_block(keys, row, it, ring.key_slots, ring.keys_ready, ring.keys_free, spec)
            load_block(values, row, it, ring.value_slots, ring.values_ready, ring.values_free, spec)
            it += 1
        turn += 1
        item = gl.num_programs(0) + gl.atomic_add(taken, 1, sem="relaxed")
        tile, head = find_item(item, packed, spec)
        sequence, before, begin, length = find_sequence(tile, sequence, before, begin, length,
                                                        packed, spec)  # fmt: skip
    for half in gl.static_range(GROUPS):
        slot = GROUPS * (turn % QUERIES) + half
        mbarrier.wait(ring.queries_free.index(slot), ((turn // QUERIES) & 1) ^ 1)
        tell_item(ring, slot, 0, 0, 0, 0, 0, -1)
        mbarrier.arrive(ring.queries_ready.index(slot), count=1)


@gluon.jit
def start_scores(q, scores, it, ring, spec: gl.constexpr):
    """Products of queries and the block of keys number `it`, under way. scores: registers for
    them.
    """
    slot = it % spec.stages
    mbarrier.wait(ring.keys_ready.index(slot), (it // spec.stages) & 1)
    keys = ring.key_slots.index(slot).permute((1, 0))
    return warpgroup_mma(q, keys, scores, use_acc=False, is_async=True)


@gluon.jit
def await_values(it, ring, spec: gl.constexpr):
    """Returns when the block of values number `it` is there."""
    mbarrier.wait(ring.values_ready.index(it % spec.stages), (it // spec.stages) & 1)


@gluon.jit
def start_values(weights, acc, it, adds, ring, spec: gl.constexpr):
    """Products of weights and the block of values number `it`, under way. adds: to acc."""
    await_values(it, ring, spec)
    values = ring.value_slots.index(it % spec.stages)
    return warpgroup_mma(weights, values, acc, use_acc=adds, is_async=True)


@gluon.jit
def as_weights(powers, acc):
    """What start_values takes. Made where it is taken: values of 16 bits that a loop carried, the
    compiler would take apart and pack again, 64 of a block's 499 instructions.
    """
    layout: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    return gl.convert_layout(powers.to(gl.bfloat16), layout, assert_trivial=True)


@gluon.jit
def add_lanes(powers):
    """Sums of each row of powers, [64, LANES]."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LANES, 16])
    sums = gl.sum(powers.reshape([ROWS, KEYS // LANES, LANES]), 1)
    return gl.convert_layout(sums, layout, assert_trivial=True)


@gluon.jit
def scale_rows(x, factors):
    """Rows of x, each times one of factors [64], of another layout of the same rows."""
    rows: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    return x * gl.expand_dims(gl.convert_layout(factors, rows, assert_trivial=True), 1)


@gluon.jit
def clear_unseen(it, block, lowest, behind, ring, spec: gl.constexpr):
    """Zeros for values, number `it` of the ring, of keys of a block outside of lowest to behind: no
    row sees them, and what is no number would be none with a weight of 0 either. Both warp groups
    write the same, each before it reads.
    """
    if (block * KEYS < lowest) | ((block + 1) * KEYS > behind):
        columns: gl.constexpr = spec.dim // 8
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // columns, columns], [4, 1], [1, 0])
        await_values(it, ring, spec)
        values = ring.value_slots.index(it % spec.stages)
        for top in gl.static_range(0, KEYS, CLEARED):
            key = block * KEYS + top
            part = values.slice(top, CLEARED)
            if (key + CLEARED <= lowest) | (key >= behind):
                part.store(gl.full([CLEARED, spec.dim], 0.0, gl.bfloat16, layout=layout))
            elif (key < lowest) | (key + CLEARED > behind):
                keys = key + gl.arange(0, CLEARED, layout=gl.SliceLayout(1, layout))
                seen = gl.expand_dims((keys >= lowest) & (keys < behind), 1)
                part.store(gl.where(seen, part.load(layout), 0.0))
        fence_async_shared()
        cta_barrier()


@gluon.jit
def hide_keys(scores, block, at, context, window, spec: gl.constexpr):
    """Scores of keys behind a row, behind the cache or before the row's window are -inf. at:
    positions of rows.
    """
    layout: gl.constexpr = scores.type.layout
    keys = block * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, layout))
    columns = gl.expand_dims(keys, 0)
    seen = columns <= gl.expand_dims(gl.minimum(at, context - 1), 1)
    if spec.windowed:
        seen = seen & (columns > gl.expand_dims(at, 1) - window)
    return gl.where(seen, scores, float("-inf"))


@gluon.jit
def weigh(scores, most, scale):
    """(powers of two of scores, larger maxima, by what to shrink what was summed before). most: of
    earlier scores of each row; scale: of scores, in powers of two.
    """
    larger = gl.maximum(most, gl.max(scores, 1))
    base = gl.where(larger == float("-inf"), 0.0, larger) * scale  # of rows that saw no key so far
    return gl.exp2(scores * scale - gl.expand_dims(base, 1)), larger, gl.exp2(most * scale - base)


@gluon.jit
def attend_block(q, scores, powers, acc, total, most, it, block, adds, at, scale, packed, ring,
                 masked: gl.constexpr, spec: gl.constexpr):  # fmt: skip
    """Scores of a block, number `it` of the ring, beside the values of the one before. powers: of
    that one; adds: whether acc holds values already.
    """
    weights = as_weights(powers, acc)
    scores = start_scores(q, scores, it, ring, spec)
    acc = start_values(weights, acc, it - 1, adds, ring, spec)
    scores = warpgroup_mma_wait(num_outstanding=1, deps=(scores,))
    mbarrier.arrive(ring.keys_free.index(it % spec.stages), count=1)
    if masked:
        scores = hide_keys(scores, block, at, packed.context, packed.window, spec)
    powers, most, shrink = weigh(scores, most, scale)
    total = scale_rows(total, shrink) + add_lanes(powers)
    # values are there: without a branch, the next wait would be moved above what makes powers
    await_values(it - 1, ring, spec)
    acc, weights, powers = warpgroup_mma_wait(num_outstanding=0, deps=(acc, weights, powers))
    mbarrier.arrive(ring.values_free.index((it - 1) % spec.stages), count=1)
    return scores, powers, scale_rows(acc, shrink), total, most


@gluon.jit
def store_rows(acc, total, buffer, out, line, num_rows, head, packed, spec: gl.constexpr):
    """A tile of results, of rows before num_rows, through the memory of its queries. line: first
    row of the tile; total: see add_lanes.
    """
    weight = gl.sum(total, 1)
    shares = 1.0 / gl.where(weight == 0.0, 1.0, weight)  # a row that sees nothing is zero
    cta_barrier()
    buffer.store(scale_rows(acc, shares).to(gl.bfloat16))
    cta_barrier()
    dim: gl.constexpr = spec.dim
    lanes: gl.constexpr = dim // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    columns = gl.expand_dims(gl.arange(0, dim, layout=gl.SliceLayout(0, layout)), 0)
    # times dim, a constant: so the compiler knows that a thread's 16 bytes are aligned
    heads = (line + rows).to(gl.int64) * (packed.kv_heads * spec.group) + head
    offsets = gl.expand_dims(heads * dim, 1) + columns
    inside = gl.expand_dims(rows < num_rows, 1) & (columns < dim)
    gl.store(out + offsets, buffer.load(layout), mask=inside)


@gluon.jit
def compute_items(out, packed, scale, ring, half: gl.constexpr, spec: gl.constexpr):
    """A warp group's partition. Arguments as attend_kernel."""
    dim: gl.constexpr = spec.dim
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, dim, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    turn = 0
    it = 0
    scores = gl.zeros([ROWS, KEYS], gl.float32, layout=score_layout)
    acc = gl.zeros([ROWS, dim], gl.float32, layout=acc_layout)
    line, num_rows, near, first, last, head = read_item(ring, turn, half)
    while head >= 0:
        at = near + gl.arange(0, ROWS, layout=row_layout)
        # of the item, and of its sequence: rows between have been written
        lowest = find_lowest(near if spec.is_paired else near - half * ROWS, packed, spec)
        behind = min(near + num_rows, packed.context)
        whole = first
        if not spec.windowed:
            whole = max(min(near + 1, packed.context) // KEYS, first)
        slot = GROUPS * (turn % QUERIES) + half
        q = ring.query_tiles.index(slot)

        # before products start, which nothing may come between
        clear_unseen(it, last, lowest, behind, ring, spec)
        scores = start_scores(q, scores, it, ring, spec)
        scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
        mbarrier.arrive(ring.keys_free.index(it % spec.stages), count=1)
        scores = hide_keys(scores, last, at, packed.context, packed.window, spec)
        most = gl.full([ROWS], float("-inf"), gl.float32, layout=row_layout)
        powers, most, _ = weigh(scores, most, scale)
        total = add_lanes(powers)
        it += 1
        for block in range(last - 1, max(whole, first) - 1, -1):
            scores, powers, acc, total, most = attend_block(
                q, scores, powers, acc, total, most, it, block, block < last - 1, at, scale, packed,
                ring, True, spec)  # fmt: skip
            it += 1
        if not spec.windowed:
            for block in range(min(last, whole) - 1, first - 1, -1):
                scores, powers, acc, total, most = attend_block(
                    q, scores, powers, acc, total, most, it, block, block < last - 1, at, scale,
                    packed, ring, False, spec)  # fmt: skip
                it += 1
        if spec.windowed:
            clear_unseen(it - 1, first, lowest, behind, ring, spec)
        acc = start_values(as_weights(powers, acc), acc, it - 1, last > first, ring, spec)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(ring.values_free.index((it - 1) % spec.stages), count=1)
        store_rows(acc, total, q, out, line, num_rows, head, packed, spec)
        fence_async_shared()
        cta_barrier()
        mbarrier.arrive(ring.queries_free.index(slot), count=1)
        turn += 1
        line, num_rows, near, first, last, head = read_item(ring, turn, half)


@gluon.jit(do_not_specialize=NUMBERS)
def attend_kernel(q, keys, values, out, taken, starts, positions, num_sequences, context, kv_heads,
                  window, scale, spec: gl.constexpr):  # fmt: skip
    """Of local memory. Descriptors, read: q, bf16 [m, heads * dim] in blocks of [64, dim]; keys,
    values, the caches, bf16 [sequences * kv_heads * context, dim] in blocks of [128, dim]. out:
    bf16 [m, heads, dim], contiguous, written. taken: i32 [1], zero before, items that loaders took
    behind their first ones. starts, positions, num_sequences, context, kv_heads, window: see
    Packed. scale: of scores, in powers of two, above 0. spec: see AttentionSpec.
    """
    stages: gl.constexpr = spec.stages
    dim: gl.constexpr = spec.dim
    ring = AttentionRing(
        gl.allocate_shared_memory(gl.bfloat16, [GROUPS * QUERIES, ROWS, dim], q.layout),
        gl.allocate_shared_memory(gl.bfloat16, [stages, KEYS, dim], keys.layout),
        gl.allocate_shared_memory(gl.bfloat16, [stages, KEYS, dim], values.layout),
        make_barriers(GROUPS * QUERIES, 1),
        make_barriers(GROUPS * QUERIES, 1),
        gl.allocate_shared_memory(
            gl.int32, [GROUPS * QUERIES * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
        ),
        make_barriers(stages, 1),
        make_barriers(stages, GROUPS),
        make_barriers(stages, 1),
        make_barriers(stages, GROUPS),
    )
    packed = Packed(starts, positions, num_sequences, context, kv_heads, window)
    gl.warp_specialize(
        [
            (compute_items, (out, packed, scale, ring, 0, spec)),
            (compute_items, (out, packed, scale, ring, 1, spec)),
            (load_items, (q, keys, values, taken, packed, ring, spec)),
        ],
        [4, 1],
        [240, 24],
    )
