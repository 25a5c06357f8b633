"""Compiled plans as users of the library run them, on one rank and on several."""

import pytest
import torch
import torch.nn.functional as F

import distmega
from distmega.compiled import CompiledProgram
from distmega.hostir import Communicator, SingleCommunicator
from tests.multigpu.ranks import ON_EITHER

HERE = "tests.multigpu.test_compiled"
MARKS = {"w1": distmega.shard(0, "tp"), "w2": distmega.shard(1, "tp")}
SHAPES = {"x": (64, 256), "w1": (515, 256), "gain": (515,), "w2": (256, 515)}
"""An inner extent that no number of ranks divides."""


def norm_mlp(dtype: str) -> distmega.Program:
    """y = (silu(x w1') * gain) w2' + x."""
    p = distmega.ProgramBuilder("norm_mlp")
    x, w1, gain, w2 = (
        p.input(name, shape, dtype) if name == "x" else p.weight(name, shape, dtype)
        for name, shape in SHAPES.items()
    )
    h = p.linear(x, w1).map("silu(a0) * a1", gain)
    return p.build(p.linear(h, w2) + x)


def check(comm: Communicator, device: torch.device) -> None:
    """Compares with torch in float64."""
    on_gpu = device.type == "cuda"
    dtype, machine = ("bf16", distmega.H200) if on_gpu else ("f32", distmega.CPU)
    plan = distmega.plan_program(norm_mlp(dtype), comm.mesh, machine, MARKS)
    step = CompiledProgram(plan, comm, str(device))
    generator = torch.Generator("cpu").manual_seed(0)
    kind = torch.bfloat16 if on_gpu else torch.float32
    wholes = {
        name: (torch.randn(shape, generator=generator, device="cpu") / shape[-1] ** 0.5).to(kind)
        for name, shape in SHAPES.items()
    }
    x, w1, gain, w2 = (wholes[name].double() for name in SHAPES)
    expected = (F.silu(x @ w1.T) * gain) @ w2.T + x
    parts = step.parts(wholes)
    for _ in range(3):
        (y,) = step(parts).values()
        assert y.device.type == device.type
        tolerance = {"rtol": 1.6e-2, "atol": 1.6e-2} if on_gpu else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(y.double().cpu(), expected, **tolerance)
    (nodes,) = CompiledProgram(plan, comm, str(device), replay=False)(parts).values()
    assert torch.equal(nodes, y)
    assert step.stats.replayed == on_gpu


def run_compiled(comm: Communicator) -> None:
    check(comm, torch.get_default_device())


@pytest.mark.parametrize(("device", "num_ranks"), ON_EITHER)
def test_a_compiled_plan_agrees_with_torch(run_ranks, device: str, num_ranks: int):
    run_ranks(f"{HERE}:run_compiled", device, num_ranks)


@pytest.mark.gpu
def test_a_compiled_plan_agrees_with_torch_on_one_gpu():
    check(SingleCommunicator(distmega.DeviceMesh(tp=1)), torch.device("cuda:0"))
