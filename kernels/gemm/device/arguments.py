"""What the matmul kernel is given at a launch, and what its parts hand each other.

In: nothing. Out: MatmulMemory, one argument of the kernel that holds its pointers, and what the
kernel makes and passes on. Why numbers and descriptors stay arguments of their own is said in
hopper/batch/arguments.py. Next: kernel.py.
"""

from typing import NamedTuple

from torch import Tensor


class MatmulMemory(NamedTuple):
    """Words of one GPU. All are 0 when a call begins.

    arrivals: int32 [num_ranks, WORDS], a word for so many rows of A of each rank, or for a part of
    its partial results: that rank's copy engine writes 1; or for a tile of these, which that rank's
    kernel pushes. A rank's words for itself are for tiles that programs help with, which write and
    clear them, and READY.
    counts: int32, a word for each part of results, which the kernel counts up and this rank's copy
    engines wait for.
    buffers: int64 [num_ranks], addresses of each rank's symmetric buffer; written by nobody.
    words: int64 [num_ranks], addresses, on each rank, of its word PUSHED of this rank, behind those
    of tiles; written by nobody.
    stuck: int32 [1], which a wait of a debug build writes when it gives up, see wait_event.
    """

    arrivals: Tensor
    counts: Tensor
    buffers: Tensor
    words: Tensor
    stuck: Tensor


class TileGrid(NamedTuple):
    """The result in tiles, and where in it this rank stands; see order.py.

    chunk_rows: rows of tiles of one rank; columns: of tiles; rank: this one; group: rows of tiles
    that are crossed together; lag: rounds by which this rank's bands come later; part: columns of
    tiles that are sent together. The last two are of a kernel that sends.
    """

    chunk_rows: object
    columns: object
    rank: object
    group: object
    lag: object
    part: object


class Helpers(NamedTuple):
    """How programs that are idle in the last wave help; see order.py. num: programs that do, 0 for
    none; given: slices along K that each of the first `num` tiles gives away; fewer: by how many
    the next ones give less.
    """

    num: object
    given: object
    fewer: object


class Sends(NamedTuple):
    """Tiles that the kernel itself pushes to all peers. late: number of the first; column_blocks:
    N / 64; buffers, words: see MatmulMemory.
    """

    late: object
    column_blocks: object
    buffers: object
    words: object


class SliceRing(NamedTuple):
    """In shared memory, made by the kernel; the loader fills it by TMA, compute warps read it.

    a: bf16 [2 * stages, 64, 64], two halves of a slice of A a slot; b: bf16 [stages, tile_n, 64],
    to the loader [2 * stages, tile_n / 2, 64] where columns are mixed; parts: the memory of b as
    bf16 [stages, 64, tile_n], half tiles of partial results; ready, free: an mbarrier a slot, of
    bytes that came, and of warp groups that have read it.
    """

    a: object
    b: object
    parts: object
    ready: object
    free: object


class Boxes(NamedTuple):
    """Two mbarriers each, one a warp group, between compute warps and the counter. out: a warp
    group has written all that it stored; sent: the counter has seen that.
    """

    out: object
    sent: object
