"""What makes host programs, or gives them other sizes, which on GPUs an earlier process may have
left behind: imported when it is used. See distmega/lazy.py."""

from typing import TYPE_CHECKING

from distmega.lazy import late_imports

if TYPE_CHECKING:
    from distmega.hostir.check.check import prove_once
    from distmega.hostir.lower.lower import lower_program
    from distmega.hostir.passes.passes import run_passes
    from distmega.hostir.passes.resize import resize_inputs

__all__ = ["lower_program", "prove_once", "resize_inputs", "run_passes"]

__getattr__ = late_imports(__name__)
