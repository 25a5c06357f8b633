"""Which tiles a matmul runs with, and whether a collective runs beside it: a model of waves.

In: extents, the number of ranks, `Rates`, the constants measured on a GPU; the same on every rank,
so that ranks choose alike. Out: `Tiles`, or None where torch's own matmul is expected to win, and
`choose_overlap`. Next: kernel.py.
"""

import math
from dataclasses import dataclass

SLICE_K = 64
TILE_ROWS = 128
"""Of the kernel: elements of K in a slot of the ring, rows of a tile."""
ALIGNED = 8
"""Elements in 16 bytes: rows of TMA's tensors are a multiple."""
MAX_RANKS = 8
BLOCK = 128
"""What is sent to peers has a multiple of these columns."""
STAGES = {256: 4, 128: 6}
"""Slots of the ring by columns of a tile: what fits into shared memory."""
GROUP = 8
"""Rows of tiles that are crossed together; 4 to 16 differ by less than 1% on an H200."""
STREAMING = 1.1
"""How much longer than torch's the kernel takes where reading the operands is all that counts."""
MIN_EVENT_ROWS = 1024
"""Rows of A that one copy brings: long enough for full bandwidth, short against a matmul."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Constants of a GPU and its links, in microseconds and bytes a microsecond.

    slice_us: a tile's step of 64 along K, by columns of the tile, all SMs busy. tile_us: a tile's
    start and end. start_us: of a launch. library_flops_per_us, memory_bytes_per_us: what torch's
    matmul reaches at best; library_share: of that where it has less than a tile for each SM.
    collective_us, collective_bytes_per_us: of NCCL's collectives. copy_us, copy_bytes_per_us: of a
    peer copy and its event. send_us: what a wave of tiles takes longer when it sends; last_us: what
    remains when the last tile is done, if its sum stays here or goes to all.
    """

    num_sms: int
    slice_us: tuple[tuple[int, float], ...]
    tile_us: float
    start_us: float
    library_flops_per_us: float
    library_share: float
    memory_bytes_per_us: float
    collective_us: float
    collective_bytes_per_us: float
    copy_us: float
    copy_bytes_per_us: float
    send_us: float
    last_us: tuple[tuple[str, float], ...]


H200 = Rates(
    num_sms=132,
    slice_us=((256, 0.656), (128, 0.345)),
    tile_us=1.0,
    start_us=4.0,
    library_flops_per_us=8.1e8,
    library_share=0.83,
    memory_bytes_per_us=4.1e6,
    collective_us=24.0,
    collective_bytes_per_us=2.45e5,
    copy_us=15.0,
    copy_bytes_per_us=3.6e5,
    send_us=6.0,
    last_us=(("scatter", 12.0), ("reduce", 30.0)),
)
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


def num_waves(extents: Extents, tile_n: int, rates: Rates) -> int:
    """Tiles that a program computes one after the other, at most."""
    tiles = math.ceil(extents.rows / TILE_ROWS) * math.ceil(extents.columns / tile_n)
    return math.ceil(tiles / rates.num_sms)


def kernel_us(extents: Extents, tile_n: int, rates: Rates) -> float:
    """Predicted time of the kernel: whole waves of tiles, or reading the operands once."""
    slices = math.ceil(extents.depth / SLICE_K)
    tile_us = slices * dict(rates.slice_us)[tile_n] + rates.tile_us
    busy = num_waves(extents, tile_n, rates) * tile_us
    return rates.start_us + max(busy, STREAMING * _read_us(extents, rates))


def library_us(extents: Extents, rates: Rates) -> float:
    """Predicted time of torch's matmul, which has more kinds of tiles to fill all SMs with."""
    tiles = math.ceil(extents.rows / TILE_ROWS) * math.ceil(extents.columns / TILE_ROWS)
    share = 1.0 if tiles >= rates.num_sms else rates.library_share
    busy = extents.flops / (rates.library_flops_per_us * share)
    return rates.start_us + max(busy, _read_us(extents, rates))


def _read_us(extents: Extents, rates: Rates) -> float:
    operands = 2 * extents.depth * (extents.rows + extents.columns)
    return (operands + 2 * extents.rows * extents.columns) / rates.memory_bytes_per_us


def best_tiles(extents: Extents, rates: Rates) -> Tiles:
    """The kernel's tiles of least predicted time."""
    tile_n = min(STAGES, key=lambda n: kernel_us(extents, n, rates))
    return Tiles(tile_n=tile_n, stages=STAGES[tile_n])


def choose_tiles(extents: Extents, rates: Rates) -> Tiles | None:
    """Tiles for a matmul without peers; None where torch's own is expected to be faster."""
    if extents.depth % ALIGNED or extents.columns % ALIGNED:
        return None
    tiles = best_tiles(extents, rates)
    ours = kernel_us(extents, tiles.tile_n, rates)
    return tiles if ours <= library_us(extents, rates) * 1.03 else None


def sent_bytes(kind: str, extents: Extents) -> int:
    """Bytes that a rank sends. kind: "gather", "scatter" or "reduce" (all-reduce)."""
    width = extents.depth if kind == "gather" else extents.columns
    part = 2 * extents.rows * width * (extents.num_ranks - 1) // extents.num_ranks
    return 2 * part if kind == "reduce" else part


def sequential_us(kind: str, extents: Extents, rates: Rates) -> float:
    """Predicted time of the matmul and NCCL's collective, one after the other."""
    moved = sent_bytes(kind, extents) / rates.collective_bytes_per_us
    return library_us(extents, rates) + rates.collective_us + moved


def overlapped_us(kind: str, extents: Extents, rates: Rates) -> float:
    """Predicted time of the kernel with the collective beside it.

    A gather delays the first tiles of other ranks where this rank's own are too few to cover the
    copies; sending delays every wave a little.
    """
    tiles = best_tiles(extents, rates)
    busy = kernel_us(extents, tiles.tile_n, rates)
    link = rates.copy_us + sent_bytes(kind, extents) / rates.copy_bytes_per_us
    if kind == "gather":
        covered = extents.rows > extents.num_ranks * TILE_ROWS
        return max(busy, link) + (rates.copy_us if covered else 2 * link)
    waves = num_waves(extents, tiles.tile_n, rates)
    return max(busy + waves * rates.send_us, link) + dict(rates.last_us)[kind]


def can_overlap(kind: str, extents: Extents) -> bool:
    """Whether the kernel's tiles fit the ranks' rows, and its blocks the columns."""
    fits = (
        extents.rows % (TILE_ROWS * extents.num_ranks) == 0 and 1 < extents.num_ranks <= MAX_RANKS
    )
    columns = ALIGNED if kind == "gather" else BLOCK
    return fits and extents.depth % ALIGNED == 0 and extents.columns % columns == 0


def choose_overlap(kind: str, extents: Extents, rates: Rates) -> bool:
    """Whether the collective should run beside the matmul, in the kernel's tiles."""
    if not can_overlap(kind, extents):
        return False
    return overlapped_us(kind, extents, rates) < sequential_us(kind, extents, rates)


def event_rows(extents: Extents) -> int:
    """Rows of A in one copy: at least 1024 where a rank has as many, a divisor of a rank's rows."""
    rows = extents.rows // extents.num_ranks
    tiles = rows // TILE_ROWS
    wanted = MIN_EVENT_ROWS // TILE_ROWS
    fitting = [n for n in range(1, tiles + 1) if tiles % n == 0]
    return TILE_ROWS * next((n for n in fitting if n >= wanted), tiles)


def band_rows(chunk_rows: int, most: int) -> int:
    """Rows of tiles in a band of a sending kernel: at most `most`, a divisor of a rank's."""
    return max(n for n in range(1, min(most, chunk_rows) + 1) if chunk_rows % n == 0)
