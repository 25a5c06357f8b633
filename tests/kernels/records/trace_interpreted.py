"""The timeline of the kernel of records under Triton's interpreter, in a process of its own. Prints
what the spans say, a line each, and whether the traced launch gave what the other gave.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

from unittest.mock import patch

import torch

from distmega.kernels.records import kernel
from tests.kernels.records.programs import program_of, values_of
from tests.kernels.records.records_interpreted import clock, interpreted, runner_of


def main() -> None:
    """On one SM, for which nobody signals."""
    program = program_of("odd_gate", "f32")
    runner, tensors = runner_of(program, num_sms=1)
    for name, x in values_of(program).items():
        tensors[name].copy_(x)
    runner.launch(tensors)
    (out,) = program.outputs
    expected = tensors[out].clone()
    tensors[out].zero_()
    for one in runner.trace_launch(tensors):
        task = one.args.get("task", "")
        print(f"{one.process}|{one.track}|{one.name}|{task}|{one.start_us}|{one.duration_us}")
    print(torch.equal(tensors[out], expected))


if __name__ == "__main__":
    with interpreted(), patch.object(kernel, "own_clock", clock):
        main()
