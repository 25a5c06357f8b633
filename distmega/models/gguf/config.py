"""ModelConfig from a GGUF file: metadata and the shapes of a few tensors come in; no weight is read
but rope factors.

GGUF calls Llama, SmolLM2 and Mistral alike `llama`. Llama 3's rope scaling is a tensor of factors
there.
"""

from distmega.errors import ModelError
from distmega.models.config import MAX_LAYERS, ModelConfig, RopeScaling
from distmega.models.fields import Fields
from distmega.models.gguf.file import GgufFile
from distmega.models.huggingface.config import yarn_mscale

ROPE_FACTORS = "rope_freqs.weight"

_ARCHITECTURES = ("llama", "qwen2", "qwen3")


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """The configuration of the model in this file; ModelError names what is missing, wrong or
    unsupported.
    """
    fields = file.metadata
    name = fields.text("general.architecture")
    if name not in _ARCHITECTURES:
        raise ModelError(
            f"architecture {name!r} in {fields.where} is not read from GGUF files",
            expected=f"one of {', '.join(_ARCHITECTURES)}",
            remedy="use the model's Hugging Face folder, where more families are read",
        )
    hidden = fields.integer(f"{name}.embedding_length")
    num_heads = fields.integer(f"{name}.attention.head_count")
    num_layers = fields.integer(f"{name}.block_count", most=MAX_LAYERS)
    head_dim = fields.integer(f"{name}.attention.key_length", hidden // max(num_heads, 1))
    _refuse_unsupported(fields, name, head_dim)
    window = fields.integer(f"{name}.attention.sliding_window", 0)
    embed = file.tensors.get("token_embd.weight")
    max_positions = fields.integer(f"{name}.context_length")
    return ModelConfig(
        architecture=name,
        hidden=hidden,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer(f"{name}.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        ffn=fields.integer(f"{name}.feed_forward_length"),
        vocab=embed.shape[0] if embed else fields.integer(f"{name}.vocab_size"),
        max_positions=max_positions,
        norm_eps=fields.number(f"{name}.attention.layer_norm_rms_epsilon"),
        rope_base=fields.number(f"{name}.rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(file, name, max_positions),
        tied="output.weight" not in file.tensors,
        windows=(window,) * num_layers if window else (),
        qkv_bias=name == "qwen2",
        qk_norm=name == "qwen3",
        eos_ids=fields.token_ids("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"),
    )


def _refuse_unsupported(fields: Fields, name: str, head_dim: int) -> None:
    for key, wanted in (
        (f"{name}.attention.value_length", head_dim),
        (f"{name}.rope.dimension_count", head_dim),
        (f"{name}.expert_count", 0),
    ):
        if fields.integer(key, wanted) != wanted:
            found = f"{key} {fields.integer(key)} in {fields.where} is not supported"
            raise ModelError(found, expected=str(wanted), remedy="use another model")


def _rope_scaling(file: GgufFile, name: str, max_positions: int) -> RopeScaling:
    fields = file.metadata
    if ROPE_FACTORS in file.tensors:
        tensor = file.tensors[ROPE_FACTORS]
        factors = file.read(tensor, tuple((0, extent) for extent in tensor.shape)).ravel()
        return RopeScaling(kind="factors", factors=tuple(factors.tolist()))
    older = fields.number(f"{name}.rope.scale_linear", 1.0)  # of files that name no type
    factor = fields.number(f"{name}.rope.scaling.factor", older)
    kind = fields.text(f"{name}.rope.scaling.type", "none" if factor in (0, 1) else "linear")
    if kind == "none":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    if kind == "yarn":
        original = fields.integer(f"{name}.rope.scaling.original_context_length", max_positions)
        attention = fields.number(f"{name}.rope.scaling.attn_factor", 1.0) * yarn_mscale(factor)
        return RopeScaling(
            kind="yarn", factor=factor, original_max_positions=original, attention_factor=attention
        )
    found = f"{name}.rope.scaling.type {kind!r} in {fields.where} is not supported"
    raise ModelError(found, expected="none, linear or yarn", remedy="use another model")
