"""Runs the kernels of a decode step's attention under Triton's interpreter, in a process of its
own: the interpreter is chosen before Triton is imported. Prints the largest error against torch.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

from unittest.mock import patch

import torch
from triton.runtime import interpreter

from distmega.hostir.library import ops as library
from distmega.kernels.library import row_attention
from distmega.kernels.library.row_attention import attend_each
from tests.kernels.interpreting import apart, patch_tensors


def error_of(
    positions: tuple[int, ...], window: int, dim: int, group: int, parts: int, cap: float = 0.0
) -> float:
    """A row of each sequence at these positions, which need not lie in its cache; nothing lies
    behind them.
    """
    torch.manual_seed(0)
    kv_heads, context = 2, 96
    q = torch.randn(len(positions), kv_heads + 1, group, dim)[:, 1:]
    caches = [torch.randn(len(positions), kv_heads, context, dim) for _ in range(2)]
    for sequence, position in enumerate(positions):
        for cache in caches:
            cache[sequence, :, max(position + 1, 0) :] = float("nan")
    at = apart(torch.tensor(positions))
    with (
        patch.object(row_attention, "choose_parts", lambda *_: parts),
        patch.object(library, "masked_attention", side_effect=AssertionError("the kernel does it")),
    ):
        found = attend_each(q, *caches, at, dim**-0.5, window, cap)
    known = [cache.nan_to_num() for cache in caches]
    expected = library.masked_attention(q, *known, at, dim**-0.5, window, cap)
    return float((found - expected).abs().max())


CASES = (
    ((0, 95, 33), 0, 16, 4, 1),
    ((0, 95, 33), 0, 16, 4, 3),
    ((1, 70), 20, 24, 3, 1),
    ((1, 70), 20, 24, 3, 2),
    ((1, 70), 20, 24, 3, 2, 0.7),
    ((0, 95, 33), 0, 16, 4, 1, 5.0),
    ((50,), 0, 32, 17, 4),
    ((-1, 120, 40), 0, 16, 4, 1),
    ((-1, 120, 40), 0, 16, 4, 3),
    ((-7, 110, 200), 20, 24, 3, 2),
    ((-7, 110, 200), 20, 24, 3, 1),
)

if __name__ == "__main__":
    with (
        patch.object(row_attention, "_on_gpu", lambda _: True),
        patch.object(row_attention, "num_programs", lambda _: 1),
        patch.object(row_attention, "DTYPES", (torch.float32,)),
        patch.object(row_attention, "NUM_KEYS", 16),
        patch.object(interpreter, "_patch_lang_tensor", patch_tensors),
    ):
        print(max((error_of(*case) for case in CASES), key=lambda error: (error != error, error)))
