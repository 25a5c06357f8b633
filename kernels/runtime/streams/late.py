"""The kernels of signals, which need Triton: imported when they are used. See distmega/lazy.py."""

from typing import TYPE_CHECKING

from distmega.lazy import late_imports

if TYPE_CHECKING:
    from distmega.kernels.runtime.streams.signal_kernels import await_signal, raise_signal

__all__ = ["await_signal", "raise_signal"]

__getattr__ = late_imports(__name__)
