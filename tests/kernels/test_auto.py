"""What megakernel="auto" leaves to library ops since a kernel would do it later."""

import pytest

from distmega.errors import UnsupportedError
from distmega.kernels import whole
from distmega.program.types import Program
from tests.kernels import row_programs
from tests.kernels.h200 import plan_for_h200


def prompt(rows: int, num_keys: int, monkeypatch: pytest.MonkeyPatch, window: int = 0) -> Program:
    """Of 4 query heads, two layers."""
    monkeypatch.setattr(row_programs, "CONTEXT", num_keys)
    return row_programs.prompt(rows, window=window)


@pytest.mark.parametrize("rows", [4, 16])
def test_rows_over_a_short_cache_are_one_kernel(rows, monkeypatch):
    assert plan_for_h200(prompt(rows, 96, monkeypatch), monkeypatch, forced=False).queues


@pytest.mark.parametrize("rows", [4, 16])
def test_rows_over_a_long_cache_are_library_ops_unless_asked_for(rows, monkeypatch):
    program = prompt(rows, 8192, monkeypatch)
    with pytest.raises(UnsupportedError, match="predicted 434 us slower than library ops"):
        plan_for_h200(program, monkeypatch, forced=False)
    assert plan_for_h200(program, monkeypatch, forced=True).queues


def test_a_window_bounds_the_keys_that_count(monkeypatch):
    program = prompt(4, 8192, monkeypatch, window=64)
    assert plan_for_h200(program, monkeypatch, forced=False).queues


def test_more_rows_than_a_kernel_takes_are_refused_before_ops_are_fused(monkeypatch):
    """Fusing attention of 1024 rows in all ways that there are took 27 s of a start."""

    def lower_program(*args: object, **options: object) -> None:
        raise AssertionError("lowered for a kernel")

    monkeypatch.setattr(whole, "lower_program", lower_program)
    with pytest.raises(UnsupportedError, match="the persistent kernel can't do 17 rows"):
        plan_for_h200(row_programs.attending_rows(17), monkeypatch, forced=False)
