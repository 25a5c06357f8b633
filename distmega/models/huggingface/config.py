"""ModelConfig from a Hugging Face config.json; defaults per family are those that the published
files leave out.

Comes in: the mapping of a config.json (rope_theta and rope_scaling, or the newer rope_parameters).
Goes out: a ModelConfig, or a ModelError for whatever the decoder would otherwise compute wrongly.
"""

import math
from dataclasses import dataclass
from typing import Literal

from distmega.errors import ModelError, UnknownModelError
from distmega.models.config import (
    ARCHITECTURES,
    MAX_LAYERS,
    ModelConfig,
    RopeScaling,
    unknown_architecture,
)
from distmega.models.fields import Fields

Sliding = Literal["none", "all", "last", "even"]
"""Layers that see a window where layer_types does not say: none, all, those from max_window_layers
on, or of those before it every other one, the first included.
"""

_EOS = "eos_token_id"
_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What a config.json of this family means where it says nothing; 0 stands for "derived from
    other values". layer_types: whether transformers takes layers that see a window from these.
    """

    num_kv_heads: int = 0
    head_dim: int = 0
    max_positions: int = 2048
    norm_eps: float = 1e-6
    rope_base: float = 10000.0
    slides: Sliding = "none"
    sliding_window: int = 0
    layer_types: bool = True
    max_window_layers: int = 28
    qkv_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: bool = False
    eos_ids: tuple[int, ...] = ()


_FAMILIES = {
    "llama": _Family(attention_bias=True, mlp_bias=True, eos_ids=(2,)),
    "mistral": _Family(
        num_kv_heads=8,
        max_positions=131072,
        slides="all",
        sliding_window=4096,
        eos_ids=(2,),
    ),
    "qwen2": _Family(max_positions=32768, slides="last", sliding_window=4096, qkv_bias=True),
    "qwen3": _Family(
        attention_bias=True,
        head_dim=128,
        max_positions=32768,
        slides="last",
        sliding_window=4096,
        qk_norm=True,
    ),
    "qwen2_moe": _Family(
        num_kv_heads=16,
        max_positions=32768,
        slides="even",
        sliding_window=4096,
        qkv_bias=True,
        experts=True,
    ),
    "qwen3_moe": _Family(
        attention_bias=True,
        num_kv_heads=4,
        max_positions=32768,
        slides="all",
        sliding_window=4096,
        layer_types=False,
        qk_norm=True,
        experts=True,
    ),
    "mixtral": _Family(
        num_kv_heads=8,
        max_positions=131072,
        norm_eps=1e-5,
        rope_base=1e6,
        slides="all",
        layer_types=False,
        experts=True,
        eos_ids=(2,),
    ),
    "olmoe": _Family(
        attention_bias=True,
        max_positions=4096,
        norm_eps=1e-5,
        qk_norm=True,
        experts=True,
        eos_ids=(50279,),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Experts:
    """The experts of a config.json; none by default."""

    num: int = 0
    per_token: int = 0
    ffn: int = 0
    norm_top: bool = False
    shared_ffn: int = 0
    dense_layers: tuple[int, ...] = ()


def _experts(fields: Fields, architecture: str, num_layers: int) -> _Experts:
    """What the families say of their experts, each in its own words."""
    counted = "num_local_experts" if "num_local_experts" in fields else "num_experts"
    qwen = architecture.startswith("qwen")
    own_ffn = "moe_intermediate_size" if qwen else "intermediate_size"
    shared = architecture == "qwen2_moe"
    return _Experts(
        num=fields.integer(counted),
        per_token=fields.integer("num_experts_per_tok"),
        ffn=fields.integer(own_ffn),
        norm_top=architecture == "mixtral" or fields.flag("norm_topk_prob", False),
        shared_ffn=fields.integer("shared_expert_intermediate_size") if shared else 0,
        dense_layers=_dense_layers(fields, num_layers) if qwen else (),
    )


def _dense_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Layers without experts: those listed, and all but every decoder_sparse_step-th."""
    step = fields.integer("decoder_sparse_step", 1)
    if step < 1:
        raise fields.bad("decoder_sparse_step", "a step of at least 1")
    listed = fields.sequence("mlp_only_layers", int) if "mlp_only_layers" in fields else []
    layers = range(num_layers)
    return tuple(layer for layer in layers if layer in listed or (layer + 1) % step)


def config_from_hf(fields: Fields) -> ModelConfig:
    """The configuration that a config.json describes; ModelError names what is missing, wrong or
    unsupported.
    """
    architecture = fields.text("model_type")
    if architecture not in ARCHITECTURES:
        raise unknown_architecture(architecture, fields.where)
    family = _FAMILIES[architecture]
    _refuse_unsupported(fields, family)
    hidden, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    head_dim = fields.integer("head_dim", family.head_dim or hidden // max(num_heads, 1))
    max_positions = fields.integer("max_position_embeddings", family.max_positions)
    rope = _rope_fields(fields)
    experts = _experts(fields, architecture, num_layers) if family.experts else _Experts()
    all_biases = fields.flag("attention_bias", False)
    dtype = fields.text("dtype", fields.text("torch_dtype", "float32"))
    return ModelConfig(
        architecture=architecture,
        hidden=hidden,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", family.num_kv_heads or num_heads),
        head_dim=head_dim,
        ffn=fields.integer("intermediate_size"),
        vocab=fields.integer("vocab_size"),
        max_positions=max_positions,
        norm_eps=fields.number("rms_norm_eps", family.norm_eps),
        rope_base=rope.number("rope_theta", fields.number("rope_theta", family.rope_base)),
        rope_scaling=_rope_scaling(rope, fields, max_positions),
        tied=fields.flag("tie_word_embeddings", False),
        windows=_windows(fields, family, num_layers),
        qkv_bias=all_biases or (family.qkv_bias and fields.flag("qkv_bias", True)),
        out_bias=all_biases,
        ffn_bias=fields.flag("mlp_bias", False),
        qk_norm=family.qk_norm,
        qk_norm_whole=architecture == "olmoe",
        num_experts=experts.num,
        experts_per_token=experts.per_token,
        expert_ffn=experts.ffn,
        norm_top=experts.norm_top,
        shared_ffn=experts.shared_ffn,
        dense_layers=experts.dense_layers,
        eos_ids=fields.token_ids(_EOS) if _EOS in fields.data else family.eos_ids,
        dtype=_DTYPES.get(dtype, "f32"),
    )


def _refuse_unsupported(fields: Fields, family: _Family) -> None:
    taken = {"attention_bias": family.attention_bias, "mlp_bias": family.mlp_bias}
    for key, is_taken in taken.items():
        if fields.flag(key, False) and not is_taken:
            raise _unsupported(fields, key, "false, for this family has no such bias")
    if fields.text("hidden_act", "silu") not in ("silu", "swish"):
        raise _unsupported(fields, "hidden_act", "silu")
    if "clip_qkv" in fields:
        raise _unsupported(fields, "clip_qkv", "null")
    if "quantization_config" in fields:
        raise _unsupported(
            fields, "quantization_config", "weights in float32, float16 or bfloat16, or a GGUF file"
        )


def _rope_fields(fields: Fields) -> Fields:
    """What says how positions are rotated; of both spellings the older, which people add by hand to
    stretch a context.
    """
    older = fields.mapping("rope_scaling")
    rope = older if older.data else fields.mapping("rope_parameters")
    for owner in (fields, rope):
        if owner.number("partial_rotary_factor", 1.0) != 1.0:
            raise _unsupported(owner, "partial_rotary_factor", "1.0, the whole head rotated")
    return rope


def _rope_scaling(rope: Fields, fields: Fields, max_positions: int) -> RopeScaling:
    """How `rope`, a part of `fields`, stretches; the original positions of the whole come first."""
    kind = rope.text("rope_type", rope.text("type", "default"))
    key = "original_max_position_embeddings"
    original = fields.integer(key, rope.integer(key, max_positions))
    if kind in ("default", "dynamic"):  # the latter stretches beyond max_positions, never reached
        return RopeScaling()
    if kind == "linear":
        return RopeScaling(kind="linear", factor=rope.number("factor"))
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=rope.number("factor"),
            original_max_positions=original,
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
        )
    if kind == "yarn":
        factor = rope.number("factor", max_positions / max(original, 1))
        return RopeScaling(
            kind="yarn",
            factor=factor,
            original_max_positions=original,
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            attention_factor=rope.number("attention_factor", _yarn_attention(rope, factor)),
            truncate=rope.flag("truncate", True),
        )
    key = "rope_type" if "rope_type" in rope else "type"
    raise _unsupported(rope, key, "default, dynamic, linear, llama3 or yarn")


def _yarn_attention(rope: Fields, factor: float) -> float:
    mscale, mscale_all_dim = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    if mscale and mscale_all_dim:
        divisor = yarn_mscale(factor, mscale_all_dim)
        if not divisor:
            raise rope.bad("mscale_all_dim", "one by which the attention can be divided")
        return yarn_mscale(factor, mscale) / divisor
    return yarn_mscale(factor)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """The scale that the YaRN paper gives to cos and sin: 0.1 ln(factor) + 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _windows(fields: Fields, family: _Family, num_layers: int) -> tuple[int, ...]:
    """Window of each layer: of those that layer_types names, if the family reads that, or else of
    those of the family, where use_sliding_window doesn't say that there are none.
    """
    if family.slides == "none":
        return ()
    absent = "sliding_window" not in fields.data
    window = fields.integer("sliding_window", family.sliding_window if absent else 0)
    qwen = family.qkv_bias or family.qk_norm
    if not window or (qwen and not fields.flag("use_sliding_window", False)):
        return ()
    if window < 1:
        raise fields.bad("sliding_window", "a window of at least 1 token, or null")
    if family.layer_types and "layer_types" in fields:
        types = fields.sequence("layer_types", str)
        if len(types) != num_layers or set(types) - {"full_attention", "sliding_attention"}:
            raise fields.bad("layer_types", f"{num_layers} of full_attention or sliding_attention")
        sliding = [kind == "sliding_attention" for kind in types]
    else:
        sliding = [_slides(fields, family, layer) for layer in range(num_layers)]
    return tuple(window if slides else 0 for slides in sliding) if any(sliding) else ()


def _slides(fields: Fields, family: _Family, layer: int) -> bool:
    """Whether a layer sees a window where layer_types does not say."""
    if family.slides == "all":
        return True
    first_or_stop = fields.integer("max_window_layers", family.max_window_layers)
    if family.slides == "last":
        return layer >= first_or_stop
    return layer < first_or_stop and layer % 2 == 0


def _unsupported(fields: Fields, key: str, expected: str) -> ModelError:
    found = f"{key} {str(fields.data.get(key))[:80]!r} in {fields.where} is not supported"
    return UnknownModelError(found, expected=expected, remedy="use another model")
