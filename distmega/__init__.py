"""distmega: a tensor program in, a plan over device and stream axes, one persistent megakernel per
GPU out.
"""

from distmega.builder import ProgramBuilder

__all__ = ["ProgramBuilder", "__version__"]

__version__ = "0.1.0"
