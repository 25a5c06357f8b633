"""Rows of experts added up in one pass: results under Triton's interpreter, machine code for
sm_90a, and that ops of groups are done by kernels.
"""

import pytest
import torch
from torch import Tensor

from distmega.kernels.library import device_ops, late
from distmega.kernels.library.device_ops import KernelOps
from distmega.kernels.library.weighted_rows import COLUMNS, WARPS, add_choices
from distmega.program.builder import ProgramBuilder
from distmega.program.ops.experts import route_values, scatter_values
from tests.forked import run_module
from tests.kernels.sm90 import compile_kernel


def test_interpreted_sums_are_torchs_to_the_last_bit() -> None:
    done = run_module("tests.kernels.library.weighted_rows_interpreted")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 0


POINTWISE = device_ops.pointwise_results


def test_rows_are_read_in_wide_words() -> None:
    types = {"y": "*bf16", "weights": "*fp32", "slots": "*i32", "starts": "*i32", "out": "*bf16"}
    types |= dict.fromkeys(("n", "first", "stop"), "i32")
    constants = {"num_choices": 8, "columns": COLUMNS}
    divisible = ("y", "out", "n")
    code = compile_kernel(add_choices, types, constants, WARPS, None, divisible)
    assert code.stack_bytes == 0
    assert code.ptx.count("ld.global.v4.b32") == 8
    assert code.ptx.count("st.global.v4.b32") == 1


def test_groups_are_weighted_and_mixed_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A formula over experts' rows and their weighted sum, each in one call."""
    calls: list[str] = []

    def add(*given: Tensor) -> Tensor:
        calls.append("sum")
        found: Tensor = scatter_values(*given)
        return found

    def evaluate(*given: object) -> tuple[Tensor, ...]:
        calls.append("formula")
        return POINTWISE(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(late, "add_weighted_rows", add, raising=False)
    monkeypatch.setattr(device_ops, "pointwise_results", evaluate)
    b = ProgramBuilder("groups")
    y, gates = b.input("y", (12, 8)), b.input("gates", (12, 8))
    weights, ids = b.input("weights", (6, 2)), b.input("ids", (6, 2), dtype="i32")
    routing = b.route(ids, 3)
    mixed = b.grouped_pointwise("silu(a0) * a1", gates, y, routing=routing)
    _, formula, total = b.build(b.scatter_add(mixed, weights, routing)).ops
    ops = KernelOps()
    monkeypatch.setattr(ops, "_has_tiles", True)
    torch.manual_seed(0)
    _, starts, _, positions = route_values(torch.rand(6, 3).argsort(1)[:, :2].int(), 3)
    rows = torch.randn(12, 8), torch.randn(12, 8)
    (found,) = ops.compile(formula, {})([*rows, starts])
    torch.testing.assert_close(found, torch.nn.functional.silu(rows[0]) * rows[1])
    share = torch.rand(6, 2)
    (out,) = ops.compile(total, {})([found, share, positions, starts])
    exact = (share[..., None] * found[positions.long()]).sum(1)
    torch.testing.assert_close(out, exact)
    assert calls == ["formula", "sum"]
