"""Kernels of this room, which need Triton: imported when they are used. See distmega/lazy.py."""

from typing import TYPE_CHECKING

from distmega.lazy import late_imports

if TYPE_CHECKING:
    from distmega.kernels.library.append import append
    from distmega.kernels.library.packed_attention import attend_packed
    from distmega.kernels.library.rope import rotate

__all__ = ["append", "attend_packed", "rotate"]

__getattr__ = late_imports(__name__)
