"""What this machine has, what does not fit, and what to do about it.

`gather_facts` looks at the machine, each thing guarded, so that one that is broken does not hide
the others; `examine` judges facts, and can be asked about any machine. Torch is loaded only when
the facts are gathered. What ranks on several GPUs can do is tried by them: doctor_ranks.py. Used
by doctor.py and calibration.py.
"""

import importlib
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from itertools import permutations
from pathlib import Path
from typing import Any, Literal

from distmega.env import read_settings
from distmega.errors import DistmegaError, RequestError, counted
from distmega.launch.contract import MULTICAST_OFF, LauncherOptions
from distmega.launch.launchers import launch

State = Literal["ok", "note", "problem"]
"""note: something works in a slower way, or is missing and not needed. problem: ranks can't run."""

Version = tuple[int, ...]

OLDEST_PYTHON: Version = (3, 11)
OLDEST: Mapping[str, Version] = {"torch": (2, 11), "triton": (3, 6), "ray": (2, 50)}
HOPPER = (9, 0)
SHARED_BYTES = 64 * 2**20
"""Shared memory below which NCCL and Ray may not get what they ask for."""

PROBE_S = 60.0
BACKENDS = ("CUDA", "NCCL")
"""Backends of symmetric memory, as kernels/runtime/symmetric.py has them."""

NCCL_PACKAGES = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One CUDA device. capability: of compute, (9, 0) on Hopper. peers: devices whose memory it can
    reach.
    """

    name: str
    capability: tuple[int, int]
    num_bytes: int
    peers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A machine. packages: versions of those installed. broken: what failed to load, and how.

    torch_cuda: CUDA that torch was built for, "" for a CPU build. num_device_files: GPUs that the
    driver shows. symmetric: backend of symmetric memory -> why it does not work, "" if it does.
    """

    python: Version = OLDEST_PYTHON
    system: str = "Linux"
    processor: str = "x86_64"
    num_cores: int = 1
    packages: Mapping[str, str] = field(default_factory=dict)
    broken: Mapping[str, str] = field(default_factory=dict)
    torch_cuda: str = ""
    nccl: str = ""
    num_device_files: int = 0
    gpus: tuple[Gpu, ...] = ()
    symmetric: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    shared_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report. remedy: what to do, where something is not as it should be."""

    topic: str
    found: str
    state: State = "ok"
    remedy: str = ""

    def __str__(self) -> str:
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.state:<8}{self.topic}: {self.found}{remedy}"


def gather_facts() -> Facts:
    """Looks at this machine; with several GPUs, two ranks try each backend of symmetric memory."""
    names = ("torch", "triton", "ray", "transformers", *NCCL_PACKAGES)
    packages = {name: version for name in names if (version := _version(name))}
    broken: dict[str, str] = {}
    torch = _load("torch", broken) if "torch" in packages else None
    gpus = _guarded(lambda: _find_gpus(torch), (), "CUDA", broken) if torch else ()
    return Facts(
        python=tuple(sys.version_info[:3]),
        system=platform.system(),
        processor=platform.machine(),
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        packages=packages,
        torch_cuda=(torch.version.cuda or "") if torch else "",
        nccl=_guarded(lambda: _nccl_version(torch), "", "NCCL", broken) if gpus else "",
        num_device_files=len(list(Path("/dev").glob("nvidia[0-9]*"))),
        gpus=gpus,
        symmetric={name: try_symmetric(name) for name in BACKENDS} if len(gpus) > 1 else {},
        environment=dict(os.environ),
        shared_bytes=_shared_bytes(),
        broken=broken,
    )


def try_symmetric(backend: str) -> str:
    """Why two ranks on GPUs can't share memory with a backend; empty if they can."""
    options = LauncherOptions(
        num_ranks=2, device="cuda", timeout_s=PROBE_S, start_timeout_s=PROBE_S
    )
    try:
        list(launch("distmega.cli.doctor_ranks:probe", backend, options))
    except DistmegaError as error:
        return error.found
    return ""


def examine(facts: Facts) -> list[Finding]:
    """All there is to say about a machine, in the order of CHECKS."""
    return [finding for check in CHECKS for finding in check(facts)]


def _check_python(facts: Facts) -> Iterator[Finding]:
    version = _dotted(facts.python)
    cores = counted(facts.num_cores, "core")
    interpreter = f"{version}, {facts.system} on {facts.processor}, {cores}"
    if facts.python < OLDEST_PYTHON:
        remedy = f"install Python {_dotted(OLDEST_PYTHON)} or later"
        yield Finding(topic="Python", found=interpreter, state="problem", remedy=remedy)
    else:
        yield Finding(topic="Python", found=interpreter)


def _check_torch(facts: Facts) -> Iterator[Finding]:
    if "torch" not in facts.packages:
        remedy = "run: pip install torch"
        yield Finding(topic="torch", found="not installed", state="problem", remedy=remedy)
    elif "torch" in facts.broken:
        found = f"{facts.packages['torch']} does not load ({facts.broken['torch']})"
        yield Finding(topic="torch", found=found, state="problem", remedy="install it again")
    else:
        build = f"for CUDA {facts.torch_cuda}" if facts.torch_cuda else "for CPUs"
        yield _judge_version(facts, "torch", build, "problem")


def _check_triton(facts: Facts) -> Iterator[Finding]:
    if "triton" in facts.packages:
        yield _judge_version(facts, "triton", "", "problem" if facts.gpus else "note")
    elif facts.gpus:
        remedy = "run: pip install 'distmega[gpu]'"
        yield Finding(topic="triton", found="not installed", state="problem", remedy=remedy)
    else:
        yield Finding(topic="triton", found="not installed, and not needed without a GPU")


def _check_ray(facts: Facts) -> Iterator[Finding]:
    if "ray" in facts.packages:
        yield _judge_version(facts, "ray", "", "note")
    else:
        remedy = "for --launcher ray run: pip install 'distmega[ray]'"
        yield Finding(topic="ray", found="not installed", state="note", remedy=remedy)


def _judge_version(facts: Facts, name: str, detail: str, state: State) -> Finding:
    version, oldest = facts.packages[name], OLDEST[name]
    found = f"{version} {detail}".strip()
    if _parsed(version) >= oldest:
        return Finding(topic=name, found=found)
    remedy = f"run: pip install '{name}>={_dotted(oldest)}'"
    return Finding(topic=name, found=found, state=state, remedy=remedy)


def _check_devices(facts: Facts) -> Iterator[Finding]:
    if not facts.gpus and not facts.num_device_files:
        yield Finding(topic="devices", found="no NVIDIA GPU; ranks run on the CPU")
    elif not facts.gpus:
        why = facts.broken.get("CUDA", "torch sees none of them")
        remedy = "check that driver and torch fit each other, and CUDA_VISIBLE_DEVICES"
        if "torch" in facts.packages and not facts.torch_cuda:
            why, remedy = (
                "torch was built for CPUs",
                "install a torch for CUDA, or use --device cpu",
            )
        found = f"{counted(facts.num_device_files, 'GPU')}, but {why}"
        yield Finding(topic="devices", found=found, state="problem", remedy=remedy)
    for number, gpu in enumerate(facts.gpus):
        found = f"cuda:{number} {gpu.name}, {gpu.num_bytes / 1e9:.0f} GB"
        if gpu.capability == HOPPER:
            yield Finding(topic="devices", found=found)
        else:
            found += f", compute capability {_dotted(gpu.capability)}"
            remedy = "the decode kernel needs 9.0; library ops run instead"
            yield Finding(topic="devices", found=found, state="note", remedy=remedy)


def _check_peers(facts: Facts) -> Iterator[Finding]:
    numbers = range(len(facts.gpus))
    apart = [(a, b) for a, b in permutations(numbers, 2) if b not in facts.gpus[a].peers]
    if apart:
        found = f"none from {', '.join(f'cuda:{a} to cuda:{b}' for a, b in apart)}"
        remedy = "ranks there communicate over NCCL; look at nvidia-smi topo -p2p r"
        yield Finding(topic="peer access", found=found, state="note", remedy=remedy)
    elif len(facts.gpus) > 1:
        yield Finding(topic="peer access", found="between all GPUs")
    for backend, problem in facts.symmetric.items():
        topic = f"symmetric memory, {backend}"
        remedy = "another backend or NCCL takes its place" if problem else ""
        state: State = "note" if problem else "ok"
        yield Finding(topic=topic, found=problem or "works", state=state, remedy=remedy)


def _check_nccl(facts: Facts) -> Iterator[Finding]:
    if "NCCL" in facts.broken:
        found, remedy = f"does not load ({facts.broken['NCCL']})", "install torch again"
        yield Finding(topic="NCCL", found=found, state="problem", remedy=remedy)
    elif facts.nccl:
        yield Finding(topic="NCCL", found=facts.nccl)
    both = [name for name in NCCL_PACKAGES if name in facts.packages]
    if len(both) > 1:
        wrong = both[not facts.torch_cuda.startswith("13")]
        right = next(name for name in both if name != wrong)
        found = f"{both[0]} and {both[1]} are both installed and write the same file"
        remedy = f"run: pip uninstall {wrong}; pip install --force-reinstall --no-deps {right}"
        state: State = "problem" if facts.gpus else "note"
        yield Finding(topic="NCCL", found=found, state=state, remedy=remedy)


def _check_multicast(facts: Facts) -> Iterator[Finding]:
    turned_on = {
        name: facts.environment[name]
        for name, off in MULTICAST_OFF.items()
        if facts.environment.get(name, off) != off
    }
    if turned_on:
        found = ", ".join(f"{name}={value}" for name, value in turned_on.items())
        remedy = f"unset {' '.join(turned_on)}: ranks then keep NVLink multicast off"
        yield Finding(topic="multicast", found=found, state="problem", remedy=remedy)
    else:
        yield Finding(topic="multicast", found="off on every rank")


def _check_memory(facts: Facts) -> Iterator[Finding]:
    shares = facts.system == "Linux" and facts.processor in ("x86_64", "AMD64", "amd64")
    if not shares:
        found = f"CPU ranks can't share it on {facts.system}, {facts.processor}"
        remedy = "their collectives go over gloo, which is slower"
        yield Finding(topic="shared memory", found=found, state="note", remedy=remedy)
    if facts.shared_bytes is None:
        return
    found = f"{facts.shared_bytes / 2**20:,.0f} MiB free in /dev/shm"
    if facts.shared_bytes >= SHARED_BYTES:
        yield Finding(topic="shared memory", found=found)
    else:
        state: State = "problem" if len(facts.gpus) > 1 else "note"
        remedy = "give the container more, such as --shm-size 1g; NCCL and Ray use it"
        yield Finding(topic="shared memory", found=found, state=state, remedy=remedy)


def _check_settings(facts: Facts) -> Iterator[Finding]:
    try:
        read_settings(facts.environment)
    except RequestError as error:
        yield Finding(topic="settings", found=error.found, state="problem", remedy=error.remedy)


CHECKS: Sequence[Callable[[Facts], Iterator[Finding]]] = (
    _check_python,
    _check_torch,
    _check_triton,
    _check_ray,
    _check_devices,
    _check_peers,
    _check_nccl,
    _check_multicast,
    _check_memory,
    _check_settings,
)


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def _parsed(version: str) -> Version:
    """The leading numbers of a version: "2.11.0+cu130" is (2, 11, 0)."""
    numbers: list[int] = []
    for part in version.partition("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _load(name: str, broken: dict[str, str]) -> Any:
    return _guarded(lambda: importlib.import_module(name), None, name, broken)


def _guarded(look: Callable[[], Any], default: Any, what: str, broken: dict[str, str]) -> Any:
    """What a look at the machine gives; a failure is noted, whatever it is."""
    try:
        return look()
    except Exception as error:  # drivers fail in many ways, and a report must name each
        broken[what] = str(error).partition("\n")[0] or type(error).__name__
        return default


def _find_gpus(torch: Any) -> tuple[Gpu, ...]:
    numbers = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return tuple(
        Gpu(
            name=torch.cuda.get_device_name(number),
            capability=torch.cuda.get_device_capability(number),
            num_bytes=torch.cuda.get_device_properties(number).total_memory,
            peers=tuple(
                other
                for other in numbers
                if other != number and torch.cuda.can_device_access_peer(number, other)
            ),
        )
        for number in numbers
    )


def _nccl_version(torch: Any) -> str:
    return _dotted(torch.cuda.nccl.version())


def _shared_bytes() -> int | None:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return None
    free = os.statvfs(folder)
    return free.f_bavail * free.f_frsize
