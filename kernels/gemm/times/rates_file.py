"""The file of measured OverlapRates: written once a machine, read by whoever plans for its GPUs.

Comes in: what `distmega doctor --calibrate` measured. Goes out: a Machine with these rates, or the
built-in ones where nothing was measured. A file that is damaged, or of other GPUs or libraries, is
refused rather than passed over. Next: ways.py.
"""

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

from distmega.errors import RequestError
from distmega.folders import cache_folder
from distmega.json_file import read_json_file
from distmega.kernels.gemm.times.matmul_ways import STAGES
from distmega.kernels.gemm.times.rates import OverlapRates, Table
from distmega.kernels.gemm.times.ways import MatmulModel, rates_of
from distmega.sharding.search.cost import Machine
from distmega.whole_file import replace_text, require_writable

FOLDER = cache_folder()
VERSION = 5
"""Of the file's form."""
GIVEN = ("num_sms", "kernel_multiples", "kernel_dtypes", "kernel_ranks")
"""Rates that nobody measures: what the GPU has, and what the kernel with a collective needs."""
REMEDY = "run: distmega doctor --calibrate (or remove the file to use built-in rates)"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Rates and where they hold. device: as torch names it; libraries: versions by name."""

    device: str
    num_ranks: int
    libraries: Mapping[str, str]
    rates: OverlapRates


def library_versions() -> dict[str, str]:
    """Versions of what rates depend on, as far as it is installed."""
    found = {}
    for name in ("torch", "triton"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def rates_path(device: str, num_ranks: int, folder: Path = FOLDER) -> Path:
    """Where the rates of so many ranks on GPUs of that name are."""
    words = "".join(c if c.isalnum() else "-" for c in device.lower())
    return folder / f"overlap-{words}-{num_ranks}.json"


def require_rates_folder(device: str, folder: Path = FOLDER) -> None:
    """Makes the folder; RequestError where rates can't be written there: before they are measured,
    which takes minutes.
    """
    path = rates_path(device, 0, folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        require_writable(path)
    except OSError as error:
        raise RequestError(
            f"measured rates can't be written to {folder} ({error.strerror})",
            expected="a folder that is there, or can be made, and may be written",
            remedy="give permission to write there, or name another one by XDG_CACHE_HOME",
        ) from error


def write_rates(measured: Measured, folder: Path = FOLDER) -> Path:
    """Replaces the file in one step, so that no reader sees half of it."""
    path = rates_path(measured.device, measured.num_ranks, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps({"version": VERSION, **asdict(measured)}, indent=1) + "\n")
    return path


def calibrated(
    machine: Machine,
    device: str,
    num_ranks: int,
    libraries: Mapping[str, str],
    folder: Path = FOLDER,
) -> Machine:
    """The machine with measured rates, or as it is if there is no file, or a folder that this user
    may not enter. RequestError for a file that does not fit.
    """
    path = rates_path(device, num_ranks, folder)
    try:
        if not path.exists():
            return machine
    except PermissionError as error:  # the home of another user
        _log.warning("%s can't be looked at (%s); using built-in rates", path, error.strerror)
        return machine
    measured, known = read_rates(path), rates_of(machine)
    here = {"device": device, "num_ranks": num_ranks, "libraries": dict(libraries)}
    found = {name: getattr(measured, name) for name in here}
    found |= {name: getattr(measured.rates, name) for name in GIVEN}
    here |= {name: getattr(known, name) for name in GIVEN}
    for name, value in here.items():
        if found[name] != value:
            raise _unfit(path, f"{name} {found[name]}", f"{name} {value}")
    return replace(machine, overlap=MatmulModel(measured.rates))


def read_rates(path: Path) -> Measured:
    """What `write_rates` wrote. RequestError names what is wrong with the file."""
    try:
        stored = read_json_file(path)
    except (OSError, ValueError) as error:
        raise _unfit(path, f"can't be read ({error})", "JSON as doctor writes it") from error
    if not isinstance(stored, dict) or stored.get("version") != VERSION:
        found = stored.get("version") if isinstance(stored, dict) else type(stored).__name__
        raise _unfit(path, f"version {found!r}", f"version {VERSION}")
    try:
        return Measured(
            device=stored["device"],
            num_ranks=stored["num_ranks"],
            libraries=stored["libraries"],
            rates=rates_of_fields(stored["rates"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise _unfit(path, f"its fields ({error})", "those that doctor writes") from error
    except ValueError as error:
        raise _unfit(path, str(error), "positive numbers where doctor writes them") from error


def rates_fields(rates: OverlapRates) -> dict[str, Any]:
    """Rates as numbers, text and tuples of such by name, for a file or another rank."""
    return asdict(rates)


def rates_of_fields(stored: Mapping[str, object]) -> OverlapRates:
    """What rates_fields was given. TypeError for other names, ValueError for unfit values."""
    rates = OverlapRates(**{k: _frozen(v) for k, v in stored.items()})  # type: ignore[arg-type]
    for field in fields(OverlapRates):
        value = getattr(rates, field.name)
        if not _is_fit(value, _SAMPLES.get(field.name, 1.0)) or (
            field.name.endswith(_DIVISORS) and not value
        ):
            raise ValueError(f"{field.name} = {repr(value)[:200]}")
    if sorted(width for width, _ in rates.slice_us) != sorted(STAGES):
        raise ValueError(f"slice_us = {rates.slice_us!r}")
    for name in ("nccl_us", "nccl_reduce_us"):
        if not _is_time(getattr(rates, name)):
            raise ValueError(f"{name} = {getattr(rates, name)!r}")
    return rates


def _is_time(table: Table) -> bool:
    """Whether a table is of times that are positive beyond its points, too: it begins at 0, and
    falls nowhere behind its last but one.
    """
    bytes_sent, times = zip(*table, strict=True)
    ascends = all(before < after for before, after in pairwise(bytes_sent))
    return ascends and bytes_sent[0] == 0 and times[-2] <= times[-1]


def _frozen(value: object) -> object:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _is_fit(value: object, sample: object) -> bool:
    """Whether a value has the form of a sample: numbers in it are from 0 to MAX_NUMBER, whole ones
    at least 1, and a tuple of numbers has as many.
    """
    if isinstance(sample, tuple):
        if not isinstance(value, tuple) or len(value) < len(sample):
            return False
        listed = isinstance(sample[0], tuple | str)
        return (listed or len(value) == len(sample)) and all(_is_fit(v, sample[0]) for v in value)
    if isinstance(sample, str):
        return isinstance(value, str)
    if isinstance(sample, int):
        return type(value) is int and 1 <= value <= MAX_NUMBER
    return type(value) in (int, float) and 0 <= value <= MAX_NUMBER  # type: ignore[operator]


MAX_NUMBER = 1e18
_DIVISORS = ("_per_us", "num_sms", "kernel_ranks")
_POINTS = ((1.0, 1.0), (2.0, 2.0))
_SAMPLES: dict[str, object] = {
    "nccl_us": _POINTS,
    "nccl_reduce_us": _POINTS,
    "slice_us": _POINTS,
    "kernel_multiples": (1, 1, 1),
    "kernel_dtypes": ("bf16",),
}
"""The form of each field that is not a number."""


def _unfit(path: Path, found: str, expected: str) -> RequestError:
    return RequestError(f"rates in {path}: {found}", expected=expected, remedy=REMEDY)
