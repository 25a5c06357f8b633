"""RandomReader's values made on a GPU: the same hash of the same flat indices, bit for bit.

Comes in: a RandomReader, a slice, where it belongs. Goes out: the tensor filled. A model of several
GB takes a second instead of a minute.
"""

import torch

from distmega.models.weights.random_source import RandomReader
from distmega.models.weights.tensors import Slices, resolve_slices

_ROWS = 1 << 24
"""Elements hashed at a time, for the memory of intermediate values."""
_MASK = 0xFFFFFFFF


def fill_random(reader: RandomReader, slices: Slices, into: torch.Tensor) -> None:
    """Writes what reader.read(slices) gives to `into`, of the slice's shape, on its device."""
    ranges = resolve_slices(reader.shape, slices)
    flat = torch.zeros(1, dtype=torch.int64, device=into.device)
    for (start, stop), extent in zip(ranges[:-1], reader.shape[:-1], strict=True):
        steps = torch.arange(start, stop, device=into.device)
        flat = (flat[:, None] * extent + steps).flatten()
    columns = torch.arange(*ranges[-1], device=into.device)
    whole = into if into.is_contiguous() else torch.empty_like(into).contiguous()
    target = whole.view(len(flat), len(columns))
    slope, least = reader.line
    rows = max(_ROWS // max(len(columns), 1), 1)
    for first in range(0, len(flat), rows):
        index = flat[first : first + rows, None] * reader.shape[-1] + columns
        values = _hash(index & _MASK, reader.key).double() * slope + least
        target[first : first + rows] = values.float()
    if whole is not into:
        into.copy_(whole)


def _hash(values: torch.Tensor, key: int) -> torch.Tensor:
    """random_source's mix of 32 bits, in 64-bit integers."""
    values = values ^ key
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        values = ((values ^ (values >> shift)) * factor) & _MASK
    return values ^ (values >> 15)
