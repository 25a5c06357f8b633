"""Rows longer than a tile: results under Triton's interpreter, which programs they are given, and
launches on a stand-in for a GPU.
"""

import pytest
import torch

from distmega.kernels.pipelined.choices import GpuModel, Traffic, plain_row_choices
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
        choice = next(c for c in family.choices if c.parts == 1 and not c.stages)
        (spec,) = family.launch(choice).rest[-1:]
    assert (spec.even, spec.x_wide) == expected
    assert spec.loads * spec.threads * spec.vector == choice.tile[1] or not spec.x_wide
