"""Weights come to the GPU once: no second copy while they are loaded."""

import gc
from pathlib import Path

import pytest
import torch
import transformers

from distmega.sources.load import ModelSource, open_model
from tests.gpu.engines import open_engine

pytestmark = pytest.mark.gpu

MB = 2**20


def saved_model(folder: Path) -> ModelSource:
    """A Hugging Face folder of 0.3 GB."""
    config = transformers.Qwen3Config(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=4, head_dim=128, vocab_size=32768, max_position_embeddings=1024,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return open_model(str(folder))


def peak_above_arenas(source: ModelSource | str) -> float:
    """MB that the GPU held while an engine was made, beyond its weights and caches."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    engine = open_engine(source)
    arenas = engine.decode_plan.weights.num_bytes + engine.decode_plan.states.num_bytes
    extra = torch.cuda.max_memory_allocated() - before - arenas
    print(f"{engine.decode_plan.weights.num_bytes / MB:.0f} MB of weights, {extra / MB:.0f} beyond")
    return extra / MB


def test_safetensors_take_no_second_copy(tmp_path):
    assert peak_above_arenas(saved_model(tmp_path)) < 64  # of 273; buffers of steps and prompts


def test_random_weights_are_made_in_parts():
    assert peak_above_arenas("qwen3-1.7b") < 1024
