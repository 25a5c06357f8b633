"""Numbers of the emulated kernels: bf16 and its pairs in 32 bits, float32 as bits, formulas.

Next on the walk: one_row/bodies.py.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from distmega.hostir.library.pointwise import FUNCTIONS
from distmega.program import expr

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]
Indices = npt.NDArray[np.int64]


def bf16_bits(x: Floats) -> Words:
    """Bits of the nearest bf16, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), np.uint32(0x7FC0), rounded).astype(np.uint32)


def to_bf16(x: Floats) -> Floats:
    """The nearest bf16 of each number, as float32."""
    return (bf16_bits(x) << 16).view(np.float32)


def pairs_of(low: Floats, high: Floats) -> Words:
    """Two bf16 in 32 bits each."""
    words: Words = bf16_bits(low) | bf16_bits(high) << np.uint32(16)
    return words.astype(np.uint32)


def halves_of(words: Words) -> Floats:
    """Both bf16 of pairs, one behind the other: [2 n]."""
    both = np.stack((words << 16, words & np.uint32(0xFFFF0000)), axis=-1)
    return np.ascontiguousarray(both.reshape(*words.shape[:-1], -1)).view(np.float32)


def bits_of(x: Floats) -> Words:
    return np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)


def floats_of(words: Words) -> Floats:
    return np.ascontiguousarray(words, dtype=np.uint32).view(np.float32)


def evaluate(formula: expr.Expr, args: Sequence[Floats]) -> Floats:
    """Value of an epilogue's formula in float32."""

    def lift(value: float) -> torch.Tensor:
        return torch.tensor(float(value), dtype=torch.float32)

    found = expr.evaluate(formula, [torch.from_numpy(x) for x in args], FUNCTIONS, lift)
    values: Floats = np.broadcast_to(found.float().numpy(), args[0].shape).copy()
    return values


def normalised(norm: str, x: Floats, eps: float) -> Floats:
    """Rows of x after a softmax or a norm, without weight and bias."""
    length = np.float32(x.shape[-1])
    if norm == "softmax":
        exponentials: Floats = np.exp(x - x.max(axis=-1, keepdims=True))
        total = exponentials.sum(axis=-1, keepdims=True, dtype=np.float32)
        shares: Floats = exponentials * (np.float32(1.0) / total)
        return shares
    if norm == "layer_norm":
        x = x - x.sum(axis=-1, keepdims=True, dtype=np.float32) / length
    mean = (x * x).sum(axis=-1, keepdims=True, dtype=np.float32) / length
    y: Floats = x * (np.float32(1.0) / np.sqrt(mean + np.float32(eps)))
    return y


def numbers_of(arena: torch.Tensor) -> Floats:
    """Elements of 2 bytes of an arena as float32."""
    values: Floats = arena.view(torch.bfloat16).float().numpy()
    return values
