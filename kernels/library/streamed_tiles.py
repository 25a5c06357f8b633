"""Whether a product of 17 to 64 rows is streamed, by which tiles, and into how many parts its sums
are cut then: the least predicted time.

In: its extents. Out: StreamedTiles, or None where torch's product is expected to be faster, or the
product is none that was measured. Next: streamed_products.py.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from distmega.kernels.library.small_tiles import ALIGNED, MOST_WEIGHT_BYTES

LEAST_ROWS, MOST_ROWS = 17, 64
MOST_WAVES = 16
"""Of programs, one an SM at a time."""
TERMS = (128, 64)
"""Of the sums, in a slot of the ring: the first of which LEAST_STAGES slots find room. Fewer steps
cost less."""
LEAST_STAGES = 3
RING_BYTES = 216 * 1024
"""Of weights and x."""
BOXES = (128, 64, 32, 16)
MOST_BOXES = 3
"""Blocks of weight rows that a tile has side by side."""
WIDTHS = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
MOST_WIDTH = 256
"""Columns of a tile, those of two weights counted together: what registers hold."""
PARTS = (1, 2, 4)
HALF_BYTES = 2
START_US = 2.12
"""Of a launch. This and all below was measured on an H200 in graphs of norms, products and norms of
their sums, without the norms' time."""
PROGRAM_US = 0.0053
"""Of each program."""
MEMORY_BYTES_PER_US = 4.74e6
IDLE_SHARE, LAST_IDLE_SHARE = 0.093, 0.316
"""Of the memory's time, added where all SMs are idle, less where some are not: of a single wave; of
several, whose last one has fewer programs than SMs."""
SM_BYTES_PER_US = 8.97e4
X_SHARE = 0.132
"""Of x's bytes, what counts for an SM beside the weights'."""
STEP_US, BOX_US = 0.05, 0.128
"""Of a slot's step along the sum, and of each block of 128 terms of weight rows there."""
OTHERS_SHARE = 0.118
"""The longest of what the memory, an SM and its steps need counts whole, the others in part."""
WRITTEN_BYTES_PER_US, PARTS_BYTES_PER_US = 4.18e6, 1.64e6
"""Of results, and of parts of them."""
LIBRARY_US, LIBRARY_TERM_US, LIBRARY_FORMULA_US = 4.36, 0.00024, 1.26
"""Of torch's product in such a graph, besides its bytes: of any, of each term of the sums; and of a
kernel for a formula of two."""
LIBRARY_BYTES_PER_US, LIBRARY_WRITTEN_BYTES_PER_US = 4.29e6, 1.6e6
MOST_LOSS = 1.05
"""Of a streamed product: kernels on either side of it that begin early are faster beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedTiles:
    """Weight rows of the blocks side by side in a tile; parts of the sums; terms of a slot of the
    ring, and slots.
    """

    boxes: tuple[int, ...]
    parts: int
    terms: int
    stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedProduct:
    """x [rows, depth] times w [columns, depth], or times two such weights, of a half type."""

    rows: int
    columns: int
    depth: int
    halves: int = 1

    @property
    def weight_bytes(self) -> int:
        return HALF_BYTES * self.halves * self.columns * self.depth


def is_measured(product: StreamedProduct) -> bool:
    """Whether it has rows and weights of those that were: TMA reads them, and results are written
    16 bytes at a time.
    """
    has_rows = LEAST_ROWS <= product.rows <= MOST_ROWS
    is_aligned = product.depth % ALIGNED == 0 and product.columns % ALIGNED == 0
    return has_rows and is_aligned and product.weight_bytes > MOST_WEIGHT_BYTES


@cache
def choose_streamed(
    product: StreamedProduct, num_sms: int, parts: Sequence[int] = (1,)
) -> StreamedTiles | None:
    """Tiles with one of these numbers of parts, if any."""
    if not is_measured(product):
        return None
    found = [
        (streamed_us(product, tiles, num_sms), sum(tiles.boxes), num, tiles)
        for num in parts
        for tiles in _tiles(product, num)
        if num_waves(product.columns, tiles, num_sms) <= MOST_WAVES
    ]
    us, _, _, tiles = min(found, default=(math.inf, 0, 0, None))
    return tiles if us <= MOST_LOSS * library_us(product) else None


def streamed_us(product: StreamedProduct, tiles: StreamedTiles, num_sms: int) -> float:
    """Predicted time."""
    programs = num_programs(product.columns, tiles)
    waves = num_waves(product.columns, tiles, num_sms)
    idle = 1 - programs / (waves * num_sms)
    idle_share = IDLE_SHARE if waves == 1 else LAST_IDLE_SHARE
    terms = waves * product.depth / tiles.parts
    rows = product.halves * sum(tiles.boxes) + X_SHARE * product.rows
    boxes_us = BOX_US * product.halves * len(tiles.boxes) * tiles.terms / 128
    times = (
        product.weight_bytes / MEMORY_BYTES_PER_US * (1 + idle_share * idle),
        HALF_BYTES * terms * rows / SM_BYTES_PER_US,
        terms / tiles.terms * (STEP_US + boxes_us),
    )
    read_us = max(times) + OTHERS_SHARE * (sum(times) - max(times))
    results = product.rows * product.columns
    if tiles.parts > 1:
        written_us = 2 * HALF_BYTES * tiles.parts * results / PARTS_BYTES_PER_US
    else:
        written_us = HALF_BYTES * results / WRITTEN_BYTES_PER_US
    return START_US + PROGRAM_US * programs + read_us + written_us


def library_us(product: StreamedProduct) -> float:
    """Predicted time of torch's product, and of the formula of two."""
    formula_us = LIBRARY_FORMULA_US * (product.halves > 1)
    terms_us = LIBRARY_TERM_US * product.depth
    written = HALF_BYTES * product.rows * product.halves * product.columns
    bytes_us = product.weight_bytes / LIBRARY_BYTES_PER_US + written / LIBRARY_WRITTEN_BYTES_PER_US
    return LIBRARY_US + terms_us + formula_us + bytes_us


def num_programs(columns: int, tiles: StreamedTiles) -> int:
    """A tile of a part each."""
    return -(-columns // sum(tiles.boxes)) * tiles.parts


def num_waves(columns: int, tiles: StreamedTiles, num_sms: int) -> int:
    """Programs that an SM has, one after the other."""
    return -(-num_programs(columns, tiles) // num_sms)


def make_tiles(halves: int, width: int, parts: int) -> StreamedTiles:
    """Tiles of so many columns, of one weight or of two."""
    slots = {
        terms: RING_BYTES // (HALF_BYTES * terms * (halves * width + MOST_ROWS)) for terms in TERMS
    }
    terms = next((n for n in TERMS if slots[n] >= LEAST_STAGES), TERMS[-1])
    return StreamedTiles(boxes=boxes_of(width), parts=parts, terms=terms, stages=slots[terms])


def boxes_of(width: int) -> tuple[int, ...]:
    """Blocks that make up a tile."""
    found: list[int] = []
    for box in BOXES:
        found += [box] * ((width - sum(found)) // box)
    return tuple(found)


def _tiles(product: StreamedProduct, parts: int) -> Iterator[StreamedTiles]:
    """Those of a product whose sums are in so many parts, which are even."""
    for width in WIDTHS:
        tiles = make_tiles(product.halves, width, parts)
        is_even = parts == 1 or product.depth % (parts * tiles.terms) == 0
        fits = product.halves * width <= MOST_WIDTH and len(tiles.boxes) <= MOST_BOXES
        if is_even and fits:
            yield tiles
