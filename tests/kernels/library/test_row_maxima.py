"""The largest of long rows: results under Triton's interpreter, machine code for sm_90a, and which
rows the kernels are given.
"""

import pytest
import torch
from torch import Tensor

from distmega.kernels.library import device_ops, late, row_maxima
from distmega.kernels.library.device_ops import KernelOps
from distmega.kernels.library.row_maxima import COLUMNS, WARPS, find_in_keys, find_in_parts, takes
from distmega.program.builder import ProgramBuilder
from tests.forked import run_module
from tests.kernels.sm90 import compile_kernel


def test_interpreted_maxima_are_torchs_with_ties_and_no_numbers() -> None:
    done = run_module("tests.kernels.library.row_maxima_interpreted")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 0


def test_parts_are_read_in_wide_words() -> None:
    types = {"x": "*bf16", "keys": "*i64", "n": "i32", "row_stride": "i32"}
    divisible = ("x", "keys", "n", "row_stride")
    code = compile_kernel(find_in_parts, types, {"columns": COLUMNS}, WARPS, None, divisible)
    assert code.stack_bytes == 0
    assert code.ptx.count("ld.global.v4.b32") == COLUMNS // (WARPS * 32 * 8)


def test_keys_of_a_row_spill_nothing() -> None:
    types = {"x": "*bf16", "keys": "*i64", "values": "*bf16", "indices": "*i64"}
    types |= dict.fromkeys(("row_stride", "base", "num_parts"), "i32")
    assert compile_kernel(find_in_keys, types, {"parts": 64}, 1, None).stack_bytes == 0


@pytest.mark.parametrize(
    ("shape", "num_valid", "expected"),
    [
        ((32, 128256), 128256, True),
        ((32, 128256), COLUMNS, False),
        ((2048, 128256), 128256, False),
        ((128256,), 128256, False),
    ],
)
def test_long_rows_alone_are_taken(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], num_valid: int, expected: bool
) -> None:
    monkeypatch.setattr(row_maxima, "has_tiles", lambda device: True)
    assert takes(torch.empty(shape, device="meta"), num_valid) is expected


def test_a_programs_argmax_is_found_by_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []

    def find(x: Tensor, base: int) -> tuple[Tensor, Tensor]:
        calls.append((*x.shape, base))
        value, index = x.max(-1)
        return value, index + base

    monkeypatch.setattr(row_maxima, "find_largest", find)
    monkeypatch.setattr(row_maxima, "takes", lambda x, num_valid: num_valid > 4)
    monkeypatch.setattr(device_ops.late, "compile_argmax", row_maxima.compile_argmax, raising=False)
    assert late is device_ops.late
    ops = KernelOps()
    monkeypatch.setattr(ops, "_has_tiles", True)
    for width, expected in ((9, [(3, 9, 0)]), (4, [])):
        calls.clear()
        b = ProgramBuilder("tokens")
        (op,) = b.build(b.argmax(b.input("x", (3, width)))).ops
        x = torch.randn(3, width)
        found = ops.compile(op, {})([x])
        torch.testing.assert_close(tuple(found), tuple(x.max(-1)))
        assert calls == expected
