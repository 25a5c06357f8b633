"""Rope tables against the rotary embedding modules of transformers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from distmega.models.config import RopeScaling
from distmega.models.fields import Fields
from distmega.models.huggingface.config import config_from_hf
from distmega.models.presets import PRESETS
from distmega.models.rope import rope_frequencies, rope_table
from distmega.models.weights.tensors import RopeTableReader
from tests.models.files import LLAMA3_ROPE, TINY

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
SCALINGS = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "base": {"rope_type": "default", "rope_theta": 100000.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": LLAMA3_ROPE,
    "yarn": YARN,
    "yarn untruncated": YARN | {"truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn attention": YARN | {"attention_factor": 0.75},
    "yarn mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0},
}


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_table_equals_transformers(scaling: str, head_dim: int):
    hf = LlamaConfig(**(TINY | {"head_dim": head_dim, "rope_parameters": SCALINGS[scaling]}))
    config = config_from_hf(Fields(hf.to_dict(), scaling))
    module = LlamaRotaryEmbedding(hf)
    np.testing.assert_allclose(rope_frequencies(config), module.inv_freq.numpy(), rtol=1e-6, atol=0)
    cos, sin = module(torch.zeros(1), torch.arange(256)[None])
    half = head_dim // 2
    expected = torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=1).numpy()
    np.testing.assert_allclose(rope_table(config, 0, 256), expected, rtol=0, atol=5e-5)


def test_factors_of_gguf_give_llama3_scaling():
    config = PRESETS["llama-3.1-8b"]
    plain = rope_frequencies(replace(config, rope_scaling=RopeScaling())).astype(np.float64)
    factors = tuple((plain / rope_frequencies(config)).tolist())
    given = replace(config, rope_scaling=RopeScaling(kind="factors", factors=factors))
    np.testing.assert_allclose(rope_frequencies(given), rope_frequencies(config), rtol=1e-6)


def test_reader_gives_any_part():
    reader = RopeTableReader(config=PRESETS["tiny-llama"])
    full = reader.read()
    assert full.shape == reader.shape == (512, 16)
    np.testing.assert_array_equal(reader.read((slice(5, 40), slice(3, 9))), full[5:40, 3:9])
