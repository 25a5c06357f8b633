"""Which products are streamed and by which tiles, beside what was measured."""

import pytest

from distmega.kernels.library.streamed_tiles import (
    LEAST_ROWS,
    LEAST_STAGES,
    MOST_ROWS,
    MOST_WAVES,
    MOST_WIDTH,
    PARTS,
    WIDTHS,
    StreamedProduct,
    boxes_of,
    choose_streamed,
    make_tiles,
    num_programs,
)
from tests.kernels.sm90 import SHARED_BYTES

NUM_SMS = 132
MEASURED = {
    (17, 4096, 4096, 1): (
        {(64, 2): 13.7, (96, 2): 13.8, (64, 1): 13.9, (32, 1): 14.0, (80, 2): 14.2},
        15.3,
    ),
    (64, 4096, 4096, 1): (
        {(64, 2): 14.4, (32, 1): 14.8, (64, 1): 15.0, (96, 2): 15.1, (80, 2): 15.2},
        16.1,
    ),
    (32, 6144, 4096, 1): (
        {(64, 1): 18.1, (128, 2): 18.6, (48, 1): 18.9, (96, 2): 19.1, (80, 1): 19.1},
        20.5,
    ),
    (17, 4096, 12288, 1): (
        {(64, 2): 29.5, (96, 2): 30.3, (80, 2): 30.4, (128, 4): 30.4, (32, 1): 31.6},
        31.6,
    ),
    (64, 4096, 12288, 1): (
        {(64, 2): 31.2, (32, 1): 32.0, (80, 2): 32.5, (128, 4): 32.8, (96, 2): 32.9},
        34.7,
    ),
    (32, 2048, 2048, 1): (
        {(64, 2): 6.9, (64, 4): 7.2, (32, 2): 7.5, (96, 4): 7.7, (32, 1): 7.7},
        8.3,
    ),
    (32, 3072, 8192, 1): (
        {(64, 2): 18.2, (128, 4): 18.8, (48, 2): 18.9, (96, 4): 19.1, (80, 2): 19.2},
        20.6,
    ),
    (32, 8192, 28672, 1): (
        {(64, 1): 113.6, (128, 2): 114.5, (256, 4): 118.7, (96, 1): 119.1, (192, 2): 120.5},
        116.4,
    ),
    (32, 12288, 4096, 2): ({(96, 1): 49.9, (128, 1): 49.9, (112, 1): 51.6}, 54.2),
    (32, 14336, 4096, 2): ({(112, 1): 57.9, (128, 1): 61.5}, 62.2),
    (32, 6144, 2048, 2): ({(64, 1): 15.7, (48, 1): 16.8, (80, 1): 18.1}, 19.9),
    (32, 28672, 8192, 2): ({(112, 1): 214.6, (128, 1): 220.9}, 223.4),
    (32, 6144, 4096, 2): ({(64, 1): 27.2, (48, 1): 28.1, (80, 1): 31.5}, 32.7),
    (64, 151936, 4096, 1): (
        {(192, 1): 292.4, (128, 1): 296.5, (96, 1): 299.5, (256, 1): 305.5, (112, 1): 306.7},
        311.5,
    ),
    (64, 128256, 2048, 1): (
        {(128, 1): 132.1, (96, 1): 132.9, (256, 1): 133.5, (112, 1): 135.3, (192, 1): 138.0},
        145.0,
    ),
    (32, 151936, 1024, 1): ({(128, 1): 80.1, (96, 1): 80.5, (192, 1): 80.7, (256, 1): 81.3}, 83.2),
    (64, 25600, 5120, 2): (
        {(112, 1): 128.9, (128, 1): 132.8, (64, 1): 135.0, (96, 1): 152.0},
        141.8,
    ),
}
"""Rows, columns, depth, weights -> us behind a norm on an H200, of one weight with the norm of its
sums behind; of the last four two products, no norms: by columns of a tile and parts of the sums,
the best five, and of torch's product and what follows from it, whole or in parts."""


@pytest.mark.parametrize("extents", MEASURED)
def test_the_choice_is_near_the_best_measured(extents: tuple[int, int, int, int]) -> None:
    times, library_us = MEASURED[extents]
    rows, columns, depth, halves = extents
    product = StreamedProduct(rows=rows, columns=columns, depth=depth, halves=halves)
    tiles = choose_streamed(product, NUM_SMS, PARTS if halves == 1 else (1,))
    assert tiles is not None
    found_us = times[sum(tiles.boxes), tiles.parts]
    assert found_us <= 1.07 * min(times.values())
    assert found_us < 1.02 * library_us


@pytest.mark.parametrize(
    ("rows", "columns", "depth"),
    [
        (LEAST_ROWS - 1, 4096, 12288),
        (MOST_ROWS + 1, 4096, 12288),
        (32, 1024, 3072),
        (32, 600000, 4096),
        (32, 4096, 4100),
        (32, 50257, 768),
    ],
)
def test_others_are_the_librarys(rows: int, columns: int, depth: int) -> None:
    """Too few rows or many, weights that are small, more tiles than an SM has in sixteen turns,
    rows that TMA can't address, results that no thread writes 8 at a time.
    """
    product = StreamedProduct(rows=rows, columns=columns, depth=depth)
    assert choose_streamed(product, NUM_SMS, PARTS) is None


def test_few_columns_with_long_sums_are_streamed_in_parts_alone() -> None:
    product = StreamedProduct(rows=32, columns=2048, depth=8192)
    assert choose_streamed(product, NUM_SMS) is None
    in_parts = choose_streamed(product, NUM_SMS, PARTS)
    assert in_parts is not None
    assert in_parts.parts > 1


def test_parts_are_even() -> None:
    product = StreamedProduct(rows=64, columns=2048, depth=8192 + 64)
    assert choose_streamed(product, NUM_SMS, (2, 4)) is None


def test_an_sm_holds_the_ring_of_any_tile() -> None:
    for halves in (1, 2):
        for width in WIDTHS:
            tiles = make_tiles(halves, width, 1)
            slot_bytes = 2 * tiles.terms * (halves * width + MOST_ROWS)
            assert sum(tiles.boxes) == width == sum(boxes_of(width))
            if halves * width <= MOST_WIDTH:
                assert tiles.stages >= LEAST_STAGES
                assert tiles.stages * (slot_bytes + 8) <= SHARED_BYTES


def test_an_sm_has_a_bounded_number_of_programs() -> None:
    product = StreamedProduct(rows=32, columns=530_000, depth=4096)
    tiles = choose_streamed(product, NUM_SMS)
    assert tiles is not None
    assert num_programs(530_000, tiles) <= MOST_WAVES * NUM_SMS
