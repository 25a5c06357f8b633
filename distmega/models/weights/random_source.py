"""Random weights from a configuration alone, for benchmarks and tests.

An element is a hash of seed, weight name and its flat index, so each rank makes exactly its slice
of the same full weights. Weights are uniform with variance 1 / (number of terms summed), norms lie
around 1: activations stay near 1.
"""

import hashlib
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distmega.models.weights.tensors import Array, Slices, WeightSpec, resolve_slices

_CHUNK = 1 << 16
"""Elements hashed at a time, so that intermediate values stay in cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomReader:
    """One weight of random values."""

    spec: WeightSpec
    seed: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    def read(self, slices: Slices = ()) -> Array:
        """Hashes the flat index of every element in the slice."""
        ranges = resolve_slices(self.shape, slices)
        shape = [max(stop - start, 0) for start, stop in ranges]
        rows = np.zeros(1, np.uint32)
        for (start, stop), extent in zip(ranges[:-1], self.shape[:-1], strict=True):
            rows = np.add.outer(
                rows * np.uint32(extent), np.arange(start, stop, dtype=np.uint32)
            ).ravel()
        rows = rows * np.uint32(self.shape[-1])
        columns = np.arange(*ranges[-1], dtype=np.uint32)
        out = np.empty((len(rows), len(columns)), np.float32)
        key, (slope, least) = np.uint32(self.key), self.line
        step = max(_CHUNK // max(len(columns), 1), 1)
        for first in range(0, len(rows), step):
            bits = _hash(rows[first : first + step, None] + columns, key)
            out[first : first + step] = bits * np.float64(slope) + least
        return out.reshape(shape)

    @property
    def key(self) -> int:
        """What the hash of this weight starts from, 32 bits."""
        digest = hashlib.blake2b(f"{self.seed} {self.spec.name}".encode(), digest_size=4).digest()
        return int.from_bytes(digest, "little")

    @property
    def line(self) -> tuple[float, float]:
        """Slope and least value: a hash of 32 bits times the slope plus the least is an element."""
        center, scale = self._center_and_scale()
        return float(np.float32(scale / 2**31)), float(np.float32(center - scale))

    def _center_and_scale(self) -> tuple[float, float]:
        """Values are uniform in center +- scale, which is sqrt(3) times the deviation."""
        kind = self.spec.name.rpartition(".")[2]
        if kind.endswith("norm"):
            return 1.0, 0.25
        if kind == "embed" or len(self.spec.stored_shape) == 1:
            return 0.0, math.sqrt(3.0)
        return 0.0, math.sqrt(3.0 / self.spec.stored_shape[-1])


def _hash(values: NDArray[np.uint32], key: np.uint32) -> NDArray[np.uint32]:
    """A bijective mix of 32 bits: every input bit reaches every output bit. `values` is
    overwritten.
    """
    values ^= key
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        values ^= values >> np.uint32(shift)
        values *= np.uint32(factor)
    values ^= values >> np.uint32(15)
    return values
