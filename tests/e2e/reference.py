"""Hugging Face transformers as the reference: the same weights, put into its own model classes."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from distmega.sources.load import ModelSource


def llama_from_source(source: ModelSource) -> LlamaForCausalLM:
    """LlamaForCausalLM in fp32 holding exactly the weights that `source` gives."""
    c = source.config
    config = LlamaConfig(
        hidden_size=c.hidden, num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads, head_dim=c.head_dim, intermediate_size=c.ffn,
        vocab_size=c.vocab, rms_norm_eps=c.norm_eps, max_position_embeddings=c.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_base},
        tie_word_embeddings=c.tied, attn_implementation="eager",
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(config)

    def read(name: str, rows: int) -> torch.Tensor:
        return torch.as_tensor(source.weight(name).read()).reshape(rows, -1)

    state = {"model.embed_tokens.weight": read("embed", c.vocab)}
    state["model.norm.weight"] = read("norm", c.hidden).flatten()
    state["lm_head.weight"] = read("embed" if c.tied else "head", c.vocab)
    for i in range(c.num_layers):
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        rows = {
            "self_attn.q_proj": ("wq", q), "self_attn.k_proj": ("wk", kv),
            "self_attn.v_proj": ("wv", kv), "self_attn.o_proj": ("wo", c.hidden),
            "mlp.gate_proj": ("w_gate", c.ffn), "mlp.up_proj": ("w_up", c.ffn),
            "mlp.down_proj": ("w_down", c.hidden),
        }  # fmt: skip
        for module, (name, count) in rows.items():
            state[f"model.layers.{i}.{module}.weight"] = read(f"layers.{i}.{name}", count)
        for module, name in (("input", "attn_norm"), ("post_attention", "ffn_norm")):
            key = f"model.layers.{i}.{module}_layernorm.weight"
            state[key] = read(f"layers.{i}.{name}", c.hidden).flatten()
    model.load_state_dict(state)
    return model.eval()
