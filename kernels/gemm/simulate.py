"""How long a matmul kernel runs with its collective beside it: its tiles, one after the other.

In: extents, tiles, `Rates`. Out: microseconds from launch to the last byte. All ranks are taken to
run in step, so what this rank sends at a time is what it receives. Next: kernel.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from distmega.kernels.gemm.rates import SLICE_K, TILE_ROWS, Extents, Rates, Tiles, ceil_div


def tile_us(extents: Extents, tile_n: int, rates: Rates) -> float:
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


def gather_us(extents: Extents, tiles: Tiles, event_rows: int, rates: Rates) -> float:
    """A kernel that computes rows as they come, `event_rows` with each copy."""
    one_us = tile_us(extents, tiles.tile_n, rates)
    rows = extents.rows // extents.num_ranks
    in_chunk = rows // TILE_ROWS * ceil_div(extents.columns, tiles.tile_n)
    tiles_each = ceil_div(extents.columns, tiles.tile_n) * tiles.group
    copies = rows // event_rows
    copy_us = 2 * event_rows * extents.depth / rates.copy_bytes_per_us + rates.copy_gap_us
    free = [rates.start_us + rates.peers_us] * min(rates.num_sms, in_chunk * extents.num_ranks)
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
    place_turns. shares: sums go to all ranks.
    """

    tiles: Tiles
    num_bands: int
    columns: int
    part: int
    num_tiles: int
    lag: int
    shares: bool

    @property
    def num_parts(self) -> int:
        """Of a band."""
        return ceil_div(self.columns, self.part)

    @property
    def num_words(self) -> int:
        """Event words for a rank's partial results; the next is for its sums."""
        return self.num_bands * self.num_parts

    @property
    def part_columns(self) -> list[int]:
        """Columns of tiles, by part of a band."""
        starts = range(0, self.columns, self.part)
        return [min(self.part, self.columns - start) for start in starts]


def plan_sending(
    extents: Extents,
    tiles: Tiles,
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
    return SendPlan(
        tiles=replace(tiles, group=group),
        num_bands=chunk_rows // group,
        columns=columns,
        part=ceil_div(columns, parts),
        num_tiles=num_tiles,
        lag=lag or chunk_rows // group,
        shares=shares,
    )


def band_rows(chunk_rows: int, most: int) -> int:
    """Rows of tiles in a band of a sending kernel: at most `most`, a divisor of a rank's."""
    return max(n for n in range(1, min(most, chunk_rows) + 1) if chunk_rows % n == 0)


def send_us(extents: Extents, plan: SendPlan, rates: Rates) -> float:
    """A kernel that sends parts of bands as they are done, and its sums too if it shares them."""
    one_us = tile_us(extents, plan.tiles.tile_n, rates)
    group, others = plan.tiles.group, extents.num_ranks - 1
    column_bytes = 2 * group * TILE_ROWS * extents.columns / plan.columns
    free = [rates.start_us + rates.peers_us] * min(rates.num_sms, plan.num_tiles)
    here = [0.0] * (plan.num_bands * plan.num_parts)
    link, number = 0.0, 0
    for chunk, band in place_turns(plan.num_bands, 0, plan.lag, extents.num_ranks):
        for part, columns in enumerate(plan.part_columns):
            place = band * plan.num_parts + part
            done = 0.0
            for _ in range(group * columns):
                program = number % len(free)
                end = free[program] + one_us
                free[program] = end if chunk else max(end, here[place]) + rates.add_us
                done = max(done, free[program])
                number += 1
            if chunk or plan.shares:
                sent = columns * column_bytes / rates.copy_bytes_per_us + rates.copy_gap_us
                link = max(link, done + rates.copy_us) + sent * (1 if chunk else others)
            if chunk:
                here[place] = max(here[place], link)
    return max(*free, link)
