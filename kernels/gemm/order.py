"""In which order the programs of a matmul take the tiles of the result.

In: a tile's number, extents in tiles. Out: `place_tile`. Rows of the result come in one chunk a
rank; chunks follow each other as a ring from `first`, so that rows that have yet to arrive, or
tiles that stay at home, come last. In a chunk, `group` rows of tiles are crossed together, so that
what runs at one time reads few rows and columns, which stay in the L2. Next: kernel.py.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def place_tile(number, chunk_rows, columns, first, chunks: gl.constexpr, group: gl.constexpr):
    """(chunk, row of tiles in it, column of tiles) of a tile; chunk_rows, columns: in tiles."""
    in_chunk = chunk_rows * columns
    chunk = (first + number // in_chunk) % chunks
    number = number % in_chunk
    top = number // (group * columns) * group
    height = min(chunk_rows - top, group)
    number = number % (group * columns)
    return chunk, top + number % height, number // height


@gluon.jit
def first_chunk(rank, spec: gl.constexpr):
    """This rank's rows come first when it gathers, last when it sends."""
    if spec.sends == "":
        return rank
    else:
        return rank + 1
