"""The matmul kernel: C[M, N] = A[M, K] B[N, K]^T in bf16 with fp32 sums, one program an SM.

A loader warp streams 64-wide slices of A and B through a ring of shared memory by TMA; two warp
groups take a half of each tile's 128 rows, multiply by wgmma and store by TMA, 64 columns at a
time, while the loader already fills the ring for the next tile. In: descriptors, event words
(events.py), a MatmulSpec. Out: the result in local or peer memory. Next: start.py.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, misc"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from distmega.kernels.gemm.device.arguments import Boxes, Helpers, Sends, SliceRing, TileGrid
from distmega.kernels.gemm.device.events import (
    before_tma_reads,
    clear_event,
    count_at_peers,
    count_event,
    finish_stores,
    wait_event,
)
from distmega.kernels.gemm.device.order import (
    end_work,
    locate_part,
    locate_tile,
    locate_word,
    locate_work,
)
from distmega.kernels.gemm.device.spec import (
    BUFFERS,
    EARLY,
    EARLY_PUSHED,
    HALF_M,
    PUSHED,
    READY,
    TILE_K,
    TILE_M,
    WORDS,
)
from distmega.kernels.gluon_compat import (
    cta_barrier,
    reinterpret,
    tma_load,
    tma_store,
    tma_store_wait,
)
from distmega.kernels.pipelined.pointwise.formula import evaluate
from distmega.kernels.runtime.mbarriers import make_barriers

EXTENTS = (
    "k_tiles", "chunk_rows", "columns", "rank", "group", "lag", "part", "arrival_rows", "late",
    "column_blocks", "num_helpers", "given", "fewer",
)  # fmt: skip
"""Arguments that one compiled kernel takes at any value."""


@gluon.jit
def load_partials(partials, it, row, left, grid, helped, memory, ring, spec: gl.constexpr):
    """Partial results of a tile, each in two slots of the ring, a half in each: other ranks', then
    what the program that helped with it has stored, if `helped`, its word, is not -1. it: slots
    filled before; row: of tiles in the chunk; left: the tile's first column.
    """
    chunk_rows, rank = grid.chunk_rows, grid.rank
    position = locate_word(row, left // spec.tile_n, grid, spec)
    part_bytes: gl.constexpr = 2 * HALF_M * spec.tile_n
    others: gl.constexpr = spec.num_ranks - 1 if spec.sends != "" else 0
    pieces: gl.constexpr = 1 if spec.sends != "" else 2
    for other in range(others + pieces * (helped >= 0).to(gl.int32)):
        source = other + (other >= rank).to(gl.int32)
        word = position
        if other >= others:
            source = rank
            word = helped
        top = (source * chunk_rows + row) * TILE_M
        if spec.sends == "":
            top = (pieces * helped + other) * TILE_M
            left = 0
        wait_event(memory.arrivals, source * WORDS + word, memory.stuck, spec.debug)
        before_tma_reads()
        if spec.sends == "push" or other == others + pieces - 1:
            clear_event(memory.arrivals, source * WORDS + word)
        for half in gl.static_range(2):
            slot = it % spec.stages
            mbarrier.wait(ring.free.index(slot), ((it // spec.stages) & 1) ^ 1)
            bar = ring.ready.index(slot)
            mbarrier.expect(bar, part_bytes)
            tma_load(partials, [top + half * HALF_M, left], bar, ring.parts.index(slot))
            it += 1
    return it


@gluon.jit
def load_tiles(a, own, b, other, partials, k_tiles, grid, helpers, arrival_rows, memory, ring,
               spec: gl.constexpr):  # fmt: skip
    """The loader's partition, of one warp. Arguments are those of matmul_kernel."""
    rank = grid.rank
    num_tiles = grid.chunk_rows * grid.columns * spec.num_ranks
    slice_bytes: gl.constexpr = 2 * TILE_K * (TILE_M + spec.tile_n)
    it = 0
    for item in range(gl.program_id(0), end_work(num_tiles, helpers, spec), gl.num_programs(0)):
        number, first, slices, word = locate_work(item, num_tiles, k_tiles, helpers, spec)
        chunk, row, column = locate_tile(number, grid, spec)
        top = row * TILE_M
        is_own = chunk == rank
        if spec.gathers and not is_own:
            index = chunk * WORDS + top // arrival_rows
            wait_event(memory.arrivals, index, memory.stuck, spec.debug)
            before_tma_reads()
        if spec.num_ranks > 1:
            top += chunk * grid.chunk_rows * TILE_M
        for k in range(first, first + slices):
            slot = it % spec.stages
            mbarrier.wait(ring.free.index(slot), ((it // spec.stages) & 1) ^ 1)
            bar = ring.ready.index(slot)
            mbarrier.expect(bar, slice_bytes)
            left = k * TILE_K
            upper, lower = ring.a.index(2 * slot), ring.a.index(2 * slot + 1)
            if spec.gathers:
                tma_load(own, [row * TILE_M, left], bar, upper, pred=is_own)
                tma_load(own, [row * TILE_M + HALF_M, left], bar, lower, pred=is_own)
                tma_load(a, [top, left], bar, upper, pred=not is_own)
                tma_load(a, [top + HALF_M, left], bar, lower, pred=not is_own)
            else:
                tma_load(a, [top, left], bar, upper)
                tma_load(a, [top + HALF_M, left], bar, lower)
            if spec.is_mixed:
                upper, lower = ring.b.index(2 * slot), ring.b.index(2 * slot + 1)
                tma_load(b, [column * spec.columns, left], bar, upper)
                if spec.apart:
                    tma_load(other, [column * spec.columns, left], bar, lower)
                else:
                    tma_load(b, [(grid.columns + column) * spec.columns, left], bar, lower)
            else:
                tma_load(b, [column * spec.tile_n, left], bar, ring.b.index(slot))
            it += 1
        if (spec.num_ranks > 1 and first == 0) and (spec.gathers or is_own):
            left = column * spec.tile_n
            it = load_partials(partials, it, row, left, grid, word, memory, ring, spec)
    if spec.num_ranks > 1 and gl.program_id(0) == 0:  # before the launch after the next one polls
        wait_event(memory.arrivals, rank * WORDS + READY, memory.stuck, spec.debug)


@gluon.jit
def block_of(tile, index: gl.constexpr, count: gl.constexpr):
    """Columns of block `index` of `count`; registers are only renamed."""
    if count == 1:
        return tile
    else:
        rows: gl.constexpr = tile.shape[0]
        columns: gl.constexpr = tile.shape[1]
        low, high = tile.reshape([rows, 2, columns // 2]).permute((0, 2, 1)).split()
        if index < count // 2:
            return block_of(low, index, count // 2)
        else:
            return block_of(high, index - count // 2, count // 2)


@gluon.jit
def store_block(part, i: gl.constexpr, count: gl.constexpr, out, top, left, leaving,
                number: gl.constexpr, rest: gl.constexpr = False):  # fmt: skip
    """Block i of `count` of a half tile, through shared memory, which is returned with it; number:
    of the blocks stored before it. rest: what rounding leaves of it.
    """
    tma_store_wait(BUFFERS - 1)
    cta_barrier()
    buffer = leaving.index(number % BUFFERS)
    block = block_of(part, i, count)
    if rest:
        rounded = block.to(buffer.dtype).to(gl.float32)
        block = gl.where(gl.abs(rounded) < float("inf"), block - rounded, 0.0)  # inf leaves nothing
    buffer.store(block.to(buffer.dtype))
    fence_async_shared()
    cta_barrier()
    tma_store(out, [top, left + i * HALF_M], buffer)
    return buffer


@gluon.jit
def store_tile(part, out, top, left, leaving):
    """Columns of a half tile to local memory."""
    count: gl.constexpr = part.shape[1] // HALF_M
    for i in gl.static_range(count):
        store_block(part, i, count, out, top, left, leaving, i)


@gluon.jit
def shape_tile(part, spec: gl.constexpr):
    """What the spec makes of a half tile of the product."""
    if spec.is_mixed:
        formula: gl.constexpr = spec.mixes
        return evaluate(formula, (block_of(part, 0, 2), block_of(part, 1, 2)))
    else:
        return part


@gluon.jit
def store_result(part, out, top, left, leaving, spec: gl.constexpr):
    """As store_tile, of what the spec makes of a half tile from this column of the product on."""
    if spec.is_mixed:
        store_tile(shape_tile(part, spec), out, top, left // 2, leaving)
    else:
        store_tile(part, out, top, left, leaving)


@gluon.jit
def store_tile_and_rest(part, out, top, leaving):
    """As store_tile, from column 0 on, and a tile below what rounding leaves, a block after its
    own, so that no rounded block is kept.
    """
    count: gl.constexpr = part.shape[1] // HALF_M
    for i in gl.static_range(count):
        store_block(part, i, count, out, top, 0, leaving, 2 * i)
        store_block(part, i, count, out, top + TILE_M, 0, leaving, 2 * i + 1, rest=True)


@gluon.jit
def push_tile(part, home, top, left, leaving, sends, rank, spec: gl.constexpr):
    """As store_tile, and to the same place in all other ranks' symmetric buffers. sends: Sends."""
    width = sends.column_blocks * HALF_M
    count: gl.constexpr = part.shape[1] // HALF_M
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, HALF_M, layout=gl.SliceLayout(1, layout))
    columns = left + gl.arange(0, HALF_M, layout=gl.SliceLayout(0, layout))
    lines = gl.expand_dims((top + rows).to(gl.int64) * width, 1)
    for i in gl.static_range(count):
        block = store_block(part, i, count, home, top, left, leaving, i).load(layout)
        positions = gl.expand_dims(columns + i * HALF_M, 0)
        inside = positions < width
        for other in range(spec.num_ranks - 1):
            peer_buffer = gl.load(sends.buffers + other + (other >= rank).to(gl.int32))
            start = gl.multiple_of(peer_buffer.to(gl.pointer_type(gl.bfloat16)), 16)
            gl.store(start + lines + positions, block, mask=inside)


@gluon.jit
def multiply(acc, it, start, end, ring, half: gl.constexpr, spec: gl.constexpr):
    """Steps of a tile along K, from `start` up to `end`; the last one may still run. acc: the warp
    group's half of the tile, f32; it: slots read before.
    """
    for k in range(start, end):
        slot = it % spec.stages
        mbarrier.wait(ring.ready.index(slot), (it // spec.stages) & 1)
        a_slice, b_slice = ring.a.index(2 * slot + half), ring.b.index(slot).permute((1, 0))
        acc = warpgroup_mma(a_slice, b_slice, acc, use_acc=k > 0, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        last = (it + spec.stages - 1) % spec.stages
        mbarrier.arrive(ring.free.index(last), count=1, pred=k > 0)
        it += 1
    return acc, it


@gluon.jit
def add_partials(acc, it, num_partials, ring, half: gl.constexpr, spec: gl.constexpr):
    """Partial results of a half tile, as load_partials brings them."""
    for _ in range(num_partials):
        for part in gl.static_range(2):
            slot = it % spec.stages
            mbarrier.wait(ring.ready.index(slot), (it // spec.stages) & 1)
            if part == half:
                acc += ring.parts.index(slot).load(acc.type.layout).to(gl.float32)
                fence_async_shared()  # of reads, before the copy engine writes there again
                cta_barrier()
            mbarrier.arrive(ring.free.index(slot), count=1)
            it += 1
    return acc, it


@gluon.jit
def hand_over(tiles_done, boxes, half: gl.constexpr):
    """Tells the counter that all that this warp group has stored is written."""
    if tiles_done > 0:
        finish_stores()
        cta_barrier()
        mbarrier.wait(boxes.sent.index(half), tiles_done & 1)
        mbarrier.arrive(boxes.out.index(half), count=1)


@gluon.jit
def count_tiles(k_tiles, grid, helpers, memory, sends, boxes, spec: gl.constexpr):
    """The counter's partition, of one warp, which spares the compute warps the release: a count for
    each part that copy engines wait for, one at the peers for sums that this kernel pushes, a word
    there for each partial result, and one here for each tile that this program helps with.
    """
    rank = grid.rank
    num_tiles = grid.chunk_rows * grid.columns * spec.num_ranks
    tiles_done = 0
    # a peer that has all of this call's words may write those of the next, which still hold what
    # the call before wrote unless READY is set
    if spec.sends == "push":
        wait_event(memory.arrivals, rank * WORDS + READY, memory.stuck, spec.debug)
    for item in range(gl.program_id(0), end_work(num_tiles, helpers, spec), gl.num_programs(0)):
        number, first, _, word = locate_work(item, num_tiles, k_tiles, helpers, spec)
        chunk, row, column = locate_tile(number, grid, spec)
        for half in gl.static_range(2):
            mbarrier.wait(boxes.out.index(half), tiles_done & 1)
            mbarrier.arrive(boxes.sent.index(half), count=1)
        if first > 0:
            count_event(memory.arrivals, rank * WORDS + word)
        elif (spec.sends == "all") & (number >= sends.late):
            count_at_peers(sends.words, rank, spec.num_ranks)
        elif spec.sends == "push":
            if chunk != rank:
                words = gl.load(sends.words + chunk).to(gl.pointer_type(gl.int32))
                count_event(words, locate_word(row, column, grid, spec) - PUSHED)
        elif spec.sends != "" and (chunk != rank or spec.sends == "all"):
            position, parts = locate_part(row, column, grid)
            count_event(memory.counts, chunk * parts + position)
        tiles_done += 1  # noqa: SIM113


@gluon.jit
def compute_tiles(out, home, aways, k_tiles, grid, helpers, sends, ring, boxes, leaving,
                  half: gl.constexpr, spec: gl.constexpr):  # fmt: skip
    """A warp group's partition: rows half * 64 to half * 64 + 63 of each tile. leaving: bf16
    [BUFFERS, 64, 64] in shared memory, of this warp group. Other arguments are those of
    matmul_kernel.
    """
    chunk_rows, rank = grid.chunk_rows, grid.rank
    tile_n: gl.constexpr = spec.tile_n
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tile_n, 16])
    num_tiles = chunk_rows * grid.columns * spec.num_ranks
    slot_rows = chunk_rows * TILE_M
    it = 0
    tiles_done = 0
    acc = gl.zeros([HALF_M, tile_n], gl.float32, layout=layout)
    for item in range(gl.program_id(0), end_work(num_tiles, helpers, spec), gl.num_programs(0)):
        number, first, slices, word = locate_work(item, num_tiles, k_tiles, helpers, spec)
        chunk, row, column = locate_tile(number, grid, spec)
        top, left = row * TILE_M + half * HALF_M, column * tile_n
        below = chunk * slot_rows + top
        if spec.num_ranks == 1:
            acc, it = multiply(acc, it, 0, slices, ring, half, spec)
        else:
            early = gl.minimum(EARLY_PUSHED if spec.sends == "push" else EARLY, slices)
            acc, it = multiply(acc, it, 0, early, ring, half, spec)
            hand_over(tiles_done, boxes, half)
            tiles_done += 1
            acc, it = multiply(acc, it, early, slices, ring, half, spec)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(ring.free.index((it + spec.stages - 1) % spec.stages), count=1)
        whole = first == 0
        if spec.num_ranks == 1:
            store_result(acc, out, below, left, leaving, spec)
        elif spec.gathers:
            if whole:
                num_partials = 2 * (word >= 0).to(gl.int32)
                acc, it = add_partials(acc, it, num_partials, ring, half, spec)
                store_result(acc, out, below, left, leaving, spec)
            else:
                store_tile_and_rest(acc, home, 2 * word * TILE_M + half * HALF_M, leaving)
        else:
            if (chunk == rank) & whole:
                others: gl.constexpr = spec.num_ranks - 1
                num_partials = others + (word >= 0).to(gl.int32)
                acc, it = add_partials(acc, it, num_partials, ring, half, spec)
            results = whole.to(gl.int32) * (spec.num_ranks * slot_rows)
            sums: gl.constexpr = spec.sends == "scatter" or spec.sends == "push"
            if (chunk == rank) & whole & sums:
                store_tile(acc, out, top, left, leaving)
            elif spec.sends == "push" and whole:
                slot_top = rank * slot_rows + top
                for other in gl.static_range(spec.num_ranks - 1):
                    if chunk == other + (other >= rank).to(gl.int32):
                        store_tile(acc, aways[other], slot_top, left, leaving)
            elif spec.sends == "all" and whole and number >= sends.late:
                push_tile(acc, home, results + below, left, leaving, sends, rank, spec)
            else:
                store_tile(acc, home, results + below, left, leaving)
    if spec.num_ranks == 1:
        tma_store_wait(0)
    else:
        hand_over(tiles_done, boxes, half)


@gluon.jit
def as_loaded(ring, b, spec: gl.constexpr):
    """The ring as the loader fills it: where columns are mixed, with two halves of a slice of b, a
    descriptor, in each slot.
    """
    if spec.is_mixed:
        shape: gl.constexpr = (2 * spec.stages, spec.columns, TILE_K)
        layout: gl.constexpr = b.layout
        halves = reinterpret(ring.b, gl.bfloat16, shape, layout)
        return SliceRing(ring.a, halves, ring.parts, ring.ready, ring.free)
    else:
        return ring


@gluon.jit(do_not_specialize=EXTENTS)
def matmul_kernel(a, own, b, other, out, home, away0, away1, away2, partials, k_tiles, chunk_rows,
                  columns, rank, group, lag, part, arrival_rows, late, column_blocks, num_helpers,
                  given, fewer, memory, spec: gl.constexpr):  # fmt: skip
    """Of local memory, in blocks of 64 columns, descriptors: a, bf16 [M, K]; own, bf16 [M /
    num_ranks, K], this rank's rows where it gathers; b, bf16 [N, K], in blocks of spec.columns
    rows; all read alone. Where spec.apart, b and other, in such blocks too, are the upper and the
    lower half of N / 2 rows; else other is None. out, bf16 [M, N], or this rank's rows where it
    scatters, written. home: this rank's symmetric buffer, bf16 [2 M, N], written, by peers too;
    partials: the same in blocks of tile_n columns, read. It has first a slot of M / num_ranks rows
    of partial results for each source rank, then M rows of results; this rank's own slot is for
    tiles that programs help with. away0 to away2: where partial results are pushed, home of each
    other rank, in their order, written; else None. Where the kernel gathers, home and partials are
    [2 * 128 * tiles of the last wave, tile_n], for what helpers compute of each, rounded, and then
    what rounding leaves.

    k_tiles: slices of 64 along K. chunk_rows, columns, rank, group, lag, part: see TileGrid.
    arrival_rows: rows of A that a word of memory.arrivals stands for. late, column_blocks: see
    Sends. num_helpers, given, fewer: see Helpers. memory: see MatmulMemory. spec: MatmulSpec.
    """
    stages: gl.constexpr = spec.stages
    a_ring = gl.allocate_shared_memory(gl.bfloat16, [2 * stages, HALF_M, TILE_K], a.layout)
    b_ring = gl.allocate_shared_memory(gl.bfloat16, [stages, spec.tile_n, TILE_K], b.layout)
    leaving0 = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, HALF_M, HALF_M], out.layout)
    leaving1 = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, HALF_M, HALF_M], out.layout)
    ready, free = make_barriers(stages, 1), make_barriers(stages, 2)
    boxes = Boxes(make_barriers(2, 1), make_barriers(2, 1))
    part_shape: gl.constexpr = (stages, HALF_M, spec.tile_n)
    part_layout: gl.constexpr = partials.layout
    part_ring = reinterpret(b_ring, gl.bfloat16, part_shape, part_layout)
    ring = SliceRing(a_ring, b_ring, part_ring, ready, free)
    loaded = as_loaded(ring, b, spec)
    grid = TileGrid(chunk_rows, columns, rank, group, lag, part)
    helpers = Helpers(num_helpers, given, fewer)
    sends = Sends(late, column_blocks, memory.buffers, memory.words)
    aways = (away0, away1, away2)
    if spec.num_ranks == 1:
        gl.warp_specialize(
            [
                (compute_tiles, (out, home, aways, k_tiles, grid, helpers, sends, ring, boxes,
                                 leaving0, 0, spec)),
                (compute_tiles, (out, home, aways, k_tiles, grid, helpers, sends, ring, boxes,
                                 leaving1, 1, spec)),
                (load_tiles, (a, own, b, other, partials, k_tiles, grid, helpers, arrival_rows,
                              memory, loaded, spec)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (compute_tiles, (out, home, aways, k_tiles, grid, helpers, sends, ring, boxes,
                                 leaving0, 0, spec)),
                (compute_tiles, (out, home, aways, k_tiles, grid, helpers, sends, ring, boxes,
                                 leaving1, 1, spec)),
                (load_tiles, (a, own, b, other, partials, k_tiles, grid, helpers, arrival_rows,
                              memory, loaded, spec)),
                (count_tiles, (k_tiles, grid, helpers, memory, sends, boxes, spec)),
            ],
            [4, 1, 1],
            [232, 40, 40],
        )  # fmt: skip
