"""Configurations by name, for `explain` and benchmarks without any download; their weights are
random (random_source.py).
"""

from dataclasses import replace

from distmega.models.config import ModelConfig, RopeScaling


def _llama3_scaling(factor: float) -> RopeScaling:
    return RopeScaling(
        kind="llama3",
        factor=factor,
        original_max_positions=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )


def _llama3(
    hidden: int,
    num_layers: int,
    num_heads: int,
    head_dim: int,
    ffn: int,
    *,
    factor: float = 0.0,
    tied: bool = False,
) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        hidden=hidden,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=head_dim,
        ffn=ffn,
        vocab=128256,
        max_positions=131072 if factor else 8192,
        rope_base=500000.0,
        rope_scaling=_llama3_scaling(factor) if factor else RopeScaling(),
        tied=tied,
        eos_ids=(128001, 128009),
        dtype="bf16",
    )


def _qwen3(hidden: int, num_layers: int, num_heads: int, ffn: int, *, tied: bool) -> ModelConfig:
    return ModelConfig(
        architecture="qwen3",
        hidden=hidden,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=128,
        ffn=ffn,
        vocab=151936,
        max_positions=40960,
        norm_eps=1e-6,
        rope_base=1e6,
        tied=tied,
        qk_norm=True,
        eos_ids=(151645, 151643),
        dtype="bf16",
    )


def _qwen3_30b_a3b() -> ModelConfig:
    return ModelConfig(
        architecture="qwen3_moe",
        hidden=2048,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        ffn=6144,
        vocab=151936,
        max_positions=40960,
        norm_eps=1e-6,
        rope_base=1e6,
        qk_norm=True,
        num_experts=128,
        experts_per_token=8,
        expert_ffn=768,
        norm_top=True,
        eos_ids=(151645, 151643),
        dtype="bf16",
    )


def _smollm2() -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        hidden=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        ffn=1536,
        vocab=49152,
        max_positions=8192,
        rope_base=1e5,
        tied=True,
        eos_ids=(0,),
        dtype="bf16",
    )


_TINY = ModelConfig(
    architecture="llama",
    hidden=48,
    num_layers=2,
    num_heads=6,
    num_kv_heads=3,
    head_dim=16,
    ffn=80,
    vocab=288,
    max_positions=512,
)
"""Uneven on purpose: 6 query and 3 kv heads, so that tp=2 pads."""

_TINY_EXPERTS = replace(
    _TINY, num_heads=4, num_kv_heads=2, num_experts=6, experts_per_token=2, expert_ffn=32
)

_TINY_SCALING = RopeScaling(
    kind="llama3", factor=8.0, original_max_positions=64, low_freq_factor=1.0, high_freq_factor=4.0
)

PRESETS: dict[str, ModelConfig] = {
    "llama-3.2-1b": _llama3(2048, 16, 32, 64, 8192, factor=32.0, tied=True),
    "llama-3.1-8b": _llama3(4096, 32, 32, 128, 14336, factor=8.0),
    "llama-3-70b": _llama3(8192, 80, 64, 128, 28672),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 6144, tied=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12288, tied=False),
    "qwen3-30b-a3b": _qwen3_30b_a3b(),
    "smollm2-135m": _smollm2(),
    "tiny-llama": replace(_TINY, rope_scaling=_TINY_SCALING),
    "tiny-mistral": replace(_TINY, architecture="mistral", windows=(8, 8)),
    "tiny-qwen2": replace(_TINY, architecture="qwen2", qkv_bias=True, tied=True),
    "tiny-qwen3": replace(_TINY, architecture="qwen3", qk_norm=True, num_heads=4, num_kv_heads=2),
    "tiny-qwen3-moe": replace(_TINY_EXPERTS, architecture="qwen3_moe", qk_norm=True, norm_top=True),
    "tiny-mixtral": replace(_TINY_EXPERTS, architecture="mixtral", norm_top=True, expert_ffn=80),
    "tiny-olmoe": replace(
        _TINY_EXPERTS, architecture="olmoe", qk_norm=True, qk_norm_whole=True, expert_ffn=80
    ),
    "tiny-qwen2-moe": replace(
        _TINY_EXPERTS, architecture="qwen2_moe", qkv_bias=True, shared_ffn=40
    ),
}
"""Name -> configuration. The tiny ones are for tests and first steps; they answer nonsense."""
