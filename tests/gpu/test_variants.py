"""Decode steps of decoders of many kinds as one kernel: as exact as torch's own bf16."""

import pytest
import torch
from torch import Tensor

from bench.llama import VARIANTS, llama_1b
from bench.models import Model
from bench.programs import own_tensors
from distmega.compiled import CompiledProgram
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.kernels.machines import H200
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.planner import plan_program

pytestmark = pytest.mark.gpu

MESH = DeviceMesh(tp=1)
MOST_ERROR = 1.25
"""Times the error of torch in bf16."""


def small(variant: str, position: int) -> Model:
    return llama_1b(variant, 3, 512, (8, 4, 64), 1536, 4096, position, with_state=True)


def in_torch(model: Model, own: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Logits, of tensors of their own."""
    given = {n: x.to(dtype) if x.is_floating_point() else x.clone() for n, x in own.items()}
    return model.in_torch(given, lambda x: x).double()


def error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("position", [1, 299])
@pytest.mark.parametrize("variant", VARIANTS)
def test_one_launch_is_as_exact_as_torch(variant, position):
    """The state that the head reads leaves too."""
    model = small(variant, position)
    plan = plan_program(model.program, MESH, H200)
    step = CompiledProgram(plan, SingleCommunicator(MESH), "cuda:0", warm=True, megakernel=True)
    own = own_tensors(step, 0, model.position)
    for name, tensor in step.tensors.items():
        tensor.copy_(own[name])
    token_name, state_name = model.program.outputs
    inputs = {name: own[name] for name in ("token", "position")}
    found, *others = [{n: x.clone() for n, x in step(inputs).items()} for _ in range(4)]
    assert all(torch.equal(x, one[name]) for one in others for name, x in found.items())
    assert (step.stats.num_megakernels, step.stats.num_library_ops) == (1, 0)
    exact = in_torch(model, own, torch.float64)
    in_half = error(in_torch(model, own, torch.bfloat16), exact)
    logits = found[state_name].double() @ own["embed"].double().T
    far = error(logits, exact)
    print(f"{variant} {position}: kernel {far:.2e}, torch {in_half:.2e}")
    assert far <= MOST_ERROR * in_half
    token = int(found[token_name][0])
    assert float(exact.max() - exact[0, token]) <= 0.05 * float(exact.abs().max())
