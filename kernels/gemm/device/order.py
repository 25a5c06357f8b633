"""In which order the programs of a matmul take the tiles of the result.

In: a tile's number, extents in tiles. Out: `locate_tile`. Rows of the result come in one chunk a
rank, a chunk in bands of `group` rows of tiles, which are crossed together, so that what runs at
one time reads few rows and columns, which stay in the L2. A kernel that gathers takes the chunks as
a ring that begins with this rank's, which is there already. One that sends takes the bands of other
ranks first, since these still have to travel, and its own when their partial results should have
come. Tiles are sent in parts, some columns of a band, which are done in turn.

The last wave of a kernel with peers, all of its own rows if it sends, may leave programs idle. They
help: of the first `helpers` tiles of that wave each gives the last `given` slices along K to one of
them, of the next as many each gives `fewer` less, and so on, so that tiles end, and their sums
leave, one after the other. A tile waits for its helper, so all programs must run at one time. Next:
kernel.py.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def locate_gathered(number, chunk_rows, columns, first, group, chunks: gl.constexpr):
    """(chunk, row of tiles in it, column of tiles) of a tile; chunk_rows, columns: in tiles."""
    in_chunk = chunk_rows * columns
    chunk = (first + number // in_chunk) % chunks
    number = number % in_chunk
    top = number // (group * columns) * group
    height = min(chunk_rows - top, group)
    number = number % (group * columns)
    return chunk, top + number % height, number // height


@gluon.jit
def locate_band(turn, bands, rank, lag, chunks: gl.constexpr):
    """(chunk, band in it) of a turn, of `bands` in each chunk: one band of each other rank in
    turn, and this rank's band of `lag` rounds before, 1 <= lag <= bands.
    """
    others = chunks - 1
    late = turn - lag * others
    if late < 0:
        step = turn % others + 1
        band = turn // others
    elif late < (bands - lag) * chunks:
        step = late % chunks
        band = late // chunks + lag * min(step, 1)
    else:
        step = 0
        band = late - (bands - lag) * others
    return (rank + step) % chunks, band


@gluon.jit
def locate_sent(number, chunk_rows, columns, rank, lag, group, chunks: gl.constexpr):
    """As locate_gathered, where group divides chunk_rows."""
    in_band = group * columns
    chunk, band = locate_band(number // in_band, chunk_rows // group, rank, lag, chunks)
    number = number % in_band
    return chunk, band * group + number % group, number // group


@gluon.jit
def locate_tile(number, grid, spec: gl.constexpr):
    """(chunk, row of tiles in it, column of tiles) of a tile of a kernel; grid: TileGrid."""
    chunk_rows, columns, rank = grid.chunk_rows, grid.columns, grid.rank
    if spec.sends == "":
        return locate_gathered(number, chunk_rows, columns, rank, grid.group, spec.num_ranks)
    else:
        return locate_sent(number, chunk_rows, columns, rank, grid.lag, grid.group, spec.num_ranks)


@gluon.jit
def locate_part(row, column, grid):
    """Number of the part of a chunk that a tile is sent with, and that of all parts; a part is
    `part` columns of tiles of a band; grid: TileGrid.
    """
    parts = (grid.columns + grid.part - 1) // grid.part
    position = row // grid.group * parts + column // grid.part
    return position, grid.chunk_rows // grid.group * parts


@gluon.jit
def locate_word(row, column, grid, spec: gl.constexpr):
    """Number of the event word for a tile of partial results: one a tile if the kernel pushes them,
    else one a part.
    """
    if spec.sends == "push":
        return row * grid.columns + column
    else:
        position, _ = locate_part(row, column, grid)
        return position


@gluon.jit
def end_work(num_tiles, helpers, spec: gl.constexpr):
    """The number behind this program's last piece of work; they are num_programs apart. helpers:
    Helpers.
    """
    if spec.num_ranks == 1:
        return num_tiles
    else:
        return end_pieces(num_tiles, gl.program_id(0), gl.num_programs(0), helpers)


@gluon.jit
def end_pieces(num_tiles, program, programs, helpers):
    """As end_work."""
    end = num_tiles
    busy = programs - helpers.num
    if (helpers.num > 0) & (program >= busy):
        end += (2 * busy - program + helpers.num - 1) // helpers.num * programs
    return end


@gluon.jit
def locate_work(item, num_tiles, k_tiles, helpers, spec: gl.constexpr):
    """(number of a tile, its first slice along K, slices, word) of a piece of work. From item
    num_tiles on these are slices that a tile has given away. word: of the event for them, for both
    pieces of such a tile; -1 for others. helpers: Helpers.
    """
    if spec.num_ranks == 1:
        return item, 0, k_tiles, -1
    else:
        return locate_piece(item, num_tiles, k_tiles, gl.num_programs(0), helpers)


@gluon.jit
def locate_piece(item, num_tiles, k_tiles, programs, helpers):
    """As locate_work."""
    wave = num_tiles // programs * programs
    number, first, slices, word = item, 0, k_tiles, -1
    if (helpers.num > 0) & (item >= wave):
        word = item - wave
        if item >= num_tiles:
            late = item - num_tiles
            word = late // programs * helpers.num + late % programs
        gives = helpers.given - word // helpers.num * helpers.fewer
        number = wave + word
        slices = k_tiles - gives
        if item >= num_tiles:
            first, slices = slices, gives
    return number, first, slices, word
