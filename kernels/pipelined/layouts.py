"""How programs share tiles, and the threads of a program a tile.

In: numbers of tiles, constexpr shapes. Out: TileLoads, `count_tiles`, `tile_number`,
`tile_layout`, `row_layout`. Next: pointwise_kernel.py.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from typing import NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

VECTOR = 8
"""Neighbouring elements of a thread: 16 bytes of a half type."""


class TileLoads(NamedTuple):
    """How tiles of a kernel's inputs come, made by the kernel.

    inputs: a descriptor each, or a pointer for one that is not loaded by TMA. stages: a buffer in
    shared memory each, [stages, ...tile], which TMA fills and the program reads. landed: mbarriers,
    one a stage and input, of bytes that came.
    """

    inputs: object
    stages: object
    landed: object


@triton.constexpr_function
def tile_layout(shape: tuple[int, ...], num_warps: int) -> gl.BlockedLayout:
    """Layout of a pointwise tile [elements] or [rows, columns]: a warp reads whole rows."""
    if len(shape) == 1:
        return gl.BlockedLayout([min(VECTOR, shape[0])], [32], [num_warps], [0])
    rows, columns = shape
    vector = min(VECTOR, columns)
    lanes = min(32, columns // vector)
    warps = min(num_warps, max(1, rows // (32 // lanes)))
    return gl.BlockedLayout([1, vector], [32 // lanes, lanes], [warps, num_warps // warps], [1, 0])


@triton.constexpr_function
def row_layout(rows: int, groups: int, width: int, num_warps: int) -> gl.BlockedLayout:
    """Layout of a tile of whole rows, [rows, groups, width] with column = group * width + place.

    As many threads share a row as it has vectors, up to all; only then are rows shared by warps.
    """
    vector = min(VECTOR, width)
    positions = width // vector
    lanes = min(32 // positions, groups)
    warps = min(num_warps, max(1, rows // (32 // (positions * lanes))))
    return gl.BlockedLayout(
        [1, 1, vector],
        [32 // (positions * lanes), lanes, positions],
        [warps, num_warps // warps, 1],
        [2, 1, 0],
    )


@gluon.jit
def count_tiles(num_tiles, run):
    """Tiles of this program: `run` neighbours, or where run is 0 every num_programs-th."""
    program = gl.program_id(0)
    step = gl.num_programs(0)
    spread = (num_tiles - program + step - 1) // step
    neighbours = gl.minimum(run, num_tiles - program * run)
    return gl.where(run == 0, spread, neighbours)


@gluon.jit
def tile_number(index, run):
    """The tile that comes as this program's number `index`."""
    program = gl.program_id(0)
    spread = program + index * gl.num_programs(0)
    return gl.where(run == 0, spread, program * run + index)
