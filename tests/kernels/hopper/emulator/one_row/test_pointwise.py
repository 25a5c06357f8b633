"""Pointwise work on rows, emulated from queues: torch's values, in any order of SMs."""

import pytest
import torch

from tests.kernels.hopper.emulator.emulating import case_of, error, expected
from tests.kernels.row_programs import PROGRAMS, attending, random_values

MOST_ERROR = 0.015
"""Of what is rounded to bf16 between ops."""


ATTENDING = {
    "attending": {}, "capped": {"softcap": 0.5},
    "biased": {"heads": 2, "group": 3, "biased": True},
    "wide": {"heads": 1, "dim": 136, "group": 2, "window": 40},
}  # fmt: skip


@pytest.mark.parametrize("name", [*PROGRAMS, *ATTENDING])
def test_rows_are_what_torch_gives(name):
    """Two calls, of other rows; the second one's states go on."""
    program = PROGRAMS[name](1) if name in PROGRAMS else attending(layers=1, **ATTENDING[name])
    values = random_values(program)
    given = [one.name for one in program.with_role("input")]
    inputs = [{n: values[n] for n in given}]
    inputs.append({n: x * -0.5 if x.is_floating_point() else x // 2 for n, x in inputs[0].items()})
    if "positions" in given:
        inputs[1]["positions"] = inputs[0]["positions"] + 1
    exact = expected(program, values, inputs)
    case = case_of(program, num_sms=5)
    results = [case.emulate(values, inputs, seed) for seed in range(2)]
    for (found,), (again,), wanted in zip(*results, exact, strict=True):
        for out, x in found.outputs.items():
            assert torch.equal(x, again.outputs[out])
            assert error(x, wanted[out]) < MOST_ERROR
        if found.ids:
            logits = wanted["logits"][0]
            assert logits.max() - logits[found.ids[0]] <= MOST_ERROR * logits.abs().max()
