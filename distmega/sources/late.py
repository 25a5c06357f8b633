"""What reads models that our own decoders do not cover, which takes torch and transformers, the
Hub's cache, and files, configurations and tokenizers of published models: imported when there is
one. See distmega/lazy.py."""

from typing import TYPE_CHECKING

from distmega.lazy import late_imports

if TYPE_CHECKING:
    from distmega.models.gguf.config import config_from_gguf
    from distmega.models.gguf.file import open_gguf
    from distmega.models.gguf.source import read_gguf
    from distmega.models.gguf.tokenizer import tokenizer_from_gguf
    from distmega.models.huggingface.config import config_from_hf
    from distmega.models.huggingface.hub import Needs, hub_folder, is_hub_id
    from distmega.models.huggingface.safetensors_source import read_safetensors
    from distmega.models.huggingface.tokenizer import TOKENIZER_FILE, tokenizer_from_folder
    from distmega.torch_import.huggingface.decoders import HfDecoder
    from distmega.torch_import.huggingface.source import read_decoder, read_weights

__all__ = [
    "TOKENIZER_FILE",
    "HfDecoder",
    "Needs",
    "config_from_gguf",
    "config_from_hf",
    "hub_folder",
    "is_hub_id",
    "open_gguf",
    "read_decoder",
    "read_gguf",
    "read_safetensors",
    "read_weights",
    "tokenizer_from_folder",
    "tokenizer_from_gguf",
]

__getattr__ = late_imports(__name__)
