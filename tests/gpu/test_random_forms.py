"""Programs made as layers of networks are, as one kernel: about as exact as torch in bf16."""

import math
from collections.abc import Mapping
from contextlib import suppress

import pytest
import torch
from torch import Tensor

from distmega.compiled import CompiledProgram
from distmega.errors import UnsupportedError
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.kernels.machines import H200
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.planner import plan_program
from tests.hostir.programs import run_program_in
from tests.kernels.hopper.emulator.test_random_forms import FORMS, attended
from tests.kernels.random_forms import random_form, random_values

pytestmark = pytest.mark.gpu

MOST_ERROR = 1.25
"""Times the error of torch in bf16, over all draws of a program's inputs."""
DRAWS = 8
"""Of one row the error of a single draw says little: where the two round differs."""


def check(program: Program, seed: int) -> None:
    """One launch, no library op; floats as exact as torch's, a token that is as good as its; equal
    bits in a second program.
    """
    plan = plan_program(program, DeviceMesh(tp=1), H200)
    steps = [
        CompiledProgram(plan, SingleCommunicator(plan.mesh), "cuda:0", warm=True, megakernel=True)
        for _ in range(2)
    ]
    for step in steps:
        assert (step.stats.num_megakernels, step.stats.num_library_ops) == (1, 0)
    squares: dict[str, list[tuple[float, float]]] = {}
    for draw in range(DRAWS):
        values = values_of(program, seed, draw)
        found, again = (run(step, program, values) for step in steps)
        assert all(torch.equal(x, again[name]) for name, x in found.items())
        exact, half = (
            run_program_in(dtype, program, values) for dtype in (torch.float64, torch.bfloat16)
        )
        for name, x in found.items():
            if not x.is_floating_point():
                (argmax,) = (op for op in program.ops if op.kind == "argmax")
                logits = exact[argmax.reads[0].tensor]
                chosen = logits.gather(-1, x.unsqueeze(-1)).squeeze(-1)
                assert (chosen >= logits.amax(-1) - 0.02 * logits.abs().max()).all()
                continue
            far, in_half = (
                float((one.double() - exact[name]).norm() / exact[name].norm())
                for one in (x, half[name])
            )
            squares.setdefault(name, []).append((far**2, in_half**2))
    for name, pairs in squares.items():
        far, in_half = (math.sqrt(sum(errors) / DRAWS) for errors in zip(*pairs, strict=True))
        print(f"{program.name} {name}: kernel {far:.2e}, torch {in_half:.2e}")
        assert far <= MOST_ERROR * in_half


def values_of(program: Program, seed: int, draw: int) -> dict[str, Tensor]:
    """Weights and states of a seed, inputs of their own for each draw."""
    values = random_values(program, seed)
    drawn = random_values(program, seed + 1000 * (1 + draw))
    values |= {tensor.name: drawn[tensor.name] for tensor in program.with_role("input")}
    return {name: x.cuda() for name, x in values.items()}


def run(step: CompiledProgram, program: Program, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Outputs of one call that begins with these weights and states."""
    for name, tensor in step.tensors.items():
        tensor.copy_(values[name])
    inputs = {tensor.name: values[tensor.name] for tensor in program.with_role("input")}
    found = {name: x.clone() for name, x in step(inputs).items()}
    step.wait()
    return found


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("make", FORMS, ids=lambda make: make.__name__)
def test_a_form_is_as_exact_as_torch(make, rows):
    p = ProgramBuilder(make.__name__)
    check(p.build(*make(p, rows)), seed=rows)


@pytest.mark.parametrize(("group", "of_queries"), [(20, False), (1, True)])
def test_attention_of_one_key_is_as_exact_as_torch(group, of_queries):
    p = ProgramBuilder("attended")
    check(p.build(*attended(p, 1, group, of_queries=of_queries)), seed=4)


@pytest.mark.parametrize("rows", [1, 7, 16])
@pytest.mark.parametrize("first", [100, 104, 108, 112])
def test_random_forms_are_as_exact_as_torch(first, rows):
    num = 0
    for seed in range(first, first + 4):
        with suppress(UnsupportedError):
            check(random_form(seed, rows), seed)
            num += 1
    assert num
