"""Products by small tiles: results under Triton's interpreter, machine code for sm_90a."""

import pytest

from distmega.kernels.library.small_tiles import SmallTiles, choose_small_tiles
from distmega.kernels.library.tiled_products import multiply_tiles
from distmega.program import expr
from tests.forked import run_module
from tests.kernels.sm90 import SHARED_BYTES, compile_kernel

SMALL = [(64, 64, 128, 4), (64, 32, 128, 4), (128, 128, 64, 8)]
"""Rows, columns, depth, warps."""


def test_interpreted_products_are_torchs_however_the_sum_is_cut() -> None:
    done = run_module("tests.kernels.library.tiled_products_interpreted")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-4


@pytest.mark.parametrize(("by_tma", "split"), [(True, True), (False, False)])
@pytest.mark.parametrize("tile", SMALL)
def test_tiles_multiply_by_wgmma_and_nothing_spills(
    tile: tuple[int, ...], by_tma: bool, split: bool
) -> None:
    rows, columns, depth, warps = tile
    types: dict[str, object] = {
        "w_start": "*bf16",
        "bias": "*bf16",
        "out": "*bf16",
        "partials": "*fp32",
        "counts": "*i32",
    }
    blocks = {"x": (rows, depth), "w": (columns, depth)}
    for name, (lines, terms) in blocks.items():
        types[name] = f"tensordesc<bf16[{lines}, {terms}]>" if by_tma else "*bf16"
    numbers = ("rows", "columns", "depth_units", "x_row_units", "x_step_units", "w_units", "parts")
    types |= dict.fromkeys(numbers, "i32")
    constants = {
        "tile_rows": rows, "tile_columns": columns, "tile_depth": depth, "unit": 4,
        "by_tma": by_tma, "turned": False, "split": split, "early": True, "ahead": True,
        "formula": expr.parse("gelu(a0)"),
    }  # fmt: skip
    code = compile_kernel(multiply_tiles, types, constants, warps, None)
    assert code.stack_bytes == 0
    assert "wgmma.mma_async" in code.ptx
    assert ("cp.async.bulk.tensor" in code.ptx) == by_tma
    assert ("atom." in code.ptx) == split
    assert code.ptx.count("griddepcontrol.wait") == 1
    assert code.shared_bytes <= SHARED_BYTES


SMS = 132


@pytest.mark.parametrize(
    ("extents", "has_formula"),
    [((128, 2304, 768), False), ((128, 3072, 768), True), ((768, 384, 196), True)],
)
def test_products_with_few_tiles_take_small_ones(
    extents: tuple[int, int, int], has_formula: bool
) -> None:
    assert choose_small_tiles(*extents, SMS, has_formula=has_formula)


@pytest.mark.parametrize("extents", [(1, 768, 768), (256, 2048, 8192), (2048, 768, 768)])
def test_others_are_the_librarys(extents: tuple[int, int, int]) -> None:
    assert choose_small_tiles(*extents, SMS, has_formula=False) is None


def test_long_sums_of_few_tiles_are_cut() -> None:
    whole = choose_small_tiles(128, 768, 768, SMS, has_formula=False)
    cut = choose_small_tiles(128, 768, 3072, SMS, has_formula=False)
    assert isinstance(whole, SmallTiles)
    assert isinstance(cut, SmallTiles)
    assert (whole.parts, cut.parts) == (1, 4)
