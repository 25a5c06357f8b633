"""Attention on a block of 128 cached positions, by eight warps with two barriers.

In: queries, the new key and value, keys and values in the ring. Out: outputs of all queries, maxima
and sums, in registers. Each warp scores 16 positions, keys being the left operand of m16n8k16 and
up to eight queries the columns of the right one; it leaves weights, relative to its own maximum,
and that and their sum in shared memory. After a barrier each warp adds up 16 columns of the values
over all 128 positions, and 16 more of heads of more than 128 elements, so that no sums over warps
are needed. All else is found before q, k and v
are waited for. Next on the walk: attention.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from distmega.kernels.hopper.ptx.blocks import (
    aim_asm,
    insert_asm,
    num_outputs,
    query_bytes,
    row_operands,
    score_asm,
    stage_asm,
    value_asm,
    value_operands,
    value_types,
)
from distmega.kernels.hopper.ptx.shapes import (
    PER_THREAD,
    THREADS,
    TILE_BYTES,
    TILE_ROWS,
    is_padded,
    num_halves,
    padded_half,
)


@gluon.jit
def keep_all(value):
    """The tensor itself, found at this point and not later."""
    # impure, so that the compiler computes it before the wait that follows
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [value], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def aim_block(ring, G: gl.constexpr, HALVES: gl.constexpr):
    """For each thread, addresses of: its part of its query; its row of keys in the ring's first
    slot; where the first block's weights of its lane begin, and where its warp's go; where its
    warp's maxima and sums go, and where those of its query begin; its row of values in the first
    slot; and its first position in a block.

    They are found at this point, and not later: before q, k and v are waited for.
    """
    bufs, _, _, xs, _, _ = ring
    # one impure block: else addresses are computed where they are used, behind the polls
    return gl.inline_asm_elementwise(
        aim_asm(HALVES),
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
    ring, aims, turn, slot, phase, block, first, position, scale, biases, HALVES: gl.constexpr,
    STAGES: gl.constexpr, SOFTCAP: gl.constexpr, BIASED: gl.constexpr,
):  # fmt: skip
    """Weights, maxima and sums of a block into shared memory, those of two blocks in turn; the
    ring's tiles of keys from `slot` on are free then. Positions before `first` and after `position`
    are masked. SOFTCAP: what scores are kept below, if it is not 0. aims: see aim_block; biases:
    see attention.load_biases, nothing unless BIASED.
    """
    _, ready, free, _, _, _ = ring
    query, keys, _, weights, sums, _, _, at = aims
    operands = (
        ready, free, query, keys, weights, sums, at, turn, slot, phase, block, first, position,
        scale,
    )  # fmt: skip
    if BIASED:
        operands = operands + biases
    # Gluon would put barriers of all warps around each wait, product and store
    gl.inline_asm_elementwise(
        score_asm(HALVES, STAGES, SOFTCAP, BIASED),
        "=&r" + ",r" * 13 + (",f" * 5 if BIASED else ",f"),
        operands,
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def add_values(
    ring, aims, turn, slot, phase, outputs, m, l, HALVES: gl.constexpr, STAGES: gl.constexpr
):
    """Adds the weighted values of a block to the outputs; the ring's tiles from `slot` on are free
    then. Comes after a barrier behind score_block; none is needed behind it, since the next block's
    weights go elsewhere, and those of the one after that come a barrier later.

    Thread (4 r + c) of a warp: outputs of its columns r, r, r + 8, r + 8 and queries 2 c, 2 c + 1,
    2 c, 2 c + 1, then of the columns 128 later, if there are any; m, l of query r.
    """
    _, ready, free, _, _, _ = ring
    _, _, weights, _, _, sums, values, _ = aims
    # as score_block; what comes in and goes out stays in the same registers from block to block
    NUM: gl.constexpr = num_outputs(HALVES)
    others = (m, l, ready, free, weights, sums, values, turn, slot, phase)
    found = gl.inline_asm_elementwise(
        value_asm(HALVES, STAGES),
        value_operands(HALVES),
        outputs + others,
        dtype=value_types(HALVES),
        is_pure=False,
        pack=1,
    )
    return found[0:NUM], found[NUM], found[NUM + 1]


@gluon.jit
def query_address(xs, row, column, HALVES: gl.constexpr):
    """Where a column of a query lies; see ptx/blocks.py."""
    pair = column % 64 // 2
    return xs + row * query_bytes(HALVES) + column // 64 * 128 + pair % 4 * 32 + pair // 4 * 4


@gluon.jit
def offset_in_tile(line, column):
    """Where a column of a cached position lies in its ring slot."""
    return line * 128 + ((column // 8) ^ (line % 8)) * 16 + column % 8 * 2


@gluon.jit
def aim_rows(
    ring, it, position, row, column, G: gl.constexpr, SIZE: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Addresses of SIZE columns of both halves of rows: of queries 0 to G - 1 where score_block
    reads them, then of the new key (row G) and value (row G + 1) in the ring, whose last block's
    first tile is number `it`, and their tiles' barriers and phases; -1 for other rows. row: [n, 1],
    column: [1, d / 2, or more if padded]; zeros there go behind the columns of queries. The last is
    where the second half of a query goes, if that is not a fixed way behind the first.
    """
    HALVES: gl.constexpr = num_halves(D)
    bufs, ready, _, xs, _, _ = ring
    column = column // SIZE * SIZE
    is_new = (row == G) | (row == G + 1)
    first = it + gl.where(row == G, 0, HALVES)
    line = position % TILE_ROWS
    if is_padded(D):
        half: gl.constexpr = D // 2
        is_zero = column >= half
        second_column = column + gl.where(is_zero, padded_half(D), half)
        column += gl.where(is_zero, half, 0)
        queries2 = gl.where(row < G, query_address(xs, row, second_column, HALVES), -1)
        second = first + second_column // 64
        is_new = is_new & (column < half)
        inside1 = offset_in_tile(line, second_column % 64)
    else:
        second = first + HALVES // 2
        inside1 = offset_in_tile(line, column)
        if HALVES > 2:
            second += column // 64
            inside1 = offset_in_tile(line, column % 64)
        queries2 = column
    queries = gl.where(row < G, query_address(xs, row, column, HALVES), -1)
    to0 = bufs + (first + column // 64) % STAGES * TILE_BYTES + offset_in_tile(line, column % 64)
    to0 = gl.where(is_new, to0, -1)
    to1 = bufs + second % STAGES * TILE_BYTES + inside1
    first += column // 64
    none = column * 0
    bar0 = ready + first % STAGES * 8 + none
    bar1 = ready + second % STAGES * 8 + none
    phase0 = first // STAGES % 2 + none
    phase1 = second // STAGES % 2 + none
    return (
        keep_all(queries), keep_all(to0), keep_all(to1), keep_all(bar0), keep_all(bar1),
        keep_all(phase0), keep_all(phase1), keep_all(queries2),
    )  # fmt: skip


@gluon.jit
def stage_queries(aims, a, b, SIZE: gl.constexpr, D: gl.constexpr):
    """Both halves of the queries into shared memory. aims: see aim_rows."""
    args = [aims[0], aims[7], a, b] if is_padded(D) else [aims[0], a, b]
    # to addresses found before the queries came, in the order in which score_block reads them
    gl.inline_asm_elementwise(
        stage_asm(D, SIZE),
        row_operands(SIZE, 2 if is_padded(D) else 1),
        args,
        dtype=gl.int32,
        is_pure=False,
        pack=SIZE,
    )


@gluon.jit
def insert_new(aims, a, b, SIZE: gl.constexpr, D: gl.constexpr):
    """The new key and value into the ring's tiles of the last block. aims: see aim_rows."""
    _, to0, to1, bar0, bar1, phase0, phase1, _ = aims
    # each thread waits for the tiles that it writes into, and no other thread waits for it
    gl.inline_asm_elementwise(
        insert_asm(D, SIZE),
        row_operands(SIZE, 6),
        [to0, to1, bar0, phase0, bar1, phase1, a, b],
        dtype=gl.int32,
        is_pure=False,
        pack=SIZE,
    )
