"""The matmul kernel agrees with torch on one GPU: exactly on small integers, at any extents."""

import pytest
import torch
from torch import Tensor

from distmega.kernels import matmul
from distmega.kernels.gemm.api import mix_columns
from distmega.kernels.gemm.times.matmul_ways import STAGES
from distmega.kernels.gemm.times.tile_times import Tiles
from distmega.kernels.pipelined.api import normalise_rows
from distmega.kernels.runtime.memory import tma_rows
from distmega.program.expr import parse

pytestmark = pytest.mark.gpu
pytest.importorskip("triton", reason="triton is not installed (pip install 'distmega[gpu]')")

from distmega.kernels.gemm.device import start as launch  # noqa: E402  not without Triton


def integers(*shape: int, seed: int) -> Tensor:
    """Small ones: any sum of their products is exact in fp32."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator, device="cuda").bfloat16()


def run(a: Tensor, b: Tensor, tile_n: int, group: int = 8) -> Tensor:
    out = torch.full((a.shape[0], b.shape[0]), float("nan"), device="cuda", dtype=torch.bfloat16)
    spec = launch.plain_spec(Tiles(tile_n=tile_n, stages=STAGES[tile_n]))
    launch.launch_matmul(tma_rows(a), tma_rows(b), out, spec, group)
    return out


@pytest.mark.parametrize("tile_n", list(STAGES))
@pytest.mark.parametrize(
    ("rows", "columns", "depth"),
    [(128, 256, 64), (1, 8, 8), (300, 520, 200), (4096, 5120, 512), (129, 4104, 1000)],
)
def test_any_extents(rows, columns, depth, tile_n):
    a, b = integers(rows, depth, seed=1), integers(columns, depth, seed=2)
    assert torch.equal(run(a, b, tile_n), (a.float() @ b.float().T).bfloat16())


@pytest.mark.parametrize("group", [1, 3, 16])
def test_any_group(group):
    a, b = integers(1000, 256, seed=1), integers(3000, 256, seed=2)
    assert torch.equal(run(a, b, 256, group), (a.float() @ b.float().T).bfloat16())


def norms_and_products(x: Tensor, w: Tensor, *, apart: bool = False) -> Tensor:
    """A chain in which each kernel reads what the one before it wrote, and writes over what an
    earlier one read. apart: none is queued before the one before it has ended.
    """
    weight = torch.ones(x.shape[-1], device="cuda", dtype=torch.bfloat16)
    for _ in range(20):
        for _ in range(2):
            x, _ = normalise_rows("rms_norm", x, None, weight, None, 1e-5)
            if apart:
                torch.cuda.synchronize()
        x = run(x, w, 128)
    return x


def test_norms_that_start_early_wait_for_what_they_read():
    x, w = torch.randn(256, 768, device="cuda").bfloat16(), integers(768, 768, seed=2)
    expected = [norms_and_products(x.roll(number, 0), w, apart=True) for number in range(10)]
    given = x.clone()
    assert torch.equal(norms_and_products(given, w), expected[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = norms_and_products(given, w)
    for number in range(10):
        given.copy_(x.roll(number, 0))
        found.zero_()
        graph.replay()
        graph.replay()
        assert torch.equal(found, expected[number])


def test_operands_in_the_middle_of_others():
    a = integers(300, 400, seed=1)[10:210, 8:328]
    b = integers(400, 401, seed=2)[:256, 1:321]
    assert torch.equal(run(a, b, 128), (a.float() @ b.float().T).bfloat16())


def test_rounding_as_torch():
    a, b = (torch.randn(2048, 4096, device="cuda").bfloat16() for _ in range(2))
    exact = a.double() @ b.double().T
    errors = [(x.double() - exact).abs().max() for x in (run(a, b, 256), a @ b.T)]
    assert errors[0] <= 1.01 * errors[1]


@pytest.mark.parametrize("tile_n", list(STAGES))
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 512, 64), (300, 768, 200)])
@pytest.mark.parametrize("formula", ["a0 - 2 * a1", "maximum(a0, a1)"])
def test_two_columns_become_one(rows, columns, depth, tile_n, formula):
    a, b = integers(rows, depth, seed=1), integers(columns, depth, seed=2)
    out = torch.full((rows, columns // 2), float("nan"), device="cuda", dtype=torch.bfloat16)
    spec = launch.plain_spec(Tiles(tile_n=tile_n, stages=STAGES[tile_n]), parse(formula))
    launch.launch_matmul(tma_rows(a), tma_rows(b), out, spec, 8)
    left, right = (a.float() @ b.float().T).chunk(2, 1)
    exact = left - 2 * right if "-" in formula else torch.maximum(left, right)
    assert torch.equal(out, exact.bfloat16())


@pytest.mark.parametrize("tile_n", list(STAGES))
@pytest.mark.parametrize(
    ("rows", "columns", "depth"), [(1, 8, 64), (300, 392, 200), (64, 4096, 2048)]
)
def test_two_weights_become_one_column(rows, columns, depth, tile_n):
    a, *weights = (integers(n, depth, seed=seed) for seed, n in enumerate((rows, columns, columns)))
    out = torch.full((rows, columns), float("nan"), device="cuda", dtype=torch.bfloat16)
    tiles = Tiles(tile_n=tile_n, stages=STAGES[tile_n])
    spec = launch.plain_spec(tiles, parse("a0 - 2 * a1"), apart=True)
    launch.launch_matmul(a, weights[0], out, spec, 8, other=weights[1])
    left, right = (a.float() @ w.float().T for w in weights)
    assert torch.equal(out, (left - 2 * right).bfloat16())
    found = matmul(a, weights[0], mixes="a0 - 2 * a1", other=weights[1])
    torch.testing.assert_close(found, out, rtol=0.02, atol=0.1)


@pytest.mark.parametrize("rows", [64, 2048, 7168])
def test_gates_are_nearer_to_exact_ones_than_a_product_and_a_formula(rows: int):
    torch.manual_seed(0)
    a, b = (torch.randn(n, 1024, device="cuda").bfloat16() for n in (rows, 2 * 1536))
    b /= 32
    left, right = (a.double() @ b.double().T).chunk(2, 1)
    exact = torch.nn.functional.silu(left) * right
    found, apart = (
        matmul(a, b, mixes="silu(a0) * a1"),
        mix_columns(torch.mm(a, b.T), parse("silu(a0) * a1")),
    )
    errors = [float((x.double() - exact).norm() / exact.norm()) for x in (found, apart)]
    assert errors[0] <= 1.01 * errors[1]
    assert errors[0] < 4e-3


def test_function():
    a, b = integers(4096, 1024, seed=1), integers(4096, 1024, seed=2)
    out = torch.empty(4096, 4096, device="cuda", dtype=torch.bfloat16)
    assert matmul(a, b, out=out) is out
    assert torch.equal(out, a @ b.T)
    assert torch.equal(matmul(a[:, :1023], b[:, :1023]), a[:, :1023] @ b[:, :1023].T)
    assert torch.equal(matmul(a.float(), b.float()), a.float() @ b.float().T)
