"""Where tensors lie: which of them TMA can address, and that all launches ask."""

import pytest
import torch
from torch import Tensor

from distmega.kernels.runtime.memory import has_tma_rows, tma_rows

HALF = torch.bfloat16
ROWS = torch.zeros(4, 64, dtype=HALF)


@pytest.mark.parametrize(
    ("x", "fits"),
    [
        (ROWS, True),
        (ROWS[:, 8:40], True),
        (ROWS[1:2], True),
        (ROWS[:, 4:36], False),
        (ROWS[:, ::2], False),
        (ROWS.T, False),
        (ROWS[:1].expand(4, 64), False),
        (ROWS[:1].expand(4, 64)[:1], False),
        (ROWS[:, :1].expand(4, 64), False),
        (ROWS.as_strided((4, 64), (32, 1)), False),
        (torch.zeros(4, 36, dtype=HALF), False),
        (torch.zeros(4, 36), True),
    ],
)
def test_tma_takes_whole_rows_that_lie_apart(x: Tensor, fits: bool):
    assert has_tma_rows(x) == fits
    moved = tma_rows(x)
    assert (moved is x) == fits
    assert torch.equal(moved, x)
    assert has_tma_rows(moved) or x.shape[1] * x.element_size() % 16
