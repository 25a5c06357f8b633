"""What makes host programs, which on GPUs an earlier process may have left behind: imported when it
is used. See distmega/lazy.py."""

from typing import TYPE_CHECKING

from distmega.lazy import late_imports

if TYPE_CHECKING:
    from distmega.hostir.check.check import prove_once
    from distmega.hostir.lower.lower import lower_program
    from distmega.hostir.passes.passes import run_passes

__all__ = ["lower_program", "prove_once", "run_passes"]

__getattr__ = late_imports(__name__)
