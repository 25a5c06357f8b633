"""Configurations from config.json and GGUF metadata, and what they refuse."""

import copy
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from distmega.errors import ModelError
from distmega.models.config import ModelConfig, RopeScaling
from distmega.models.fields import Fields
from distmega.models.gguf.config import config_from_gguf
from distmega.models.gguf.file import GgufFile
from distmega.models.huggingface.config import config_from_hf
from distmega.models.presets import PRESETS
from distmega.sources.load import ModelSource
from distmega.sources.locate import read_config
from tests.models.files import LLAMA3_ROPE

BASE = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "intermediate_size": 128, "vocab_size": 300, "max_position_embeddings": 128,
}  # fmt: skip


def read(**changes: object) -> ModelConfig:
    return config_from_hf(Fields(BASE | changes, "config.json"))


def test_smollm2_gguf_values(smollm2: ModelSource):
    assert smollm2.config == ModelConfig(
        architecture="llama",
        hidden=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        ffn=1536,
        vocab=49152,
        max_positions=8192,
        norm_eps=1e-5,
        rope_base=1e5,
        tied=True,
        eos_ids=(2,),
    )
    assert smollm2.config.group == 3


def test_transformers_folders(family: tuple[transformers.PreTrainedModel, Path]):
    model, folder = family
    config, hf = read_config(str(folder)), model.config
    assert config.architecture == hf.model_type
    assert (config.hidden, config.ffn, config.vocab) == (48, 80, 288)
    assert (config.num_heads, config.num_kv_heads) == (hf.num_attention_heads, 3)
    assert config.head_dim == 16
    assert config.rope_base == hf.rope_parameters["rope_theta"]
    assert config.tied == hf.tie_word_embeddings
    assert config.qkv_bias == (hf.model_type == "qwen2")
    assert config.qk_norm == (hf.model_type == "qwen3")
    assert config.windows == ((8, 8) if hf.model_type == "mistral" else ())
    assert (config.rope_scaling.kind == "llama3") == (hf.model_type == "llama")
    assert config.eos_ids == (() if hf.eos_token_id is None else (hf.eos_token_id,))


def test_defaults_of_a_short_config():
    config = read()
    assert (config.num_kv_heads, config.head_dim) == (4, 16)
    assert (config.norm_eps, config.rope_base, config.tied) == (1e-6, 10000.0, False)
    assert read(model_type="qwen3").head_dim == 128
    mistral = read(model_type="mistral", num_attention_heads=8)
    assert (mistral.num_kv_heads, mistral.window(0)) == (8, 4096)
    assert read(model_type="mistral", num_key_value_heads=2, sliding_window=None).windows == ()


def test_older_spelling_of_rope_and_dtype():
    config = read(
        rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0}, torch_dtype="bfloat16"
    )
    assert config.rope_base == 5e5
    assert config.rope_scaling == RopeScaling(kind="linear", factor=2.0)
    assert config.dtype == "bf16"
    assert read(rope_scaling={"type": "dynamic", "factor": 2.0}) == read()
    newer = read(rope_parameters=LLAMA3_ROPE)
    older = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    assert read(rope_theta=5e5, rope_scaling=older) == newer


@pytest.mark.parametrize(
    "changes",
    [
        {"original_max_position_embeddings": 32},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 77.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_scaling": {}},
    ],
)
def test_what_rope_is_said_twice_means_what_it_does_to_transformers(changes: dict[str, object]):
    """Original positions beside the scaling, and both spellings of it."""
    changes = {"rope_parameters": LLAMA3_ROPE} | changes
    config = transformers.LlamaConfig(**copy.deepcopy(BASE | changes))
    config.standardize_rope_params()  # as its frequencies are computed
    expected, found = config.rope_parameters, read(**changes)
    assert found.rope_base == expected["rope_theta"]
    scaling = found.rope_scaling
    assert (scaling.kind, scaling.factor) == (expected["rope_type"], expected["factor"])
    assert scaling.original_max_positions == expected.get("original_max_position_embeddings", 0)


def test_qwen2_windows():
    qwen = {"model_type": "qwen2", "sliding_window": 8}
    assert read(**qwen).windows == ()
    assert read(**qwen, use_sliding_window=True).windows == ()
    some = read(**qwen, use_sliding_window=True, max_window_layers=3)
    assert some.windows == (0, 0, 0, 8)
    types = ["sliding_attention", "full_attention"] * 2
    assert read(**qwen, use_sliding_window=True, layer_types=types).windows == (8, 0, 8, 0)


EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "num_key_value_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize("num_window_layers", [None, 0, 3, 28])
def test_windows_of_experts_are_those_of_transformers(num_window_layers: int | None):
    some = {} if num_window_layers is None else {"max_window_layers": num_window_layers}
    asked = {**EXPERTS, **some, "sliding_window": 8, "use_sliding_window": True}
    theirs = transformers.Qwen2MoeConfig(**(BASE | asked))
    windows = tuple(8 * (kind == "sliding_attention") for kind in theirs.layer_types)
    assert read(**asked, model_type="qwen2_moe").windows == (windows if any(windows) else ())
    assert read(**asked, model_type="qwen3_moe").windows == (8,) * 4  # whatever the number says
    assert read(**asked, model_type="mixtral").windows == (8,) * 4


@pytest.mark.parametrize("family", ["mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"])
def test_layer_types_mean_what_they_do_to_transformers(family: str, tmp_path: Path):
    """By what a model gives whose layers are all said to see everything: is that heeded?"""
    small = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64,
        "num_attention_heads": 4, "head_dim": 8, "max_position_embeddings": 64,
        "model_type": family, "use_sliding_window": True, "max_window_layers": 0,
    }  # fmt: skip
    types = ["full_attention"] * 2

    def logits(**more: object) -> torch.Tensor:
        (tmp_path / "config.json").write_text(json.dumps({**small, **EXPERTS, **more}))
        config = transformers.AutoConfig.from_pretrained(tmp_path)
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            found: torch.Tensor = model(torch.arange(12)[None], use_cache=False).logits
        return found

    wide, narrow = logits(sliding_window=64), logits(sliding_window=3)
    named = logits(sliding_window=3, layer_types=types)
    assert not torch.allclose(wide, narrow)
    heeded = torch.allclose(named, wide)
    assert heeded != torch.allclose(named, narrow)
    windows = read(**{**small, **EXPERTS}, sliding_window=3, layer_types=types).windows
    assert windows == (() if heeded else (3, 3))


def test_dense_layers_are_those_of_families_that_know_them():
    asked = {**EXPERTS, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert read(**asked, model_type="qwen3_moe").dense_layers == (0, 2, 3)
    assert read(**asked, model_type="qwen2_moe").dense_layers == (0, 2, 3)
    assert read(**asked, model_type="mixtral").dense_layers == ()
    assert read(**asked, model_type="olmoe").dense_layers == ()


def test_several_end_tokens_and_generation_config(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"eos_token_id": [7, 8]}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9]}))
    config = read_config(str(tmp_path / "config.json"))
    assert config.eos_ids == (7, 8, 9)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral", "olmoe", "gpt2", "gemma3"])
@pytest.mark.parametrize("said", [{}, {"eos_token_id": None}])
def test_end_tokens_that_no_file_names_are_those_of_the_family(
    family: str, said: dict[str, object], tmp_path: Path
):
    inner = {"text_config": {**BASE, "model_type": "gemma3_text"}} if family == "gemma3" else {}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**BASE, **EXPERTS, "model_type": family, **inner, **said}))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    decoder = theirs.get_text_config(decoder=True)
    ids = getattr(theirs, "eos_token_id", None) or decoder.eos_token_id
    assert read_config(path).eos_ids == (() if ids is None else (ids,))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9]}))
    assert read_config(path).eos_ids == (9,)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
ZERO = -1.0 / (0.1 * math.log(4.0))
"""The mscale_all_dim by which the attention would be divided by zero."""


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gpt_neox"}, "gpt_neox"),
        ({"model_type": None}, "model_type"),
        ({"hidden_size": "many"}, "many"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"num_hidden_layers": 10**9}, "1000000000"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"num_hidden_layers": 0}, "num_layers 0"),
        ({"num_attention_heads": 0}, "num_heads 0"),
        ({"num_key_value_heads": 3}, "4 query heads over 3 kv heads"),
        ({"head_dim": 15}, "head_dim 15"),
        ({"rms_norm_eps": 0}, "norm_eps 0"),
        ({"rope_theta": -1.0}, "rope_base -1.0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"model_type": "mistral", "attention_bias": True}, "attention_bias"),
        ({"model_type": "qwen3", "mlp_bias": True}, "mlp_bias"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "0.5"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": LLAMA3_ROPE | {"low_freq_factor": 4.0}}, "low_freq_factor 4.0"),
        ({"model_type": "mistral", "sliding_window": -3, "num_key_value_heads": 4}, "-3"),
        ({"eos_token_id": "end"}, "eos_token_id"),
        ({"num_hidden_layers": 10_000}, "num_hidden_layers is '10000'"),
        ({"vocab_size": 10**9}, "vocab 1000000000"),
        ({"hidden_size": 2**35, "head_dim": 16}, f"hidden {2**35}"),
        ({"rope_scaling": YARN | {"attention_factor": -1.0}}, "attention_factor -1.0"),
        ({"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": ZERO}}, "mscale_all_dim is"),
        ({"rope_scaling": YARN | {"mscale": -20.0, "mscale_all_dim": 1.0}}, "attention_factor -"),
    ],
)
def test_refusals_name_the_value(changes: dict[str, object], named: str):
    with pytest.raises(ModelError) as caught:
        read(**changes)
    assert named in caught.value.found


def test_unknown_architecture_lists_the_known():
    with pytest.raises(ModelError, match="llama, mistral, qwen2, qwen3"):
        read(model_type="mamba")


def test_wrong_number_of_layer_types():
    with pytest.raises(ModelError, match="layer_types"):
        read(
            model_type="qwen2",
            use_sliding_window=True,
            sliding_window=4,
            layer_types=["full_attention"],
        )


def test_a_config_is_checked_when_made():
    with pytest.raises(ModelError, match="3 attention windows"):
        replace(PRESETS["tiny-llama"], windows=(1, 2, 3))
    with pytest.raises(ModelError, match="5 rope factors"):
        replace(PRESETS["tiny-llama"], rope_scaling=RopeScaling(kind="factors", factors=(1.0,) * 5))


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": 1', "\udcff", "[" * 100000])
def test_damaged_json(tmp_path: Path, text: str):
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelError, match=r"config\.json"):
        read_config(str(path))


GGUF = {
    "general.architecture": "llama", "llama.embedding_length": 64, "llama.block_count": 2,
    "llama.attention.head_count": 4, "llama.feed_forward_length": 128, "llama.context_length": 256,
    "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.vocab_size": 300,
}  # fmt: skip


def read_gguf_metadata(**changes: object) -> ModelConfig:
    values = GGUF | {f"llama.{key.replace('__', '.')}": value for key, value in changes.items()}
    metadata = Fields(values, "m.gguf")
    empty = np.empty(0, np.uint8)
    return config_from_gguf(
        GgufFile(path=Path("m.gguf"), metadata=metadata, tensors={}, data=empty)
    )


def test_gguf_metadata():
    config = read_gguf_metadata()
    assert (config.num_kv_heads, config.head_dim, config.vocab, config.tied) == (4, 16, 300, True)
    assert read_gguf_metadata(attention__sliding_window=32).windows == (32, 32)
    linear = read_gguf_metadata(rope__scaling__type="linear", rope__scaling__factor=2.0)
    assert linear.rope_scaling == RopeScaling(kind="linear", factor=2.0)
    for older in ("rope__scale_linear", "rope__scaling__factor"):  # no type is linear
        assert read_gguf_metadata(**{older: 2.0}).rope_scaling == linear.rope_scaling
        assert read_gguf_metadata(**{older: 1.0}).rope_scaling == RopeScaling()
    none = read_gguf_metadata(rope__scaling__type="none", rope__scale_linear=2.0)
    assert none.rope_scaling == RopeScaling()
    yarn = read_gguf_metadata(
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=64,
    )
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert yarn.rope_scaling == read(rope_parameters=rope).rope_scaling


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope__scaling__type": "longrope"}, "longrope"),
        ({"rope__dimension_count": 8}, "rope.dimension_count 8"),
        ({"attention__value_length": 8}, "attention.value_length 8"),
        ({"expert_count": 4}, "expert_count 4"),
        ({"context_length": None}, "llama.context_length"),
        ({"block_count": 2**32 - 1}, "4294967295"),
    ],
)
def test_gguf_metadata_that_is_refused(changes: dict[str, object], named: str):
    with pytest.raises(ModelError) as caught:
        read_gguf_metadata(**changes)
    assert named in caught.value.found
