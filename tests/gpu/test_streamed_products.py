"""Streamed products on a GPU, beside float64."""

import pytest
import torch
from torch.nn.functional import silu

from distmega.hostir.passes.fused_kinds import NormStep, RowSteps
from distmega.hostir.run.early_reads import early_reads
from distmega.kernels.library.row_steps import run_rows
from distmega.kernels.library.streamed_products import stream_product
from distmega.kernels.library.streamed_tiles import make_tiles
from distmega.program import expr

pytestmark = pytest.mark.gpu

SILU = expr.parse("silu(a0) * a1")
NORM = RowSteps(steps=(NormStep(norm="rms_norm", x=0, weight=1, eps=1e-5),), outs=(2,))


def random(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def apart(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "columns", "depth", "width", "parts"),
    [
        (64, 4096, 4096, 128, 4),
        (17, 4096, 4096, 64, 2),
        (33, 6152, 4096, 96, 2),
        (33, 6152, 1000, 48, 1),
        (1, 304, 64, 16, 1),
        (50, 2000, 512, 224, 1),
    ],
)
def test_sums_are_those_of_float64(rows, columns, depth, width, parts, dtype):
    torch.manual_seed(0)
    x, w = random(rows, depth, dtype=dtype), random(columns, depth, scale=0.05, dtype=dtype)
    found = stream_product(x, [w], make_tiles(1, width, parts))
    exact = x.double() @ w.double().T
    assert found.shape == ((parts, rows, columns) if parts > 1 else (rows, columns))
    whole = found.sum(0) if parts > 1 else found
    assert apart(whole, exact) < (1e-5 if parts > 1 else 3e-3)


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize(("rows", "columns", "width"), [(64, 3000, 96), (40, 12288, 96)])
def test_two_weights_are_mixed(rows, columns, width, stacked):
    torch.manual_seed(1)
    x = random(rows, 1024)
    first, second = random(columns, 1024, scale=0.05), random(columns, 1024, scale=0.05)
    weights = [torch.cat([first, second])] if stacked else [first, second]
    found = stream_product(x, weights, make_tiles(2, width, 1), mixes=SILU)
    exact = silu(x.double() @ first.double().T) * (x.double() @ second.double().T)
    assert apart(found, exact) < 3e-3


def test_a_bias_and_a_formula_come_last():
    torch.manual_seed(2)
    x, w, bias = random(20, 768), random(1000, 768, scale=0.05), random(1000)
    gelu = expr.parse("gelu(a0)")
    found = stream_product(x, [w], make_tiles(1, 64, 1), bias=bias, formula=gelu)
    exact = torch.nn.functional.gelu(x.double() @ w.double().T + bias.double())
    assert apart(found, exact) < 3e-3


def test_what_is_in_front_has_ended_before_x_is_read():
    """Norms that write what products read, each time something else, one graph replayed."""
    torch.manual_seed(3)
    x, ones = random(64, 4096), random(4096, scale=0.0) + 1
    weights = [random(2 * 4096, 4096, scale=0.02) for _ in range(4)]
    tiles = make_tiles(2, 96, 1)

    def run() -> torch.Tensor:
        y = x
        for w in weights:
            (normed,) = run_rows(NORM, [y, ones], (64, 4096), [torch.bfloat16])
            y = stream_product(normed, [w], tiles, mixes=SILU)
        return y

    with early_reads(states=False):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with early_reads(states=False), torch.cuda.graph(graph):
        y = run()
    for _ in range(200):
        x.copy_(random(64, 4096))
        graph.replay()
        found = y.clone()
        torch.cuda.synchronize()
        want = x
        for w in weights:
            (normed,) = run_rows(NORM, [want, ones], (64, 4096), [torch.bfloat16])
            torch.cuda.synchronize()
            want = stream_product(normed, [w], tiles, mixes=SILU)
            torch.cuda.synchronize()
        assert torch.equal(found, want)
