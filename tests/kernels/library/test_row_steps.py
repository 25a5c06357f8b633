"""Formulas and norms over rows in one kernel: results under Triton's interpreter, machine code for
sm_90a.
"""

import pytest
import torch

from distmega.hostir.passes.fused_kinds import MAX_READS, MAX_WRITES, NormStep, RowSteps
from distmega.hostir.passes.row_ops import MAX_COLUMNS
from distmega.kernels.library.row_steps import row_strides, run_steps, tile_of
from distmega.program import expr
from tests.forked import run_module
from tests.kernels.ptx import vector_accesses
from tests.kernels.sm90 import REGISTERS, Machine, compile_kernel


def test_interpreted_rows_are_torchs() -> None:
    done = run_module("tests.kernels.library.row_steps_interpreted")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-4


BLOCK = RowSteps(
    steps=(
        expr.parse("a0 + a1"),
        NormStep(norm="layer_norm", x=4, weight=2, bias=3, eps=1e-5),
        expr.parse("gelu(a5) + a4"),
    ),
    outs=(6, 4),
)
"""Of two tensors of rows and two vectors."""


def code_of(columns: int, plan: RowSteps = BLOCK, whole: int = 2, vectors: int = 2) -> Machine:
    """For whole operands and vectors behind them, all bf16."""
    rows, padded, warps = tile_of(512, columns, 132)
    num, outs = whole + vectors, len(plan.outs)
    types: dict[str, object] = {f"x{i}": "*bf16" for i in range(num)}
    types |= {f"y{i}": "*bf16" for i in range(outs)}
    types |= {"outer_strides": ("i32",) * num, "inner_strides": ("i32",) * num}
    types |= dict.fromkeys(("num_rows", "num_inner", "num_columns"), "i32")
    types["column_strides"] = ("i32",) * num
    constants: dict[str, object] = {
        "plan": plan, "num_inputs": num, "rows": rows, "padded": padded, "early": True,
    }  # fmt: skip
    return compile_kernel(run_steps, types, constants, warps, None)


@pytest.mark.parametrize("columns", [64, 1000, 4096, MAX_COLUMNS])
def test_rows_stay_in_registers(columns: int) -> None:
    code = code_of(columns)
    assert code.stack_bytes == 0
    assert code.ptx.count("griddepcontrol.wait") == 1
    _, _, warps = tile_of(512, columns, 132)
    assert code.registers * 32 * warps <= REGISTERS


def test_rows_that_lie_together_are_read_in_wide_words() -> None:
    rows, padded, warps = tile_of(512, 4096, 132)
    types: dict[str, object] = dict.fromkeys(("x0", "x1", "x2", "x3", "y0", "y1"), "*bf16")
    types |= dict.fromkeys(("num_rows", "num_inner", "num_columns"), "i32")
    types["inner_strides"] = ("i32",) * 4
    constants: dict[str, object] = {
        "plan": BLOCK, "num_inputs": 4, "rows": rows, "padded": padded, "early": True,
        "outer_strides": (0,) * 4, "column_strides": (1,) * 4,
    }  # fmt: skip
    multiples = ("num_columns", "inner_strides")
    code = compile_kernel(run_steps, types, constants, warps, None, multiples)
    assert vector_accesses(code.ptx)


def test_the_most_operands_and_results_stay_in_registers() -> None:
    text = " + ".join(f"a{i}" for i in range(MAX_READS))
    steps = [expr.parse(text), NormStep(norm="softmax", x=MAX_READS)]
    steps += [expr.parse(f"a{MAX_READS + 1} * a{i}") for i in range(MAX_WRITES - 1)]
    first = MAX_READS + 1
    plan = RowSteps(steps=tuple(steps), outs=tuple(range(first, first + MAX_WRITES)))
    assert code_of(2048, plan, whole=MAX_READS, vectors=0).stack_bytes == 0


def test_rows_of_any_strides_that_dims_before_have_in_common() -> None:
    x = torch.zeros(2, 3, 5, 8)
    assert row_strides(x) == (40, 8, 1)
    assert row_strides(x.transpose(2, 3)) == (40, 1, 8)
    assert row_strides(x[:, :, :1].expand(2, 3, 5, 8)) == (40, 0, 1)
    assert row_strides(x[:1, :1, :1].expand(2, 3, 5, 8)) == (0, 0, 1)
    assert row_strides(x.transpose(0, 1)) is None
    assert row_strides(x[0, 0]) == (0, 8, 1)


def test_short_rows_are_several_a_program_where_there_are_many() -> None:
    assert tile_of(100, 128, 132) == (1, 128, 4)
    assert tile_of(100000, 128, 132) == (8, 128, 4)
    assert tile_of(1000, 4096, 132) == (1, 4096, 8)
    assert tile_of(1000, 8192, 132) == (1, 8192, 16)
