"""Which tiles a matmul runs with, and how a collective goes with it: the least predicted time.

In: extents, OverlapRates, the same on every rank, so that ranks choose alike. Out: `Tiles`, or None
where the library's own matmul is expected to win, and a `MatmulChoice`. Next: ways.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, product
from typing import Literal

from distmega.kernels.gemm.times.rates import OverlapRates, Table
from distmega.kernels.gemm.times.tile_times import (
    GATHERED,
    GROUP,
    LEAVING_COLUMNS,
    MOST_PEERS,
    NUM_WORDS,
    PUSHING_RANKS,
    SUMMED,
    TILE_ROWS,
    WHOLE,
    DepthSplit,
    Tiles,
    band_rows,
    ceil_div,
    count_tiles,
    gather_us,
    plan_sending,
    push_us,
    send_us,
    split_last_wave,
    tile_us,
)
from distmega.sharding.overlap.products import Collective, Extents

Means = Literal["nccl", "peer", "tiles"]
"""The library's matmul with NCCL's collective, or with one by peer memory, or the kernel with the
collective beside it (kernels/gemm: peer_collectives.py, overlap.py)."""

ALIGNED = 8
"""Elements in 16 bytes: rows of TMA's tensors are a multiple."""
STAGES = {256: 4, 128: 6}
"""Slots of the ring by columns of a tile: what fits into shared memory."""
MIXED_COLUMNS = max(STAGES)
"""A product has a multiple of them where its kernel makes one column of two of one weight."""
STREAMING = 1.1
"""How much longer than the library's the kernel takes where reading operands is all that counts."""
MIN_PREDICTED_SPEEDUP = 1.02
"""By how much the kernel must be expected to win: it is predicted a little too well."""
PUSHING = 1.1
"""How much longer than predicted a kernel took, at most, that pushes partial results."""
NARROW = 1.01
"""How much longer the kernel takes in bands of fewer rows of tiles than GROUP."""
PARTS = (1, 2, 4)
"""Into how many parts a band is cut to be sent."""
SPLIT_US = 4.0
"""By how much splitting the last wave must be expected to win."""
FEW = 4
"""Ways to run the kernel that are also tried with the last wave split, the best without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulChoice:
    """How a matmul with its collective runs. If by "tiles", the rest is of the kernel:
    split, and lag, parts as in plan_sending if it sends; pushes: partial results leave from the
    kernel itself, a tile at a time, not by copy engines.
    """

    means: Means
    us: float
    tiles: Tiles | None = None
    lag: int = 0
    parts: int = 1
    pushes: bool = False
    split: DepthSplit = WHOLE


def kernel_us(extents: Extents, tile_n: int, rates: OverlapRates) -> float:
    """Predicted time of the kernel: whole waves of tiles, or reading the operands once."""
    tiles = ceil_div(extents.rows, TILE_ROWS) * ceil_div(extents.columns, tile_n)
    busy = ceil_div(tiles, rates.num_sms) * tile_us(extents, tile_n, rates)
    return rates.launch_us + max(busy, STREAMING * _read_us(extents, rates))


def library_us(extents: Extents, rates: OverlapRates) -> float:
    """Predicted time of the library's matmul: it has the kernel's kinds of tiles and more."""
    times = [extents.flops / rates.library_flops_per_us * rates.library_uneven]
    times += [
        ceil_div(ceil_div(extents.rows, TILE_ROWS) * ceil_div(extents.columns, n), rates.num_sms)
        * tile_us(extents, n, rates)
        for n, _ in rates.slice_us
    ]
    return rates.launch_us + max(min(times), _read_us(extents, rates))


def _read_us(extents: Extents, rates: OverlapRates) -> float:
    elements = extents.depth * (extents.rows + extents.columns) + extents.rows * extents.columns
    return extents.item_bytes * elements / rates.memory_bytes_per_us


def best_tiles(extents: Extents, rates: OverlapRates) -> Tiles:
    """The kernel's tiles of least predicted time, without peers."""
    tile_n = min(STAGES, key=lambda n: kernel_us(extents, n, rates))
    return Tiles(tile_n=tile_n, stages=STAGES[tile_n])


def choose_tiles(extents: Extents, rates: OverlapRates) -> Tiles | None:
    """Tiles for a matmul without peers; None where the library's is expected to be faster."""
    if extents.depth % ALIGNED or extents.columns % ALIGNED or not extents.flops:
        return None
    tiles = best_tiles(extents, rates)
    ours = kernel_us(extents, tiles.tile_n, rates)
    return tiles if ours <= library_us(extents, rates) else None


def choose_mixed_tiles(
    extents: Extents, rates: OverlapRates, *, apart: bool = False
) -> Tiles | None:
    """As choose_tiles, where the library's matmul is followed by a kernel that makes one column of
    two, and this one does so itself; columns are those of the product. apart: of two weights, for
    which the library has a matmul each.
    """
    columns = 2 * ALIGNED if apart else MIXED_COLUMNS
    if extents.depth % ALIGNED or extents.columns % columns or not extents.flops:
        return None
    tiles = best_tiles(extents, rates)
    num_bytes = extents.item_bytes * extents.rows * extents.columns * 1.5
    mixing_us = num_bytes / rates.memory_bytes_per_us
    ours = kernel_us(extents, tiles.tile_n, rates)
    if apart:
        half = replace(extents, columns=extents.columns // 2)
        library = 2 * library_us(half, rates) + rates.launch_us
    else:
        library = library_us(extents, rates)
    return tiles if ours <= library + mixing_us else None


def sent_bytes(collective: Collective, extents: Extents) -> int:
    """Bytes that a rank sends; to reduce is to scatter, then gather."""
    width = extents.depth if collective == "all_gather" else extents.columns
    whole = extents.item_bytes * extents.rows * width
    part = whole * (extents.num_ranks - 1) // extents.num_ranks
    return 2 * part if collective == "all_reduce" else part


def nccl_us(collective: Collective, extents: Extents, rates: OverlapRates) -> float:
    """Predicted time of the library's matmul and NCCL's collective, one after the other."""
    sent = sent_bytes(collective, extents)
    return library_us(extents, rates) + transfer_us(collective, sent, rates)


def transfer_us(collective: Collective, num_bytes: float, rates: OverlapRates) -> float:
    """Predicted time of a collective of NCCL in which each rank sends so many bytes."""
    table = rates.nccl_reduce_us if collective == "all_reduce" else rates.nccl_us
    return _between(table, num_bytes)


def peer_us(collective: Collective, extents: Extents, rates: OverlapRates) -> float:
    """Predicted time of the library's matmul and a collective by peer memory."""
    sent = sent_bytes(collective, extents)
    if collective == "all_reduce":
        return library_us(extents, rates) + rates.two_shot_us + sent / rates.two_shot_bytes_per_us
    copies_us = rates.peer_copies_us + rates.peer_copy_us * (extents.num_ranks - 1)
    return library_us(extents, rates) + copies_us + sent / rates.copy_bytes_per_us


def _between(table: Table, x: float) -> float:
    """Linear between the points of a table, and beyond its last."""
    for (x0, y0), (x1, y1) in pairwise(table):
        if x <= x1 or x1 == table[-1][0]:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    raise AssertionError("a table of one point")


@cache
def tiles_choice(collective: Collective, extents: Extents, rates: OverlapRates) -> MatmulChoice:
    """The kernel's best tiles, lag, parts and split with the collective beside it. Where ranks
    gather and compute alike, tiles stay whole: each rank begins with other rows, so those of the
    last wave are others, and a tile summed in two pieces is rounded otherwise.
    """
    whole = [
        replace(choice, us=tiles_us(collective, extents, choice, rates))
        for choice in _kernel_ways(collective, extents)
    ]
    whole.sort(key=lambda choice: choice.us)
    pushes = collective == "all_reduce" and extents.num_ranks <= PUSHING_RANKS
    pieces = GATHERED if collective == "all_gather" else SUMMED
    found = whole[:1]
    for choice in whole[: 0 if extents.replicated else FEW]:
        assert choice.tiles is not None
        split = split_last_wave(extents, choice.tiles, rates, pieces=pieces, pushes=pushes)
        if split.given:
            choice = replace(choice, split=split)
            found.append(replace(choice, us=tiles_us(collective, extents, choice, rates)))
    return min(found, key=lambda choice: choice.us + (SPLIT_US if choice.split.given else 0.0))


def _kernel_ways(collective: Collective, extents: Extents) -> Iterator[MatmulChoice]:
    """What the kernel is tried with, the last wave whole, of no time yet."""
    chunk_rows = extents.rows // (extents.num_ranks * TILE_ROWS)
    gathers = collective == "all_gather"
    groups = {min(n, chunk_rows) if gathers else band_rows(chunk_rows, n) for n in (4, 8)}
    for tile_n, stages in STAGES.items():
        for group in sorted(groups, reverse=True):
            tiles = Tiles(tile_n=tile_n, stages=stages, group=group)
            if gathers:
                yield MatmulChoice(means="tiles", us=0.0, tiles=tiles)
                continue
            lags = (0, 2) if chunk_rows // group > 2 else (0,)
            for lag, parts in product(lags, PARTS):
                yield MatmulChoice(means="tiles", us=0.0, tiles=tiles, lag=lag, parts=parts)
            if collective == "reduce_scatter" and can_push(extents, tile_n):
                yield MatmulChoice(means="tiles", us=0.0, tiles=tiles, pushes=True)


def can_push(extents: Extents, tile_n: int) -> bool:
    """Whether there is an event word for each tile of a rank's rows, a descriptor a peer, and
    shared memory in which a whole tile waits to leave while the next one is computed.
    """
    num_tiles = count_tiles(extents, tile_n) // extents.num_ranks
    fits = num_tiles < NUM_WORDS and extents.num_ranks <= 1 + MOST_PEERS
    return fits and tile_n <= LEAVING_COLUMNS


def tiles_us(
    collective: Collective, extents: Extents, choice: MatmulChoice, rates: OverlapRates
) -> float:
    """Predicted time of the kernel with the collective beside it, as `choice` says."""
    tiles = choice.tiles
    assert tiles is not None
    least = rates.launch_us + STREAMING * _stream_us(extents, tiles.group, rates)
    narrow = NARROW if tiles.group < GROUP else 1.0
    if collective == "all_gather":
        return max(gather_us(extents, tiles, rates, choice.split) * narrow, least)
    plan = plan_sending(
        extents,
        tiles,
        rates.num_sms,
        lag=choice.lag,
        parts=choice.parts,
        split=choice.split,
        shares=collective == "all_reduce",
    )
    if choice.pushes:
        return max(push_us(extents, plan, rates) * PUSHING * narrow, least)
    return max(send_us(extents, plan, rates) * narrow, least)


def _stream_us(extents: Extents, group: int, rates: OverlapRates) -> float:
    """Reading B for every band of A, where the L2 does not keep it."""
    weight = extents.item_bytes * extents.depth * extents.columns
    bands = ceil_div(extents.rows, group * TILE_ROWS)
    again = (bands - 1) * weight if weight > rates.cache_bytes else 0
    return _read_us(extents, rates) + again / rates.memory_bytes_per_us


def kernel_problem(
    collective: Collective, extents: Extents, dtype: str, rates: OverlapRates
) -> str:
    """What the kernel with the collective beside it would need that it is not given; empty if
    nothing.
    """
    rows, columns, depth = rates.kernel_multiples
    rows *= extents.num_ranks
    columns = depth if collective == "all_gather" else columns
    if dtype not in rates.kernel_dtypes:
        return f"a type of {', '.join(rates.kernel_dtypes)}, not {dtype}"
    if not extents.flops:
        return "something to multiply"
    if extents.rows % rows or extents.columns % columns:
        found = f"{extents.rows} x {extents.columns}"
        return f"rows a multiple of {rows} and columns of {columns}, not {found}"
    if extents.depth % depth or not 1 < extents.num_ranks <= rates.kernel_ranks:
        return f"a depth a multiple of {depth} and 2 to {rates.kernel_ranks} ranks"
    if rates.slice_us and extents.rows // rows * max(PARTS) >= NUM_WORDS:
        return f"fewer than {rows * NUM_WORDS // max(PARTS)} rows"
    return ""


def has_peer_collective(collective: Collective, extents: Extents, rates: OverlapRates) -> bool:
    """Whether each rank has whole rows, or of a sum that all want whole vectors; of something."""
    if not 1 < extents.num_ranks <= rates.kernel_ranks or not extents.flops:
        return False
    if collective == "all_reduce":
        return extents.columns % (ALIGNED * extents.num_ranks) == 0
    return extents.rows % extents.num_ranks == 0


@cache
def choose_means(
    collective: Collective, extents: Extents, rates: OverlapRates, *, beside: bool = True
) -> MatmulChoice:
    """How a matmul with its collective runs fastest, by what is predicted. beside: whether copies
    may run beside the kernel. Those between ranks that share a GPU may need SMs, all of which the
    kernels that wait for them hold.
    """
    found = [MatmulChoice(means="nccl", us=nccl_us(collective, extents, rates))]
    if has_peer_collective(collective, extents, rates):
        found.append(MatmulChoice(means="peer", us=peer_us(collective, extents, rates)))
    if beside and not kernel_problem(collective, extents, "bf16", rates):
        found.append(tiles_choice(collective, extents, rates))
    return min(
        found,
        key=lambda choice: choice.us * (MIN_PREDICTED_SPEEDUP if choice.means == "tiles" else 1.0),
    )
