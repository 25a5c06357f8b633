"""Which tiles a matmul runs with, and how a collective goes with it: the least predicted time.

In: extents, the number of ranks, `Rates`, the constants measured on a GPU; the same on every rank,
so that ranks choose alike. Out: `Tiles`, or None where torch's own matmul is expected to win, and a
`Choice`. Next: rates.py.
"""

from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product
from typing import Literal

from distmega.kernels.gemm.rates import (
    H200,
    NUM_WORDS,
    TILE_ROWS,
    Extents,
    Rates,
    Tiles,
    ceil_div,
)
from distmega.kernels.gemm.simulate import (
    band_rows,
    gather_us,
    plan_sending,
    send_us,
    tile_us,
)

__all__ = ["H200", "Extents", "Rates", "Tiles"]

Kind = Literal["gather", "scatter", "reduce"]
"""All-gather before the matmul, reduce-scatter or all-reduce behind it."""
Way = Literal["nccl", "peer", "tiles"]
"""torch's matmul with NCCL's collective, or with one by peer memory (exchange.py), or the kernel
with the collective beside it (overlap.py)."""

ALIGNED = 8
"""Elements in 16 bytes: rows of TMA's tensors are a multiple."""
MAX_RANKS = 8
BLOCK = 128
"""What is sent to peers has a multiple of these columns."""
STAGES = {256: 4, 128: 6}
"""Slots of the ring by columns of a tile: what fits into shared memory."""
STREAMING = 1.1
"""How much longer than torch's the kernel takes where reading the operands is all that counts."""
DOUBT = 1.02
"""By how much the kernel must be expected to win: it is predicted a little too well."""
PARTS = (1, 2, 4)
"""Into how many parts a band is cut to be sent."""
MIN_EVENT_ROWS = 1024
"""Rows of A that one copy brings: each copy costs some microseconds of the link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How a matmul with its collective runs. If it is "tiles", the rest is of the kernel:
    lag, parts as in plan_sending if it sends.
    """

    way: Way
    us: float
    tiles: Tiles | None = None
    lag: int = 0
    parts: int = 1


def kernel_us(extents: Extents, tile_n: int, rates: Rates) -> float:
    """Predicted time of the kernel: whole waves of tiles, or reading the operands once."""
    tiles = ceil_div(extents.rows, TILE_ROWS) * ceil_div(extents.columns, tile_n)
    busy = ceil_div(tiles, rates.num_sms) * tile_us(extents, tile_n, rates)
    return rates.start_us + max(busy, STREAMING * _read_us(extents, rates))


def library_us(extents: Extents, rates: Rates) -> float:
    """Predicted time of torch's matmul: it has the kernel's kinds of tiles and more."""
    uneven = extents.flops / rates.library_flops_per_us * rates.library_uneven
    waves = [
        ceil_div(ceil_div(extents.rows, TILE_ROWS) * ceil_div(extents.columns, n), rates.num_sms)
        * tile_us(extents, n, rates)
        for n in STAGES
    ]
    return rates.start_us + max(min(uneven, *waves), _read_us(extents, rates))


def _read_us(extents: Extents, rates: Rates) -> float:
    operands = 2 * extents.depth * (extents.rows + extents.columns)
    return (operands + 2 * extents.rows * extents.columns) / rates.memory_bytes_per_us


def best_tiles(extents: Extents, rates: Rates) -> Tiles:
    """The kernel's tiles of least predicted time, without peers."""
    tile_n = min(STAGES, key=lambda n: kernel_us(extents, n, rates))
    return Tiles(tile_n=tile_n, stages=STAGES[tile_n])


def choose_tiles(extents: Extents, rates: Rates) -> Tiles | None:
    """Tiles for a matmul without peers; None where torch's own is expected to be faster."""
    if extents.depth % ALIGNED or extents.columns % ALIGNED:
        return None
    tiles = best_tiles(extents, rates)
    ours = kernel_us(extents, tiles.tile_n, rates)
    return tiles if ours <= library_us(extents, rates) else None


def sent_bytes(kind: Kind, extents: Extents) -> int:
    """Bytes that a rank sends; to reduce is to scatter, then gather."""
    width = extents.depth if kind == "gather" else extents.columns
    part = 2 * extents.rows * width * (extents.num_ranks - 1) // extents.num_ranks
    return 2 * part if kind == "reduce" else part


def nccl_us(kind: Kind, extents: Extents, rates: Rates) -> float:
    """Predicted time of torch's matmul and NCCL's collective, one after the other."""
    sent = sent_bytes(kind, extents)
    table = rates.nccl_reduce_us if kind == "reduce" else rates.nccl_us
    return library_us(extents, rates) + _between(table, sent)


def peer_us(kind: Kind, extents: Extents, rates: Rates) -> float:
    """Predicted time of torch's matmul and a collective by peer memory."""
    sent = sent_bytes(kind, extents)
    if kind == "reduce":
        return library_us(extents, rates) + rates.two_shot_us + sent / rates.two_shot_bytes_per_us
    copies_us = rates.exchange_us + rates.exchange_peer_us * (extents.num_ranks - 1)
    return library_us(extents, rates) + copies_us + sent / rates.copy_bytes_per_us


def _between(table: tuple[tuple[float, float], ...], x: float) -> float:
    """Linear between the points of a table, and beyond its last."""
    for (x0, y0), (x1, y1) in pairwise(table):
        if x <= x1 or x1 == table[-1][0]:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    raise AssertionError("a table of one point")


def tiles_choice(kind: Kind, extents: Extents, rates: Rates) -> Choice:
    """The kernel's best tiles and lag with the collective beside it."""
    chunk_rows = extents.rows // (extents.num_ranks * TILE_ROWS)
    found = []
    for tile_n, stages in STAGES.items():
        groups = (8,) if kind == "gather" else (4, 8)
        for group in sorted({band_rows(chunk_rows, n) for n in groups}, reverse=True):
            tiles = Tiles(tile_n=tile_n, stages=stages, group=group)
            least = rates.start_us + STREAMING * _stream_us(extents, group, rates)
            if kind == "gather":
                us = gather_us(extents, tiles, event_rows(extents), rates)
                found.append(Choice(way="tiles", us=max(us, least), tiles=tiles))
                continue
            shares = kind == "reduce"
            lags = (0, 2) if chunk_rows // group > 2 else (0,)
            for lag, parts in product(lags, PARTS):
                plan = plan_sending(extents, tiles, lag=lag, parts=parts, shares=shares)
                us = max(send_us(extents, plan, rates), least)
                found.append(Choice(way="tiles", us=us, tiles=tiles, lag=lag, parts=parts))
    return min(found, key=lambda choice: choice.us)


def _stream_us(extents: Extents, group: int, rates: Rates) -> float:
    """Reading B for every band of A, where the L2 does not keep it."""
    weight = 2 * extents.depth * extents.columns
    bands = ceil_div(extents.rows, group * TILE_ROWS)
    again = (bands - 1) * weight if weight > rates.cache_bytes else 0
    return _read_us(extents, rates) + again / rates.memory_bytes_per_us


def can_overlap(kind: Kind, extents: Extents) -> bool:
    """Whether the kernel's tiles fit a rank's rows, blocks the columns, events their words."""
    chunk_rows, rest = divmod(extents.rows, TILE_ROWS * extents.num_ranks)
    fits = rest == 0 and 1 < extents.num_ranks <= MAX_RANKS
    fits = fits and chunk_rows * max(PARTS) < NUM_WORDS
    columns = ALIGNED if kind == "gather" else BLOCK
    return fits and extents.depth % ALIGNED == 0 and extents.columns % columns == 0


def can_exchange(kind: Kind, extents: Extents) -> bool:
    """Whether peer memory holds whole rows of each rank; a reduction is by vectors."""
    if not 1 < extents.num_ranks <= MAX_RANKS or extents.rows % extents.num_ranks:
        return False
    return kind != "reduce" or extents.columns % (ALIGNED * extents.num_ranks) == 0


@cache
def choose_way(kind: Kind, extents: Extents, rates: Rates) -> Choice:
    """How a matmul with its collective runs fastest, by what is predicted."""
    found = [Choice(way="nccl", us=nccl_us(kind, extents, rates))]
    if can_exchange(kind, extents):
        found.append(Choice(way="peer", us=peer_us(kind, extents, rates)))
    if can_overlap(kind, extents):
        found.append(tiles_choice(kind, extents, rates))
    return min(found, key=lambda choice: choice.us * (DOUBT if choice.way == "tiles" else 1.0))


def event_rows(extents: Extents) -> int:
    """Rows of A in one copy: at least 1024 where a rank has as many, a divisor of a rank's rows."""
    rows = extents.rows // extents.num_ranks
    tiles = rows // TILE_ROWS
    fitting = [n for n in range(1, tiles + 1) if tiles % n == 0]
    return TILE_ROWS * next((n for n in fitting if n * TILE_ROWS >= MIN_EVENT_ROWS), tiles)
