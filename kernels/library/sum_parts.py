"""Into how many parts the sums of a product of few rows are cut, where the op behind it adds up the
parts: the least predicted time.

In: its extents. Out: parts, 1 where torch's product as it is, or one by small tiles, is expected to
be as fast. Next: hostir/passes/split_sums.py.
"""

from distmega.kernels.library.small_tiles import choose_small_tiles
from distmega.kernels.library.streamed_tiles import PARTS, StreamedProduct, choose_streamed

LEAST_ROWS, MOST_ROWS = 8, 128
LEAST_COLUMNS, MOST_COLUMNS = 1024, 8192
LEAST_TERMS, MOST_TERMS = 1024, 14336
"""Extents that were measured."""
ALIGNED = 64
"""Terms of a part are a multiple."""
TILE_COLUMNS = 64
"""Of the library's tiles, of which there are few to busy the SMs where columns are few."""
TERM_US = 0.00015
"""Gained by two parts for each term, which fewer tiles in turn have to add up."""
IDLE_US = 1.0
"""Gained by two parts where hardly an SM has a tile of the whole product."""
RESULT_US = 2.5e-6
"""Lost for each result that is written and read as two numbers of 4 bytes."""
WIDE_COLUMNS, WIDE_US = 4096, 1.0
"""Lost by rows of more columns, which the kernel that adds up has as twice as many."""
OTHER_US = 0.1
LEAST_US = 0.25
"""Least gain that is worth it. All times were measured on an H200 in graphs of products and the
norms behind them."""


def choose_sum_parts(rows: int, columns: int, terms: int, num_sms: int) -> int:
    """Of x [rows, terms] times w [columns, terms], of a half type, on a GPU of num_sms SMs."""
    measured = (
        LEAST_ROWS <= rows <= MOST_ROWS
        and LEAST_COLUMNS <= columns <= MOST_COLUMNS
        and LEAST_TERMS <= terms <= MOST_TERMS
    )
    tiles = -(-columns // TILE_COLUMNS)
    parts = 4 if 4 * tiles <= num_sms // 2 else 2
    if not measured or terms % (parts * ALIGNED):
        return 1
    if choose_small_tiles(rows, columns, terms, num_sms, has_formula=False):
        return 1
    product = StreamedProduct(rows=rows, columns=columns, depth=terms)
    streamed = choose_streamed(product, num_sms, PARTS)
    if streamed is not None:
        return streamed.parts
    idle_us = IDLE_US * max(0.0, 1 - 2 * tiles / num_sms)
    lost_us = RESULT_US * rows * columns + WIDE_US * (columns > WIDE_COLUMNS)
    gained_us = OTHER_US + TERM_US * terms + idle_us - lost_us
    return parts if gained_us >= LEAST_US else 1
