"""Launches, which need Triton: imported when there is one. See distmega/lazy.py."""

from typing import TYPE_CHECKING

from distmega.lazy import late_imports

if TYPE_CHECKING:
    from distmega.kernels.runtime.ahead import launch, launching_nothing

__all__ = ["launch", "launching_nothing"]

__getattr__ = late_imports(__name__)
