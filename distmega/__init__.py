"""distmega: a tensor program in, a plan over device and stream axes, one persistent megakernel per
GPU out.

The names of `__all__` are the library; what they are for stands in docs/library.md.
`distmega.launch`, `distmega.hostir` and `distmega.kernels` have public names of their own, and
`distmega.errors` has all errors. Names are loaded when they are first used.

In the repository the other packages lie beside this folder. Python started there finds `distmega`
before any installed copy, so this file makes it find them too.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from distmega.lazy import names_from

if TYPE_CHECKING:
    from distmega.compiled import CompiledProgram as CompiledProgram
    from distmega.compiled import compile_plan as compile_plan
    from distmega.engine.engine import Engine as Engine
    from distmega.engine.jobs import open_engine as open_engine
    from distmega.engine.ranks import Emit as Emit
    from distmega.engine.ranks import RankContext as RankContext
    from distmega.engine.requests import EngineOptions as EngineOptions
    from distmega.engine.requests import GenerateRequest as GenerateRequest
    from distmega.engine.requests import GenerateResult as GenerateResult
    from distmega.engine.requests import Token as Token
    from distmega.errors import DistmegaError as DistmegaError
    from distmega.generation import generate as generate
    from distmega.models.load import open_model as open_model
    from distmega.models.sampling import Sampling as Sampling
    from distmega.program.builder import ProgramBuilder as ProgramBuilder
    from distmega.program.types import Program as Program
    from distmega.sharding.layout.mesh import DeviceMesh as DeviceMesh
    from distmega.sharding.layout.placements import replicate as replicate
    from distmega.sharding.layout.placements import shard as shard
    from distmega.sharding.layout.placements import stream as stream
    from distmega.sharding.overlap.pairs import Overlap as Overlap
    from distmega.sharding.planner import Plan as Plan
    from distmega.sharding.planner import plan_program as plan_program
    from distmega.sharding.search.cost import CPU as CPU
    from distmega.sharding.search.cost import H100 as H100
    from distmega.sharding.search.cost import H200 as H200
    from distmega.sharding.search.cost import Machine as Machine
    from distmega.torch_import.captured import Captured as Captured
    from distmega.torch_import.captured import CapturedModule as CapturedModule
    from distmega.torch_import.captured import capture as capture

__version__ = "0.1.0"

_HOMES = {
    "ProgramBuilder": "program.builder",
    "Program": "program.types",
    "DeviceMesh": "sharding.layout.mesh",
    "plan_program": "sharding.planner",
    "Plan": "sharding.planner",
    "shard": "sharding.layout.placements",
    "replicate": "sharding.layout.placements",
    "stream": "sharding.layout.placements",
    "Overlap": "sharding.overlap.pairs",
    "Machine": "sharding.search.cost",
    "CPU": "sharding.search.cost",
    "H100": "sharding.search.cost",
    "H200": "sharding.search.cost",
    "capture": "torch_import.captured",
    "Captured": "torch_import.captured",
    "CapturedModule": "torch_import.captured",
    "compile_plan": "compiled",
    "CompiledProgram": "compiled",
    "RankContext": "engine.ranks",
    "Emit": "engine.ranks",
    "generate": "generation",
    "GenerateRequest": "engine.requests",
    "GenerateResult": "engine.requests",
    "Token": "engine.requests",
    "EngineOptions": "engine.requests",
    "Sampling": "models.sampling",
    "open_model": "models.load",
    "open_engine": "engine.jobs",
    "Engine": "engine.engine",
    "DistmegaError": "errors",
}
"""Public name -> its module."""

__all__ = ["__version__", *_HOMES]
__getattr__ = names_from(__name__, _HOMES)

_ROOT = Path(__file__).resolve().parent.parent
if (_ROOT / "hostir" / "ir" / "nodes.py").exists():
    __path__.append(str(_ROOT))


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
