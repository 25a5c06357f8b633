"""Shared-memory layouts of TMA tiles, and the extents that they take.

In: element types, extents, tile shapes. Out: `tile_layout_of`, `common_width`, `padded_to`. Next:
families.py.
"""

from collections.abc import Sequence
from functools import cache

import torch
from triton.experimental.gluon import language as gl

GLUON_TYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
}
SWIZZLE_BYTES = 128
"""Widest run of a tile that one TMA message takes without splitting it."""


@cache
def tile_layout_of(tile: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Layout of a tile that TMA writes or reads."""
    return gl.NVMMASharedLayout.get_default_for(list(tile), GLUON_TYPES[dtype])


def common_width(itemsizes: Sequence[int], extent: int) -> int:
    """Elements of the widest run, up to 128 bytes of the largest type, that divides `extent`; 0 if
    it has less than 16 bytes of the smallest.
    """
    width = SWIZZLE_BYTES // max(itemsizes)
    while extent % width:
        width //= 2
    return width if width * min(itemsizes) >= 16 else 0


def padded_to(extent: int) -> int:
    """The next power of two."""
    return 1 << (extent - 1).bit_length()
