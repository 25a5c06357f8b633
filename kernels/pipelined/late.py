"""What launches this room's kernels, which needs Triton: imported when it is used. See
distmega/lazy.py."""

from typing import TYPE_CHECKING

from distmega.lazy import late_imports

if TYPE_CHECKING:
    from distmega.kernels.pipelined.norms.norms import run_norm
    from distmega.kernels.pipelined.pointwise.pointwise import run_pointwise

__all__ = ["run_norm", "run_pointwise"]

__getattr__ = late_imports(__name__)
