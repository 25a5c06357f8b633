"""Which products are streamed and by which tiles, beside what was measured."""

import pytest

from distmega.kernels.library.streamed_tiles import (
    LEAST_ROWS,
    LEAST_STAGES,
    MOST_ROWS,
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
        {(64, 2): 13.8, (96, 2): 14.0, (64, 1): 14.2, (32, 1): 14.3, (80, 2): 14.3},
        15.4,
    ),
    (64, 4096, 4096, 1): (
        {(32, 1): 15.4, (64, 2): 15.7, (64, 1): 16.0, (96, 2): 16.4, (80, 2): 16.6},
        16.0,
    ),
    (32, 6144, 4096, 1): (
        {(64, 1): 19.1, (128, 2): 19.2, (96, 2): 19.4, (48, 1): 19.6, (112, 2): 19.9},
        20.6,
    ),
    (17, 4096, 12288, 1): (
        {(64, 2): 30.0, (96, 2): 30.6, (80, 2): 30.8, (128, 4): 31.1, (32, 1): 31.9},
        32.4,
    ),
    (64, 4096, 12288, 1): (
        {(32, 1): 32.6, (64, 2): 32.8, (80, 2): 34.2, (96, 2): 34.4, (64, 1): 34.9},
        35.0,
    ),
    (32, 2048, 2048, 1): (
        {(64, 2): 6.9, (64, 4): 7.1, (32, 2): 7.4, (96, 4): 7.6, (48, 2): 7.7},
        8.4,
    ),
    (32, 3072, 8192, 1): (
        {(64, 2): 18.5, (48, 2): 18.9, (128, 4): 19.2, (80, 2): 19.4, (96, 4): 19.5},
        20.5,
    ),
    (32, 8192, 28672, 1): (
        {(64, 1): 115.8, (128, 2): 116.5, (96, 1): 121.3, (256, 4): 122.7, (160, 2): 123.2},
        121.4,
    ),
    (32, 12288, 4096, 2): ({(96, 1): 51.9, (128, 1): 52.3, (112, 1): 54.0}, 55.8),
    (32, 14336, 4096, 2): ({(112, 1): 60.4, (128, 1): 61.0}, 68.3),
    (32, 6144, 2048, 2): ({(64, 1): 16.6, (48, 1): 17.5, (80, 1): 19.4}, 20.0),
    (32, 28672, 8192, 2): ({(112, 1): 221.8, (128, 1): 242.1}, 249.7),
    (32, 6144, 4096, 2): ({(64, 1): 28.6, (48, 1): 29.3, (80, 1): 33.3}, 33.3),
}
"""Rows, columns, depth, weights -> us behind a norm on an H200, of one weight with the norm of its
sums behind: by columns of a tile and parts of the sums, the best five, and of torch's product and
what follows from it, whole or in parts."""


@pytest.mark.parametrize("extents", MEASURED)
def test_the_choice_is_near_the_best_measured(extents: tuple[int, int, int, int]) -> None:
    times, library_us = MEASURED[extents]
    rows, columns, depth, halves = extents
    product = StreamedProduct(rows=rows, columns=columns, depth=depth, halves=halves)
    tiles = choose_streamed(product, NUM_SMS, PARTS if halves == 1 else (1,))
    assert tiles is not None
    found_us = times[sum(tiles.boxes), tiles.parts]
    assert found_us <= 1.1 * min(times.values())
    assert found_us < 1.02 * library_us


@pytest.mark.parametrize(
    ("rows", "columns", "depth"),
    [
        (LEAST_ROWS - 1, 4096, 12288),
        (MOST_ROWS + 1, 4096, 12288),
        (32, 1024, 3072),
        (32, 151936, 4096),
        (32, 4096, 4100),
    ],
)
def test_others_are_the_librarys(rows: int, columns: int, depth: int) -> None:
    """Too few rows or many, weights that are small, more tiles than an SM has in two turns,
    rows that TMA can't address.
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


def test_an_sm_has_two_programs_at_most() -> None:
    product = StreamedProduct(rows=32, columns=12288, depth=4096, halves=2)
    for num_sms in (70, 100, 132):
        tiles = choose_streamed(product, num_sms)
        assert tiles is not None
        assert num_programs(12288, tiles) <= 2 * num_sms
