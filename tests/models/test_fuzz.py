"""Model files from outside are read or refused: config.json, GGUF, safetensors, their index, and
tokenizer.json.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from hypothesis import strategies as st
from safetensors.numpy import save

from distmega.models.config import RopeScaling
from distmega.models.fields import Fields
from distmega.models.gguf.config import config_from_gguf
from distmega.models.gguf.file import GgufFile, open_gguf
from distmega.models.gguf.tokenizer import tokenizer_from_gguf
from distmega.models.huggingface.config import config_from_hf
from distmega.models.huggingface.tokenizer import tokenizer_from_folder
from distmega.models.presets import PRESETS
from distmega.models.rope import rope_table
from distmega.models.text.tokenizer import byte_tokenizer
from distmega.models.weights.random_source import RandomReader
from distmega.models.weights.tensors import weight_specs
from distmega.sources.load import open_model
from tests.fuzz import changed, damaged, damaged_bytes, fuzz_target
from tests.models.files import LLAMA3_ROPE, TINY, write_gguf

CONFIG = replace(
    PRESETS["tiny-llama"], hidden=8, num_heads=2, num_kv_heads=1, head_dim=4, ffn=8, vocab=300,
    num_layers=1, rope_scaling=RopeScaling(),
)  # fmt: skip
JSON = {
    "model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 4, "intermediate_size": 8, "vocab_size": 300, "num_hidden_layers": 1,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
}  # fmt: skip
ROPES = [
    LLAMA3_ROPE,
    {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0, "truncate": False,
     "attention_factor": 1.0, "beta_fast": 32, "beta_slow": 1,
     "original_max_position_embeddings": 9},
    {"rope_type": "linear", "factor": 2.0},
]  # fmt: skip
MIXED = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
CONFIGS: list[object] = [
    {**TINY, **extra, "model_type": name, "rope_scaling": rope, "eos_token_id": [1, 2]}
    for name, extra in (
        ("llama", {}),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}),
        ("qwen3_moe", MIXED),
        ("mixtral", MIXED),
    )
    for rope in ROPES
]


def read_config(data: object) -> None:
    fields = Fields(data, "config.json") if isinstance(data, dict) else Fields({}, "config.json")
    config = config_from_hf(fields)
    assert rope_table(replace(config, head_dim=min(config.head_dim, 64)), 0, 4).shape[0] == 4
    assert len(weight_specs(config)) >= 3


test_configs = fuzz_target(changed(CONFIGS), read_config)


@cache
def gguf_bytes() -> bytes:
    with TemporaryDirectory() as folder:
        write_gguf(Path(folder) / "m.gguf", CONFIG)
        return (Path(folder) / "m.gguf").read_bytes()


def read_gguf(data: bytes) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        path.write_bytes(data)
        source = open_model(path)
        for name in source.readers:
            assert source.weight(name).read().dtype == np.float32
        source.tokenizer().encode("hello")


test_gguf_files = fuzz_target(
    st.deferred(lambda: damaged_bytes([gguf_bytes()]) | damaged_bytes([gguf_bytes()[:12_000]])),
    read_gguf,
)


@cache
def gguf_metadata() -> dict[str, object]:
    with TemporaryDirectory() as folder:
        write_gguf(Path(folder) / "m.gguf", replace(CONFIG, vocab=270))
        return {**open_gguf(Path(folder) / "m.gguf").metadata.data, "llama.vocab_size": 270}


def read_metadata(data: object) -> None:
    fields = Fields(data, "m.gguf") if isinstance(data, dict) else Fields({}, "m.gguf")
    tokenizer_from_gguf(fields, ()).encode("hello")
    file = GgufFile(path=Path("m.gguf"), metadata=fields, tensors={}, data=np.empty(0, np.uint8))
    config_from_gguf(file)


def _sentencepiece() -> dict[str, object]:
    changes = {"model": "llama", "scores": [0.0] * 270, "bos_token_id": 1, "unknown_token_id": 0}
    return gguf_metadata() | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


test_gguf_metadata = fuzz_target(
    st.deferred(lambda: changed([gguf_metadata(), _sentencepiece()])), read_metadata
)


def _weights() -> dict[str, np.ndarray]:
    return {
        spec.hf_name: RandomReader(spec=spec).read().reshape(spec.stored_shape)
        for spec in weight_specs(CONFIG).values()
    }


@cache
def safetensors_bytes() -> bytes:
    return save(_weights())


def _in_folder(files: dict[str, bytes], read: Callable[[Path], None]) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name) / "model"
        folder.mkdir()
        for file, data in {"config.json": json.dumps(JSON).encode(), **files}.items():
            (folder / file).write_bytes(data)
        read(folder)


def _read_weights(folder: Path) -> None:
    source = open_model(folder)
    for name in source.readers:
        assert source.weight(name).read().dtype == np.float32


test_safetensors_files = fuzz_target(
    st.deferred(lambda: damaged_bytes([safetensors_bytes(), safetensors_bytes()[:2000]])),
    lambda data: _in_folder({"model.safetensors": data}, _read_weights),
)


@cache
def index_values() -> list[object]:
    names = dict.fromkeys(_weights(), "a.safetensors")
    return [{"metadata": {}, "weight_map": names}]


shards = st.sampled_from(
    ["../b", "/etc/passwd", "../../x", "a/../../y", ".", "", "\0", "a.safetensors/", "config.json"]
)


def _read_index(value: object, shard: str) -> None:
    if isinstance(value, dict) and isinstance(value.get("weight_map"), dict):
        value["weight_map"] |= {"model.norm.weight": shard}
    files = {"a.safetensors": safetensors_bytes()}
    text = json.dumps(value).encode("utf-8", "surrogatepass")
    _in_folder({"model.safetensors.index.json": text, **files}, _read_weights)


test_indices = fuzz_target(
    st.deferred(lambda: st.tuples(changed(index_values()), shards | st.just("a.safetensors"))),
    lambda pair: _read_index(*pair),
)


@cache
def tokenizer_values() -> list[object]:
    value = json.loads(byte_tokenizer(260)._backend.to_str())
    begin = {"SpecialToken": {"id": "begin", "type_id": 0}}
    value["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"begin": {"id": "begin", "ids": [1], "tokens": ["a"]}},
    }
    value["truncation"] = {
        "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    value["padding"] = {
        "strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "a",
    }  # fmt: skip
    words = {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"}
    pieces = {"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0], ["b", -1.0]]}
    lower = {"type": "Sequence", "normalizers": [{"type": "Lowercase"}, {"type": "NFC"}]}
    bare = {"normalizer": lower, "pre_tokenizer": {"type": "Whitespace"}, "decoder": None}
    return [value, {**value, "model": words, **bare}, {**value, "model": pieces, **bare}]


def _read_tokenizer(value: object) -> None:
    text = value if isinstance(value, str) else json.dumps(value)

    def read(folder: Path) -> None:
        tokenizer = tokenizer_from_folder(folder, ())
        tokenizer.decode(tokenizer.encode("hello a b"))

    _in_folder({"tokenizer.json": text.encode("utf-8", "surrogatepass")}, read)


test_tokenizers = fuzz_target(
    st.deferred(
        lambda: changed(tokenizer_values())
        | damaged([json.dumps(each) for each in tokenizer_values()], ["{", "[", '"', "9" * 30, ","])
    ),
    _read_tokenizer,
)


def test_the_seeds_are_read():
    for value in CONFIGS:
        read_config(value)
    read_gguf(gguf_bytes())
    read_metadata(gguf_metadata())
    read_metadata(_sentencepiece())
    _in_folder({"model.safetensors": safetensors_bytes()}, _read_weights)
    _read_index(index_values()[0], "a.safetensors")
    for value in tokenizer_values():
        _read_tokenizer(value)
