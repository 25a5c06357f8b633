"""The matmul kernel: C[M, N] = A[M, K] B[N, K]^T in bf16 with fp32 sums, one program an SM.

A loader warp streams 64-wide slices of A and B through a ring of shared memory by TMA; two warp
groups take a half of each tile's 128 rows, multiply by wgmma and store by TMA, 64 columns at a
time, while the loader already fills the ring for the next tile. In: descriptors, event words
(events.py), a MatmulSpec. Out: the result in local or peer memory. Next: launch.py.
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

from distmega.kernels.gemm.events import before_tma_reads, finish_stores, wait_event
from distmega.kernels.gemm.mover import move_tiles
from distmega.kernels.gemm.order import first_chunk, place_tile
from distmega.kernels.gemm.spec import BUFFERS, EARLY, HALF_M, TILE_K, TILE_M
from distmega.kernels.gluon_compat import cta_barrier, tma_load, tma_store, tma_store_wait

EXTENTS = (
    "column_blocks", "k_tiles", "chunk_rows", "columns", "rank", "arrival_rows", "epoch",
)  # fmt: skip
"""Arguments that one compiled kernel takes at any value."""


@gluon.jit
def make_barriers(number: gl.constexpr, arrivals: gl.constexpr):
    """mbarriers that complete a phase after so many arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(bars.index(i), count=arrivals)
    fence_async_shared()
    return bars


@gluon.jit
def load_tiles(a, own, b, k_tiles, chunk_rows, columns, rank, arrivals, arrival_rows, epoch, stuck,
               ring, spec: gl.constexpr):  # fmt: skip
    """The loader's partition, of one warp."""
    a_ring, b_ring, ready, free = ring
    num_tiles = chunk_rows * columns * spec.num_ranks
    slice_bytes: gl.constexpr = 2 * TILE_K * (TILE_M + spec.tile_n)
    first = first_chunk(rank, spec)
    it = 0
    for number in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        chunk, row, column = place_tile(
            number, chunk_rows, columns, first, spec.num_ranks, spec.group
        )
        top = row * TILE_M
        is_own = chunk == rank
        if spec.gathers and not is_own:
            index = (chunk * chunk_rows * TILE_M + top) // arrival_rows
            wait_event(arrivals, index, epoch, stuck, spec.debug)
            before_tma_reads()
        if spec.num_ranks > 1:
            top += chunk * chunk_rows * TILE_M
        for k in range(k_tiles):
            slot = it % spec.stages
            mbarrier.wait(free.index(slot), ((it // spec.stages) & 1) ^ 1)
            bar = ready.index(slot)
            mbarrier.expect(bar, slice_bytes)
            left = k * TILE_K
            upper, lower = a_ring.index(2 * slot), a_ring.index(2 * slot + 1)
            if spec.gathers:
                tma_load(own, [row * TILE_M, left], bar, upper, pred=is_own)
                tma_load(own, [row * TILE_M + HALF_M, left], bar, lower, pred=is_own)
                tma_load(a, [top, left], bar, upper, pred=not is_own)
                tma_load(a, [top + HALF_M, left], bar, lower, pred=not is_own)
            else:
                tma_load(a, [top, left], bar, upper)
                tma_load(a, [top + HALF_M, left], bar, lower)
            tma_load(b, [column * spec.tile_n, left], bar, b_ring.index(slot))
            it += 1


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
def stage_block(block, buffer, in_flight: gl.constexpr):
    """A block into shared memory once at most `in_flight` stores still read it."""
    tma_store_wait(in_flight)
    cta_barrier()
    buffer.store(block.to(buffer.dtype))
    fence_async_shared()
    cta_barrier()


@gluon.jit
def store_tile(part, out, top, left, leaving):
    """Columns of a half tile to local memory."""
    count: gl.constexpr = part.shape[1] // HALF_M
    for i in gl.static_range(count):
        tma_store_wait(BUFFERS - 1)
        cta_barrier()
        buffer = leaving.index(i % BUFFERS)
        buffer.store(block_of(part, i, count).to(buffer.dtype))
        fence_async_shared()
        cta_barrier()
        tma_store(out, [top, left + i * HALF_M], buffer)


@gluon.jit
def load_partial(other, wanted, partials, slot_rows, top, left, column_blocks, rank,
                 layout: gl.constexpr, spec: gl.constexpr):  # fmt: skip
    """A half tile of the partial result of the other ranks' number `other`; zeros if not wanted.

    partials: bf16 [num_ranks * slot_rows, N] of local memory, written by peers.
    """
    tile_n: gl.constexpr = spec.tile_n
    num_columns = column_blocks * HALF_M
    rows = gl.arange(0, HALF_M, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, tile_n, layout=gl.SliceLayout(0, layout))
    places = gl.expand_dims(rows.to(gl.int64) * num_columns, 1) + gl.expand_dims(columns, 0)
    inside = gl.expand_dims((left + columns < num_columns) & wanted, 0)
    source = other + (other >= rank).to(gl.int32)
    start = partials + (source * slot_rows + top).to(gl.int64) * num_columns + left
    return gl.load(start + places, mask=inside, other=0.0, cache_modifier=".cg")


@gluon.jit
def multiply(acc, it, start, end, ring, half: gl.constexpr, spec: gl.constexpr):
    """Steps of a tile along K; the last one may still run."""
    a_ring, b_ring, ready, free = ring
    for k in range(start, end):
        slot = it % spec.stages
        mbarrier.wait(ready.index(slot), (it // spec.stages) & 1)
        a_slice, b_slice = a_ring.index(2 * slot + half), b_ring.index(slot).permute((1, 0))
        acc = warpgroup_mma(a_slice, b_slice, acc, use_acc=k > 0, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        mbarrier.arrive(free.index((it + spec.stages - 1) % spec.stages), count=1, pred=k > 0)
        it += 1
    return acc, it


@gluon.jit
def hand_over(tiles_done, boxes, half: gl.constexpr):
    """Tells the mover that all that this warp group has stored is written."""
    _, outbox, sentbox = boxes
    if tiles_done > 0:
        finish_stores()
        mbarrier.wait(sentbox.index(half), tiles_done & 1)
        mbarrier.arrive(outbox.index(half), count=1)


@gluon.jit
def compute_tiles(out, home, column_blocks, k_tiles, chunk_rows, columns, rank, partials, ring,
                  boxes, leaving, half: gl.constexpr, spec: gl.constexpr):  # fmt: skip
    """A warp group's partition: rows half * 64 to half * 64 + 63 of each tile."""
    tile_n: gl.constexpr = spec.tile_n
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tile_n, 16])
    num_tiles = chunk_rows * columns * spec.num_ranks
    slot_rows = chunk_rows * TILE_M
    first = first_chunk(rank, spec)
    it = 0
    tiles_done = 0
    own_done = 0
    acc = gl.zeros([HALF_M, tile_n], gl.float32, layout=layout)
    for number in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        chunk, row, column = place_tile(
            number, chunk_rows, columns, first, spec.num_ranks, spec.group
        )
        top, left = row * TILE_M + half * HALF_M, column * tile_n
        below = chunk * slot_rows + top
        if spec.sends == "":
            acc, it = multiply(acc, it, 0, k_tiles, ring, half, spec)
        else:
            early = gl.minimum(EARLY, k_tiles)
            acc, it = multiply(acc, it, 0, early, ring, half, spec)
            hand_over(tiles_done, boxes, half)
            tiles_done += 1
            acc, it = multiply(acc, it, early, k_tiles, ring, half, spec)
            if chunk == rank:
                mbarrier.wait(boxes[0].index(0), own_done & 1)
                own_done += 1
            partial = load_partial(
                0, chunk == rank, partials, slot_rows, top, left, column_blocks, rank, layout, spec
            )
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(ring[3].index((it + spec.stages - 1) % spec.stages), count=1)
        if spec.sends == "":
            store_tile(acc, out, below, left, leaving)
        else:
            acc += partial.to(gl.float32)
            others: gl.constexpr = spec.num_ranks - 1
            for other in range(1, others):
                acc += load_partial(
                    other, chunk == rank, partials, slot_rows, top, left, column_blocks, rank,
                    layout, spec,
                ).to(gl.float32)  # fmt: skip
            if (chunk == rank) & (spec.sends == "scatter"):
                store_tile(acc, out, top, left, leaving)
            else:
                store_tile(acc, home, spec.num_ranks * slot_rows + below, left, leaving)
    if spec.sends == "":
        tma_store_wait(0)
    else:
        hand_over(tiles_done, boxes, half)


@gluon.jit(do_not_specialize=EXTENTS)
def matmul_kernel(a, own, b, out, home, column_blocks, k_tiles, chunk_rows, columns, rank,
                  arrivals, arrival_rows, partials, events, rooms, peers, epoch, stuck,
                  spec: gl.constexpr):  # fmt: skip
    """Extents: column_blocks N / 64, k_tiles, chunk_rows (of one rank) and columns in tiles.

    a [M, K], own [M / num_ranks, K] (this rank's rows when it gathers), b [N, K], out (M rows, or
    this rank's when it scatters), home [2 M, N] (this rank's room): descriptors of local memory.
    partials: the same room as pointer. A room has first a slot of M / num_ranks rows of partial
    results for each source rank, then M rows for results. arrivals: a word for arrival_rows rows of
    A. events: this rank's words, for partial results [num_ranks, tiles of a rank, 2] and behind
    them for results [tiles, 2]. rooms, peers: int64 [num_ranks], addresses of each rank's room and
    events. stuck: as in wait_event. Event words are zeroed once, at the start of all.
    """
    stages: gl.constexpr = spec.stages
    a_ring = gl.allocate_shared_memory(gl.bfloat16, [2 * stages, HALF_M, TILE_K], a.layout)
    b_ring = gl.allocate_shared_memory(gl.bfloat16, [stages, spec.tile_n, TILE_K], b.layout)
    leaving0 = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, HALF_M, HALF_M], out.layout)
    leaving1 = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, HALF_M, HALF_M], out.layout)
    ready, free = make_barriers(stages, 1), make_barriers(stages, 2)
    boxes = (make_barriers(1, 1), make_barriers(2, 1), make_barriers(2, 1))
    ring = (a_ring, b_ring, ready, free)
    if spec.sends == "":
        gl.warp_specialize(
            [
                (compute_tiles, (out, home, column_blocks, k_tiles, chunk_rows, columns, rank,
                                 partials, ring, boxes, leaving0, 0, spec)),
                (compute_tiles, (out, home, column_blocks, k_tiles, chunk_rows, columns, rank,
                                 partials, ring, boxes, leaving1, 1, spec)),
                (load_tiles, (a, own, b, k_tiles, chunk_rows, columns, rank, arrivals,
                              arrival_rows, epoch, stuck, ring, spec)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (compute_tiles, (out, home, column_blocks, k_tiles, chunk_rows, columns, rank,
                                 partials, ring, boxes, leaving0, 0, spec)),
                (compute_tiles, (out, home, column_blocks, k_tiles, chunk_rows, columns, rank,
                                 partials, ring, boxes, leaving1, 1, spec)),
                (move_tiles, (column_blocks, chunk_rows, columns, rank, partials, events, rooms,
                              peers, epoch, stuck, boxes, spec)),
                (load_tiles, (a, own, b, k_tiles, chunk_rows, columns, rank, arrivals,
                              arrival_rows, epoch, stuck, ring, spec)),
            ],
            [4, 2, 1],
            [224, 56, 56],
        )  # fmt: skip
