"""distmega: a tensor program in, a plan over device and stream axes, one persistent megakernel per
GPU out.

The names of `__all__` are the library; what they are for stands in the README, "As a library".
`distmega.launch`, `distmega.hostir` and `distmega.kernels` have public names of their own, and
`distmega.errors` has all errors. Names are loaded when they are first used.

In the repository the other packages lie beside this folder. Python started there finds `distmega`
before any installed copy, so this file makes it find them too.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from distmega.lazy import names_from

if TYPE_CHECKING:
    from distmega.builder import ProgramBuilder as ProgramBuilder
    from distmega.compiled import CompiledProgram as CompiledProgram
    from distmega.compiled import compile_plan as compile_plan
    from distmega.engine import Engine as Engine
    from distmega.errors import DistmegaError as DistmegaError
    from distmega.generation import generate as generate
    from distmega.jobs import open_engine as open_engine
    from distmega.models.load import open_model as open_model
    from distmega.models.sampling import Sampling as Sampling
    from distmega.program import Program as Program
    from distmega.ranks import Emit as Emit
    from distmega.ranks import RankContext as RankContext
    from distmega.requests import EngineOptions as EngineOptions
    from distmega.requests import GenerateRequest as GenerateRequest
    from distmega.requests import GenerateResult as GenerateResult
    from distmega.requests import Token as Token
    from distmega.sharding.cost import CPU as CPU
    from distmega.sharding.cost import H100 as H100
    from distmega.sharding.cost import H200 as H200
    from distmega.sharding.cost import Machine as Machine
    from distmega.sharding.mesh import DeviceMesh as DeviceMesh
    from distmega.sharding.overlap import Overlap as Overlap
    from distmega.sharding.placements import replicate as replicate
    from distmega.sharding.placements import shard as shard
    from distmega.sharding.placements import stream as stream
    from distmega.sharding.planner import Plan as Plan
    from distmega.sharding.planner import plan_program as plan_program

__version__ = "0.1.0"

_HOMES = {
    "ProgramBuilder": "builder", "Program": "program",
    "DeviceMesh": "sharding.mesh", "plan_program": "sharding.planner", "Plan": "sharding.planner",
    "shard": "sharding.placements", "replicate": "sharding.placements",
    "stream": "sharding.placements", "Overlap": "sharding.overlap",
    "Machine": "sharding.cost", "CPU": "sharding.cost", "H100": "sharding.cost",
    "H200": "sharding.cost",
    "compile_plan": "compiled", "CompiledProgram": "compiled",
    "RankContext": "ranks", "Emit": "ranks",
    "generate": "generation", "GenerateRequest": "requests", "GenerateResult": "requests",
    "Token": "requests", "EngineOptions": "requests", "Sampling": "models.sampling",
    "open_model": "models.load", "open_engine": "jobs", "Engine": "engine",
    "DistmegaError": "errors",
}  # fmt: skip
"""Public name -> its module."""

__all__ = ["__version__", *_HOMES]
__getattr__ = names_from(__name__, _HOMES)

_ROOT = Path(__file__).resolve().parent.parent
if (_ROOT / "hostir" / "nodes.py").exists():
    __path__.append(str(_ROOT))


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
