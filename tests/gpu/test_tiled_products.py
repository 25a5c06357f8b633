"""Products by small tiles on a GPU: those of float64, in any layout, and the same bits again, when
called one after another and from a graph whose kernels may start early.
"""

import pytest
import torch
from torch import Tensor

from distmega.kernels.library.small_tiles import TILES, SmallTiles
from distmega.kernels.library.tiled_products import TiledProduct
from distmega.program import expr

pytestmark = pytest.mark.gpu

GELU = expr.parse("gelu(a0)")
ALL = [
    SmallTiles(rows=t.rows, columns=t.columns, depth=t.depth, warps=t.warps, stages=t.stages,
               parts=parts) for t in TILES for parts in (1, 3)
]  # fmt: skip


def operands(rows: int, columns: int, depth: int, *, turned: bool) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(rows)
    shape = (depth, rows) if turned else (rows, depth)
    x = torch.randn(shape, generator=generator, device="cuda").bfloat16()
    w = torch.randn(columns, depth, generator=generator, device="cuda") * depth**-0.5
    bias = torch.randn(columns, generator=generator, device="cuda").bfloat16()
    return [x.T if turned else x, w.bfloat16(), bias]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    "extents",
    [(128, 768, 3072), (17, 100, 196), (300, 72, 264), (64, 8, 20), (2, 768, 768), (5, 40, 2048)],
)
def test_products_are_those_of_float64(extents: tuple[int, int, int], turned: bool):
    x, w, bias = operands(*extents, turned=turned)
    exact = torch.nn.functional.linear(x.double(), w.double(), bias.double())
    for tiles in ALL:
        for formula, right in ((None, exact), (GELU, torch.nn.functional.gelu(exact))):
            product = TiledProduct(formula)
            found = product(x, w, bias, tiles)
            assert float((found.double() - right).norm() / right.norm()) < 4e-3
            assert torch.equal(found, product(x, w, bias, tiles))


def test_kernels_of_a_graph_wait_for_each_other():
    x, w, bias = operands(128, 768, 768, turned=False)
    product = TiledProduct(GELU)

    def chain(x: Tensor) -> Tensor:
        for number in range(40):
            x = product(x, w, bias, ALL[number % len(ALL)])
        return x

    chain(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(x)
    for _ in range(20):
        x.copy_(x.flip(0))
        expected = chain(x)
        found.zero_()
        graph.replay()
        graph.replay()
        assert torch.equal(found, expected)


def test_kernels_of_a_graph_wait_for_those_of_other_streams():
    x, w, bias = operands(128, 768, 768, turned=False)
    product, side = TiledProduct(GELU), torch.cuda.Stream()

    def both(x: Tensor) -> Tensor:
        for _ in range(10):
            x = product(x, w, bias, ALL[0])
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                other = product(product(x, w, bias, ALL[1]), w, bias, ALL[0])
            x = product(x, w, None, ALL[2])
            torch.cuda.current_stream().wait_stream(side)
            x = product((x + other) * 0.5, w, bias, ALL[-1])
        return x

    expected = both(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = both(x)
    for _ in range(20):
        found.zero_()
        graph.replay()
        assert torch.equal(found, expected)
