"""Small decoders of transformers whose steps are one kernel, by name."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from transformers import (
    BloomConfig,
    GPT2Config,
    GraniteConfig,
    MptConfig,
    Olmo2Config,
    PhiConfig,
    PretrainedConfig,
)

CONTEXT = 160
SIZES = {
    "vocab_size": 328, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512,
    "max_position_embeddings": CONTEXT,
}  # fmt: skip

DECODERS: Mapping[str, Callable[[], PretrainedConfig]] = MappingProxyType(
    {
        "gpt2": lambda: GPT2Config(
            vocab_size=328, n_layer=2, n_head=4, n_embd=256, n_positions=CONTEXT
        ),
        "olmo2": lambda: Olmo2Config(hidden_size=256, num_key_value_heads=4, **SIZES),
        "phi": lambda: PhiConfig(hidden_size=320, partial_rotary_factor=0.4, **SIZES),
        "granite": lambda: GraniteConfig(
            hidden_size=256, num_key_value_heads=2, embedding_multiplier=12.0,
            residual_multiplier=0.22, logits_scaling=8.0, **SIZES,
        ),
        "bloom": lambda: BloomConfig(vocab_size=328, hidden_size=256, n_layer=2, n_head=4),
        "mpt": lambda: MptConfig(
            vocab_size=328, d_model=256, n_heads=4, n_layers=2, max_seq_len=CONTEXT
        ),
    }
)  # fmt: skip
