"""Matmuls of groups of rows, each with the matrix of its group, as one kernel: experts of a prompt.

The kernel of kernel.py over the tiles of all groups: a loader warp fills the ring, two warp groups
multiply a half of each tile's rows. The host never learns where groups start; each part of a
program walks over the groups to its next tile. A half without rows is not multiplied, and what a
tile reads of the next group is not stored. In: descriptors, where groups start, a MatmulSpec. Out:
the results, and zeros in the rows of no group. Next: start_groups.py.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, misc"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from distmega.kernels.gemm.device.arguments import SliceRing
from distmega.kernels.gemm.device.kernel import (
    as_loaded,
    block_of,
    multiply,
    shape_tile,
    store_tile,
)
from distmega.kernels.gemm.device.spec import BUFFERS, HALF_M, TILE_K, TILE_M
from distmega.kernels.gluon_compat import cta_barrier, tma_load, tma_store_wait
from distmega.kernels.runtime.mbarriers import make_barriers

EXTENTS = ("k_tiles", "num_groups", "all_rows", "eighths", "columns")
"""Arguments that one compiled kernel takes at any value."""


@gluon.jit
def tiles_high(top, stop):
    """Rows of tiles of the group with the rows from `top` up to `stop`."""
    return (stop - top + TILE_M - 1) // TILE_M


@gluon.jit
def locate_in_group(number, before, top, stop):
    """(first row, column of tiles) of a tile of that group, before which there are `before`."""
    high = tiles_high(top, stop)
    return top + (number - before) % high * TILE_M, (number - before) // high


@gluon.jit
def find_tile(starts, number, group, before, num_groups, columns):
    """The group of a tile, the tiles before that group, and its first row and the row behind its
    last. From `group` on, before which there are `before` tiles. num_groups if there is no such
    tile. columns: of tiles.
    """
    group, before = gl.to_tensor(group), gl.to_tensor(before)
    top = gl.load(starts + group)
    stop = gl.load(starts + gl.minimum(group + 1, num_groups))
    tiles = tiles_high(top, stop) * columns
    while (group < num_groups) & (number >= before + tiles):
        before += tiles
        group += 1
        top = stop
        stop = gl.load(starts + gl.minimum(group + 1, num_groups))
        tiles = tiles_high(top, stop) * columns
    return group, before, top, stop


@gluon.jit
def load_groups(a, b, other, starts, k_tiles, num_groups, n, columns, ring, spec: gl.constexpr):
    """The loader's partition, of one warp. Arguments are those of grouped_kernel."""
    half_bytes: gl.constexpr = 2 * TILE_K * HALF_M
    b_bytes: gl.constexpr = 2 * TILE_K * spec.tile_n
    it = 0
    number = gl.program_id(0)
    group, before, top, stop = find_tile(starts, number, 0, 0, num_groups, columns)
    while group < num_groups:
        first, column = locate_in_group(number, before, top, stop)
        has_both = first + HALF_M < stop
        matrix = group * n + column * spec.columns
        for k in range(k_tiles):
            slot = it % spec.stages
            mbarrier.wait(ring.free.index(slot), ((it // spec.stages) & 1) ^ 1)
            bar = ring.ready.index(slot)
            left = k * TILE_K
            mbarrier.expect(bar, b_bytes + 2 * half_bytes, pred=has_both)
            mbarrier.expect(bar, b_bytes + half_bytes, pred=not has_both)
            tma_load(a, [first, left], bar, ring.a.index(2 * slot))
            tma_load(a, [first + HALF_M, left], bar, ring.a.index(2 * slot + 1), pred=has_both)
            if spec.is_mixed:
                tma_load(b, [matrix, left], bar, ring.b.index(2 * slot))
                tma_load(other, [matrix, left], bar, ring.b.index(2 * slot + 1))
            else:
                tma_load(b, [matrix, left], bar, ring.b.index(slot))
            it += 1
        number += gl.num_programs(0)
        group, before, top, stop = find_tile(starts, number, group, before, num_groups, columns)


@gluon.jit
def pass_slices(it, slices, ring, spec: gl.constexpr):
    """Slots of a tile that has no rows for this warp group."""
    for _ in range(slices):
        slot = it % spec.stages
        mbarrier.wait(ring.ready.index(slot), (it // spec.stages) & 1)
        mbarrier.arrive(ring.free.index(slot), count=1)
        it += 1
    return it


@gluon.jit
def store_rows(part, out, top, num_rows, left, n, leaving):
    """The first rows of a half tile, fewer than it has, from column `left` on of out [..., n]."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, HALF_M, layout=gl.SliceLayout(1, layout))
    columns = left + gl.arange(0, HALF_M, layout=gl.SliceLayout(0, layout))
    lines = gl.expand_dims((top + rows).to(gl.int64) * n, 1)
    there = gl.expand_dims(rows < num_rows, 1)
    count: gl.constexpr = part.shape[1] // HALF_M
    tma_store_wait(0)
    for i in gl.static_range(count):
        buffer = leaving.index(i % BUFFERS)
        cta_barrier()
        buffer.store(block_of(part, i, count).to(buffer.dtype))
        cta_barrier()
        positions = gl.expand_dims(columns + i * HALF_M, 0)
        gl.store(out + lines + positions, buffer.load(layout), mask=there & (positions < n))
    fence_async_shared()  # of reads, before the copy engine is told to read there
    cta_barrier()


@gluon.jit
def clear_rows(out, low, high, all_rows, n, first, step):
    """Zeros in the rows below `low` and from `high` on, blocks `first`, `first` + `step`, ..."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    inner = gl.arange(0, HALF_M, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, HALF_M, layout=gl.SliceLayout(0, layout))
    zeros = gl.zeros([HALF_M, HALF_M], out.dtype.element_ty, layout=layout)
    for block in range(first, (all_rows + HALF_M - 1) // HALF_M, step):
        top = block * HALF_M
        if (top < low) | (top + HALF_M > high):
            rows = top + inner
            nobody = ((rows < low) | (rows >= high)) & (rows < all_rows)
            lines = gl.expand_dims(rows.to(gl.int64) * n, 1)
            for left in range(0, n, HALF_M):
                positions = gl.expand_dims(left + columns, 0)
                mask = gl.expand_dims(nobody, 1) & (positions < n)
                gl.store(out + lines + positions, zeros, mask=mask)


@gluon.jit
def compute_groups(out, result, starts, k_tiles, num_groups, all_rows, n, columns, ring, leaving,
                   half: gl.constexpr, spec: gl.constexpr):  # fmt: skip
    """A warp group's partition: rows half * 64 to half * 64 + 63 of each tile. leaving: bf16
    [BUFFERS, 64, 64] in shared memory, of this warp group. Other arguments are those of
    grouped_kernel.
    """
    tile_n: gl.constexpr = spec.tile_n
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tile_n, 16])
    low, high = gl.load(starts), gl.load(starts + num_groups)
    programs = gl.num_programs(0)
    clear_rows(result, low, high, all_rows, n, 2 * gl.program_id(0) + half, 2 * programs)
    it = 0
    number = gl.program_id(0)
    acc = gl.zeros([HALF_M, tile_n], gl.float32, layout=layout)
    group, before, top, stop = find_tile(starts, number, 0, 0, num_groups, columns)
    while group < num_groups:
        first, column = locate_in_group(number, before, top, stop)
        first += half * HALF_M
        num_rows = stop - first
        if num_rows > 0:
            acc, it = multiply(acc, it, 0, k_tiles, ring, half, spec)
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
            mbarrier.arrive(ring.free.index((it + spec.stages - 1) % spec.stages), count=1)
            part = shape_tile(acc, spec)
            left = column * spec.columns
            if num_rows >= HALF_M:
                store_tile(part, out, first, left, leaving)
            else:
                store_rows(part, result, first, num_rows, left, n, leaving)
        else:
            it = pass_slices(it, k_tiles, ring, spec)
        number += programs
        group, before, top, stop = find_tile(starts, number, group, before, num_groups, columns)
    tma_store_wait(0)


@gluon.jit(do_not_specialize=EXTENTS)
def grouped_kernel(a, b, other, out, result, starts, k_tiles, num_groups, all_rows, eighths,
                   columns, spec: gl.constexpr):  # fmt: skip
    """Of local memory, descriptors in blocks of 64 columns: a, bf16 [all_rows, K], rows sorted by
    group, in blocks of 64 rows; b, bf16 [num_groups * n, K], in blocks of spec.columns rows; both
    read. Where columns are mixed, b and other, alike, are the two matrices of each group, else
    other is None. out, in blocks of 64 rows, and result, bf16 [all_rows, n] contiguous, are the
    same memory, written. starts: int32 [num_groups + 1], where groups start, read.

    k_tiles: slices of 64 along K. eighths: n / 8, so that n is known to be a multiple of 8.
    columns: of tiles. spec: MatmulSpec without peers.
    """
    n = 8 * eighths
    stages: gl.constexpr = spec.stages
    a_ring = gl.allocate_shared_memory(gl.bfloat16, [2 * stages, HALF_M, TILE_K], a.layout)
    b_ring = gl.allocate_shared_memory(gl.bfloat16, [stages, spec.tile_n, TILE_K], b.layout)
    leaving0 = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, HALF_M, HALF_M], out.layout)
    leaving1 = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, HALF_M, HALF_M], out.layout)
    ready, free = make_barriers(stages, 1), make_barriers(stages, 2)
    ring = SliceRing(a_ring, b_ring, b_ring, ready, free)
    loaded = as_loaded(ring, b, spec)
    gl.warp_specialize(
        [
            (compute_groups, (out, result, starts, k_tiles, num_groups, all_rows, n, columns, ring,
                              leaving0, 0, spec)),
            (compute_groups, (out, result, starts, k_tiles, num_groups, all_rows, n, columns, ring,
                              leaving1, 1, spec)),
            (load_groups, (a, b, other, starts, k_tiles, num_groups, n, columns, loaded, spec)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
