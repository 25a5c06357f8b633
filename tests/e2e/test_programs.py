"""The programs of bench/programs.py are what their peers in torch compute, and cases read as they
should.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from bench.programs import (
    CASES,
    GRAPH,
    OURS,
    TOLERANCE,
    VARIANTS,
    Case,
    Model,
    encoder,
    gated_mlp,
    gpt2_step,
    llama_1b,
    mixer,
    parse_case,
    records,
)
from distmega.compiled import CompiledProgram
from distmega.hostir import SingleCommunicator
from distmega.hostir.library.torch_types import torch_dtype
from distmega.kernels.machines import CPU
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.planner import plan_program

POSITION = 20


def small_llama(variant: str) -> Model:
    """Gives the token, and what the head reads."""
    return llama_1b(variant, 2, 64, (8, 4, 16), 128, 96, POSITION, with_state=True)


SMALL: dict[str, Callable[[], Model]] = {
    "gated_mlp": lambda: gated_mlp(3, 2, 64, 128),
    "gpt2_step": lambda: gpt2_step(0, 2, 64, 4, 32),
    "encoder": lambda: encoder(16, 2, 64, 4),
    "mixer": lambda: mixer(0, 2, 64, 24, 32),
    **{f"llama {one}": partial(small_llama, one) for one in VARIANTS},
}


def random_tensors(step: CompiledProgram) -> dict[str, Tensor]:
    torch.manual_seed(0)
    found: dict[str, Tensor] = {}
    for buffer in step.host.buffers:
        if buffer.role == "temp":
            continue
        if buffer.dtype == "i64":
            found[buffer.name] = torch.tensor([POSITION])
        else:
            x = torch.randn(buffer.shape)
            scaled = x * buffer.shape[-1] ** -0.5 if len(buffer.shape) > 1 else 1 + 0.1 * x
            found[buffer.name] = scaled.to(torch_dtype(buffer.dtype))
    return found


@pytest.mark.parametrize("name", SMALL)
def test_a_program_is_what_torch_computes(name: str):
    model, mesh = SMALL[name](), DeviceMesh(tp=1)
    step = CompiledProgram(plan_program(model.program, mesh, CPU), SingleCommunicator(mesh))
    ours = random_tensors(step)
    theirs = {each: x.clone() for each, x in ours.items()}
    expected = model.in_torch(theirs, lambda x: x).float()
    *token, found = step(ours).values()
    if token:  # torch gives logits
        found = found @ ours["embed"].T
        assert expected[0, token[0]] > expected.max() - TOLERANCE * expected.abs().max()
    assert (found.float() - expected).abs().max() < TOLERANCE * expected.abs().max()
    for buffer in step.host.buffers:
        if buffer.role == "state":
            torch.testing.assert_close(ours[buffer.name], theirs[buffer.name], rtol=0.02, atol=0.02)
            assert (ours[buffer.name] != random_tensors(step)[buffer.name]).any()


def test_all_cases_are_read():
    assert [parse_case(text).text for text in CASES] == [*CASES]
    assert parse_case("gated_mlp rows=64 tp=2") == Case(
        "gated_mlp rows=64 tp=2", "gated_mlp", 64, 2
    )
    assert parse_case("mixer") == Case("mixer", "mixer", 0, 1)
    with pytest.raises(SystemExit, match="case 'other'; expected one of gated_mlp, gpt2_step"):
        parse_case("other")


def test_records_are_medians_over_processes():
    lines = [
        {"device": "NVIDIA H200", "floor_us": 1.0, "us": {OURS: us, GRAPH: 4.0},
         "host_us": {OURS: 3.0, GRAPH: 1.0}}
        for us in (5.0, 2.0, 9.0)
    ]  # fmt: skip
    lines[1]["us"]["torch.compile"] = 7.0
    (_, gpu), (benchmark, host) = records(parse_case("mixer"), lines)
    assert (gpu.case, gpu.ours_us, gpu.floor_us) == ("mixer", 5.0, 1.0)
    assert gpu.peers == {GRAPH: 4.0, "torch.compile": 7.0}
    assert (benchmark, host.case, host.ours_us) == ("programs-host", "host time of mixer", 3.0)
    assert host.floor_us == 1.0
