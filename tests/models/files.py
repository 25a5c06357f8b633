"""Small model files for tests: GGUF written from random weights, Hugging Face folders saved by
transformers.
"""

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers

from distmega.models.config import ModelConfig
from distmega.models.text.tokenizer import byte_letters, byte_tokenizer
from distmega.models.weights.random_source import RandomReader
from distmega.models.weights.tensors import Array, weight_specs

TINY = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 3, "vocab_size": 288, "max_position_embeddings": 256, "head_dim": 16,
}  # fmt: skip

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip


FOUR_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


@dataclass(frozen=True, slots=True)
class Family:
    """A transformers class pair and what its configuration adds to TINY."""

    config: type[transformers.PretrainedConfig]
    model: type[transformers.PreTrainedModel]
    changes: dict[str, object]

    def build(self) -> transformers.PreTrainedModel:
        """A model of random weights, norms and biases included."""
        torch.manual_seed(0)
        model = self.model(self.config(**(TINY | self.changes))).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        return model


FAMILIES = {
    "llama": Family(
        transformers.LlamaConfig, transformers.LlamaForCausalLM, {"rope_parameters": LLAMA3_ROPE}
    ),
    "mistral": Family(
        transformers.MistralConfig, transformers.MistralForCausalLM, {"sliding_window": 8}
    ),
    "qwen2": Family(
        transformers.Qwen2Config,
        transformers.Qwen2ForCausalLM,
        {"tie_word_embeddings": True, "num_attention_heads": 3},
    ),
    "qwen3": Family(transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {}),
}

SPARSE_FAMILIES = {
    "qwen3_moe": Family(
        transformers.Qwen3MoeConfig,
        transformers.Qwen3MoeForCausalLM,
        FOUR_HEADS
        | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
           "norm_topk_prob": True, "mlp_only_layers": [1], "num_hidden_layers": 3},
    ),
    "mixtral": Family(
        transformers.MixtralConfig,
        transformers.MixtralForCausalLM,
        FOUR_HEADS | {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 8},
    ),
    "olmoe": Family(
        transformers.OlmoeConfig,
        transformers.OlmoeForCausalLM,
        FOUR_HEADS | {"num_experts": 6, "num_experts_per_tok": 3, "hidden_size": 64},
    ),
    "qwen2_moe": Family(
        transformers.Qwen2MoeConfig,
        transformers.Qwen2MoeForCausalLM,
        FOUR_HEADS
        | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
           "shared_expert_intermediate_size": 40, "hidden_size": 64},
    ),
}  # fmt: skip
"""With experts, of which ranks can't have equally many; qwen3_moe also has a layer without."""


def save_tokenizer(folder: Path, vocab: int = TINY["vocab_size"]) -> None:
    """Writes a tokenizer.json whose ids are bytes."""
    byte_tokenizer(vocab)._backend.save(str(folder / "tokenizer.json"))


def interleave(rows: Array, head_dim: int) -> Array:
    """Half-split query or key rows as converters to GGUF order them for the architecture llama."""
    heads = rows.reshape(-1, 2, head_dim // 2, rows.shape[1])
    return np.ascontiguousarray(heads.swapaxes(1, 2).reshape(rows.shape))


def write_gguf(
    path: Path,
    config: ModelConfig,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    drop: str = "",
    rope_factors: tuple[float, ...] = (),
) -> dict[str, Array]:
    """Writes random weights as GGUF with a byte tokenizer, and returns them by logical name as they
    should be read.

    Matrices are quantised to `kind`; the weight named `drop` is left out.
    """
    architecture = "llama" if config.architecture == "mistral" else config.architecture
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.ffn)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_base)
    _add_tokenizer(writer, config.vocab)
    written = {}
    for spec in weight_specs(config).values():
        stored = RandomReader(spec=spec).read().reshape(spec.stored_shape)
        moved = spec.name.endswith(("wq", "wk")) and architecture == "llama"
        data = interleave(stored, config.head_dim) if moved else stored
        packed = gguf.quants.quantize(data, kind) if data.ndim == 2 else data
        kept = gguf.quants.dequantize(packed, kind) if data.ndim == 2 else data
        if moved:
            heads = kept.reshape(-1, config.head_dim // 2, 2, kept.shape[1])
            kept = heads.swapaxes(1, 2).reshape(kept.shape)
        written[spec.name] = kept.reshape(spec.shape)
        if spec.name != drop:
            writer.add_tensor(spec.gguf_name, packed, raw_dtype=kind if data.ndim == 2 else None)
    if rope_factors:
        writer.add_tensor("rope_freqs.weight", np.asarray(rope_factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def _add_tokenizer(writer: gguf.GGUFWriter, vocab: int) -> None:
    letters = byte_letters()
    tokens = [*letters, "he", "ll", "<|end|>"]
    tokens += [f"<{n}>" for n in range(len(tokens), vocab)]
    types = [gguf.TokenType.NORMAL] * len(tokens)
    types[258] = gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["h e", "l l"])
    writer.add_eos_token_id(258)
