"""Runs the kernel of packed attention under Triton's interpreter, in a process of its own: the
interpreter is chosen before Triton is imported. Prints the largest error against torch.
"""

import math
import os

os.environ["TRITON_INTERPRET"] = "1"

from unittest.mock import patch

import torch
from triton.runtime import interpreter

from distmega.hostir.library import ops as library
from distmega.kernels.library import packed_attention
from distmega.kernels.library.packed_attention import AttentionTiles, attend_packed
from tests.kernels.interpreting import apart, patch_tensors, shifted

SMALL = AttentionTiles(rows=16, keys=16, warps=4, stages=1)


def error_of(
    lengths: tuple[int, ...], cached: tuple[int, ...], window: int, dim: int, cap: float = 0.0
) -> float:
    """Sequences of so many rows behind so many positions in their caches, which need not lie in
    them; 0 rows: not there. What no row sees is no number.
    """
    torch.manual_seed(0)
    kv_heads, group, context = 2, 3, 96
    q = torch.randn(sum(lengths), kv_heads, group, dim)
    caches = [torch.randn(len(lengths), kv_heads, context, dim) for _ in range(2)]
    spans = [range(start, start + num) for num, start in zip(lengths, cached, strict=True)]
    positions = torch.tensor([position for span in spans for position in span])
    sequences = torch.tensor([i for i, span in enumerate(spans) for _ in span])
    starts = torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)])
    for cache in caches:
        for own, span in zip(cache, spans, strict=True):
            own[:, max(0, span.stop) :] = math.nan
            own[:, : max(0, span.start + 1 - window) if window else 0] = math.inf
    if len(lengths) == 1:
        caches = [cache[0] for cache in caches]
    given = (*map(shifted, (q, *caches)), apart(positions), sequences)
    found = attend_packed(*given, apart(starts), dim**-0.5, window, softcap=cap)
    expected = library.packed_attention(*given, dim**-0.5, window, cap)
    return float((found - expected).abs().max())


CASES = (
    ((40,), (0,), 0, 16),
    ((17,), (45,), 0, 16),
    ((33, 0, 1, 20), (0, 5, 60, 31), 0, 16),
    ((33, 0, 1, 20), (0, 5, 60, 31), 9, 16),
    ((30, 25), (3, 50), 24, 24),
    ((30, 25), (3, 50), 24, 24, 0.7),
    ((17,), (45,), 0, 16, 5.0),
    ((30, 25), (80, 90), 0, 16),
    ((30, 25), (80, 120), 24, 16),
    ((20, 25), (-5, -30), 0, 16),
)

if __name__ == "__main__":
    tiles = dict.fromkeys((64, 128), SMALL)
    with (
        patch.object(packed_attention, "_takes", lambda *_: True),
        patch.object(packed_attention, "TILES", tiles),
        patch.object(interpreter, "_patch_lang_tensor", patch_tensors),
    ):
        print(max((error_of(*case) for case in CASES), key=lambda error: (error != error, error)))
