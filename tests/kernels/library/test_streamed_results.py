"""Results of streamed products on a CPU, where the kernel runs as Python: float64's, to the bit
where sums are whole numbers, which f32 holds.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import gelu, silu

from distmega.hostir.run.early_reads import early_reads
from distmega.kernels.library import streamed_products
from distmega.kernels.library.streamed_products import stream_product
from distmega.kernels.library.streamed_tiles import StreamedTiles, make_tiles
from distmega.program import expr
from tests.kernels.gluon_threads import named_arguments, run_kernel

SILU = expr.parse("silu(a0) * a1")
GELU = expr.parse("gelu(a0)")
WEIGHTS = ("w0", "w1", "w2", "other0", "other1", "other2")
BF16, F16 = torch.bfloat16, torch.float16


def launch(kernel: Any, grid: Sequence[int], *arguments: object, **options: Any) -> None:
    """As ahead.launch, of a result that holds nothing. Weights alone may be read early."""
    given = named_arguments(kernel, arguments, options)
    given["out"].fill_(torch.nan)
    run_kernel(kernel, grid, given, WEIGHTS if options["early"] else ())


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run as Python."""
    monkeypatch.setattr(streamed_products, "launch", launch)
    torch.manual_seed(0)


def tiles(*boxes: int, parts: int = 1, terms: int = 64, stages: int = 3) -> StreamedTiles:
    return StreamedTiles(boxes=boxes, parts=parts, terms=terms, stages=stages)


def whole(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Numbers whose products and sums have no error in f32."""
    return torch.randint(-8, 9, shape).to(dtype)


def times(x: Tensor, w: Tensor) -> Tensor:
    return x.double() @ w.double().T


@pytest.mark.parametrize(
    ("rows", "columns", "depth", "cut"),
    [
        pytest.param(1, 40, 64, tiles(16), id="fewer steps than slots"),
        pytest.param(32, 40, 200, tiles(32), id="a slot's terms not full"),
        pytest.param(17, 64, 192, tiles(32), id="as many steps as slots"),
        pytest.param(33, 104, 520, tiles(32, 16, terms=128), id="slots of two blocks of x"),
        pytest.param(31, 56, 712, tiles(32, terms=128, stages=2), id="two slots, 32 rows of x"),
        pytest.param(64, 200, 1096, tiles(64, 32, 16, stages=4), id="three blocks side by side"),
        pytest.param(2, 152, 640, tiles(128, terms=128), id="a last tile of few columns"),
        pytest.param(63, 136, 768, make_tiles(1, 128, 1), id="tiles of 128"),
        pytest.param(50, 304, 328, make_tiles(1, 224, 1), id="tiles of 224"),
    ],
)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_sums_are_those_of_float64(
    rows: int, columns: int, depth: int, cut: StreamedTiles, dtype: torch.dtype
) -> None:
    x, w = whole(rows, depth, dtype=dtype), whole(columns, depth, dtype=dtype)
    with early_reads(states=False):
        found = stream_product(x, [w], cut)
    assert torch.equal(found, times(x, w).to(dtype))


@pytest.mark.parametrize(
    ("rows", "columns", "depth", "cut"),
    [
        pytest.param(17, 72, 512, tiles(16, parts=2), id="even parts"),
        pytest.param(64, 40, 1000, tiles(32, 16, parts=4), id="a last part that is shorter"),
        pytest.param(40, 24, 1024, tiles(16, parts=4, terms=128), id="fewer steps than slots"),
        pytest.param(32, 152, 1024, make_tiles(1, 64, 2), id="tiles of 64"),
    ],
)
def test_parts_of_sums_are_those_of_float64(
    rows: int, columns: int, depth: int, cut: StreamedTiles
) -> None:
    x, w = whole(rows, depth), whole(columns, depth)
    with early_reads(states=False):
        found = stream_product(x, [w], cut)
    terms = -(-depth // (cut.parts * cut.terms)) * cut.terms
    parts = zip(x.split(terms, 1), w.split(terms, 1), strict=True)
    assert torch.equal(found, torch.stack([times(*part) for part in parts]).float())


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize(
    ("rows", "columns", "depth", "cut"),
    [
        pytest.param(20, 40, 456, tiles(16), id="tiles of 16"),
        pytest.param(64, 56, 328, tiles(32, 16, terms=128), id="tiles of two blocks"),
        pytest.param(33, 136, 640, make_tiles(2, 112, 1), id="tiles of 112"),
    ],
)
def test_two_weights_are_mixed(
    rows: int, columns: int, depth: int, cut: StreamedTiles, stacked: bool
) -> None:
    """Behind the last column of the first of two stacked weights lies the second one."""
    x = whole(rows, depth) / 32
    first, second = whole(columns, depth) / 32, whole(columns, depth) / 32
    weights = [torch.cat([first, second])] if stacked else [first, second]
    with early_reads(states=False):
        found = stream_product(x, weights, cut, mixes=SILU)
    exact = silu(times(x, first)) * times(x, second)
    torch.testing.assert_close(found, exact.to(BF16), rtol=0.008, atol=1e-5)


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(("columns", "parts"), [(72, 1), (40, 1), (72, 2)])
def test_a_bias_and_a_formula_come_last(columns: int, parts: int, early: bool) -> None:
    """Of one part or of each. Without early reads nothing is read before the wait."""
    x, w, bias = whole(20, 256) / 32, whole(columns, 256) / 16, whole(columns) / 4
    with early_reads(states=False) if early else nullcontext():
        found = stream_product(x, [w], tiles(32, 16, parts=parts), bias=bias, formula=GELU)
    pairs = zip(x.chunk(parts, 1), w.chunk(parts, 1), strict=True)
    exact = torch.stack([gelu(times(*pair) + bias.double()) for pair in pairs])
    expected = (exact.float() if parts > 1 else exact[0].to(BF16)).view(found.shape)
    rtol = 1e-5 if parts > 1 else 0.008
    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-5)


@given(
    rows=st.integers(1, 64),
    column_eights=st.integers(1, 19),
    depth_eights=st.integers(1, 80),
    boxes=st.sampled_from([(16,), (32,), (32, 16), (64, 32, 16)]),
    terms=st.sampled_from([64, 128]),
    stages=st.integers(2, 5),
    parts=st.sampled_from([1, 2]),
)
@settings(max_examples=60)
def test_sums_of_any_extents_are_those_of_float64(
    rows: int, column_eights: int, depth_eights: int, boxes: tuple[int, ...], terms: int,
    stages: int, parts: int,
) -> None:  # fmt: skip
    """A last part may have no terms at all: then it is zero."""
    cut = tiles(*boxes, parts=parts, terms=terms, stages=stages)
    x, w = whole(rows, 8 * depth_eights), whole(8 * column_eights, 8 * depth_eights)
    with early_reads(states=False):
        found = stream_product(x, [w], cut)
    expected = times(x, w)
    assert found.dtype == (BF16 if parts == 1 else torch.float32)
    if parts == 1:
        assert torch.equal(found, expected.to(BF16))
    else:
        assert torch.equal(found.sum(0), expected.float())
