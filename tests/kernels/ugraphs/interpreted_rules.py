"""Runs compiled programs whose ops are rules' kernels under Triton's interpreter, in a process of
its own. Of each case it prints the rules, how many kernels ran, and the largest error against the
program in float64, as a share of the largest value.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import sys
from dataclasses import replace
from unittest.mock import patch

import torch
from triton.runtime import interpreter

from distmega.compiled import CompiledProgram
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.hostir.library.ops import compile_op, op_operands
from distmega.kernels.machines import CPU
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.planner import plan_program
from distmega.superopt.programs import read_case
from distmega.superopt.rules import shipped_rules
from tests.kernels.ugraphs.interpreted import mended_interpreter


def exact_outputs(program: Program, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The program op by op, in float64."""
    wide = replace(program, tensors=tuple(replace(t, dtype="f64") for t in program.tensors))
    values = {name: x.double() for name, x in inputs.items()}
    for op in wide.ops:
        results = compile_op(op, {})([values[name] for name in op_operands(op)])
        values.update(zip((a.tensor for a in op.writes), results, strict=True))
    return [values[name] for name in program.outputs]


def report(case: str) -> str:
    """A line about a case."""
    program, mesh = read_case(case), DeviceMesh(tp=1)
    run = CompiledProgram(
        plan_program(program, mesh, CPU), SingleCommunicator(mesh), rules=shipped_rules()
    )
    torch.manual_seed(0)
    inputs = {t.name: torch.randn(t.shape).bfloat16() for t in program.tensors if t.role != "temp"}
    launched: list[object] = []
    grid = interpreter.GridExecutor.__call__

    def counted(self: interpreter.GridExecutor, *args: object, **options: object) -> object:
        launched.append(self.fn)
        return grid(self, *args, **options)

    with patch.object(interpreter.GridExecutor, "__call__", counted):
        found = run(inputs)
    error = max(
        float((found[name].double() - wanted).abs().max() / wanted.abs().max())
        for name, wanted in zip(program.outputs, exact_outputs(program, inputs), strict=True)
    )
    return f"{','.join(run.stats.rules)} {len(launched)} {error:.2e}"


if __name__ == "__main__":
    with mended_interpreter():
        for case in sys.argv[1:]:
            print(report(case), flush=True)
