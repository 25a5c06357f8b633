"""Whether a product of a few hundred rows runs by small tiles, and by which: the least predicted
time.

In: its extents. Out: SmallTiles, or None where torch's product, and a kernel behind it for the
formula, is expected to be faster. Next: tiled_products.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

LEAST_ROWS, MOST_ROWS = 17, 1024
"""Of the products that were measured."""
ALIGNED = 8
"""Elements in 16 bytes: what TMA takes begins and steps by multiples."""
PARTS = (1, 2, 3, 4, 6, 8)
LEAST_STEPS = 2
"""Of a part of the sum."""
HALF_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallTiles:
    """Rows, columns and terms of the sum at a time; warps; slots of operands on the way; parts of
    the sum. resident: programs that an SM has at once. step_us: of one step along the sum.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    parts: int = 1
    resident: int = 1
    step_us: float = 0.0


TILES = (
    SmallTiles(rows=64, columns=64, depth=128, warps=4, stages=4, step_us=0.34),
    SmallTiles(rows=64, columns=32, depth=128, warps=4, stages=4, resident=2, step_us=0.25),
)
"""Measured on H200s, as all times here: docs/notes/prefill.md."""
START_US, WAVE_US = 0.6, 0.6
"""Of a launch behind another, and of each wave of programs until its operands come."""
SUM_US = 1.8
"""Of adding up parts."""
READ_SHARE = 0.6
"""Of the time that the weight's bytes alone take, what is not hidden."""
BYTES_PER_US = 4.1e6
LIBRARY_US, LIBRARY_TERM_US = 2.9, 0.0015
"""Of torch's product: of any, and of each term of the sum."""
LIBRARY_SPLIT_US, LIBRARY_SPLIT_TERM_US, LIBRARY_SPLIT_SHARE = 5.3, 0.0004, 0.8
"""The same, and as READ_SHARE, where it cuts the sum."""
FORMULA_US = 1.9
"""Of a kernel that applies a formula."""
ODD_US = 2.0
"""Longer torch's product takes where rows of an operand begin at odd places."""
MIN_PREDICTED_SPEEDUP = 1.05


@cache
def choose_small_tiles(
    rows: int, columns: int, depth: int, num_sms: int, *, has_formula: bool
) -> SmallTiles | None:
    """Tiles for x [rows, depth] times w [columns, depth]; None where the library's is expected to
    be as fast.
    """
    if not LEAST_ROWS <= rows <= MOST_ROWS:
        return None
    best, us = min(
        ((tiles, tiles_us(rows, columns, depth, num_sms, tiles)) for tiles in _candidates(depth)),
        key=lambda found: found[1],
    )
    library = library_us(columns, depth) + FORMULA_US * has_formula
    return best if us * MIN_PREDICTED_SPEEDUP < library else None


def tiles_us(rows: int, columns: int, depth: int, num_sms: int, tiles: SmallTiles) -> float:
    """Predicted time of the kernel: an SM's programs share what it reads at a time."""
    programs = _ceil(rows, tiles.rows) * _ceil(columns, tiles.columns) * tiles.parts
    steps = _ceil(_ceil(depth, tiles.depth), tiles.parts)
    waves = _ceil(programs, num_sms * tiles.resident)
    busy = _ceil(programs, num_sms) * steps * tiles.step_us
    us = START_US + WAVE_US * waves + busy + READ_SHARE * _read_us(columns, depth)
    return us + SUM_US * (tiles.parts > 1)


def library_us(columns: int, depth: int) -> float:
    """Predicted time of torch's product of so few rows."""
    read_us = _read_us(columns, depth)
    whole = LIBRARY_US + LIBRARY_TERM_US * depth + READ_SHARE * read_us
    split = LIBRARY_SPLIT_US + LIBRARY_SPLIT_TERM_US * depth + LIBRARY_SPLIT_SHARE * read_us
    odd = ODD_US if depth % ALIGNED or columns % ALIGNED else 0.0
    return min(whole, split) + odd


def _candidates(depth: int) -> Iterator[SmallTiles]:
    for tiles in TILES:
        for parts in PARTS:
            if parts == 1 or _ceil(depth, tiles.depth) >= LEAST_STEPS * parts:
                yield replace(tiles, parts=parts)


def _read_us(columns: int, depth: int) -> float:
    return HALF_BYTES * columns * depth / BYTES_PER_US


def _ceil(x: int, y: int) -> int:
    return -(-x // y)
