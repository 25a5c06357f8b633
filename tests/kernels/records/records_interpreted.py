"""Runs the kernel of records under Triton's interpreter, in a process of its own: the interpreter
is chosen before Triton is imported. Prints for each program what differs, "" if nothing does.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from triton import language as tl
from triton.runtime import interpreter

from distmega.kernels.machines import CPU
from distmega.kernels.megakernel import compile_megakernel
from distmega.kernels.pipelined.pointwise import formula
from distmega.kernels.records import formulas, products, waits
from distmega.kernels.records.runner import RecordRunner
from distmega.kernels.whole import plan_whole
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.localize import localize
from distmega.sharding.planner import plan_program
from tests.hostir.threads import ThreadCommunicator, Wires
from tests.kernels.records.memory import allocate_tensors
from tests.kernels.records.programs import expected_of, program_of, tolerance, values_of
from tests.kernels.ugraphs.interpreted import mended_interpreter


def by_torch(function: Callable[..., Tensor]) -> Callable[..., tl.tensor]:
    """A function of libdevice, which the interpreter lacks, on what the interpreter calculates
    with.
    """

    def run(*xs: tl.tensor) -> tl.tensor:
        data = function(*(torch.from_numpy(x.handle.data) for x in xs)).numpy()
        return tl.tensor(interpreter.TensorHandle(data, xs[0].dtype), xs[0].type)

    return run


def clock() -> tl.tensor:
    """In place of one in PTX."""
    now = np.array([time.monotonic_ns()], dtype=np.int64)
    return tl.tensor(interpreter.TensorHandle(now, tl.int64), tl.int64)


def reached(counter: tl.tensor, target: tl.tensor, scope: str) -> tl.tensor:
    """Likewise: one look."""
    return (tl.load(counter) >= target).to(tl.int32)


NAMES = "sin", "cos", "erf", "exp", "log", "log2", "log10", "sqrt", "floor", "tanh", "pow"
DEVICE = SimpleNamespace(**{name: by_torch(getattr(torch, name)) for name in NAMES})


@contextmanager
def interpreted() -> Iterator[None]:
    """What the kernel needs besides to run."""
    with (
        mended_interpreter(),
        patch.object(formula, "libdevice", DEVICE),
        patch.object(formulas, "libdevice", DEVICE),
        patch.object(products, "fetch", lambda pointers: None),
        patch.object(waits, "reached", reached),
    ):
        yield


def runner_of(
    program: Program, num_sms: int, timeout_s: float = 2.0
) -> tuple[RecordRunner, dict[str, Tensor]]:
    """A runner of the program, and its tensors by name."""
    mesh = DeviceMesh(tp=1)
    local = localize(plan_program(program, mesh, CPU))
    whole = plan_whole(local, ThreadCommunicator(mesh, 0, Wires(mesh)), torch.device("cpu"))
    layouts = whole.weights, whole.states
    kernel = compile_megakernel(
        whole.segment, mesh, num_sms=num_sms, weights=layouts[0], states=layouts[1]
    )
    arenas, tensors = allocate_tensors(kernel.segment, layouts)
    runner = RecordRunner(
        kernel, rank=0, weights_arena=arenas[0], state_arena=arenas[1], timeout_s=timeout_s
    )
    return runner, tensors


def difference(program: Program) -> str:
    """From what torch gives; on one SM, since the interpreter runs SMs one behind the other."""
    runner, tensors = runner_of(program, num_sms=1)
    values = values_of(program)
    for name, x in values.items():
        tensors[name].copy_(x)
    runner.launch(tensors)
    expected = expected_of(program, values)
    for name in program.outputs:
        most = tolerance(program, name)
        try:
            torch.testing.assert_close(
                tensors[name], expected[name], rtol=most, atol=most, equal_nan=True
            )
        except AssertionError as error:
            return f"{name}: {error}".replace("\n", " ")
    return ""


if __name__ == "__main__":
    with interpreted():
        for argument in sys.argv[1:]:
            kind, _, dtype = argument.partition(":")
            print(f"{argument} {difference(program_of(kind, dtype))}", flush=True)
