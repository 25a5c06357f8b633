"""Whether a product of up to a few hundred rows runs by small tiles, and by which: the least
predicted time.

In: its extents. Out: SmallTiles, or None where torch's product, and a kernel behind it for the
formula, is expected to be as fast. Next: tiled_products.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

LEAST_ROWS, MOST_ROWS = 2, 1024
MOST_WEIGHT_BYTES = 6 * 2**20
"""Of the products that were measured to gain: larger weights keep the memory busy in any kernel."""
ALIGNED = 8
"""Elements in 16 bytes: what TMA takes begins and steps by multiples."""
PARTS = (1, 2, 3, 4, 6, 8)
LEAST_STEPS = 2
"""Of a part of the sum."""
HALF_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallTiles:
    """Rows, columns and terms of the sum at a time; warps; slots of operands on the way; parts of
    the sum. resident: programs that an SM has at once. start_us: of a wave of programs; step_us: of
    a step along the sum, which programs of an SM take in turns; formula_us: of applying a formula
    to a tile.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    parts: int = 1
    resident: int = 1
    start_us: float = 0.0
    step_us: float = 0.0
    formula_us: float = 0.8


TILES = (
    SmallTiles(rows=64, columns=64, depth=128, warps=4, stages=4, start_us=2.3, step_us=0.23),
    SmallTiles(
        rows=64, columns=64, depth=128, warps=4, stages=3, resident=2, start_us=2.4, step_us=0.23
    ),
    SmallTiles(rows=64, columns=16, depth=256, warps=4, stages=4, start_us=1.83, step_us=0.353),
    SmallTiles(
        rows=16,
        columns=16,
        depth=256,
        warps=1,
        stages=4,
        resident=3,
        start_us=1.1,
        step_us=0.45,
        formula_us=0.25,
    ),
)
"""Measured on H200s, in graphs of kernels that start early, as all times here."""
SUM_US = 2.8
"""Of adding up parts."""
RAGGED_US = 1.5
"""Of rows that fill no last tile, but for those of the only one."""
BYTES_PER_US = 4.1e6
LIBRARY_US, LIBRARY_TERM_US, LIBRARY_ROW_US = 2.9, 0.0007, 0.0015
"""Of torch's product: of any, of each term of the sum for up to LIBRARY_ROWS rows, twice that for
more, and of each row.
"""
LIBRARY_ROWS = 64
LIBRARY_READ_SHARE = 0.75
"""Of the time that the weight's bytes alone take, what is not hidden."""
LIBRARY_FORMULA_US = 1.9
"""Of a kernel that applies a formula."""
LIBRARY_ODD_US = 1.0
"""Longer torch's product takes where rows of an operand begin at odd places."""
MIN_PREDICTED_SPEEDUP = 1.1


def choose_small_tiles(
    rows: int, columns: int, depth: int, num_sms: int, *, has_formula: bool
) -> SmallTiles | None:
    """Tiles for x [rows, depth] times w [columns, depth]; None where the library's is expected to
    be as fast.
    """
    return _choose(rows, columns, depth, num_sms, has_formula=has_formula)[0]


def product_us(rows: int, columns: int, depth: int, num_sms: int, *, has_formula: bool) -> float:
    """Predicted time of the product of x [rows, depth] and w [columns, depth], by what is chosen
    for it.
    """
    return _choose(rows, columns, depth, num_sms, has_formula=has_formula)[1]


@cache
def _choose(
    rows: int, columns: int, depth: int, num_sms: int, *, has_formula: bool
) -> tuple[SmallTiles | None, float]:
    """Tiles, or None for torch's product, and the predicted time."""
    library = library_us(rows, columns, depth) + LIBRARY_FORMULA_US * has_formula
    if not LEAST_ROWS <= rows <= MOST_ROWS or HALF_BYTES * columns * depth > MOST_WEIGHT_BYTES:
        return None, library
    best, us = min(
        (
            (tiles, tiles_us(rows, columns, depth, num_sms, tiles) + tiles.formula_us * has_formula)
            for tiles in _candidates(depth)
        ),
        key=lambda found: found[1],
    )
    return (best, us) if us * MIN_PREDICTED_SPEEDUP < library else (None, library)


def tiles_us(rows: int, columns: int, depth: int, num_sms: int, tiles: SmallTiles) -> float:
    """Predicted time of the kernel without a formula."""
    programs = _ceil(rows, tiles.rows) * _ceil(columns, tiles.columns) * tiles.parts
    steps = _ceil(_ceil(depth, tiles.depth), tiles.parts)
    waves = _ceil(programs, num_sms * tiles.resident)
    us = waves * tiles.start_us + _ceil(programs, num_sms) * steps * tiles.step_us
    is_ragged = rows > tiles.rows and rows % tiles.rows > 0
    return us + SUM_US * (tiles.parts > 1) + RAGGED_US * is_ragged


def library_us(rows: int, columns: int, depth: int) -> float:
    """Predicted time of torch's product."""
    read_us = HALF_BYTES * columns * depth / BYTES_PER_US
    terms_us = LIBRARY_TERM_US * depth * (1 if rows <= LIBRARY_ROWS else 2)
    odd_us = LIBRARY_ODD_US if depth % ALIGNED or columns % ALIGNED else 0.0
    moved_us = max(terms_us + LIBRARY_READ_SHARE * read_us, read_us)
    return LIBRARY_US + moved_us + LIBRARY_ROW_US * rows + odd_us


def _candidates(depth: int) -> Iterator[SmallTiles]:
    for tiles in TILES:
        for parts in PARTS:
            if parts == 1 or _ceil(depth, tiles.depth) >= LEAST_STEPS * parts:
                yield replace(tiles, parts=parts)


def _ceil(x: int, y: int) -> int:
    return -(-x // y)
