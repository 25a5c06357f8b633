"""Shared-memory layouts of TMA tiles, and descriptors over them.

In: a tensor as a kernel views it and a tile's shape. Out: a TensorDescriptor. Next: pointwise.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

GLUON_TYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
}
SWIZZLE_BYTES = 128
"""Widest run of a tile that one TMA message takes without splitting it."""


def describe(
    x: Tensor, shape: Sequence[int], strides: Sequence[int], tile: Sequence[int]
) -> TensorDescriptor:
    """Descriptor of x seen with `shape` and `strides` in elements, in blocks of `tile`."""
    layout = gl.NVMMASharedLayout.get_default_for(list(tile), GLUON_TYPES[x.dtype])
    return TensorDescriptor(x, list(shape), list(strides), list(tile), layout)


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
