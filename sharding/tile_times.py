"""How long a matmul kernel runs with its collective beside it: its tiles, one after the other.

In: extents, tiles, OverlapRates. Out: microseconds from launch to the last byte. All ranks are
taken to run in step, so what one sends at a time is what it receives. Next: matmul_ways.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from distmega.sharding.overlap_rates import OverlapRates

SLICE_K = 64
TILE_ROWS = 128
"""Of the kernel: elements of K in a slot of the ring, rows of a tile."""
NUM_WORDS = 2**12
"""Event words for each rank of a team."""
PUSHING_RANKS = 2
"""Most ranks of a team whose kernels push sums themselves; to three peers it gained nothing."""
GROUP = 8
"""Rows of tiles that are crossed together; 4 to 16 differ by less than 1% on an H200."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """How the kernel runs: columns of a tile, slots of the ring, rows of tiles in a group."""

    tile_n: int
    stages: int
    group: int = GROUP


@dataclass(frozen=True, slots=True, kw_only=True)
class Extents:
    """A product A[rows, depth] B[columns, depth]^T on each of num_ranks ranks, of elements of
    item_bytes; `rows` are those of all ranks together.
    """

    rows: int
    columns: int
    depth: int
    num_ranks: int = 1
    item_bytes: int = 2

    @property
    def flops(self) -> int:
        """Flops on one rank."""
        return 2 * self.rows * self.columns * self.depth


def ceil_div(number: int, by: int) -> int:
    """The least integer not below number / by."""
    return -(-number // by)


def tile_us(extents: Extents, tile_n: int, rates: OverlapRates) -> float:
    """A tile on a busy GPU."""
    return ceil_div(extents.depth, SLICE_K) * dict(rates.slice_us)[tile_n] + rates.tile_us


def place_turns(bands: int, rank: int, lag: int, num_ranks: int) -> Iterator[tuple[int, int]]:
    """(chunk, band) of all turns of a sending kernel; in order.py the kernel's words for it."""
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


def gather_us(extents: Extents, tiles: Tiles, event_rows: int, rates: OverlapRates) -> float:
    """A kernel that computes rows as they come, `event_rows` with each copy."""
    one_us = tile_us(extents, tiles.tile_n, rates)
    rows = extents.rows // extents.num_ranks
    in_chunk = rows // TILE_ROWS * ceil_div(extents.columns, tiles.tile_n)
    tiles_each = ceil_div(extents.columns, tiles.tile_n) * tiles.group
    copies = rows // event_rows
    copy_us = 2 * event_rows * extents.depth / rates.copy_bytes_per_us + rates.copy_gap_us
    free = [rates.launch_us + rates.peers_us] * min(rates.num_sms, in_chunk * extents.num_ranks)
    for number in range(in_chunk * extents.num_ranks):
        step, place = divmod(number, in_chunk)
        lowest = min((place // tiles_each + 1) * tiles.group * TILE_ROWS, rows)
        done = (step - 1) * copies + ceil_div(lowest, event_rows)
        ready = rates.copy_us + done * copy_us if step else 0.0
        program = number % len(free)
        free[program] = max(free[program], ready) + one_us
    return max(free)


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPlan:
    """What a sending kernel and the copies behind it agree on.

    num_bands: of a rank's rows. columns: of tiles; part: so many are sent at once. lag: as
    place_turns. shares: sums go to all ranks; num_late: so many of the last tiles the kernel itself
    pushes to the peers, whole columns of the last band.
    """

    tiles: Tiles
    num_bands: int
    columns: int
    part: int
    num_tiles: int
    lag: int
    shares: bool
    num_late: int

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
    shares: bool,
) -> SendPlan:
    """tiles.group is cut to a divisor of a rank's rows, lag 0 means all bands. parts: of a band."""
    chunk_rows = extents.rows // (extents.num_ranks * TILE_ROWS)
    group = band_rows(chunk_rows, tiles.group)
    columns = ceil_div(extents.columns, tiles.tile_n)
    num_tiles = chunk_rows * columns * extents.num_ranks
    last_wave = (num_tiles - 1) % num_sms + 1
    late = min(ceil_div(last_wave, group), columns) * group
    return SendPlan(
        tiles=replace(tiles, group=group),
        num_bands=chunk_rows // group,
        columns=columns,
        part=ceil_div(columns, parts),
        num_tiles=num_tiles,
        lag=lag or chunk_rows // group,
        shares=shares,
        num_late=late if shares and extents.num_ranks <= PUSHING_RANKS else 0,
    )


def band_rows(chunk_rows: int, most: int) -> int:
    """Rows of tiles in a band of a sending kernel: at most `most`, a divisor of a rank's."""
    return max(n for n in range(1, min(most, chunk_rows) + 1) if chunk_rows % n == 0)


def send_us(extents: Extents, plan: SendPlan, rates: OverlapRates) -> float:
    """A kernel that sends parts of bands as they are done, and its sums too if it shares them."""
    one_us = tile_us(extents, plan.tiles.tile_n, rates)
    group, others = plan.tiles.group, extents.num_ranks - 1
    column_bytes = 2 * group * TILE_ROWS * extents.columns / plan.columns
    free = [rates.launch_us + rates.peers_us] * min(rates.num_sms, plan.num_tiles)
    here = [0.0] * (plan.num_bands * plan.num_parts)
    link, number = 0.0, 0
    for chunk, band in place_turns(plan.num_bands, 0, plan.lag, extents.num_ranks):
        copied = sum(plan.part_columns(not chunk and band == plan.num_bands - 1))
        for part, columns in enumerate(plan.part_columns()):
            place = band * plan.num_parts + part
            done, start = 0.0, part * plan.part
            for column in range(start, start + columns):
                for _ in range(group):
                    program = number % len(free)
                    end = free[program] + one_us
                    free[program] = end if chunk else max(end, here[place]) + rates.add_us
                    done = max(done, free[program]) if column < copied else done
                    number += 1
            if done and (chunk or plan.shares):
                sent = max(min(columns, copied - start), 0) * column_bytes
                sent_us = sent / rates.copy_bytes_per_us + rates.copy_gap_us
                link = max(link, done + rates.copy_us) + sent_us * (1 if chunk else others)
            if chunk:
                here[place] = max(here[place], link)
    pushed_us = plan.num_late // group * column_bytes * others / rates.push_bytes_per_us
    return max(link, max(free) + (rates.push_us + pushed_us if plan.num_late else 0.0))
