"""What an engine needs on CPUs alone, for several stages, for a trace, or where there is no kernel;
and what plans steps and prompts, which on GPUs an earlier process may have left behind: imported
when it is used. See distmega/lazy.py."""

from typing import TYPE_CHECKING

from distmega.lazy import late_imports

if TYPE_CHECKING:
    from distmega.engine.cpu_kernels import open_kernels
    from distmega.engine.decode_planner import lower_decode, lower_library_decode, plan_decode
    from distmega.engine.library_steps import LibrarySteps
    from distmega.engine.prefill_planner import lower_prefill
    from distmega.engine.ranks.trace_summary import summarise
    from distmega.kernels.cpu.peer import peer_memory_problem
    from distmega.kernels.cpu.runner import CpuMegakernel
    from distmega.kernels.runtime.streams.signals import open_signals

__all__ = [
    "CpuMegakernel",
    "LibrarySteps",
    "lower_decode",
    "lower_library_decode",
    "lower_prefill",
    "open_kernels",
    "open_signals",
    "peer_memory_problem",
    "plan_decode",
    "summarise",
]

__getattr__ = late_imports(__name__)
