"""How long a matmul kernel runs with its collective beside it: its tiles, one after the other.

In: extents, tiles, OverlapRates. Out: microseconds from launch to the last byte. All ranks are
taken to run in step, so what one sends at a time is what it receives. Next: matmul_ways.py.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

from distmega.kernels.gemm.times.rates import OverlapRates
from distmega.sharding.overlap.products import Extents

SLICE_K = 64
TILE_ROWS = 128
"""Of the kernel: elements of K in a slot of the ring, rows of a tile."""
NUM_WORDS = 2**12
"""Event words for each rank of a team."""
PUSHED = NUM_WORDS - 1
"""The word in which kernels of a peer count sums that they have pushed."""
READY = PUSHED
"""The same of a rank for itself: the words of the call before are 0 again."""
PUSHING_RANKS = 2
"""Most ranks of a team whose kernels push sums themselves; to three peers it gained nothing."""
MOST_PEERS = 3
"""To so many a kernel pushes partial results: one descriptor each."""
LEAVING_COLUMNS = 128
"""Of a tile that wait in shared memory to leave."""
EARLY, EARLY_PUSHED = 2, 32
"""Steps along K after which the stores of the tile before are taken to be written: here, or in the
memory of a peer.
"""
SUMMED, GATHERED = 1, 2
"""Tiles of bf16 that a program stores of what it has computed for another: with sums over ranks,
whose parts are rounded anyway, one; else a second for what rounding leaves.
"""
GROUP = 8
"""Rows of tiles that are crossed together; 4 to 16 differ by less than 1% on an H200."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """How the kernel runs: columns of a tile, slots of the ring, rows of tiles in a group."""

    tile_n: int
    stages: int
    group: int = GROUP


def ceil_div(number: int, by: int) -> int:
    """The least integer not below number / by."""
    return -(-number // by)


def tile_us(extents: Extents, tile_n: int, rates: OverlapRates) -> float:
    """A tile on a busy GPU."""
    return ceil_div(extents.depth, SLICE_K) * dict(rates.slice_us)[tile_n] + rates.tile_us


def order_turns(bands: int, rank: int, lag: int, num_ranks: int) -> Iterator[tuple[int, int]]:
    """(chunk, band) of all turns of a sending kernel; device/order.py has
    the kernel's words for it.
    """
    others = num_ranks - 1
    for turn in range(bands * num_ranks):
        late = turn - lag * others
        if late < 0:
            step, band = turn % others + 1, turn // others
        elif late < (bands - lag) * num_ranks:
            step, band = late % num_ranks, late // num_ranks
            band += lag if step else 0
        else:
            step, band = 0, late - (bands - lag) * others
        yield (rank + step) % num_ranks, band


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthSplit:
    """Slices along K that tiles of the last wave give to programs that would be idle: the first
    tiles, one a helper, `given`, the next as many `fewer` less, and so on; 0 for none.
    """

    given: int
    fewer: int = 0


WHOLE = DepthSplit(given=0)


def count_tiles(extents: Extents, tile_n: int) -> int:
    """Tiles of a result of whole rows of tiles."""
    return extents.rows // TILE_ROWS * ceil_div(extents.columns, tile_n)


def count_helpers(extents: Extents, tile_n: int, split: DepthSplit, num_sms: int) -> int:
    """Programs without a tile in the last of several waves; 0 if its tiles stay whole."""
    num_tiles, slices = count_tiles(extents, tile_n), ceil_div(extents.depth, SLICE_K)
    helpers = -num_tiles % num_sms if num_tiles > num_sms and split.given else 0
    if helpers:
        turns = ceil_div(num_sms - helpers, helpers)
        assert (turns - 1) * split.fewer < split.given < slices, "each tile gives and keeps some"
    return helpers


class _Programs:
    """The programs of a kernel with peers, which take its tiles in turn.

    free: when each is done with what it has been given. num_helpers, split: as in SendPlan.
    pieces: as split_last_wave.
    """

    def __init__(
        self,
        extents: Extents,
        tile_n: int,
        num_helpers: int,
        split: DepthSplit,
        pieces: int,
        rates: OverlapRates,
    ) -> None:
        tiles = count_tiles(extents, tile_n)
        self.free = [rates.launch_us + rates.peers_us] * min(rates.num_sms, tiles)
        self.number = 0
        self._num_helpers, self._split, self._pieces = num_helpers, split, pieces
        self._rates = rates
        self._tile_us = tile_us(extents, tile_n, rates)
        self._slice_us = dict(rates.slice_us)[tile_n]
        self._wave = tiles // len(self.free) * len(self.free) if num_helpers else tiles

    def end_us(self, ready: float = 0.0, partials: float | None = None) -> float:
        """When the next tile is done; ready: when its rows are here, partials: when other ranks'
        results for it are, if they are added to it.
        """
        free, rates = self.free, self._rates
        program, late = self.number % len(free), self.number - self._wave
        self.number += 1
        end = max(free[program], ready) + self._tile_us
        helped = 0.0
        if late >= 0:
            turn = late // self._num_helpers
            given_us = (self._split.given - turn * self._split.fewer) * self._slice_us
            helper = late % self._num_helpers - self._num_helpers
            free[helper] = max(free[helper], ready) + given_us
            free[helper] += rates.tile_us + self._pieces * rates.add_us
            end, helped = end - given_us, free[helper] + rates.help_us
        if partials is not None:
            end = max(end, partials) + rates.add_us
        if helped:
            end = max(end, helped) + self._pieces * rates.add_us
        free[program] = end
        return end


def copied_rows(extents: Extents, tiles: Tiles) -> list[int]:
    """Rows of A in each copy of a rank's: a band of tiles, which are crossed together."""
    rows, most = extents.rows // extents.num_ranks, tiles.group * TILE_ROWS
    return [min(most, rows - first) for first in range(0, rows, most)]


def gather_us(
    extents: Extents, tiles: Tiles, rates: OverlapRates, split: DepthSplit = WHOLE
) -> float:
    """A kernel that computes rows as they come."""
    rows = extents.rows // extents.num_ranks
    in_chunk = rows // TILE_ROWS * ceil_div(extents.columns, tiles.tile_n)
    tiles_each = ceil_div(extents.columns, tiles.tile_n) * tiles.group
    row_us = 2 * extents.depth / rates.copy_bytes_per_us
    ends = list(accumulate(n * row_us + rates.copy_gap_us for n in copied_rows(extents, tiles)))
    num_tiles = in_chunk * extents.num_ranks
    helpers = count_helpers(extents, tiles.tile_n, split, rates.num_sms)
    programs = _Programs(extents, tiles.tile_n, helpers, split, GATHERED, rates)
    for number in range(num_tiles):
        step, position = divmod(number, in_chunk)
        done_us = (step - 1) * ends[-1] + ends[position // tiles_each]
        programs.end_us(rates.copy_us + done_us if step else 0.0)
    return max(programs.free)


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPlan:
    """What a sending kernel and the copies behind it agree on.

    num_bands: of a rank's rows. columns: of tiles; part: so many are sent at once. lag: as
    order_turns. shares: sums go to all ranks; num_late: so many of the last tiles the kernel itself
    pushes to the peers, whole columns of the last band. num_helpers: programs that the last wave
    leaves idle, which take slices of its tiles as `split` says; 0 where they do not.
    """

    tiles: Tiles
    num_bands: int
    columns: int
    part: int
    num_tiles: int
    lag: int
    shares: bool
    num_late: int
    num_helpers: int
    split: DepthSplit

    @property
    def num_parts(self) -> int:
        """Of a band."""
        return ceil_div(self.columns, self.part)

    @property
    def num_words(self) -> int:
        """Event words for a rank's partial results; the next is for its sums."""
        return self.num_bands * self.num_parts

    def part_columns(self, last: bool = False) -> list[int]:
        """Columns of tiles that copies take, by part of a band; last: of this rank's last band."""
        copied = self.columns - (self.num_late // self.tiles.group if last else 0)
        return [min(self.part, copied - start) for start in range(0, copied, self.part)]


def plan_sending(
    extents: Extents,
    tiles: Tiles,
    num_sms: int,
    *,
    lag: int = 0,
    parts: int = 1,
    split: DepthSplit = WHOLE,
    shares: bool,
) -> SendPlan:
    """tiles.group is cut to a divisor of a rank's rows, lag 0 means all bands. parts: of a band.
    split: the last wave's tiles stay whole all the same if not all are of own rows.
    """
    chunk_rows = extents.rows // (extents.num_ranks * TILE_ROWS)
    group = band_rows(chunk_rows, tiles.group)
    columns = ceil_div(extents.columns, tiles.tile_n)
    num_tiles = chunk_rows * columns * extents.num_ranks
    last_wave = (num_tiles - 1) % num_sms + 1
    late = min(ceil_div(last_wave, group), columns) * group
    lag = lag or chunk_rows // group
    is_own = last_wave <= lag * group * columns
    return SendPlan(
        tiles=replace(tiles, group=group),
        num_bands=chunk_rows // group,
        columns=columns,
        part=ceil_div(columns, parts),
        num_tiles=num_tiles,
        lag=lag,
        shares=shares,
        num_late=late if shares and extents.num_ranks <= PUSHING_RANKS else 0,
        num_helpers=count_helpers(extents, tiles.tile_n, split, num_sms) if is_own else 0,
        split=split,
    )


def band_rows(chunk_rows: int, most: int) -> int:
    """Rows of tiles in a band of a sending kernel: at most `most`, a divisor of a rank's."""
    return max(n for n in range(1, min(most, chunk_rows) + 1) if chunk_rows % n == 0)


def push_us(extents: Extents, plan: SendPlan, rates: OverlapRates) -> float:
    """A kernel that pushes its tiles of others' rows itself, one by one."""
    tile_n = plan.tiles.tile_n
    programs = _Programs(extents, tile_n, plan.num_helpers, plan.split, SUMMED, rates)
    steps = min(EARLY_PUSHED, ceil_div(extents.depth, SLICE_K))
    known_us = steps * dict(rates.slice_us)[tile_n] + rates.push_us
    tile_bytes = 2 * TILE_ROWS * extents.columns / plan.columns
    in_band = plan.tiles.group * plan.columns
    here = [0.0] * (plan.num_bands * in_band)
    link = 0.0
    for chunk, band in order_turns(plan.num_bands, 0, plan.lag, extents.num_ranks):
        for position in range(band * in_band, (band + 1) * in_band):
            end = programs.end_us(partials=None if chunk else here[position])
            if chunk:
                link = max(link, end) + tile_bytes / rates.push_bytes_per_us
                here[position] = max(here[position], link + rates.push_us, end + known_us)
    return max(programs.free)


def send_us(extents: Extents, plan: SendPlan, rates: OverlapRates) -> float:
    """A kernel that sends parts of bands as they are done, and its sums too if it shares them."""
    programs = _Programs(extents, plan.tiles.tile_n, plan.num_helpers, plan.split, SUMMED, rates)
    group, others = plan.tiles.group, extents.num_ranks - 1
    column_bytes = 2 * group * TILE_ROWS * extents.columns / plan.columns
    here = [0.0] * (plan.num_bands * plan.num_parts)
    link, late = 0.0, []
    for chunk, band in order_turns(plan.num_bands, 0, plan.lag, extents.num_ranks):
        copied = sum(plan.part_columns(not chunk and band == plan.num_bands - 1))
        for part, columns in enumerate(plan.part_columns()):
            position = band * plan.num_parts + part
            done, start = 0.0, part * plan.part
            for column in range(start, start + columns):
                for _ in range(group):
                    end = programs.end_us(partials=None if chunk else here[position])
                    done = max(done, end) if column < copied else done
                    if programs.number > plan.num_tiles - plan.num_late:
                        late.append(end)
            if done and (chunk or plan.shares):
                sent = max(min(columns, copied - start), 0) * column_bytes
                sent_us = sent / rates.copy_bytes_per_us + rates.copy_gap_us
                link = max(link, done + rates.copy_us) + sent_us * (1 if chunk else others)
            if chunk:
                here[position] = max(here[position], link)
    return max(link, _pushed_us(sorted(late), column_bytes / group * others, rates), *programs.free)


def _pushed_us(ends: Iterable[float], num_bytes: float, rates: OverlapRates) -> float:
    """When tiles that are done at `ends`, ascending, each of so many bytes, are at the peers."""
    link = last = 0.0
    for end in ends:
        link = max(link, end) + num_bytes / rates.push_bytes_per_us
        last = max(link, end + num_bytes / rates.push_program_bytes_per_us)
    return last + rates.push_us if last else 0.0


def split_last_wave(
    extents: Extents, tiles: Tiles, rates: OverlapRates, *, pieces: int, pushes: bool = False
) -> DepthSplit:
    """How the last wave's tiles end soonest, or their sums are at the peers soonest if the kernel
    pushes them; whole where splitting gains nothing. pieces: tiles of bf16 that a helper stores.
    """
    slices = ceil_div(extents.depth, SLICE_K)
    columns = ceil_div(extents.columns, tiles.tile_n)
    wave = extents.rows // TILE_ROWS * columns % rates.num_sms
    if not wave:
        return WHOLE
    helpers = rates.num_sms - wave
    one_us = dict(rates.slice_us)[tiles.tile_n]
    turns = ceil_div(wave, helpers)
    piece_us = rates.tile_us + pieces * rates.add_us
    sent = 2 * TILE_ROWS * extents.columns / columns * (extents.num_ranks - 1)

    def end_us(ends: list[float]) -> float:
        return _pushed_us(ends, sent, rates) if pushes else max(ends)

    best, least = WHOLE, end_us([slices * one_us] * wave)
    for fewer in range(slices // turns if pushes and turns > 1 else 1):
        # Of tiles of each turn, the helper's part must be done when the rest is.
        given = min(
            int(
                (slices - ((turn + 1) * piece_us + rates.help_us) / one_us
                 + fewer * turn * (turn + 3) / 2)
                / (turn + 2)
            )
            for turn in range(turns)
        )  # fmt: skip
        if given <= (turns - 1) * fewer:
            break
        end = end_us(
            [
                (slices - given + position // helpers * fewer) * one_us + pieces * rates.add_us
                for position in range(wave)
            ]
        )
        if end < least:
            best, least = DepthSplit(given=given, fewer=fewer), end
    return best
