"""Experts of one row in the kernel of one row: the results of library ops on the same weights."""

import itertools
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from distmega.compiled import CompiledProgram
from distmega.engine.engine import Engine
from distmega.errors import ModelError
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.kernels.machines import CPU, H200
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.planner import plan_program
from tests.gpu.engines import open_engine, random_model
from tests.kernels.hopper.plan.test_expert_queues import NUM_CHOSEN, layers

pytestmark = pytest.mark.gpu

MESH = DeviceMesh(tp=1)
NUM_ROWS = 24
ROUNDING = 2**-6
"""What rounding may move a score, of the highest of its row: some steps of bf16."""
FEW_LAYERS = {"num_layers": 4, "vocab": 32000}


def experts_engine() -> Engine:
    """Qwen3-30B-A3B's extents, a few layers of it."""
    return open_engine(random_model("qwen3-30b-a3b", **FEW_LAYERS))


def error(found: Tensor, exact: Tensor) -> Tensor:
    """Of each row."""
    return (found.double() - exact.double()).norm(dim=-1) / exact.double().norm(dim=-1)


def margin(outs: Mapping[str, Tensor], scores: tuple[str, ...]) -> float:
    """Of the scores of a row: what the last expert chosen has more than the next, of the highest;
    the least of all layers.
    """
    ordered = [outs[name][0].float().sort(descending=True).values for name in scores]
    return min(float((x[NUM_CHOSEN - 1] - x[NUM_CHOSEN]) / x.abs().max()) for x in ordered)


def with_outputs(program: Program, names: tuple[str, ...]) -> Program:
    return replace(program, outputs=(*program.outputs, *names))


@pytest.mark.parametrize(("width", "gated"), [(192, True), (768, True), (72, False), (1024, True)])
def test_one_launch_gives_what_library_ops_do(width, gated):
    """Of rows that go to different experts, where rounding chooses none; and NaN where a row's
    scores are NaN, no more.
    """
    program = layers(3, width, gated=gated)
    scores = tuple(op.reads[0].tensor for op in program.ops if op.kind == "top_k")
    (made,) = program.outputs
    generator = torch.Generator().manual_seed(width)
    given = {
        tensor.name: (torch.randn(tensor.shape, generator=generator) * tensor.shape[-1] ** -0.5)
        for tensor in program.with_role("weight")
    }
    values = {n: (x.abs() + 0.5 if x.dim() == 1 else x).bfloat16() for n, x in given.items()}
    rows = torch.randn(NUM_ROWS, 1, program.tensor_map()["x"].shape[-1], generator=generator)
    rows = rows.bfloat16()
    library = CompiledProgram(
        plan_program(with_outputs(program, scores), MESH, CPU),
        SingleCommunicator(MESH),
        "cpu",
        megakernel=False,
    )
    step = CompiledProgram(
        plan_program(program, MESH, H200), SingleCommunicator(MESH), "cuda:0", megakernel=True
    )
    errors = []
    for row in rows:
        expected = library(library.parts({**values, "x": row}))
        parts = step.parts({n: x.to("cuda:0") for n, x in {**values, "x": row}.items()})
        (found,) = step(parts).values()
        if margin(expected, scores) > ROUNDING:
            errors.append(float(error(found.cpu(), expected[made])))
    assert (step.stats.num_megakernels, step.stats.num_library_ops) == (1, 0)
    assert len(errors) >= NUM_ROWS // 2
    assert max(errors) < 2e-2
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
