"""What reads models that our own decoders do not cover, which takes torch and transformers:
imported when there is one. See distmega/lazy.py."""

from typing import TYPE_CHECKING

from distmega.lazy import late_imports

if TYPE_CHECKING:
    from distmega.torch_import.huggingface.decoders import HfDecoder
    from distmega.torch_import.huggingface.source import read_decoder, read_weights

__all__ = ["HfDecoder", "read_decoder", "read_weights"]

__getattr__ = late_imports(__name__)
