"""The partition of a matmul kernel that deals with peers: two warps that the compute warps never
wait for long.

In: half tiles that compute warps have stored in this rank's room. Out: the same in the rooms of
the ranks that want them, an event word set after each; and, for this rank's own tiles, the word
to compute warps that all partial results have come. Data goes by plain loads and stores, so that
a release orders it. Next: launch.py.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, misc"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from distmega.kernels.gemm.events import set_event, wait_event
from distmega.kernels.gemm.order import first_chunk, place_tile
from distmega.kernels.gemm.spec import HALF_M, TILE_M

VECTOR = gl.constexpr(8)
"""Elements of 16 bytes."""
THREADS = gl.constexpr(64)
LOADS = gl.constexpr(4)
"""Vectors that a thread has in flight."""


@gluon.jit
def room_of(rooms, rank):
    """A rank's room, as a pointer that vectors can be stored through."""
    return gl.multiple_of(gl.load(rooms + rank).to(gl.pointer_type(gl.bfloat16)), 16)


@gluon.jit
def copy_half(source, source_top, rooms, to, every: gl.constexpr, target_top, left, column_blocks,
              rank, spec: gl.constexpr):  # fmt: skip
    """A half tile of this rank's room into the room of rank `to`, or of every other one."""
    tile_n: gl.constexpr = spec.tile_n
    lanes: gl.constexpr = tile_n // VECTOR
    rows_at_once: gl.constexpr = LOADS * THREADS // lanes
    others: gl.constexpr = spec.num_ranks - 1
    layout: gl.constexpr = gl.BlockedLayout(
        [1, VECTOR], [32 // lanes, lanes], [THREADS // 32, 1], [1, 0]
    )
    num_columns = column_blocks * HALF_M
    rows = gl.arange(0, rows_at_once, layout=gl.SliceLayout(1, layout))
    columns = left + gl.arange(0, tile_n, layout=gl.SliceLayout(0, layout))
    places = gl.expand_dims(rows.to(gl.int64) * num_columns, 1) + gl.expand_dims(columns, 0)
    inside = gl.expand_dims(columns < num_columns, 0)
    for row in range(0, HALF_M, rows_at_once):
        start = source + (source_top + row).to(gl.int64) * num_columns
        values = gl.load(start + places, mask=inside, cache_modifier=".cg")
        below = (target_top + row).to(gl.int64) * num_columns
        if every:
            for other in range(others):
                peer = other + (other >= rank).to(gl.int32)
                gl.store(room_of(rooms, peer) + below + places, values, mask=inside)
        else:
            gl.store(room_of(rooms, to) + below + places, values, mask=inside)


@gluon.jit
def send_half(chunk, row, column, half: gl.constexpr, chunk_rows, columns, column_blocks, rank,
              source, rooms, peers, epoch, spec: gl.constexpr):  # fmt: skip
    """A half tile that lies in this rank's room to who wants it, and its event."""
    others: gl.constexpr = spec.num_ranks - 1
    slot_rows = chunk_rows * TILE_M
    num_tiles = chunk_rows * columns * spec.num_ranks
    results = spec.num_ranks * slot_rows
    top, left = row * TILE_M + half * HALF_M, column * spec.tile_n
    lies = results + chunk * slot_rows + top
    index = (row * columns + column) * 2 + half
    if chunk != rank:
        copy_half(source, lies, rooms, chunk, False, rank * slot_rows + top, left, column_blocks,
                  rank, spec)  # fmt: skip
        set_event(gl.load(peers + chunk), rank * chunk_rows * columns * 2 + index, epoch)
    elif spec.sends == "all":
        copy_half(source, lies, rooms, chunk, True, lies, left, column_blocks, rank, spec)
        index += (num_tiles + rank * chunk_rows * columns) * 2
        for other in range(others):
            peer = other + (other >= rank).to(gl.int32)
            set_event(gl.load(peers + peer), index, epoch)


@gluon.jit
def move_tiles(column_blocks, chunk_rows, columns, rank, source, events, rooms, peers, epoch,
               stuck, boxes, spec: gl.constexpr):  # fmt: skip
    """The mover's partition: the tiles of this program in their order, both halves of each."""
    inbox, outbox, sentbox = boxes
    others: gl.constexpr = spec.num_ranks - 1
    chunk_tiles = chunk_rows * columns
    num_tiles = chunk_tiles * spec.num_ranks
    first = first_chunk(rank, spec)
    tiles_done = 0
    for number in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        chunk, row, column = place_tile(
            number, chunk_rows, columns, first, spec.num_ranks, spec.group
        )
        if chunk == rank:
            for other in range(others):
                peer = other + (other >= rank).to(gl.int32)
                index = (peer * chunk_tiles + row * columns + column) * 2
                wait_event(events, index, epoch, stuck, spec.debug)
                wait_event(events, index + 1, epoch, stuck, spec.debug)
            mbarrier.arrive(inbox.index(0), count=1)
        for half in gl.static_range(2):
            mbarrier.wait(outbox.index(half), tiles_done & 1)
            send_half(chunk, row, column, half, chunk_rows, columns, column_blocks, rank, source,
                      rooms, peers, epoch, spec)  # fmt: skip
            mbarrier.arrive(sentbox.index(half), count=1)
        tiles_done += 1  # noqa: SIM113
    if spec.sends == "all":
        for number in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
            chunk, row, column = place_tile(
                number, chunk_rows, columns, first, spec.num_ranks, spec.group
            )
            if chunk != rank:
                index = (num_tiles + (chunk * chunk_rows + row) * columns + column) * 2
                wait_event(events, index, epoch, stuck, spec.debug)
                wait_event(events, index + 1, epoch, stuck, spec.debug)
