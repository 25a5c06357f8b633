"""Models with experts: configurations, weights in many arrays, and the decoder on ranks that are
threads of this process, against transformers.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from distmega.engine.decode_planner import expert_layouts
from distmega.engine.requests import Experts
from distmega.errors import ModelError, RequestError
from distmega.hostir.lower.lower import lower_program
from distmega.hostir.passes.passes import run_passes
from distmega.kernels.machines import CPU
from distmega.models.config import ModelConfig
from distmega.models.decoder import build_decoder
from distmega.models.fields import Fields
from distmega.models.huggingface.config import config_from_hf
from distmega.models.presets import PRESETS
from distmega.models.weights.tensors import weight_specs
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.localize import LocalProgram, localize
from distmega.sharding.planner import plan_program
from distmega.sources.load import ModelSource, open_model
from distmega.sources.locate import read_config
from tests.e2e.running import relative_error
from tests.hostir.threads import run_mesh
from tests.models.files import SPARSE_FAMILIES

TOLERANCE = 1e-4
CONTEXT, NUM_PREFILLED, NUM_DECODED = 16, 9, 3


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experts")


def token_ids() -> list[int]:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, 288, (NUM_PREFILLED + NUM_DECODED,), generator=generator).tolist()


@cache
def saved(name: str, root: Path) -> tuple[transformers.PreTrainedModel, ModelSource, Tensor]:
    """The model of transformers, the same opened from its folder, and its logits."""
    model = SPARSE_FAMILIES[name].build()
    model.save_pretrained(root / name)
    with torch.no_grad():
        logits = model(torch.tensor([token_ids()])).logits[0].float()
    return model, open_model(root / name), logits


def planned(program: Program, num_ranks: int, way: Experts) -> LocalProgram:
    mesh = DeviceMesh(tp=num_ranks)
    layouts = expert_layouts(program, mesh, way)
    return localize(plan_program(program, mesh, CPU, annotations=layouts))


def weights_of(source: ModelSource, program: Program) -> dict[str, Tensor]:
    names = {tensor.name: tensor.shape for tensor in program.with_role("weight")}
    return {
        name: torch.from_numpy(source.weight(name).read(tuple(slice(0, n) for n in shape)))
        for name, shape in names.items()
    }


@pytest.mark.parametrize("name", SPARSE_FAMILIES)
@pytest.mark.parametrize(
    ("num_ranks", "way"),
    [(1, "auto"), (2, "tensor"), (2, "expert"), (4, "tensor"), (4, "expert"), (2, "auto")],
)
def test_logits_equal_transformers(name: str, num_ranks: int, way: Experts, root: Path):
    """Prefill by one program and decode by another, from the states that the first leaves."""
    _, source, expected = saved(name, root)
    ids = token_ids()
    states: list[dict[str, Tensor]] = []
    found = []
    for start, stop in [(0, NUM_PREFILLED), *((n, n + 1) for n in range(NUM_PREFILLED, len(ids)))]:
        program = build_decoder(source.config, stop - start, CONTEXT, logits="all")
        local = planned(program, num_ranks, way)
        host = run_passes(lower_program(local, megakernel=False, peer_memory=False))
        given = weights_of(source, program)
        given |= {t.name: torch.zeros(t.shape) for t in program.with_role("state")}
        given["tokens"] = torch.tensor(ids[start:stop])
        given["positions"] = torch.arange(start, stop)
        kept = [t.name for t in program.with_role("state")] if states else []

        def bind(host, rank, tensors, kept=kept, states=states):
            tensors.update({name: states[rank][name] for name in kept})
            return {}

        ranks = run_mesh(host, local, given, bind)
        states = [{t.name: each[t.name] for t in program.with_role("state")} for each in ranks]
        for each in ranks[1:]:
            assert torch.equal(each["logits"], ranks[0]["logits"])
        found.append(ranks[0]["logits"])
    assert relative_error(torch.cat(found).numpy(), expected.numpy()) < TOLERANCE


@pytest.mark.parametrize("name", SPARSE_FAMILIES)
def test_configurations_of_folders(name: str, root: Path):
    model, source, _ = saved(name, root)
    config, hf = source.config, model.config
    assert config.architecture == hf.model_type == name
    assert config.experts_per_token == hf.num_experts_per_tok
    assert config.num_experts == getattr(hf, "num_local_experts", None) or hf.num_experts
    assert config.expert_ffn == getattr(hf, "moe_intermediate_size", hf.intermediate_size)
    assert config.shared_ffn == (40 if name == "qwen2_moe" else 0)
    assert config.norm_top == (name in ("qwen3_moe", "mixtral"))
    assert config.qk_norm == (name in ("qwen3_moe", "olmoe"))
    assert config.qk_norm_whole == (name == "olmoe")
    assert config.qkv_bias == (name == "qwen2_moe")
    assert config.windows == ((8, 8) if name == "mixtral" else ())
    assert config.dense_layers == ((1,) if name == "qwen3_moe" else ())


def test_weights_of_one_expert_are_read_alone(root: Path):
    _, source, _ = saved("mixtral", root)
    whole = source.weight("layers.1.expert_up").read()
    assert whole.shape == (5, 80, 48)
    part = source.weight("layers.1.expert_up").read((slice(2, 4), slice(3, 9), slice(1, 2)))
    assert (part == whole[2:4, 3:9, 1:2]).all()
    stored = load_file(root / "mixtral" / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.4.w3.weight"
    assert (stored[name].numpy() == whole[4]).all()


def test_a_missing_expert_is_named(root: Path, tmp_path: Path):
    saved("olmoe", root)
    stored = load_file(root / "olmoe" / "model.safetensors")
    lost = "model.layers.0.mlp.experts.3.up_proj.weight"
    save_file({n: x for n, x in stored.items() if n != lost}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((root / "olmoe" / "config.json").read_bytes())
    with pytest.raises(ModelError, match=f"lacks 1 of .* weights: {lost}"):
        open_model(tmp_path)


def test_preset_of_30b():
    config = PRESETS["qwen3-30b-a3b"]
    counts = {spec.name: torch.Size(spec.shape).numel() for spec in weight_specs(config).values()}
    total = sum(counts.values())
    experts = sum(n for name, n in counts.items() if ".expert_" in name)
    assert 30.5e9 < total < 30.6e9
    used = total - experts + experts * config.experts_per_token // config.num_experts
    assert 3.3e9 < used < 3.4e9
    program = build_decoder(config, 1, 512, dtype="bf16")
    assert sum(op.kind == "grouped_linear" for op in program.ops) == 3 * 48


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts_per_token": 7}, "7 experts per token of 6"),
        ({"experts_per_token": 0}, "0 experts per token of 6"),
        ({"expert_ffn": 0}, "expert_ffn 0"),
        ({"num_experts": 0}, "experts of which there are none"),
        ({"dense_layers": (2,)}, r"dense layers \(2,\)"),
    ],
)
def test_a_configuration_that_makes_no_sense(changes: dict[str, object], message: str):
    with pytest.raises(ModelError, match=message):
        replace(PRESETS["tiny-qwen3-moe"], **changes)


BASE = {
    "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 8, "intermediate_size": 128, "vocab_size": 300, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip


def read(**changes: object) -> ModelConfig:
    return config_from_hf(Fields(BASE | changes, "config.json"))


def test_defaults_and_dense_layers_of_a_short_config():
    config = read()
    assert (config.num_kv_heads, config.head_dim, config.norm_top) == (4, 8, False)
    assert read(decoder_sparse_step=2).dense_layers == (0, 2)
    assert read(mlp_only_layers=[3]).dense_layers == (3,)
    mixtral = read(model_type="mixtral", num_local_experts=4)
    assert (mixtral.num_experts, mixtral.expert_ffn, mixtral.norm_top) == (4, 128, True)
    assert (mixtral.rope_base, mixtral.norm_eps, mixtral.windows) == (1e6, 1e-5, ())
    assert read(model_type="olmoe").num_kv_heads == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 9}, "9 experts per token of 8"),
        ({"num_experts": None}, "'num_experts' is missing"),
        ({"moe_intermediate_size": None}, "'moe_intermediate_size' is missing"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is '0'"),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv"),
        ({"model_type": "qwen2_moe"}, "'shared_expert_intermediate_size' is missing"),
    ],
)
def test_what_a_config_is_refused_for(changes: dict[str, object], message: str):
    with pytest.raises(ModelError, match=message):
        read(**changes)


def test_too_many_ranks_for_the_experts():
    config = replace(PRESETS["tiny-qwen3-moe"], num_heads=16, num_kv_heads=16)
    program = build_decoder(config, 1, 8)
    with pytest.raises(RequestError, match="experts expert with 6 experts on 16 ranks"):
        expert_layouts(program, DeviceMesh(tp=16), "expert")


def test_random_weights_of_a_config_alone(root: Path, tmp_path: Path):
    saved("qwen2_moe", root)
    path = tmp_path / "config.json"
    path.write_bytes((root / "qwen2_moe" / "config.json").read_bytes())
    source = open_model(path)
    assert source.config == replace(
        read_config(str(root / "qwen2_moe")), eos_ids=source.config.eos_ids
    )
    part = source.weight("layers.0.expert_down").read((slice(1, 3),))
    assert part.shape == (2, 64, 32)
    assert abs(float(part.std()) * 32**0.5 - 1.0) < 0.1
