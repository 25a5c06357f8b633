"""Hugging Face's tokenizers: imported when a text is read, since most of a start needs none. See
distmega/lazy.py."""

from typing import TYPE_CHECKING

from distmega.lazy import late_imports

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

__all__ = ["Backend", "decoders", "models", "pre_tokenizers"]

__getattr__ = late_imports(__name__)
