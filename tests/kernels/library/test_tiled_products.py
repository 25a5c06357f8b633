"""Products by small tiles: results under Triton's interpreter, machine code for sm_90a."""

import pytest

from distmega.kernels.library.small_tiles import TILES, SmallTiles, choose_small_tiles
from distmega.kernels.library.tiled_products import multiply_tiles
from distmega.program import expr
from tests.forked import run_module
from tests.kernels.sm90 import SHARED_BYTES, compile_kernel


def test_interpreted_products_are_torchs_however_the_sum_is_cut() -> None:
    done = run_module("tests.kernels.library.tiled_products_interpreted")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-4


@pytest.mark.parametrize(("by_tma", "split"), [(True, True), (False, False)])
@pytest.mark.parametrize("tile", TILES)
def test_tiles_multiply_by_tensor_cores_and_nothing_spills(
    tile: SmallTiles, by_tma: bool, split: bool
) -> None:
    rows, columns, depth, warps = tile.rows, tile.columns, tile.depth, tile.warps
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
        "by_tma": by_tma, "turned": False, "split": split, "early": True,
        "formula": expr.parse("gelu(a0)"),
    }  # fmt: skip
    code = compile_kernel(multiply_tiles, types, constants, warps, None)
    assert code.stack_bytes == 0
    assert ("wgmma.mma_async" if rows >= 64 else "mma.sync.aligned.m16n8k16") in code.ptx
    assert ("cp.async.bulk.tensor" in code.ptx) == by_tma
    assert ("atom." in code.ptx) == split
    assert code.ptx.count("griddepcontrol.wait") == 1
    assert code.shared_bytes <= SHARED_BYTES


SMS = 132


@pytest.mark.parametrize(
    ("extents", "has_formula"),
    [
        ((128, 2304, 768), False),
        ((128, 3072, 768), True),
        ((768, 384, 196), True),
        ((4, 512, 512), False),
        ((16, 768, 3072), True),
    ],
)
def test_products_with_few_tiles_take_small_ones(
    extents: tuple[int, int, int], has_formula: bool
) -> None:
    assert choose_small_tiles(*extents, SMS, has_formula=has_formula)


@pytest.mark.parametrize(
    "extents", [(1, 768, 768), (256, 2048, 8192), (2048, 768, 768), (32, 2048, 2048)]
)
def test_others_are_the_librarys(extents: tuple[int, int, int]) -> None:
    assert choose_small_tiles(*extents, SMS, has_formula=False) is None


def test_a_formula_inside_makes_small_tiles_pay() -> None:
    assert choose_small_tiles(96, 768, 768, SMS, has_formula=False) is None
    assert choose_small_tiles(96, 768, 768, SMS, has_formula=True)


def test_an_sm_has_the_programs_of_a_wave() -> None:
    for tiles in TILES:
        slots = tiles.stages * (tiles.rows + tiles.columns) * tiles.depth * 2
        assert slots * tiles.resident <= SHARED_BYTES
