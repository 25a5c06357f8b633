"""Biases of attention and of the FFN: as transformers has them, on one rank and on several; what
the decode kernel lacks goes to library ops.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import distmega
from distmega.cli.main import main
from distmega.engine.decode_plan import model_mesh
from distmega.engine.decode_planner import lower_decode, plan_decode
from distmega.engine.engine import Engine
from distmega.engine.requests import EngineOptions
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.kernels.hopper.row_plan.queues import build_queues
from distmega.kernels.machines import H200
from distmega.launch import LauncherOptions
from distmega.models.presets import PRESETS
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sources.load import open_model
from tests.forked import forked_ranks
from tests.models.files import FAMILIES, save_tokenizer

CASES = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {"attention_bias": True},
}
IDS = [5, 9, 200, 31, 7]


def save(name: str, folder: Path, **changes: object):
    """A tiny model with biases, none of which is zero."""
    family = FAMILIES[name]
    model = replace(family, changes={**family.changes, **CASES[name], **changes}).build()
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path):
    model = save(name, tmp_path)
    source, mesh = open_model(tmp_path), DeviceMesh(tp=1)
    config = source.config
    assert (config.qkv_bias, config.out_bias) == (True, True)
    assert config.ffn_bias == (name == "llama")
    options = EngineOptions(max_context=32)
    engine = Engine(source, mesh, SingleCommunicator(mesh), options, logits="last")
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(engine.logits(IDS), expected, rtol=1e-3, atol=1e-4)
    engine.prefill(IDS[:-1])
    decoded = engine.decode_step(IDS[-1:])["logits"]
    torch.testing.assert_close(decoded[0], expected[-1], rtol=1e-3, atol=1e-4)


def test_ranks_add_a_bias_once(tmp_path: Path):
    save("llama", tmp_path)

    def answer(tp: int) -> distmega.GenerateResult:
        request = distmega.GenerateRequest(
            model=str(tmp_path), prompts=("ab",), max_new_tokens=6, logprobs=0, tp=tp,
            options=EngineOptions(max_context=32),
        )  # fmt: skip
        return distmega.generate(request, LauncherOptions(device="cpu"))

    with forked_ranks():
        (alone,), (shared,) = answer(1).answers, answer(2).answers
    assert alone.ids == shared.ids
    told = [[step.logprob for step in one.logprobs] for one in (alone, shared)]
    assert told[0] == pytest.approx(told[1], abs=1e-4)


@pytest.mark.parametrize("biases", [{"out_bias": True}, {"ffn_bias": True}])
@pytest.mark.parametrize("tp", [1, 2])
def test_the_kernel_of_one_row_adds_them(biases: dict[str, bool], tp: int):
    """Of every product that has one, once: of a sum over ranks, as each rank has a part of it."""
    config = replace(PRESETS["smollm2-135m"], num_layers=2, **biases)
    options = EngineOptions(max_context=256)
    plan = plan_decode(config, model_mesh(tp, 1), H200, options)
    lowered = lower_decode(config, plan, options, peer_memory=True)
    (segment,) = lowered.host.segments
    queues = build_queues(segment, lowered.weights, lowered.states, 132)
    names = ("attn_sum",) if "out_bias" in biases else ("ffn_mixed", "ffn_sum")
    biased = {one.name for queue in queues.queues for one in queue if getattr(one, "bias", -1) >= 0}
    assert biased == {f"layers.{layer}.{name}" for layer in range(2) for name in names}


def test_explain_says_what_decodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    save("llama", tmp_path)
    assert main(["explain", str(tmp_path), "--machine", "h200"]) == 0
    assert "tasks a step, on Hopper GPUs" in capsys.readouterr().out
    save("llama", tmp_path, head_dim=264)
    assert main(["explain", str(tmp_path), "--machine", "h200"]) == 0
    assert (
        "decode steps: library ops, since the persistent kernel can't do" in capsys.readouterr().out
    )
    assert main(["explain", "smollm2-135m", "--machine", "h200"]) == 0
    assert "tasks a step, on Hopper GPUs" in capsys.readouterr().out
