"""What a launcher is asked and what it answers: a Job in, Emitted values and one Result out.

A job is a target function named "module:function", called on every rank
(distmega/engine/ranks/context.py states how). This file needs neither torch nor Ray, so that a
caller can be quick. Next: launch/launchers.py.
"""

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from distmega.arguments import (
    require_number,
    require_one_of,
    require_type,
    require_whole,
    shown,
)
from distmega.engine.ranks.context import DeviceKind
from distmega.env import MAX_SECONDS, PREFIX
from distmega.errors import LaunchError, RequestError

MULTICAST_OFF = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
"""Variables that keep NVLink multicast off; every rank gets them, with the caller's values where
set.
"""

PASSIVE = {"OMP_WAIT_POLICY": "passive"}
"""Threads of OpenMP that wait for each other sleep. By default they spin, for longer than a turn of
the scheduler takes: on a machine with other work, ranks are then many times slower; on an idle one
it makes no difference.
"""


LAUNCHERS = ("local", "torchrun", "ray")
MAX_RANKS = 65_536
"""Of a job, as of a mesh."""
Strategy = Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """How Ray places the ranks. A GPU rank also gets one whole GPU.

    Attributes:
        strategy: Ray's strategy of a placement group.
        cpus_per_rank: Cores that a rank asks for; a fraction of one is allowed.
        ranks_per_bundle: Consecutive ranks that must share a node, as the ranks of a pipeline's
            stage should; a divisor of the number of ranks.
        placement_timeout_s: How long to wait for a place for all of them.
    """

    strategy: Strategy = "PACK"
    cpus_per_rank: float = 0.25
    ranks_per_bundle: int = 1
    placement_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        """RequestError for a value out of range or of another type."""
        require_one_of("strategy", self.strategy, get_args(Strategy))
        require_number("cpus_per_rank", self.cpus_per_rank, MAX_RANKS, zero=True)
        require_whole("ranks_per_bundle", self.ranks_per_bundle, 1, MAX_RANKS)
        require_number("placement_timeout_s", self.placement_timeout_s, MAX_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherOptions:
    """Who starts the ranks and how many.

    Attributes:
        launcher: "local", "torchrun", "ray", or "auto", which is torchrun in a process that it
            started, else local.
        num_ranks: Ranks of the job.
        device: "auto" is cuda on a machine with an NVIDIA GPU, else cpu.
        timeout_s: The longest silence allowed from running ranks; None is DISTMEGA_TIMEOUT_S.
        start_timeout_s: The longest from their start until all of them run, whatever they report
            meanwhile; Ray's placement, before it, has a limit of its own, and torchrun starts its
            ranks itself.
        max_restarts: How often the ranks are started again after a RankFailure. Values that were
            already yielded are then left out, so the target must emit the same values again, but
            for ProgressReports.
        ray: How Ray places them.
    """

    launcher: str = "auto"
    num_ranks: int = 1
    device: DeviceKind | Literal["auto"] = "auto"
    timeout_s: float | None = None
    start_timeout_s: float = 300.0
    max_restarts: int = 0
    ray: RayOptions = RayOptions()

    def __post_init__(self) -> None:
        """RequestError for a value out of range or of another type."""
        require_one_of("launcher", self.launcher, ("auto", *LAUNCHERS))
        require_one_of("device", self.device, ("auto", *get_args(DeviceKind)))
        require_whole("num_ranks", self.num_ranks, 1, MAX_RANKS)
        if self.timeout_s is not None:
            require_number("timeout_s", self.timeout_s, MAX_SECONDS)
        require_number("start_timeout_s", self.start_timeout_s, MAX_SECONDS)
        require_whole("max_restarts", self.max_restarts, 0)
        require_type("ray", self.ray, RayOptions, "RayOptions")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request to a group of ranks. `payload` is pickled; `timeout_s` bounds the silence between
    two reports.
    """

    target: str
    payload: bytes
    num_ranks: int
    device: DeviceKind
    timeout_s: float
    start_timeout_s: float
    ray: RayOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Emitted:
    """What the target emitted on rank 0, in order and while it runs.

    Attributes:
        value: What was emitted, unpickled.
    """

    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What the target returned on rank 0; comes last, once every rank has returned.

    Attributes:
        value: What was returned, unpickled.
    """

    value: Any


Event = Emitted | Result


def function_name(target: str | Callable[..., object]) -> str:
    """A target by name; the script that runs, `__main__` here, is a module of its own name on the
    ranks. RequestError for a function that no other process finds by its name.
    """
    if isinstance(target, str):
        return target
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", "")
    if module == "__main__":
        module = _main_module()
    if not module or not name.isidentifier():
        raise RequestError(
            f"target {shown(name or target)}",
            expected="a function of a module, or of the script that runs",
            remedy="define it at the top level of a file",
        )
    return f"{module}:{name}"


def _main_module() -> str | None:
    """The name under which others import what runs as `__main__`, if they can."""
    main = sys.modules["__main__"]
    if spec := getattr(main, "__spec__", None):
        return str(spec.name)
    file = getattr(main, "__file__", None)
    return Path(file).stem if file and Path(file).is_file() else None


_importing: list[str] = []
"""Targets whose module is being imported."""


def require_no_import() -> None:
    """RequestError while a target's module is imported: every rank would start ranks again."""
    if _importing:
        raise RequestError(
            f"launch is called while the module of {_importing[-1]!r} is imported",
            expected="a module that starts nothing when it is imported, as each rank does",
            remedy='put what starts ranks under `if __name__ == "__main__":`',
        )


def load_function(name: str) -> Callable[..., Any]:
    """The function called `name`, "module:function"; raises LaunchError if there is none."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise _bad_target(name, "it is not of the form module:function")
    _importing.append(name)
    try:
        function = getattr(importlib.import_module(module_name), attribute, None)
    except ImportError as error:
        raise _bad_target(name, f"{type(error).__name__}: {error}") from error
    finally:
        _importing.pop()
    if not callable(function):
        raise _bad_target(name, f"module {module_name} has no such function")
    return function  # type: ignore[no-any-return]


def rank_environment(environment: dict[str, str]) -> dict[str, str]:
    """The variables that a rank must have beyond its machine's own: imports as here, no multicast,
    threads that wait passively, our settings.
    """
    settings = {name: value for name, value in environment.items() if name.startswith(PREFIX)}
    defaults = {**MULTICAST_OFF, **PASSIVE}
    chosen = {name: environment.get(name, value) for name, value in defaults.items()}
    return {"PYTHONPATH": os.pathsep.join(sys.path), **chosen, **settings}


def _bad_target(name: str, reason: str) -> LaunchError:
    return LaunchError(
        f"target {name!r} can't be loaded ({reason})",
        expected="module:function, importable on every rank",
        remedy="correct the name, or install the module where the ranks run",
    )
