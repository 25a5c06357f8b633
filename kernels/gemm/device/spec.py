"""What the matmul kernel is specialised for, and sizes that its parts share. Next: kernel.py."""

from dataclasses import dataclass

from triton.experimental.gluon import language as gl

from distmega.kernels.gemm.times import tile_times
from distmega.program.expr import Expr

TILE_M = gl.constexpr(128)
HALF_M = gl.constexpr(64)
"""Rows of a tile that one warp group computes; rows and columns of what is stored at a time."""
TILE_K = gl.constexpr(64)
READY = gl.constexpr(tile_times.READY)
PUSHED = gl.constexpr(tile_times.PUSHED)
EARLY = gl.constexpr(tile_times.EARLY)
EARLY_PUSHED = gl.constexpr(tile_times.EARLY_PUSHED)
"""As there."""
WORDS = gl.constexpr(tile_times.NUM_WORDS)
"""Event words that each source rank has for itself on every rank, and counts of a rank's rows."""
BUFFERS = gl.constexpr(tile_times.LEAVING_COLUMNS // 64)
"""Blocks of a warp group's result that may wait to leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulSpec:
    """What the kernel is specialised for.

    tile_n: columns of a tile, 128 or 256. stages: slots of the ring. num_ranks: chunks of rows, 1
    without peers. gathers: rows of A but this rank's arrive while the kernel runs. sends: "" for a
    local result; "scatter": the rows of another rank go to it, those of this rank are summed over
    ranks; "push": so, but from the kernel itself and not by copy engines; "all": these sums go to
    all ranks. mixes: of columns n and N / 2 + n of the product, a0
    and a1, one column n of the result; nothing is sent then, and N is a multiple of tile_n, unless
    `apart`: both halves of the columns are of a weight of their own. debug: waits are bounded.
    """

    tile_n: int
    stages: int
    num_ranks: int = 1
    gathers: bool = False
    sends: str = ""
    mixes: Expr | None = None
    apart: bool = False
    debug: bool = False

    @property
    def is_mixed(self) -> bool:
        return self.mixes is not None

    @property
    def columns(self) -> int:
        """Of the result, that a tile makes."""
        return self.tile_n // 2 if self.is_mixed else self.tile_n
