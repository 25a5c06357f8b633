"""Small random configurations of decoders, made by transformers' own classes."""

import random
from collections.abc import Callable
from typing import Any

import transformers as hf
from transformers import PretrainedConfig

VOCAB, POSITIONS = 61, 64
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def common(rng: random.Random, *, groups: bool = True) -> dict[str, Any]:
    """Extents that most families share: heads of 8, one to four key heads if `groups`."""
    kv_heads = rng.choice([1, 2, 4]) if groups else 0
    return {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": rng.choice([2, 3]),
        "num_attention_heads": 4,
        "intermediate_size": rng.choice([40, 48]),
        "max_position_embeddings": POSITIONS,
        **({"num_key_value_heads": kv_heads} if groups else {}),
        **SPECIAL,
    }


def gpt2(rng: random.Random) -> PretrainedConfig:
    scaled = rng.random() < 0.5
    return hf.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=POSITIONS,
        scale_attn_by_inverse_layer_idx=scaled, **SPECIAL,
    )  # fmt: skip


def opt(rng: random.Random) -> PretrainedConfig:
    return hf.OPTConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48,
        max_position_embeddings=POSITIONS, word_embed_proj_dim=rng.choice([24, 32]), **SPECIAL,
    )  # fmt: skip


def gptj(rng: random.Random) -> PretrainedConfig:
    return hf.GPTJConfig(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=POSITIONS,
        rotary_dim=rng.choice([4, 8]), **SPECIAL,
    )  # fmt: skip


def windows(rng: random.Random, config: type[PretrainedConfig]) -> PretrainedConfig:
    """Gemma 2 and 3: windows in some layers, heads that are no part of the hidden extent."""
    return config(
        **common(rng) | {"num_hidden_layers": 3}, head_dim=rng.choice([8, 16]),
        sliding_window=rng.choice([3, 5]), query_pre_attn_scalar=rng.choice([8, 12]),
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip


def granite(rng: random.Random) -> PretrainedConfig:
    return hf.GraniteConfig(
        **common(rng), embedding_multiplier=2.0, logits_scaling=3.0, residual_multiplier=0.5,
        attention_multiplier=0.3,
    )  # fmt: skip


def falcon(rng: random.Random, **changes: object) -> PretrainedConfig:
    given = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2} | SPECIAL
    return hf.FalconConfig(num_attention_heads=4, bias=rng.random() < 0.5, **given, **changes)


def stablelm(rng: random.Random) -> PretrainedConfig:
    normed = rng.random() < 0.5
    return hf.StableLmConfig(
        **common(rng), use_qkv_bias=not normed, qk_layernorm=normed,
        use_parallel_residual=rng.random() < 0.5,
    )  # fmt: skip


def mpt(rng: random.Random) -> PretrainedConfig:
    return hf.MptConfig(
        vocab_size=VOCAB, d_model=32, n_heads=4, n_layers=2, max_seq_len=POSITIONS, **SPECIAL
    )


def bloom(rng: random.Random) -> PretrainedConfig:
    return hf.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4, **SPECIAL)


FAMILIES: dict[str, Callable[[random.Random], PretrainedConfig]] = {
    "gpt2": gpt2,
    "opt": opt,
    "gpt_neox": lambda rng: hf.GPTNeoXConfig(
        **common(rng, groups=False), use_parallel_residual=rng.random() < 0.5
    ),
    "gptj": gptj,
    "phi": lambda rng: hf.PhiConfig(**common(rng), partial_rotary_factor=0.5),
    "phi3": lambda rng: hf.Phi3Config(**common(rng)),
    "gemma": lambda rng: hf.GemmaConfig(**common(rng), head_dim=8),
    "gemma2": lambda rng: windows(rng, hf.Gemma2Config),
    "gemma3_text": lambda rng: windows(rng, hf.Gemma3TextConfig),
    "olmo2": lambda rng: hf.Olmo2Config(**common(rng)),
    "granite": granite,
    "starcoder2": lambda rng: hf.Starcoder2Config(**common(rng), sliding_window=6),
    "stablelm": stablelm,
    "cohere": lambda rng: hf.CohereConfig(**common(rng), use_qk_norm=rng.random() < 0.5),
    "falcon-new": lambda rng: falcon(
        rng, new_decoder_architecture=True, num_kv_heads=rng.choice([1, 2])
    ),
    "falcon-old": lambda rng: falcon(rng, multi_query=True, parallel_attn=True),
    "falcon-alibi": lambda rng: falcon(rng, multi_query=False, alibi=True, parallel_attn=False),
    "mpt": mpt,
    "bloom": bloom,
    "llama": lambda rng: hf.LlamaConfig(**common(rng), attention_bias=True, mlp_bias=True),
}
"""Family -> a configuration drawn by a random.Random."""
