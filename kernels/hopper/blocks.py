"""Attention on a block of 128 cached positions, by eight warps with two barriers.

In: queries, the new key and value, keys and values in the ring. Out: outputs of all queries, maxima
and sums, in registers. Each warp scores 16 positions, keys being the left operand of m16n8k16 and
up to eight queries the columns of the right one; it leaves weights, relative to its own maximum,
and that and their sum in shared memory. After a barrier each warp adds up 16 columns of the values
over all 128 positions, so that no sums over warps are needed. All else is found before q, k and v
are waited for. Next on the walk: attention.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from distmega.kernels.hopper import block_ptx
from distmega.kernels.hopper.block_ptx import (
    aim_asm,
    place_asm,
    row_operands,
    score_asm,
    stage_asm,
    value_asm,
)
from distmega.kernels.hopper.shapes import PER_THREAD, THREADS, TILE_BYTES, TILE_ROWS

QUERY_BYTES = gl.constexpr(block_ptx.QUERY_BYTES)


@gluon.jit
def keep_all(value):
    """The tensor itself, found at this point and not later."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [value], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def aim_block(places, G: gl.constexpr):
    """For each thread, addresses of: its part of its query; its row of keys in the ring's first
    slot; where the first block's weights of its lane begin, and where its warp's go; where its
    warp's maxima and sums go, and where those of its query begin; its row of values in the first
    slot; and its first position in a block.

    They are found at this point, and not later: before q, k and v are waited for.
    """
    bufs, _, _, xs, _, _ = places
    return gl.inline_asm_elementwise(
        aim_asm(),
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r",
        [bufs + gl.full([THREADS], 0, gl.int32, layout=PER_THREAD), xs, G - 1],
        dtype=(
            gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32,
        ),
        is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def score_block(
    places, aims, turn, slot, phase, block, first, position, scale, HALVES: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Weights, maxima and sums of a block into shared memory, those of two blocks in turn; the
    ring's tiles of keys from `slot` on are free then. Positions before `first` and after `position`
    are masked. aims: see aim_block.
    """
    _, ready, free, _, _, _ = places
    query, keys, _, weights, sums, _, _, at = aims
    gl.inline_asm_elementwise(
        score_asm(HALVES, STAGES),
        "=&r" + ",r" * 13 + ",f",
        [
            ready, free, query, keys, weights, sums, at, turn, slot, phase, block, first, position,
            scale,
        ],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def add_values(
    places, aims, turn, slot, phase, o0, o1, o2, o3, m, l, HALVES: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Adds the weighted values of a block to the outputs; the ring's tiles from `slot` on are free
    then. Comes after a barrier behind score_block; none is needed behind it, since the next block's
    weights go elsewhere, and those of the one after that come a barrier later.

    Thread (4 r + c) of a warp: o0 to o3 of its columns r, r, r + 8, r + 8 and queries 2 c, 2 c + 1,
    2 c, 2 c + 1; m, l of query r.
    """
    _, ready, free, _, _, _ = places
    _, _, weights, _, _, sums, values, _ = aims
    return gl.inline_asm_elementwise(
        value_asm(HALVES, STAGES),
        "=&f,=&f,=&f,=&f,=&f,=&f,f,f,f,f,f,f" + ",r" * 8,
        [
            o0, o1, o2, o3, m, l, ready, free, weights, sums, values, turn, slot, phase,
        ],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def aim_rows(
    places, it, position, row, column, G: gl.constexpr, SIZE: gl.constexpr, HALVES: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Addresses of SIZE columns of both halves of rows: of queries 0 to G - 1 where score_block
    reads them, then of the new key (row G) and value (row G + 1) in the ring, whose last block's
    first tile is number `it`, and their tiles' barriers and phases; -1 for other rows. row: [n, 1],
    column: [1, d / 2].
    """
    bufs, ready, _, xs, _, _ = places
    column = column // SIZE * SIZE
    pair = column // 2
    queries = gl.where(row < G, xs + row * QUERY_BYTES + pair % 4 * 32 + pair // 4 * 4, -1)
    first = it + gl.where(row == G, 0, HALVES)
    second = first + HALVES - 1
    line = position % TILE_ROWS
    inside = line * 128 + ((column // 8) ^ (line % 8)) * 16 + column % 8 * 2
    is_new = (row == G) | (row == G + 1)
    to0 = gl.where(is_new, bufs + first % STAGES * TILE_BYTES + inside, -1)
    to1 = bufs + second % STAGES * TILE_BYTES + inside
    none = column * 0
    bar0 = ready + first % STAGES * 8 + none
    bar1 = ready + second % STAGES * 8 + none
    phase0 = first // STAGES % 2 + none
    phase1 = second // STAGES % 2 + none
    return (
        keep_all(queries), keep_all(to0), keep_all(to1), keep_all(bar0), keep_all(bar1),
        keep_all(phase0), keep_all(phase1),
    )  # fmt: skip


@gluon.jit
def stage_queries(aims, a, b, SIZE: gl.constexpr):
    """Both halves of the queries into shared memory. aims: see aim_rows."""
    gl.inline_asm_elementwise(
        stage_asm(a.shape[1], SIZE),
        row_operands(SIZE, 1),
        [aims[0], a, b],
        dtype=gl.int32,
        is_pure=False,
        pack=SIZE,
    )


@gluon.jit
def place_new(aims, a, b, SIZE: gl.constexpr):
    """The new key and value into the ring's tiles of the last block. aims: see aim_rows."""
    _, to0, to1, bar0, bar1, phase0, phase1 = aims
    gl.inline_asm_elementwise(
        place_asm(a.shape[1], SIZE),
        row_operands(SIZE, 6),
        [to0, to1, bar0, phase0, bar1, phase1, a, b],
        dtype=gl.int32,
        is_pure=False,
        pack=SIZE,
    )
