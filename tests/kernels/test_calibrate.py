"""What is made of measured times; the measuring itself needs GPUs."""

import pytest

pytest.importorskip("triton")
from distmega.kernels.gemm import calibrate


def test_a_line_through_two_measurements():
    fixed, rate = calibrate._line(12.0, 112.0, 1e6, 11e6)
    assert rate == pytest.approx(1e5)
    assert fixed == pytest.approx(2.0)


def test_noise_makes_no_rate_negative():
    fixed, rate = calibrate._line(12.0, 11.0, 1e6, 2e6)
    assert rate > 0
    assert fixed > 0


@pytest.mark.parametrize(
    ("both", "factor"), [(100.0, 1.0), (90.0, 1.0), (140.0, 2.0), (120.0, 1.5)]
)
def test_how_much_two_things_slow_each_other_down(both: float, factor: float):
    assert calibrate._factor(100.0, 40.0, both) == pytest.approx(factor)
