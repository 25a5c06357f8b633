"""Operators of torch that programs have no kind for, which few programs hold: imported when one
does. See distmega/lazy.py.
"""

from typing import TYPE_CHECKING

from distmega.lazy import late_imports

if TYPE_CHECKING:
    from distmega.hostir.library.opaque import compile_opaque

__all__ = ["compile_opaque"]

__getattr__ = late_imports(__name__)
