"""distmega: a tensor program in; a plan over device and stream axes; one persistent megakernel a
GPU out, or library ops and collectives in one CUDA graph.

program/ states programs, models/ and sources/ make them of models, torch_import/ of torch modules;
compiled/ runs any of them on a rank, engine/ language models; superopt/ finds faster equals of
programs; cli/ is the command. Read compiled/compile.py first, and docs/walk.md beside it.

The names of `__all__` are the library; what they are for stands in docs/library.md.
`distmega.launch`, `distmega.hostir` and `distmega.kernels` have public names of their own, and
`distmega.errors` has all errors. Names are loaded when they are first used.

In the repository the other packages lie beside this folder. Python started there finds `distmega`
before any installed copy, so this file makes it find them too.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from distmega.lazy import late_imports

if TYPE_CHECKING:
    from distmega.compiled import CompiledProgram, compile_plan
    from distmega.engine.engine import Engine
    from distmega.engine.ranks.context import Emit, ProgressReport, RankContext
    from distmega.engine.ranks.jobs import open_engine
    from distmega.engine.requests import EngineOptions, GenerateRequest, GenerateResult, Token
    from distmega.errors import DistmegaError
    from distmega.generation import generate
    from distmega.kernels.machines import CPU, H100, H200
    from distmega.models.sampling import Sampling
    from distmega.program.builder import ProgramBuilder
    from distmega.program.types import Program
    from distmega.sharding.layout.mesh import DeviceMesh
    from distmega.sharding.layout.placements import replicate, shard, stream
    from distmega.sharding.overlap.pairs import Overlap
    from distmega.sharding.planner import Plan, plan_program
    from distmega.sharding.search.cost import Machine
    from distmega.sources.load import open_model
    from distmega.torch_import.captured import Captured, CapturedModule, capture

__version__ = "0.1.0"

__all__ = [
    "CPU",
    "H100",
    "H200",
    "Captured",
    "CapturedModule",
    "CompiledProgram",
    "DeviceMesh",
    "DistmegaError",
    "Emit",
    "Engine",
    "EngineOptions",
    "GenerateRequest",
    "GenerateResult",
    "Machine",
    "Overlap",
    "Plan",
    "Program",
    "ProgramBuilder",
    "ProgressReport",
    "RankContext",
    "Sampling",
    "Token",
    "__version__",
    "capture",
    "compile_plan",
    "generate",
    "open_engine",
    "open_model",
    "plan_program",
    "replicate",
    "shard",
    "stream",
]

__getattr__ = late_imports(__name__)

_ROOT = Path(__file__).resolve().parent.parent
if (_ROOT / "hostir" / "ir" / "nodes.py").exists():
    __path__.append(str(_ROOT))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
