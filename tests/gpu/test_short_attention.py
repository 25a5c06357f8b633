"""Attention of short sequences on a GPU, beside torch's in float64."""

import pytest
import torch

from distmega.hostir.library import ops
from distmega.kernels.library.short_attention import attend

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)])
@pytest.mark.parametrize(
    ("b", "h", "g", "m", "t", "d", "e"),
    [(1, 12, 1, 128, 128, 64, 64), (2, 3, 2, 77, 300, 40, 128), (4, 2, 1, 1, 512, 128, 24)],
)
def test_attention_is_that_of_float64(b, h, g, m, t, d, e, order):
    torch.manual_seed(0)
    q = torch.randn(b, m, h * g, d, device="cuda").bfloat16().transpose(1, 2)
    both = torch.randn(b, t, h, d + e, device="cuda").bfloat16().transpose(1, 2)
    k, v = both.split((d, e), 3)
    exact = ops.attend(q.double(), k.double(), v.double(), None, d**-0.5, 0.0, order)
    plain = ops.attend(q, k, v, None, d**-0.5, 0.0, order)
    found = attend(q, k, v, d**-0.5, order)
    apart = (found.double() - exact).norm() / exact.norm()
    assert found.is_contiguous()
    assert apart < 1.25 * (plain.double() - exact).norm() / exact.norm()
