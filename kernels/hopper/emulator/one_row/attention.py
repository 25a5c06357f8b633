"""Attention of the emulated kernel of one row: what its loader brings, splits, their sum.

In: queries, keys and values as flagged words, cached blocks in the ring. Out: partials, the new
position in the cache. Mirrors attention.py, blocks.py and splits.py. Next on the walk: kernel.py.
"""

from collections.abc import Generator, Iterator

import numpy as np

from distmega.kernels.hopper.emulator.interleaving import RAN, Key, Steps, shuffled
from distmega.kernels.hopper.emulator.numbers import (
    Floats,
    Indices,
    bits_of,
    floats_of,
    pairs_of,
    to_bf16,
)
from distmega.kernels.hopper.emulator.one_row.bodies import norm_vector
from distmega.kernels.hopper.emulator.sm import GARBAGE, RowSm
from distmega.kernels.hopper.plan.types import AttentionShape
from distmega.kernels.hopper.plan.words import (
    MIN_BLOCKS,
    ROW_PARTIAL_EXTRA,
    VECTOR_MULTIPLE,
    RowAttention,
    RowCombine,
)
from distmega.kernels.powers import LOG2_E

BLOCK = 128
"""Cached positions of a block."""
HALF = 64
"""Columns of a block that one slot of the ring holds."""


def num_active_splits(position: int, window: int, max_splits: int) -> int:
    """Splits that have work, the new position included."""
    blocks = position // BLOCK + 1 - first_seen(position, window) // BLOCK
    return max(min(blocks // MIN_BLOCKS, max_splits), 1)


def first_seen(position: int, window: int) -> int:
    return max(position + 1 - window, 0)


def blocks_of(one: RowAttention, position: int) -> range:
    """Blocks of a split, none if it is not in use."""
    active = num_active_splits(position, one.window, one.max_splits)
    if one.split >= active:
        return range(0)
    first = first_seen(position, one.window) // BLOCK
    return range(first + one.split, position // BLOCK + 1, active)


def shape_of(sm: RowSm) -> AttentionShape:
    shape = sm.gpu.queues.attention
    assert shape is not None, "a segment with attention"
    return shape


def load_blocks(sm: RowSm, one: RowAttention, position: int) -> Steps:
    """Steps of the loader: keys and values of each block, 64 columns a slot."""
    halves = -(-shape_of(sm).head_dim // HALF)
    for block in blocks_of(one, position):
        for row in (one.k_row, one.v_row):
            for half in range(halves):
                first = row + block * BLOCK

                def read(first: int = first, half: int = half, row: int = row) -> Floats:
                    return cache_tile(sm, one, first, half, row, position)

                yield from sm.ring.ask(sm.loader, read)


def cache_tile(
    sm: RowSm, one: RowAttention, first: int, half: int, row: int, position: int
) -> Floats:
    """[128, 64] of the cache, zeros behind its columns. Rows that the query doesn't see, and the
    one that this step writes, hold anything finite.
    """
    cache = sm.gpu.cache
    tile: Floats = np.full((BLOCK, HALF), GARBAGE, dtype=np.float32)
    rows = first + np.arange(BLOCK)
    at = rows - row
    inside = (at >= first_seen(position, one.window)) & (at < position)
    columns = slice(half * HALF, min((half + 1) * HALF, cache.values.shape[1]))
    num = columns.stop - columns.start
    found = cache.read(sm.loader, rows[inside], remember=False)
    tile[inside, :num] = found[:, columns]
    tile[:, num:] = 0.0
    return tile


def attention(sm: RowSm, one: RowAttention, position: int, flag: int) -> Steps:
    """Queries of a kv head over the blocks of a split; appends the new position to the cache if the
    split has the last block.
    """
    blocks = blocks_of(one, position)
    if not blocks:
        return
    shape = shape_of(sm)
    dim = shape.head_dim
    queries, key, value = yield from rotated(sm, one, position, flag)
    highest: Floats = np.full(len(queries), -np.inf, dtype=np.float32)
    total: Floats = np.zeros(len(queries), dtype=np.float32)
    out: Floats = np.zeros((len(queries), dim), dtype=np.float32)
    scale = np.float32(shape.scale * LOG2_E)
    for block in blocks:
        keys = yield from take_block(sm, dim)
        values = yield from take_block(sm, dim)
        at = block * BLOCK + np.arange(BLOCK)
        if block == position // BLOCK:
            keys[position % BLOCK], values[position % BLOCK] = key, value
        seen = (at >= first_seen(position, one.window)) & (at <= position)
        found = products(queries, keys) * scale
        if shape.softcap:
            most = np.float32(shape.softcap * LOG2_E)
            found = most * np.tanh(found / most)
        if shape.biased:
            found += biases(sm, one, at) * np.float32(LOG2_E)
        scores = np.where(seen, found, np.float32(-np.inf))
        peak = np.maximum(highest, scores.max(axis=1))
        weights = np.exp2(scores - peak[:, None]).astype(np.float32)
        factor = np.exp2(highest - peak)
        total = total * factor + weights.sum(axis=1, dtype=np.float32)
        out = out * factor[:, None] + products(to_bf16(weights), values.T)
        highest = peak
    yield RAN
    stride = dim + ROW_PARTIAL_EXTRA
    for query in range(len(queries)):
        row = one.partial + ((one.query0 + query) * one.max_splits + one.split) * stride
        both = np.array([highest[query], total[query]], dtype=np.float32)
        sm.publish(row + np.arange(dim + 2), bits_of(np.concatenate((out[query], both))), flag)
    shape = shape_of(sm)
    is_first = one.query0 == shape.first_query(one.head, 0)  # others of a head store the same bits
    if position // BLOCK in blocks and is_first:
        rows = np.array([one.k_row, one.v_row]) + position
        sm.store(sm.gpu.cache, rows, np.stack((key, value)))
        sm.fence()


def products(rows: Floats, columns: Floats) -> Floats:
    """rows [m, k] times columns [n, k], of each row the same bits whatever rows are beside it:
    tasks may share queries of a head, and BLAS rounds by where a row stands on some processors.
    """
    found: Floats = (rows[:, None, :] * columns).sum(axis=2, dtype=np.float32)
    return found


def biases(sm: RowSm, one: RowAttention, at: Indices) -> Floats:
    """What is added to scores [queries, positions]."""
    shape = shape_of(sm)
    first = one.table * VECTOR_MULTIPLE // 2
    table = sm.gpu.floats[first : first + shape.max_context * shape.num_heads]
    found: Floats = np.zeros((shape.num_queries, len(at)), dtype=np.float32)
    inside = at < shape.max_context
    heads = slice(one.query0, one.query0 + shape.num_queries)
    found[:, inside] = table.reshape(-1, shape.num_heads)[at[inside], heads].T
    return found


def take_block(sm: RowSm, dim: int) -> Generator[Key, None, Floats]:
    """Keys or values of a block: [128, dim]."""
    halves = []
    for _ in range(-(-dim // HALF)):
        tile = yield from sm.take()
        halves.append(tile)
    return np.concatenate(halves, axis=1)[:, :dim].copy()


def rotated(
    sm: RowSm, one: RowAttention, position: int, flag: int
) -> Generator[Key, None, tuple[Floats, Floats, Floats]]:
    """Queries and the new key, normed and rotated, and the value, in bf16."""
    shape = shape_of(sm)
    dim, half = shape.head_dim, shape.head_dim // 2
    heads = [one.src + (one.query0 + query) * dim for query in range(shape.num_queries)]
    heads += [one.k_src + one.head * dim, one.v_src + one.head * dim]
    at: Indices = (np.array(heads)[:, None] + np.arange(dim)).reshape(-1)
    found = yield from sm.poll(at, flag, repr(one.name))
    rows = floats_of(found).reshape(len(heads), dim).copy()
    turned = rows[:-1]
    if shape.qk_norm:
        mean = (turned * turned).sum(axis=1, dtype=np.float32) / np.float32(dim)
        inv = np.float32(1.0) / np.sqrt(mean + np.float32(sm.gpu.queues.eps))
        weights = np.stack(
            [norm_vector(sm, one.q_norm, dim)] * (len(heads) - 2)
            + [norm_vector(sm, one.k_norm, dim)]
        )
        turned = turned * inv[:, None] * weights
    if shape.rotated:
        cos, sin = sm.gpu.rope[position, :half], sm.gpu.rope[position, half:]
        a, b = turned[:, :half], turned[:, half:]
        turned = np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=1)
    rows[:-1] = turned
    rows = to_bf16(rows)
    return rows[:-2], rows[-2], rows[-1]


def combine(sm: RowSm, one: RowCombine, position: int, flag: int) -> Steps:
    """Output of one query head from the partials of its splits. No barrier stands between a
    thread's poll, of two columns, and its store.
    """
    dim = shape_of(sm).head_dim
    active = num_active_splits(position, one.window, one.max_splits)
    stride = dim + ROW_PARTIAL_EXTRA
    firsts = one.partial + (one.head * one.max_splits + np.arange(active)) * stride
    for part in parts_of(sm, dim // 2):
        columns = np.arange(2 * part.start, 2 * part.stop)
        if not len(columns):
            continue
        extra = np.concatenate((columns, [dim, dim + 1]))
        at = (firsts[:, None] + extra).reshape(-1)
        found = yield from sm.poll(at, flag, f"the splits of {one.name!r}")
        values = floats_of(found).reshape(active, len(extra))
        peaks, sums = values[:, -2], values[:, -1]
        factors = np.exp2(peaks - peaks.max())
        total = (factors * sums).sum(dtype=np.float32)
        y = (factors[:, None] * values[:, :-2]).sum(axis=0, dtype=np.float32) / total
        yield RAN
        to = one.dst + one.head * (dim // 2) + columns[::2] // 2
        sm.publish(to, pairs_of(y[::2], y[1::2]), flag)


def parts_of(sm: RowSm, num: int) -> Iterator[range]:
    yield from shuffled(sm.gpu.order.random, num)
