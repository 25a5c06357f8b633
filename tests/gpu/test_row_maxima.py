"""The largest of long rows on a GPU, beside torch's."""

import pytest
import torch

from distmega.kernels.library.row_maxima import find_largest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "n"), [(1, 32001), (32, 128256), (64, 151936)])
def test_places_and_values_are_torchs(rows, n, dtype):
    torch.manual_seed(0)
    x = torch.randn(rows, n, device="cuda").to(dtype)
    x[0, n - 1], x[rows // 2, 5:7] = float("nan"), 100.0
    value, index = x[:, : n - 3].max(-1)
    found, place = find_largest(x[:, : n - 3], 11)
    assert torch.equal(place, index + 11)
    assert torch.equal(found, value)
    assert find_largest(x, 0)[1][0] == n - 1
