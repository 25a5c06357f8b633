"""Small random configurations of decoders whose layers keep states that each token changes."""

import random
from collections.abc import Callable
from typing import Any

import transformers as hf
from transformers import PretrainedConfig

from tests.torch_import.families import VOCAB

SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2}
ATTENTION = {
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
    "max_position_embeddings": 64,
}  # fmt: skip


def heads_of_mamba(rng: random.Random) -> dict[str, Any]:
    """Of Mamba 2 layers in hybrids: heads, head dim, states, groups."""
    return {
        "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": rng.choice([4, 8]),
        "mamba_n_groups": rng.choice([1, 2]), "mamba_chunk_size": 4,
    }  # fmt: skip


RECURRENT: dict[str, Callable[[random.Random], PretrainedConfig]] = {
    "mamba": lambda rng: hf.MambaConfig(**SIZES, state_size=rng.choice([3, 4])),
    "falcon_mamba": lambda rng: hf.FalconMambaConfig(**SIZES, state_size=rng.choice([3, 4])),
    "mamba2": lambda rng: hf.Mamba2Config(
        **SIZES, state_size=8, num_heads=8, head_dim=8, n_groups=rng.choice([1, 2]), chunk_size=4
    ),
    "jamba": lambda rng: hf.JambaConfig(
        **SIZES, **ATTENTION, mamba_d_state=4, mamba_dt_rank=4, attn_layer_period=2,
        attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, num_experts=2,
        num_experts_per_tok=1,
    ),
    "lfm2": lambda rng: hf.Lfm2Config(
        **SIZES, **ATTENTION, layer_types=["conv", "full_attention"],
        conv_L_cache=rng.choice([2, 3]),
    ),
    "bamba": lambda rng: hf.BambaConfig(
        **SIZES, **ATTENTION, **heads_of_mamba(rng), attn_layer_indices=[1]
    ),
    "falcon_h1": lambda rng: hf.FalconH1Config(
        **SIZES, **ATTENTION, **heads_of_mamba(rng), mamba_d_ssm=64
    ),
    "granitemoehybrid": lambda rng: hf.GraniteMoeHybridConfig(
        **SIZES, **ATTENTION, **heads_of_mamba(rng), layer_types=["mamba", "attention"],
        num_local_experts=2, num_experts_per_tok=1, shared_intermediate_size=16,
    ),
    "qwen3_next": lambda rng: hf.Qwen3NextConfig(
        **SIZES, **ATTENTION, layer_types=["linear_attention", "full_attention"], num_experts=2,
        num_experts_per_tok=1, linear_num_value_heads=4, linear_num_key_heads=2,
        linear_key_head_dim=8, linear_value_head_dim=8, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, head_dim=8,
    ),
}  # fmt: skip
"""Family -> a configuration that a random.Random chooses."""
