"""How long a matmul kernel runs with its collective beside it: its tiles, one after the other.

In: extents, tiles, `Rates`. Out: microseconds from launch to the last byte. All ranks are taken to
run in step, so what this rank sends at a time is what it receives. Next: kernel.py.
"""

from collections.abc import Iterator

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
    copy_us = 2 * event_rows * extents.depth / rates.copy_bytes_per_us
    free = [rates.start_us + rates.peers_us] * min(rates.num_sms, in_chunk * extents.num_ranks)
    for number in range(in_chunk * extents.num_ranks):
        step, place = divmod(number, in_chunk)
        lowest = min((place // tiles_each + 1) * tiles.group * TILE_ROWS, rows)
        done = (step - 1) * copies + ceil_div(lowest, event_rows)
        ready = rates.copy_us + done * copy_us if step else 0.0
        program = number % len(free)
        free[program] = max(free[program], ready) + one_us
    return max(free)


def send_us(extents: Extents, tiles: Tiles, lag: int, shares: bool, rates: Rates) -> float:
    """A kernel that sends bands of rows as they are done, and its sums too if it shares them."""
    one_us = tile_us(extents, tiles.tile_n, rates)
    bands = extents.rows // (extents.num_ranks * TILE_ROWS * tiles.group)
    in_band = tiles.group * ceil_div(extents.columns, tiles.tile_n)
    band_us = 2 * tiles.group * TILE_ROWS * extents.columns / rates.copy_bytes_per_us
    free = [rates.start_us + rates.peers_us] * min(
        rates.num_sms, in_band * bands * extents.num_ranks
    )
    here = [0.0] * bands
    link, number = 0.0, 0
    for chunk, band in place_turns(bands, 0, lag, extents.num_ranks):
        done = 0.0
        for _ in range(in_band):
            program = number % len(free)
            end = free[program] + one_us
            free[program] = end if chunk else max(end, here[band]) + rates.add_us
            done = max(done, free[program])
            number += 1
        if chunk:
            link = max(link, done + rates.copy_us) + band_us
            here[band] = max(here[band], link)
        elif shares:
            link = max(link, done + rates.copy_us) + band_us * (extents.num_ranks - 1)
    return max(*free, link)
