"""Extents of a matmul, the kernel's tiles, and the constants of the machine that the choices rest
on. Next: simulate.py.
"""

from dataclasses import dataclass

SLICE_K = 64
TILE_ROWS = 128
"""Of the kernel: elements of K in a slot of the ring, rows of a tile."""
NUM_WORDS = 2**12
"""Event words for each rank of a team."""
GROUP = 8
"""Rows of tiles that are crossed together; 4 to 16 differ by less than 1% on an H200."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Constants of a GPU and its links, in microseconds and bytes a microsecond.

    slice_us: a tile's step of 64 along K, by columns of the tile, all SMs busy. tile_us: a tile's
    start and end; add_us: of adding partial results. start_us: of a launch; peers_us: what it
    takes longer with peers. library_flops_per_us: torch's matmul at its best; library_uneven: how
    much longer it takes where tiles do not fill waves. memory_bytes_per_us: of reading operands;
    cache_bytes: of a weight that the L2 keeps. nccl_us, nccl_reduce_us: NCCL's gathers and
    scatters, and its all-reduce, by bytes that a rank sends. copy_us, copy_bytes_per_us: of a copy
    to a peer, from the last store to the event word; copy_gap_us: from a copy to the next.
    exchange_us, exchange_peer_us: of copies around a library matmul, and for each peer.
    two_shot_us, two_shot_bytes_per_us: of torch's all-reduce.
    """

    num_sms: int
    slice_us: tuple[tuple[int, float], ...]
    tile_us: float
    add_us: float
    start_us: float
    library_flops_per_us: float
    library_uneven: float
    memory_bytes_per_us: float
    cache_bytes: int
    peers_us: float
    nccl_us: tuple[tuple[float, float], ...]
    nccl_reduce_us: tuple[tuple[float, float], ...]
    copy_us: float
    copy_bytes_per_us: float
    copy_gap_us: float
    exchange_us: float
    exchange_peer_us: float
    two_shot_us: float
    two_shot_bytes_per_us: float


H200 = Rates(
    num_sms=132,
    slice_us=((256, 0.656), (128, 0.345)),
    tile_us=1.0,
    add_us=1.0,
    start_us=4.0,
    library_flops_per_us=8.1e8,
    library_uneven=1.09,
    memory_bytes_per_us=4.1e6,
    cache_bytes=2**25,
    peers_us=10.0,
    nccl_us=((0.0, 10.0), (5e5, 13.0), (1e6, 20.0), (2e6, 27.0), (4.2e6, 37.0), (8.4e6, 54.0),
             (1.68e7, 92.0), (3.36e7, 158.0), (1.34e8, 590.0)),
    nccl_reduce_us=((0.0, 12.0), (1e6, 18.0), (2e6, 34.0), (4.2e6, 38.0), (8.4e6, 50.0),
                    (1.68e7, 77.0), (3.36e7, 140.0), (6.7e7, 252.0), (2.7e8, 972.0)),
    copy_us=15.0,
    copy_bytes_per_us=3.6e5,
    copy_gap_us=5.0,
    exchange_us=8.0,
    exchange_peer_us=9.7,
    two_shot_us=9.5,
    two_shot_bytes_per_us=3.2e5,
)  # fmt: skip
"""One H200 of a node joined by NVLink; from bench/overlap.py and bench/notes/overlap.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """How the kernel runs: columns of a tile, slots of the ring, rows of tiles in a group."""

    tile_n: int
    stages: int
    group: int = GROUP


@dataclass(frozen=True, slots=True, kw_only=True)
class Extents:
    """A product A[rows, depth] B[columns, depth]^T on each of num_ranks ranks; `rows` are those of
    all ranks together.
    """

    rows: int
    columns: int
    depth: int
    num_ranks: int = 1

    @property
    def flops(self) -> int:
        """Flops on one rank."""
        return 2 * self.rows * self.columns * self.depth


def ceil_div(number: int, by: int) -> int:
    """The least integer not below number / by."""
    return -(-number // by)
