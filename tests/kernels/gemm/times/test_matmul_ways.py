"""Tiles and means of matmuls with a collective: what the simulation of the kernel expects."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmega.kernels.gemm.times.matmul_ways import (
    best_tiles,
    can_push,
    choose_means,
    choose_mixed_tiles,
    choose_tiles,
    kernel_problem,
    kernel_us,
    sent_bytes,
    tiles_choice,
)
from distmega.kernels.gemm.times.rates import H200_RATES
from distmega.kernels.gemm.times.tile_times import (
    WHOLE,
    Tiles,
    band_rows,
    copied_rows,
    plan_sending,
    send_us,
    split_last_wave,
)
from distmega.kernels.gemm.times.ways import MatmulModel
from distmega.sharding.overlap.products import Extents, Product

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


def test_wide_tiles_where_they_fill_the_waves_and_narrow_ones_where_not():
    assert best_tiles(Extents(rows=4096, columns=5120, depth=8192), H200_RATES).tile_n == 256
    assert best_tiles(Extents(rows=1024, columns=14336, depth=8192), H200_RATES).tile_n == 128


MIXED_US = {
    (2048, 16384): {
        192: (28.1, 30.5, 28.5), 256: (33.2, 31.3, 30.5), 320: (36.9, 39.9, 48.0),
        384: (43.3, 40.4, 49.1), 448: (52.4, 50.5, 49.1), 512: (54.5, 51.4, 49.9),
        640: (68.3, 63.3, 71.1), 1024: (106.5, 97.9, 94.2), 8192: (903.3, 811.2, 806.5),
    },
    (4096, 24576): {
        128: (65.6, 73.2, 64.8), 192: (69.0, 87.9, 100.8), 256: (88.0, 85.1, 103.8),
        384: (120.9, 128.8, 148.5), 448: (144.3, 141.2, 135.6), 768: (215.3, 210.4, 222.6),
        2048: (624.0, 604.5, 595.3), 8192: (2518.8, 2418.1, 2382.7),
    },
    (4096, 12288): {
        192: (41.5, 57.2, 57.3), 320: (66.8, 83.6, 108.0), 512: (77.4, 73.4, 91.3),
        640: (95.7, 95.0, 91.5), 768: (108.7, 116.9, 134.7), 2048: (289.6, 282.4, 272.2),
    },
    (8192, 28672): {
        192: (171.0, 216.9, 203.5), 320: (237.2, 338.1, 277.5), 512: (323.7, 325.4, 348.7),
        1024: (645.9, 657.4, 623.7), 4096: (2866.3, 2789.9, 2884.9),
    },
}  # fmt: skip
"""By depth and columns, then rows: us on an H200 of cuBLAS and a kernel of silu(a0) * a1 behind it,
of ours with 128 columns a tile and with 256.
"""


@pytest.mark.parametrize("shape", MIXED_US)
def test_products_with_a_formula_go_the_way_that_was_quickest(shape: tuple[int, int]):
    depth, columns = shape
    for rows, (library, narrow, wide) in MIXED_US[shape].items():
        extents = Extents(rows=rows, columns=columns, depth=depth)
        tiles = choose_mixed_tiles(extents, H200_RATES)
        chosen = library if tiles is None else {128: narrow, 256: wide}[tiles.tile_n]
        assert chosen <= 1.035 * min(library, narrow, wide), (rows, tiles)


SCATTERED_US = {
    (2048, 2048, 4096): (67.8, 69.3), (2048, 6144, 4096): (141.9, 161.6),
    (4096, 2048, 4096): (103.5, 127.8), (8192, 2048, 4096): (198.4, 233.8),
    (4096, 5120, 8192): (446.1, 540.7), (1024, 4096, 8192): (100.3, 117.0),
}  # fmt: skip
"""By rows, depth of a rank and columns: us over two H200s of a reduce-scatter, its partial results
sent by copies, and pushed.
"""


@pytest.mark.parametrize("shape", SCATTERED_US)
def test_partial_results_are_pushed_where_that_is_no_slower(shape: tuple[int, int, int]):
    rows, depth, columns = shape
    extents = Extents(rows=rows, columns=columns, depth=depth, num_ranks=2)
    chosen = tiles_choice("reduce_scatter", extents, H200_RATES)
    times = dict(zip((False, True), SCATTERED_US[shape], strict=True))
    assert times[chosen.pushes] <= 1.03 * min(times.values())


def test_a_kernel_pushes_what_has_words_descriptors_and_room():
    few = Extents(rows=2048, columns=4096, depth=2048, num_ranks=2)
    assert tiles_choice("reduce_scatter", few, H200_RATES).pushes
    assert can_push(few, 128)
    assert not can_push(few, 256), "half a tile has no place to wait"
    assert can_push(replace(few, num_ranks=4), 128)
    assert not can_push(replace(few, num_ranks=8), 128)
    most = replace(few, rows=2 * 128 * 4095, columns=128)
    assert can_push(most, 128)
    assert not can_push(replace(most, rows=2 * 128 * 4096), 128)


def test_time_goes_by_whole_waves():
    full = Extents(rows=128 * 11, columns=256 * 12, depth=4096)
    more = replace(full, rows=128 * 12)
    assert kernel_us(more, 256, H200_RATES) > 1.9 * kernel_us(full, 256, H200_RATES)


def test_rows_that_tma_can_not_address_are_left_to_torch():
    fitting = Extents(rows=8192, columns=8192, depth=8192)
    assert choose_tiles(fitting, H200_RATES) is not None
    assert choose_tiles(replace(fitting, depth=8191), H200_RATES) is None
    assert choose_tiles(replace(fitting, columns=8190), H200_RATES) is None


def test_a_skinny_matmul_is_left_to_torch():
    assert choose_tiles(Extents(rows=16, columns=14336, depth=8192), H200_RATES) is None


def test_a_formula_in_the_product_saves_what_follows_it():
    """Its columns are whole tiles, and few rows gain too little."""
    many = Extents(rows=2048, columns=24576, depth=4096)
    assert choose_mixed_tiles(many, H200_RATES) is not None
    assert choose_mixed_tiles(replace(many, columns=24576 + 128), H200_RATES) is None
    assert choose_mixed_tiles(replace(many, depth=4095), H200_RATES) is None
    assert choose_mixed_tiles(replace(many, rows=1), H200_RATES) is None


@pytest.mark.parametrize("rows", [64, 256, 1024])
def test_two_weights_gain_more_than_one(rows: int):
    """The library starts a kernel for each of them, and one for the formula."""
    extents = Extents(rows=rows, columns=8192, depth=2048)
    assert choose_mixed_tiles(extents, H200_RATES, apart=True) is not None
    odd = replace(extents, columns=8192 + 16)
    assert choose_mixed_tiles(odd, H200_RATES, apart=True) is not None
    assert choose_mixed_tiles(odd, H200_RATES) is None


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("rows", [4096, 8192, 16384])
def test_long_matmuls_overlap(collective, num_ranks, rows):
    extents = Extents(rows=rows, columns=8192, depth=4096, num_ranks=num_ranks)
    assert choose_means(collective, extents, H200_RATES).means == "tiles"
    assert choose_means(collective, extents, H200_RATES, beside=False).means != "tiles"


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_rows_that_are_no_tiles_of_a_rank_do_not_overlap(collective):
    extents = Extents(rows=128, columns=8192, depth=8192, num_ranks=2)
    assert "rows a multiple of 256" in kernel_problem(collective, extents, "bf16", H200_RATES)
    assert choose_means(collective, extents, H200_RATES).means != "tiles"
    alone = replace(extents, rows=4096, num_ranks=1)
    assert "2 to 8 ranks" in kernel_problem(collective, alone, "bf16", H200_RATES)


def test_rows_that_ranks_do_not_divide_are_left_to_nccl_unless_all_want_the_sum():
    extents = Extents(rows=1001, columns=8192, depth=8192, num_ranks=2)
    assert choose_means("all_gather", extents, H200_RATES).means == "nccl"
    assert choose_means("reduce_scatter", extents, H200_RATES).means == "nccl"
    assert choose_means("all_reduce", extents, H200_RATES).means == "peer"
    no_vectors = replace(extents, columns=8200)
    assert choose_means("all_reduce", no_vectors, H200_RATES).means == "nccl"


@pytest.mark.parametrize("shares", [False, True])
def test_sending_beside_the_tiles_costs_little_of_sending_behind_them(shares):
    extents = Extents(rows=8192, columns=8192, depth=8192, num_ranks=2)
    choice = tiles_choice("all_reduce" if shares else "reduce_scatter", extents, H200_RATES)
    assert choice.tiles is not None
    least = kernel_us(extents, choice.tiles.tile_n, H200_RATES)
    behind = (
        sent_bytes("all_reduce" if shares else "reduce_scatter", extents)
        / H200_RATES.copy_bytes_per_us
    )
    assert 0.9 * least < choice.us < least + behind / 2, "the last wave may be shared"
    slow = replace(H200_RATES, copy_bytes_per_us=H200_RATES.copy_bytes_per_us / 100)
    plan = plan_sending(extents, choice.tiles, 132, shares=shares)
    assert send_us(extents, plan, slow) > 90 * behind


@pytest.mark.parametrize("collective", ["reduce_scatter", "all_reduce"])
def test_idle_programs_help_in_the_last_wave_where_that_is_quicker(collective):
    extents = Extents(rows=4096, columns=8192, depth=5120, num_ranks=2)
    choice = tiles_choice(collective, extents, H200_RATES)
    assert choice.tiles == Tiles(tile_n=256, stages=4)
    assert choice.split != WHOLE
    shares = collective == "all_reduce"
    whole = plan_sending(extents, choice.tiles, 132, shares=shares)
    assert (whole.num_helpers, whole.num_tiles % 132) == (0, 100)
    plan = plan_sending(extents, choice.tiles, 132, split=choice.split, shares=shares)
    assert plan.num_helpers == 32
    gained = send_us(extents, whole, H200_RATES) - send_us(extents, plan, H200_RATES)
    assert gained > (9.0 if shares else 5.0)
    waiting = replace(H200_RATES, help_us=1000.0)
    assert tiles_choice(collective, extents, waiting).split == WHOLE
    full = replace(extents, columns=256 * 33)
    assert split_last_wave(full, choice.tiles, H200_RATES, pieces=1, pushes=shares) == WHOLE


@given(
    chunk_rows=st.integers(1, 40), columns=st.integers(1, 60), slices=st.integers(1, 300),
    tile_n=st.sampled_from([128, 256]), pieces=st.sampled_from([1, 2]), pushes=st.booleans(),
)  # fmt: skip
def test_each_tile_that_is_shared_keeps_and_gives_a_slice(
    chunk_rows, columns, slices, tile_n, pieces, pushes
):
    extents = Extents(rows=256 * chunk_rows, columns=tile_n * columns, depth=64 * slices,
                      num_ranks=2)  # fmt: skip
    tiles = Tiles(tile_n=tile_n, stages=4)
    split = split_last_wave(extents, tiles, H200_RATES, pieces=pieces, pushes=pushes)
    if split != WHOLE:
        wave = 2 * chunk_rows * columns % 132
        turns = -(-wave // (132 - wave))
        assert 0 < split.given - (turns - 1) * split.fewer <= split.given < slices
    for shares in (False, True):
        plan = plan_sending(extents, tiles, 132, split=split, shares=shares)
        if plan.num_helpers:
            assert plan.num_helpers == 132 - plan.num_tiles % 132
            assert plan.num_tiles % 132 <= plan.num_tiles // 2


def test_bytes_of_a_collective():
    extents = Extents(rows=4096, columns=8192, depth=1024, num_ranks=4)
    assert sent_bytes("all_gather", extents) == 2 * 3072 * 1024
    assert sent_bytes("reduce_scatter", extents) == 2 * 3072 * 8192
    assert sent_bytes("all_reduce", extents) == 2 * 2 * 3072 * 8192


@given(rows=st.integers(1, 256), num_ranks=st.sampled_from([2, 4, 8]), group=st.integers(1, 16))
def test_copies_bring_whole_bands_of_a_ranks_rows(rows, num_ranks, group):
    extents = Extents(rows=128 * rows * num_ranks, columns=1024, depth=1024, num_ranks=num_ranks)
    *whole, last = copied_rows(extents, Tiles(tile_n=128, stages=6, group=group))
    assert {*whole} <= {128 * group}
    assert last % 128 == 0
    assert 0 < last <= 128 * group
    assert sum(whole) + last == 128 * rows


@given(
    chunk_rows=st.integers(1, 40), columns=st.integers(1, 60), ranks=st.sampled_from([2, 4, 8]),
    most=st.sampled_from([1, 2, 4, 8]), parts=st.integers(1, 5),
)  # fmt: skip
def test_parts_of_a_band_are_all_its_columns(chunk_rows, columns, ranks, most, parts):
    extents = Extents(rows=128 * chunk_rows * ranks, columns=256 * columns, depth=64,
                      num_ranks=ranks)  # fmt: skip
    tiles = Tiles(tile_n=256, stages=4, group=most)
    plan = plan_sending(extents, tiles, 132, parts=parts, shares=True)
    assert plan.num_tiles == plan.num_bands * plan.tiles.group * columns * ranks
    assert plan.num_bands * plan.tiles.group == chunk_rows
    found = plan.part_columns()
    assert sum(found) == columns
    assert len(found) == plan.num_parts <= min(parts, columns)
    assert min(found) > 0
    group = plan.tiles.group
    assert sum(plan.part_columns(last=True)) * group == columns * group - plan.num_late
    last_wave = (plan.num_tiles - 1) % 132 + 1
    if ranks == 2:
        assert min(last_wave, group * columns) <= plan.num_late < last_wave + group
    else:
        assert plan.num_late == 0
    scattering = plan_sending(extents, tiles, 132, parts=parts, shares=False)
    assert scattering.num_late == 0


@given(chunk_rows=st.integers(1, 200), most=st.integers(1, 16))
def test_bands_divide_a_ranks_rows(chunk_rows, most):
    rows = band_rows(chunk_rows, most)
    assert 1 <= rows <= most
    assert chunk_rows % rows == 0
    assert all(chunk_rows % more for more in range(rows + 1, min(most, chunk_rows) + 1))


@pytest.mark.parametrize(
    ("collective", "rows", "columns", "depth", "means"),
    [
        ("all_gather", 128, 7168, 4096, "nccl"),
        ("all_gather", 256, 14336, 8192, "peer"),
        ("all_gather", 512, 14336, 8192, "tiles"),
        ("all_gather", 1024, 5120, 8192, "tiles"),
        ("reduce_scatter", 128, 4096, 7168, "nccl"),
        ("reduce_scatter", 256, 8192, 14336, "peer"),
        ("reduce_scatter", 512, 4096, 7168, "peer"),
        ("reduce_scatter", 1024, 4096, 7168, "tiles"),
        ("all_reduce", 128, 8192, 14336, "peer"),
        ("all_reduce", 512, 4096, 7168, "peer"),
        ("all_reduce", 1024, 8192, 5120, "tiles"),
    ],
)
def test_short_matmuls_go_the_way_that_was_fastest_on_two_h200(
    collective, rows, columns, depth, means
):
    extents = Extents(rows=rows, columns=columns, depth=depth, num_ranks=2)
    assert choose_means(collective, extents, H200_RATES).means == means


@pytest.mark.parametrize("empty", ["rows", "columns", "depth"])
def test_what_is_empty_is_the_librarys(empty):
    whole = Extents(rows=512, columns=4096, depth=1024)
    extents = replace(whole, **{empty: 0})
    assert choose_mixed_tiles(whole, H200_RATES, apart=True) is not None
    assert choose_tiles(extents, H200_RATES) is None
    for apart in (False, True):
        assert choose_mixed_tiles(extents, H200_RATES, apart=apart) is None
    for collective in COLLECTIVES:
        shared = replace(extents, num_ranks=2)
        assert choose_means(collective, shared, H200_RATES).means == "nccl"
        times, refused = MatmulModel(H200_RATES).way_times_us(
            Product(collective=collective, extents=shared, dtype="bf16"), (2,), peer_copies=True
        )
        assert "something to multiply" in refused["kernel"]
        assert all(time >= 0 for time in times.values())
