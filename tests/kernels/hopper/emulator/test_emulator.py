"""Queues of the kernel of one row, emulated: they compute what torch does, in any order of SMs."""

import pytest
import torch

from tests.gpu.test_whole import PROGRAMS, program_of, random_values
from tests.kernels.hopper.emulator.emulating import case_of, error, expected

MOST_ERROR = 0.01
"""Of what is rounded to bf16 between ops."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_calls_in_any_order_of_sms_give_what_torch_does(name: str):
    """Two equal calls give equal bits, a third one with another input its own."""
    program = program_of(name, "bf16")
    values = random_values(program)
    case = case_of(program, num_sms=5)
    x = values["x"]
    inputs = [{"x": x}, {"x": x}, {"x": -0.5 * x}]
    exact = expected(program, values, inputs)
    (out,) = program.outputs
    firsts = []
    for seed in range(3):
        found = [each[0].outputs[out] for each in case.emulate(values, inputs, seed)]
        firsts.append(found[0])
        assert torch.equal(found[0], found[1])
        for one, wanted in zip(found, exact, strict=True):
            assert error(one, wanted[out]) < MOST_ERROR
    assert all(torch.equal(one, firsts[0]) for one in firsts)
