"""Experts of one row in the kernel of one row: the results of library ops on the same weights."""

import itertools

import pytest
import torch
from torch import Tensor

from distmega.compiled import CompiledProgram
from distmega.engine.engine import Engine
from distmega.errors import ModelError
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.kernels.machines import CPU, H200
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.planner import plan_program
from tests.gpu.engines import open_engine, random_model
from tests.kernels.hopper.plan.test_expert_queues import layers

pytestmark = pytest.mark.gpu

MESH = DeviceMesh(tp=1)
NUM_ROWS = 24
FEW_LAYERS = {"num_layers": 4, "vocab": 32000}


def experts_engine() -> Engine:
    """Qwen3-30B-A3B's extents, a few layers of it."""
    return open_engine(random_model("qwen3-30b-a3b", **FEW_LAYERS))


def error(found: Tensor, exact: Tensor) -> Tensor:
    """Of each row."""
    return (found.double() - exact.double()).norm(dim=-1) / exact.double().norm(dim=-1)


@pytest.mark.parametrize(("width", "gated"), [(192, True), (768, True), (72, False), (1024, True)])
def test_one_launch_gives_what_library_ops_do(width, gated):
    """Of rows that go to different experts; and NaN where a row's scores are NaN, no more."""
    program = layers(3, width, gated=gated)
    generator = torch.Generator().manual_seed(width)
    given = {
        tensor.name: (torch.randn(tensor.shape, generator=generator) * tensor.shape[-1] ** -0.5)
        for tensor in program.with_role("weight")
    }
    values = {n: (x.abs() + 0.5 if x.dim() == 1 else x).bfloat16() for n, x in given.items()}
    rows = torch.randn(NUM_ROWS, 1, program.tensor_map()["x"].shape[-1], generator=generator)
    rows = rows.bfloat16()
    steps = {
        device: CompiledProgram(
            plan_program(program, MESH, machine),
            SingleCommunicator(MESH),
            device,
            megakernel=device != "cpu",
        )
        for device, machine in (("cuda:0", H200), ("cpu", CPU))
    }
    found: dict[str, Tensor] = {}
    for device, step in steps.items():
        outs = []
        for row in rows:
            parts = step.parts({n: x.to(device) for n, x in {**values, "x": row}.items()})
            (out,) = step(parts).values()
            outs.append(out.clone().cpu())
        found[device] = torch.cat(outs)
    assert (steps["cuda:0"].stats.num_megakernels, steps["cuda:0"].stats.num_library_ops) == (1, 0)
    assert float(error(found["cuda:0"], found["cpu"]).max()) < 2e-2
    step = steps["cuda:0"]
    bad = rows[0].clone()
    bad[0, 3] = float("nan")
    for row, is_bad in ((bad, True), (rows[1], False)):
        parts = step.parts({n: x.to("cuda:0") for n, x in {**values, "x": row}.items()})
        (out,) = step(parts).values()
        assert bool(out.isnan().all()) == is_bad
        assert bool(out.isnan().any()) == is_bad


def test_decode_gives_the_logits_of_library_ops():
    """A prefill is library ops with the same weights. Where two experts weigh nearly the same,
    rounding chooses, so a few rows may differ.
    """
    engine = experts_engine()
    vocab = engine.decode_plan.config.vocab
    shape = (40,)
    ids = torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(3)).tolist()
    expected = engine.logits(ids).float()[8:]
    engine.prefill(ids[:8])
    found = torch.cat([engine.decode_step([one])["logits"].clone() for one in ids[8:]]).float()
    errors = error(found, expected)
    print(f"decode beside prefill: median {errors.median():.2e}, most {errors.max():.2e}")
    assert float(errors.median()) < 2e-2


def test_steps_are_bitwise_the_same_in_any_launch():
    engine = experts_engine()
    prompt = list(range(1, 60))
    many = list(itertools.islice(engine.generate(prompt, ignore_eos=True), 200))
    assert many == list(itertools.islice(engine.generate(prompt, ignore_eos=True), 200))
    one = [engine.prefill(prompt)]
    while len(one) < 32:
        one.append(engine.decode(one[-1]))
    assert many[:32] == one


def test_scores_that_are_none_are_a_named_error():
    """No wait is left open, nothing is read that is no expert's, and the engine says so."""
    engine = experts_engine()
    router = engine.tensor("layers.2.router")
    router[5, 7] = float("nan")
    with pytest.raises(ModelError, match="logits that are NaN"):
        list(itertools.islice(engine.generate([1, 2, 3], ignore_eos=True), 8))
