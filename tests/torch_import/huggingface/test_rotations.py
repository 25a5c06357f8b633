"""Rope scalings that depend on the length of a text: as transformers has them, of the context."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PretrainedConfig

import distmega
from distmega.errors import ModelError
from distmega.sources.load import ModelSource
from distmega.torch_import.huggingface.rotations import fix_frequencies
from tests.torch_import.huggingface.test_decoders import family_config, reference
from tests.torch_import.test_folders import RANK

ORIGINAL = 16
"""Positions that the models were first trained on."""


def longrope(rope: dict[str, Any], num_pairs: int) -> dict[str, Any]:
    return {
        **rope,
        "rope_type": "longrope",
        "short_factor": [1 + 0.1 * n for n in range(num_pairs)],
        "long_factor": [2.0 + n for n in range(num_pairs)],
        "original_max_position_embeddings": ORIGINAL,
        "short_mscale": 1.1,
        "long_mscale": 1.3,
    }


def scaled(name: str) -> PretrainedConfig:
    """A family with longrope, in each type of its layers if they have their own."""
    config = family_config(name)
    heads = config.hidden_size // config.num_attention_heads
    num_pairs = (getattr(config, "head_dim", None) or heads) // 2
    rope = config.rope_parameters
    config.rope_parameters = (
        longrope(rope, num_pairs)
        if "rope_type" in rope
        else {layer: longrope(own, num_pairs) for layer, own in rope.items()}
    )
    return config


def check(model: nn.Module, engine: distmega.Engine, num_tokens: int) -> None:
    """Logits of a prompt and of the step behind it."""
    ids = [*range(3, 3 + num_tokens)]
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(engine.logits(ids[:-1]), expected[:-1], rtol=1e-4, atol=1e-4)
    last = engine.decode_step(ids[-1:])["logits"]
    torch.testing.assert_close(last, expected[-1:], rtol=1e-4, atol=1e-4)


def opened(source: ModelSource, max_context: int) -> distmega.Engine:
    options = distmega.EngineOptions(max_context=max_context)
    return distmega.open_engine(RANK, source, 1, options, logits="last")


def test_factors_are_those_of_the_context(tmp_path: Path) -> None:
    model = reference(scaled("granite"))
    model.save_pretrained(tmp_path)
    source = distmega.open_model(tmp_path)
    short, long = (opened(source, each) for each in (ORIGINAL, 2 * ORIGINAL))
    check(model, long, ORIGINAL + 4)
    check(model, short, ORIGINAL)
    assert not torch.allclose(short.logits([3, 4]), long.logits([3, 4]))


def test_types_of_layers_have_their_own() -> None:
    config = scaled("gemma3_text")
    rotary = reference(config).model.rotary_emb
    for max_context, key in ((ORIGINAL, "short_factor"), (ORIGINAL + 1, "long_factor")):
        fix_frequencies(rotary, max_context)
        for layer, rope in config.rope_parameters.items():
            pairs = torch.arange(len(rope[key])) / len(rope[key])
            wanted = 1 / (torch.tensor(rope[key]) * rope["rope_theta"] ** pairs)
            torch.testing.assert_close(rotary.get_buffer(f"{layer}_inv_freq"), wanted)


def test_dynamic_frequencies_are_those_of_the_configuration(tmp_path: Path) -> None:
    config = family_config("granite")
    config.rope_parameters = {**config.rope_parameters, "rope_type": "dynamic", "factor": 2.0}
    model = reference(config)
    model.save_pretrained(tmp_path)
    check(model, opened(distmega.open_model(tmp_path), 32), 20)


def test_a_class_that_asks_for_positions_is_refused_by_name(tmp_path: Path) -> None:
    scaled("phimoe").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"^rope scaling longrope of phimoe, whose class asks"):
        distmega.open_model(tmp_path)
