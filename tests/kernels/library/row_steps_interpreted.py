"""Runs the kernel of formulas and norms over rows under Triton's interpreter, in a process of its
own: the interpreter is chosen before Triton is imported. Prints the largest error against torch.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

from unittest.mock import patch

import torch

from distmega.hostir.library.rows import run_rows as run_by_torch
from distmega.hostir.passes.fused_kinds import NormStep, RowSteps
from distmega.kernels.library import row_steps
from distmega.kernels.library.row_steps import run_rows
from distmega.program import expr

ROWS = (7, 40), (2, 3, 33), (1, 64), (300, 16)
"""Shapes; short rows are several a program."""
NORMS = "rms_norm", "layer_norm", "softmax"


def plan_of(norm: str) -> RowSteps:
    """Of whole rows a0, vectors a1 and a2, and a number a3 for each row."""
    vectors = norm != "softmax"
    first = NormStep(
        norm=norm, x=4, weight=1 if vectors else -1, bias=2 if vectors else -1, eps=0.1
    )
    texts = "gelu(a0) + a3", "a5 * a3 + a4", "1.0 + a2"
    steps = [expr.parse(text) for text in texts]
    again = NormStep(norm="layer_norm", x=6, eps=0.1)
    return RowSteps(steps=(steps[0], first, steps[1], again, steps[2]), outs=(7, 4, 8))


def error_of(shape: tuple[int, ...], norm: str, *, strided: bool) -> float:
    torch.manual_seed(0)
    *front, columns = shape
    x = torch.randn(*front, 2 * columns)[..., ::2] if strided else torch.randn(shape)
    ones = (1,) * len(front)
    xs = [x, *(torch.randn(*ones, columns) for _ in range(2)), torch.randn(*front, 1)]
    if strided:
        xs[3] = torch.randn(*front[:-1], 1, 1)  # of a sequence
    plan, dtypes = plan_of(norm), [torch.float32] * 3
    found, expected = (run(plan, xs, shape, dtypes) for run in (run_rows, run_by_torch))
    errors = [float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)]
    assert all(a.is_contiguous() and a.shape == shape for a in found)
    return max(errors)


if __name__ == "__main__":
    cases = [
        (shape, norm, strided) for shape in ROWS for norm in NORMS for strided in (False, True)
    ]
    with (
        patch.object(row_steps, "_takes", lambda _: True),
        patch.object(row_steps, "num_sms", lambda _: 4),
        patch.object(row_steps, "is_hopper", lambda _: False),
    ):
        print(max(error_of(shape, norm, strided=strided) for shape, norm, strided in cases))
