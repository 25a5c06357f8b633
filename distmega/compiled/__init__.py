"""A planned program, made ready to run on one rank: a Plan and the rank's position in the job come
in, a CompiledProgram goes out, which is called with this rank's tensors.

Start at compile.py and program.py. What runs is decided in lowering.py, alike on all ranks; what a
call may give is checked in given.py and stays in bindings.py; running.py and replay.py run it.
"""

from typing import TYPE_CHECKING

from distmega.lazy import late_imports

if TYPE_CHECKING:
    from distmega.compiled.choices import Megakernels
    from distmega.compiled.compile import compile_plan
    from distmega.compiled.program import CompiledProgram
    from distmega.compiled.report import CompiledStats

__all__ = ["CompiledProgram", "CompiledStats", "Megakernels", "compile_plan"]

__getattr__ = late_imports(__name__)
