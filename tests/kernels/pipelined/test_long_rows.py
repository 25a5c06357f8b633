"""Rows longer than a tile: results under Triton's interpreter, which programs they are given, and
launches on a stand-in for a GPU.
"""

import pytest
import torch

from distmega.kernels.pipelined.choices import (
    GpuModel,
    Traffic,
    plain_row_choices,
    row_choices,
    time_us,
)
from distmega.kernels.pipelined.norms import norms
from tests.forked import run_module
from tests.kernels.offline import offline

H200 = GpuModel(num_sms=132, bandwidth_bytes_per_us=4.3e6)


@pytest.mark.parametrize(
    "dtypes",
    [["bfloat16"], pytest.param(["float16", "float32"], marks=pytest.mark.nightly)],
)
def test_interpreted_rows_are_those_of_float64(dtypes):
    """Of any length and alignment, with what is no number and infinities."""
    done = run_module("tests.kernels.pipelined.long_rows_interpreted", *dtypes)
    assert done.returncode == 0, done.stderr
    assert not done.stdout


@pytest.mark.parametrize("columns", [32000, 50257, 128256])
def test_few_rows_are_shared(columns):
    """So that more SMs than rows work; of many rows each has a program."""
    for rows in (1, 8, 4096):
        traffic = Traffic(in_bytes=2, out_bytes=2, num_elements=rows * columns)
        choice = plain_row_choices(rows, columns, traffic, H200)[0]
        assert (choice.parts > 1) == (rows < H200.num_sms)
        assert choice.parts * choice.tile[1] >= columns or choice.parts == 1


MEASURED = {
    (1, 50257): (2.6, [2.6, 2.8, 2.8, 3.2, 3.5, 4.1, 10.3, 9.8, 9.0, 9.3]),
    (8, 50257): (3.2, [3.2, 3.4, 3.8, 3.5, 3.8, 4.4, 10.4, 9.8, 9.0, 9.4]),
    (64, 50257): (7.2, [7.8, 7.7, 8.2, 7.6, 9.0, 7.2, 10.6, 9.9, 9.2, 9.8]),
    (256, 50257): (18.5, [23.4, 20.5, 24.2, 22.2, 26.7, 26.0, 22.4, 19.7, 18.5, 19.2]),
    (1, 128256): (2.8, [2.8, 2.9, 2.8, 3.3, 3.5, 4.3, 25.3, 21.7, 18.7, 17.4]),
    (8, 128256): (4.1, [4.1, 4.1, 4.2, 4.4, 4.8, 4.8, 25.5, 22.0, 19.0, 17.9]),
    (64, 128256): (11.9, [14.5, 12.7, 14.2, 12.7, 14.4, 13.5, 28.2, 23.9, 20.0, 18.7]),
    (256, 128256): (48.6, [57.9, 51.7, 56.3, 52.3, 58.1, 58.2, 62.8, 54.7, 51.3, 48.8]),
}
"""Rows and columns of a softmax in bf16 -> us on an H200 of the best of all that were tried and of
the choices in VARIANTS' order.
"""
VARIANTS = [
    (shared, num_warps, per_thread)
    for shared, all_warps in ((True, (4, 8, 16)), (False, (8, 16)))
    for num_warps in all_warps
    for per_thread in (16, 32)
]
"""Whether programs share a row, warps of each, elements of a thread."""


@pytest.mark.parametrize("size", MEASURED)
def test_choice_is_near_the_best_measured(size):
    """Within a tenth; its prediction within an eighth."""
    traffic = Traffic(in_bytes=2, out_bytes=2, num_elements=size[0] * size[1])
    choice = row_choices(*size, traffic, H200)[0]
    assert choice in plain_row_choices(*size, traffic, H200)
    best, times = MEASURED[size]
    taken = times[VARIANTS.index((choice.parts > 1, choice.num_warps, choice.per_thread))]
    assert taken <= 1.1 * best
    predicted = time_us(choice, size[0] * choice.parts, traffic, H200)
    assert abs(predicted / taken - 1) < 1 / 8


def operands(rows: int, row: int, columns: int, dtype: torch.dtype) -> norms.Operands:
    x = torch.empty(rows, row, dtype=dtype)[:, :columns]
    y = torch.empty(rows, columns, dtype=dtype)
    return x, None, None, None, y, None


def test_every_choice_takes_what_it_is_launched_with(monkeypatch: pytest.MonkeyPatch):
    with offline(monkeypatch) as launched:
        given = operands(8, 20001, 20001, torch.bfloat16)
        family = norms.family_of("softmax", 0.0, given)
        assert family is not None
        for parts in (1, 3):
            family.launch(next(c for c in family.choices if (c.parts > 1) == (parts > 1)))(given)
        assert [code.ptx.count("griddepcontrol.wait") for code in launched] == [1, 1, 1]
        assert all(".v4.b32" in code.ptx for code in launched)


@pytest.mark.parametrize(
    ("row", "columns", "dtype", "expected"),
    [
        (20000, 20000, torch.bfloat16, (True, True)),
        (20001, 20001, torch.bfloat16, (False, True)),
        (20009, 20001, torch.float16, (False, True)),
        (20004, 20001, torch.bfloat16, (False, False)),
        (20004, 20000, torch.float32, (True, True)),
    ],
)
def test_rows_that_lie_as_the_results_are_wide(monkeypatch, row, columns, dtype, expected):
    with offline(monkeypatch):
        family = norms.family_of("softmax", 0.0, operands(3, row, columns, dtype))
        assert family is not None
        choice = next(c for c in family.choices if c.parts == 1)
        (spec,) = family.launch(choice).rest[-1:]
    assert (spec.even, spec.x_wide) == expected
    assert spec.loads * spec.threads * spec.vector == choice.tile[1] or not spec.x_wide
