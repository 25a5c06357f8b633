"""Transformers on the GPU with the weights that an engine holds."""

import torch
import transformers
from torch import Tensor

from distmega.engine.engine import Engine
from distmega.models.config import ModelConfig
from distmega.models.weights.tensors import weight_specs

CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}


def rope_parameters(config: ModelConfig) -> dict[str, object]:
    scaling = config.rope_scaling
    if scaling.kind == "none":
        return {"rope_type": "default", "rope_theta": config.rope_base}
    assert scaling.kind == "llama3"
    return {
        "rope_type": "llama3", "rope_theta": config.rope_base, "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_positions,
    }  # fmt: skip


def sliding(config: ModelConfig) -> dict[str, object]:
    """Attention windows as transformers has them: one width, in all layers or in some."""
    if not any(config.windows):
        return {"sliding_window": None} if config.architecture == "mistral" else {}
    if config.architecture == "mistral":
        return {"sliding_window": config.windows[0]}
    types = ["sliding_attention" if window else "full_attention" for window in config.windows]
    return {
        "use_sliding_window": True, "sliding_window": max(config.windows), "layer_types": types,
    }  # fmt: skip


def reference_logits(engine: Engine, ids: list[int], dtype: torch.dtype) -> Tensor:
    """Logits [len(ids), vocab] of transformers computing in `dtype`, as float32."""
    config = engine.decode_plan.config
    config_class, model_class = CLASSES[config.architecture]
    hf_config = config_class(
        hidden_size=config.hidden, num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads, num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim, intermediate_size=config.ffn, vocab_size=config.vocab,
        rms_norm_eps=config.norm_eps, max_position_embeddings=config.max_positions,
        rope_parameters=rope_parameters(config), tie_word_embeddings=config.tied,
        attn_implementation="eager", **sliding(config),
    )  # fmt: skip
    with torch.device("meta"):
        model = model_class(hf_config)
    state = {}
    for name, spec in weight_specs(config).items():
        state[spec.hf_name] = engine.tensor(name).reshape(spec.stored_shape).to(dtype)
    if config.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    with torch.device(engine.device):
        model.model.rotary_emb = type(model.model.rotary_emb)(hf_config)
    with torch.no_grad():
        return model.eval()(torch.tensor([ids], device=engine.device)).logits[0].float()
