"""Runs the kernel of short attention under Triton's interpreter, in a process of its own: the
interpreter is chosen before Triton is imported. Prints the largest error against torch.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

from unittest.mock import patch

import torch
from triton.runtime import interpreter

from distmega.hostir.library import ops
from distmega.kernels.library import short_attention
from tests.kernels.interpreting import patch_tensors

CASES = (
    (1, 3, 1, 70, 70, 16, 16, (0, 2, 1, 3)),
    (2, 2, 2, 5, 40, 24, 8, (0, 1, 2, 3)),
    (2, 1, 3, 65, 33, 16, 40, (2, 0, 1, 3)),
)
"""Batches, heads of keys, heads that share one, rows, keys, elements of keys and of values, order
of the result's dims.
"""


def error_of(
    b: int, h: int, g: int, m: int, t: int, d: int, e: int, order: tuple[int, ...]
) -> float:
    torch.manual_seed(m)
    q = torch.randn(b, m, h * g, d).transpose(1, 2)
    k, v = torch.randn(b, t, h, d + e).transpose(1, 2).split((d, e), 3)
    expected = ops.attend(q, k, v, None, 0.3, 0.0, order)
    found = short_attention.attend(q, k, v, 0.3, order)
    assert found.is_contiguous()
    return float((found - expected).abs().max())


if __name__ == "__main__":
    with (
        patch.object(short_attention, "gdc_launch_dependents", lambda: None),
        patch.object(short_attention, "gdc_wait", lambda: None),
        patch.object(short_attention, "KEYS", {64: 32}),
        patch.object(interpreter, "_patch_lang_tensor", patch_tensors),
    ):
        print(max(error_of(*case) for case in CASES))
