"""What an engine needs on CPUs alone: imported when it is used. See distmega/lazy.py."""

from typing import TYPE_CHECKING

from distmega.lazy import late_imports

if TYPE_CHECKING:
    from distmega.engine.cpu_kernels import open_kernels
    from distmega.kernels.cpu.peer import peer_memory_problem
    from distmega.kernels.cpu.runner import CpuMegakernel

__all__ = ["CpuMegakernel", "open_kernels", "peer_memory_problem"]

__getattr__ = late_imports(__name__)
