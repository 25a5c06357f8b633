"""Experts of one row, emulated: what torch gives, whichever experts rows go to."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from distmega.engine.decode_planner import expert_layouts
from distmega.errors import CheckError
from distmega.kernels.hopper.plan.types import RowQueues
from distmega.kernels.hopper.plan.words import RowRoute
from distmega.models.decoder import build_decoder
from distmega.models.presets import PRESETS
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import replicate
from tests.kernels.hopper.emulator.emulating import (
    case_of,
    error,
    expected,
    with_queues,
)
from tests.kernels.hopper.row_plan.test_expert_queues import NUM_EXPERTS, expert_marks, layers

TORCH = {"bf16": "bfloat16", "f32": "float32"}
MOST_ERROR = 0.02
"""Of what is rounded to bf16 between ops; what an expert weighs is so with its results."""


def random_values(program: Program) -> dict[str, Tensor]:
    """Of weights and states."""
    generator = torch.Generator().manual_seed(1)

    def numbers(shape: tuple[int, ...]) -> Tensor:
        found = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        return (found.abs() + 0.5 if len(shape) == 1 else found).bfloat16()

    kept = (*program.with_role("weight"), *program.with_role("state"))
    return {one.name: numbers(one.shape).to(getattr(torch, TORCH[one.dtype])) for one in kept}


def rows(num: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [{"x": torch.randn(1, 256, generator=generator).bfloat16()} for _ in range(num)]


@pytest.mark.parametrize(
    ("width", "tp", "kinds"),
    [
        (192, 1, {}),
        (72, 1, {"gated": False}),
        (192, 2, {}),
        (1024, 1, {"weighing": "softmax"}),
        (64, 1, {"chosen": NUM_EXPERTS, "weighing": "values"}),
    ],
)
def test_rows_of_any_experts_give_what_torch_does(width, tp, kinds):
    """In any order of SMs, bit by bit the same."""
    program = layers(2, width, **kinds)
    values, inputs = random_values(program), rows(3)
    case = case_of(program, tp, 5, expert_marks(program))
    exact = expected(program, values, inputs)
    (out,) = program.outputs
    chosen = {tuple(each[name].flatten().tolist()) for each in exact for name in chosen_of(program)}
    assert len(chosen) >= min(4, NUM_EXPERTS)
    firsts = []
    for seed in range(2):
        found = case.emulate(values, inputs, seed)
        firsts.append(torch.cat([each[0].outputs[out] for each in found]))
        for each, wanted in zip(found, exact, strict=True):
            assert all(torch.equal(one.outputs[out], each[0].outputs[out]) for one in each)
            assert error(each[0].outputs[out], wanted[out]) < MOST_ERROR
    assert all(torch.equal(one, firsts[0]) for one in firsts)


def chosen_of(program: Program) -> list[str]:
    return [op.writes[1].tensor for op in program.ops if op.kind == "top_k"]


def require_decodes(family: str, tp: int, seed: int) -> None:
    """Logits of steps on end, a launch each, on every rank its own part."""
    config = replace(
        PRESETS[family], hidden=64, head_dim=32, expert_ffn=64 * tp, vocab=200, max_positions=64
    )
    program = build_decoder(config, 1, 32, dtype="bf16")
    marks = expert_layouts(program, DeviceMesh(tp=tp), "tensor")
    case = case_of(program, tp, 5, {**marks, "rope_table": replicate()})
    values = random_values(program)
    inputs = [{"tokens": torch.tensor([11 * i]), "positions": torch.tensor([i])} for i in range(3)]
    exact = expected(program, values, inputs)
    for found, wanted in zip(case.emulate(values, inputs, seed), exact, strict=True):
        logits = torch.cat([one.logits for one in found])[: config.vocab]
        assert error(logits, wanted["logits"]) < 2 * MOST_ERROR
        assert {one.ids for one in found} == {(int(logits.argmax()),)}


@pytest.mark.parametrize(("family", "tp"), [("tiny-qwen3-moe", 2), ("tiny-mixtral", 1)])
def test_decoders_of_experts(family, tp):
    require_decodes(family, tp, 5)


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["tiny-qwen3-moe", "tiny-mixtral"])
@pytest.mark.parametrize("tp", [1, 2])
def test_decoders_of_experts_in_many_orders(family, tp):
    for seed in range(20):
        require_decodes(family, tp, seed)


@pytest.mark.parametrize("kind", ["ties", "lowest", "none"])
def test_scores_of_any_kind_choose_experts_that_there_are(kind):
    """Equal scores the first experts; what is no number makes all results none, and leaves the
    launch after it alone.
    """
    program = layers(1, 64)
    values, (row, other) = random_values(program), rows(2)
    router = values["l0r"].clone()
    router[{"ties": slice(None), "lowest": slice(3, None), "none": 4}[kind]] = {
        "ties": 0.0, "lowest": 0.0, "none": torch.nan,
    }[kind]  # fmt: skip
    values["l0r"] = router
    case = case_of(program, num_sms=5)
    found = [each[0].outputs["x0"] for each in case.emulate(values, [row, other], 3)]
    if kind == "none":
        assert all(bool(one.isnan().all()) for one in found)
        return
    for one, wanted in zip(found, expected(program, values, [row, other]), strict=True):
        assert error(one, wanted["x0"]) < MOST_ERROR


def without_choices(queues: RowQueues, num: int) -> RowQueues:
    """The first `num` choices of SM 0 left out."""
    first, *others = queues.queues
    gone = [one for one in first if isinstance(one, RowRoute)][:num]
    return replace(queues, queues=(tuple(one for one in first if one not in gone), *others))


def test_a_choice_that_is_not_made_is_seen():
    """Tiles of the layer before's experts, or of none."""
    program = layers(2, 64)
    values, inputs = random_values(program), rows(1)
    case = case_of(program, num_sms=5)
    late = without_choices(case.queues[0], 2)
    with pytest.raises((CheckError, IndexError)):
        with_queues(case, [late]).emulate(values, inputs, 0)
