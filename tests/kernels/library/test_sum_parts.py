"""Into how many parts sums are cut, beside what was measured."""

import pytest

from distmega.kernels.library import sum_parts
from distmega.kernels.library.streamed_tiles import PARTS, StreamedProduct, choose_streamed
from distmega.kernels.library.sum_parts import choose_sum_parts

MEASURED = {
    (64, 1024, 4096): (9.6, 8.5, 8.2),
    (64, 2048, 2048): (9.1, 7.9, 8.0),
    (32, 2048, 8192): (15.8, 14.5, 14.9),
    (64, 2048, 8192): (16.3, 14.7, 15.7),
    (64, 3072, 8192): (21.4, 19.9, 20.7),
    (32, 4096, 4096): (15.5, 14.6, 15.3),
    (64, 4096, 4096): (15.3, 15.7, 16.2),
    (64, 5120, 4096): (17.3, 18.1, 19.3),
    (64, 5120, 14336): (47.3, 45.6, 46.2),
    (128, 8192, 14336): (66.4, 71.3, 77.2),
}
"""Rows, columns and terms -> us of a product and the norm behind it on an H200, of sums that are
whole, in two parts and in four."""
NUM_SMS = 132


@pytest.mark.parametrize("extents", MEASURED)
def test_the_choice_of_the_librarys_is_near_the_best_measured(extents, monkeypatch):
    monkeypatch.setattr(sum_parts, "choose_streamed", lambda *given: None)
    times = dict(zip((1, 2, 4), MEASURED[extents], strict=True))
    assert times[choose_sum_parts(*extents, NUM_SMS)] <= 1.03 * min(times.values())


@pytest.mark.parametrize(
    "extents",
    [(7, 2048, 8192), (129, 2048, 8192), (64, 960, 8192), (64, 16384, 8192), (64, 2048, 960),
     (64, 2048, 32768), (64, 2048, 8256)],
)  # fmt: skip
def test_what_was_not_measured_stays_whole(extents):
    assert choose_sum_parts(*extents, NUM_SMS) == 1


@pytest.mark.parametrize("extents", [(32, 4096, 12288), (64, 4096, 4096), (33, 2048, 8192)])
def test_products_that_are_streamed_have_the_parts_of_their_tiles(extents):
    rows, columns, depth = extents
    product = StreamedProduct(rows=rows, columns=columns, depth=depth)
    tiles = choose_streamed(product, NUM_SMS, PARTS)
    assert tiles is not None
    assert choose_sum_parts(*extents, NUM_SMS) == tiles.parts


def test_products_by_small_tiles_stay_whole():
    assert choose_sum_parts(64, 1024, 1024, NUM_SMS) == 1
