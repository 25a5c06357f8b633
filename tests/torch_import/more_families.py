"""Small random configurations of further decoders that transformers has, none of which the capture
was written with.
"""

import random
from collections.abc import Callable
from typing import Any

import transformers as hf
from transformers import PretrainedConfig

from tests.torch_import.families import POSITIONS, SPECIAL, VOCAB, common

MIXED = ("sliding_attention", "full_attention", "sliding_attention")


def gpt_width(rng: random.Random) -> dict[str, Any]:
    """Extents as the first GPTs name them."""
    return {
        "vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS,
        **SPECIAL,
    }  # fmt: skip


def mixed(rng: random.Random) -> dict[str, Any]:
    """Three layers, the outer two with a window."""
    return common(rng) | {
        "num_hidden_layers": 3, "sliding_window": rng.choice([3, 5]), "layer_types": [*MIXED]
    }  # fmt: skip


def experts() -> dict[str, Any]:
    """Four experts, two a token, as families name their numbers."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return {
        **dict.fromkeys(names, 4), "num_experts_per_tok": 2, "moe_k": 2, "n_shared_experts": 1,
        "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    }  # fmt: skip


def latent() -> dict[str, Any]:
    """Keys and values of a short row a token."""
    return {
        "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
        "v_head_dim": 8, "num_key_value_heads": 4,
    }  # fmt: skip


def olmo(rng: random.Random) -> PretrainedConfig:
    return hf.OlmoConfig(**common(rng), clip_qkv=rng.choice([None, 0.5]))


def smollm3(rng: random.Random) -> PretrainedConfig:
    """Every other layer has no rotation."""
    return hf.SmolLM3Config(**common(rng), no_rope_layer_interval=2)


def xglm(rng: random.Random) -> PretrainedConfig:
    return hf.XGLMConfig(
        vocab_size=VOCAB, d_model=32, num_layers=2, attention_heads=4, ffn_dim=48,
        max_position_embeddings=POSITIONS, **SPECIAL,
    )  # fmt: skip


def gpt_neo(rng: random.Random) -> PretrainedConfig:
    return hf.GPTNeoConfig(
        vocab_size=VOCAB, hidden_size=32, num_layers=2, num_heads=4, window_size=5,
        attention_types=[[["global", "local"], 1]], max_position_embeddings=POSITIONS, **SPECIAL,
    )  # fmt: skip


def apertus(rng: random.Random) -> PretrainedConfig:
    scaling = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0,
               "original_max_position_embeddings": 32, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0}  # fmt: skip
    return hf.ApertusConfig(**common(rng), rope_parameters=scaling)


def neox_japanese(rng: random.Random) -> PretrainedConfig:
    given = {k: v for k, v in common(rng, groups=False).items() if k != "intermediate_size"}
    return hf.GPTNeoXJapaneseConfig(**given, intermediate_multiple_size=2)


def without_encoder(config: type[PretrainedConfig], **more: object) -> PretrainedConfig:
    """The decoder of an encoder and decoder."""
    sides = {f"{side}_{name}": n for side in ("encoder", "decoder")
             for name, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))}  # fmt: skip
    return config(
        vocab_size=VOCAB, d_model=32, max_position_embeddings=POSITIONS, is_decoder=True,
        is_encoder_decoder=False, **sides, **more, **SPECIAL,
    )  # fmt: skip


MORE_FAMILIES: dict[str, Callable[[random.Random], PretrainedConfig]] = {
    "qwen2": lambda rng: hf.Qwen2Config(**common(rng)),
    "qwen3": lambda rng: hf.Qwen3Config(**common(rng), head_dim=16),
    "mistral": lambda rng: hf.MistralConfig(**common(rng), sliding_window=rng.choice([None, 5])),
    "ministral": lambda rng: hf.MinistralConfig(**mixed(rng), head_dim=8),
    "olmo": olmo,
    "olmo3": lambda rng: hf.Olmo3Config(**mixed(rng)),
    "glm": lambda rng: hf.GlmConfig(**common(rng), head_dim=8),
    "glm4": lambda rng: hf.Glm4Config(**common(rng), head_dim=8),
    "exaone4": lambda rng: hf.Exaone4Config(**mixed(rng)),
    "smollm3": smollm3,
    "nemotron": lambda rng: hf.NemotronConfig(**common(rng), head_dim=8),
    "cohere2": lambda rng: hf.Cohere2Config(**mixed(rng), head_dim=8),
    "gpt_bigcode": lambda rng: hf.GPTBigCodeConfig(
        **gpt_width(rng), multi_query=rng.random() < 0.5
    ),
    "codegen": lambda rng: hf.CodeGenConfig(**gpt_width(rng), rotary_dim=rng.choice([4, 8])),
    "ctrl": lambda rng: hf.CTRLConfig(**gpt_width(rng), dff=48),
    "gpt_neo": gpt_neo,
    "gpt_neox_japanese": neox_japanese,
    "xglm": xglm,
    "biogpt": lambda rng: hf.BioGptConfig(**common(rng, groups=False)),
    "helium": lambda rng: hf.HeliumConfig(**common(rng), head_dim=8),
    "apertus": apertus,
    "ernie4_5": lambda rng: hf.Ernie4_5Config(**common(rng), head_dim=8),
    "seed_oss": lambda rng: hf.SeedOssConfig(
        **common(rng), head_dim=8, attention_bias=True, attention_out_bias=True, mlp_bias=True
    ),
    "arcee": lambda rng: hf.ArceeConfig(**common(rng), mlp_bias=True),
    "persimmon": lambda rng: hf.PersimmonConfig(**common(rng, groups=False)),
    "hunyuan_v1_dense": lambda rng: hf.HunYuanDenseV1Config(**common(rng), head_dim=8),
    "diffllama": lambda rng: hf.DiffLlamaConfig(
        **common(rng) | {"num_key_value_heads": rng.choice([2, 4])},
        head_dim=8,
    ),
    "jais2": lambda rng: hf.Jais2Config(**common(rng), head_dim=8),
    "vaultgemma": lambda rng: hf.VaultGemmaConfig(
        **mixed(rng), head_dim=8, query_pre_attn_scalar=8
    ),
    "nanochat": lambda rng: hf.NanoChatConfig(**common(rng)),
    "cwm": lambda rng: hf.CwmConfig(**mixed(rng), head_dim=8),
    "modernbert-decoder": lambda rng: hf.ModernBertDecoderConfig(
        **common(rng, groups=False), local_attention=8, cls_token_id=1, sep_token_id=2
    ),
    "roformer": lambda rng: hf.RoFormerConfig(**common(rng, groups=False), is_decoder=True),
    "roberta": lambda rng: hf.RobertaConfig(**common(rng, groups=False), is_decoder=True),
    "trocr": lambda rng: hf.TrOCRConfig(
        vocab_size=VOCAB, d_model=32, decoder_layers=2, decoder_attention_heads=4,
        decoder_ffn_dim=48, max_position_embeddings=POSITIONS, **SPECIAL,
    ),
    "bart": lambda rng: without_encoder(hf.BartConfig),
    "marian": lambda rng: without_encoder(hf.MarianConfig),
    "pegasus": lambda rng: without_encoder(hf.PegasusConfig),
    "whisper": lambda rng: without_encoder(
        hf.WhisperConfig, max_source_positions=POSITIONS, max_target_positions=POSITIONS
    ),
    "gemma3": lambda rng: hf.Gemma3Config(
        text_config=hf.Gemma3TextConfig(**mixed(rng), head_dim=8, query_pre_attn_scalar=8)
    ),
    "aria_text": lambda rng: hf.AriaTextConfig(**common(rng), **experts(), head_dim=8),
    "big_bird": lambda rng: hf.BigBirdConfig(
        **common(rng, groups=False), attention_type="original_full", is_decoder=True
    ),
    "olmoe": lambda rng: hf.OlmoeConfig(**common(rng), **experts()),
    "granitemoe": lambda rng: hf.GraniteMoeConfig(**common(rng), **experts()),
    "ernie4_5_moe": lambda rng: hf.Ernie4_5_MoeConfig(**common(rng), **experts(), head_dim=8),
    "phimoe": lambda rng: hf.PhimoeConfig(**common(rng), **experts()),
    "deepseek_v2": lambda rng: hf.DeepseekV2Config(**common(rng) | latent(), **experts()),
    "deepseek_v3": lambda rng: hf.DeepseekV3Config(**common(rng) | latent(), **experts()),
    "minimax_m2": lambda rng: hf.MiniMaxM2Config(**common(rng), **experts(), head_dim=8),
    "bitnet": lambda rng: hf.BitNetConfig(**common(rng)),
    "doge": lambda rng: hf.DogeConfig(**common(rng)),
    "minicpm3": lambda rng: hf.MiniCPM3Config(**common(rng) | latent()),
    "dots1": lambda rng: hf.Dots1Config(**common(rng), **experts()),
    "mixtral": lambda rng: hf.MixtralConfig(
        **common(rng), num_local_experts=4, num_experts_per_tok=2
    ),
    "gpt_oss": lambda rng: hf.GptOssConfig(
        **mixed(rng), head_dim=8, num_local_experts=4, num_experts_per_tok=2
    ),
    "youtu": lambda rng: hf.YoutuConfig(
        **common(rng, groups=False), kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=4,
        v_head_dim=8, qk_nope_head_dim=8,
    ),
}  # fmt: skip
"""Family -> a configuration drawn by a random.Random."""
