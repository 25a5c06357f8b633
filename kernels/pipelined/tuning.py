"""Measured choices: inside `tuning()` each new shape class times its best few candidates; the
winner is kept on disk for the machine's GPU, and rank 0's winners hold on every rank.

In: candidates of choices.py and a way to run one. Out: the choice to run. Next: pointwise.py.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distmega.folders import cache_folder
from distmega.hostir.comm.plain import gather_bytes
from distmega.json_file import parse_json_text, read_json_file
from distmega.kernels.gemm.times.rates_file import library_versions
from distmega.kernels.pipelined.choices import KernelChoice
from distmega.whole_file import replace_text

CHOICES = cache_folder() / "choices.json"
NUM_TMA, NUM_PLAIN = 8, 16
"""Candidates of either kind that are measured first."""
NUM_LEADING, NUM_FINALISTS = 3, 4
"""Of them, those whose plain variants come next; of all, those that are measured once more."""
NUM_RUNS = 15
NUM_SHORT_RUNS = 45
SHORT_US = 300.0
"""Kernels that take less differ by less than their times do from run to run."""
FLUSH_BYTES = 2**28
"""Written before each run: more than the L2 holds, and time for the host to run ahead."""

_log = logging.getLogger(__name__)


class _Table:
    """Shape class -> choice; read from disk at the first look-up."""

    def __init__(self) -> None:
        self.measuring = False
        self.entries: dict[str, KernelChoice] | None = None
        self.version = 0

    def known(self) -> dict[str, KernelChoice]:
        if self.entries is None:
            self.entries = read_choices(CHOICES)
        return self.entries


_table = _Table()


def version() -> int:
    """Changes when what `pick` gives may have changed."""
    return _table.version


def pick(
    key: str,
    candidates: Sequence[KernelChoice],
    *,
    prepare: Callable[[Sequence[KernelChoice]], object],
    run: Callable[[KernelChoice], object],
) -> KernelChoice:
    """The measured choice of a shape class on this GPU; else the model's, or inside `tuning()` the
    fastest of its best few. A measured choice that is no candidate any more is measured again.

    prepare: compiles choices before they run.
    """
    known = _table.known()
    if not _table.measuring or known.get(_on_this_gpu(key)) in candidates:
        return known_choice(key, candidates)
    times = _measured(first_of_kinds(candidates), prepare, run)
    leading = sorted(times, key=times.__getitem__)
    kinds = {kind_of(choice) for choice in leading[:NUM_LEADING] if not choice.stages}
    variants = [each for each in candidates if kind_of(each) in kinds and each not in times]
    times |= _measured(variants, prepare, run)
    finalists = sorted(times, key=times.__getitem__)[:NUM_FINALISTS]
    times = _median_us(finalists, run)
    best = known[_on_this_gpu(key)] = min(times, key=times.__getitem__)
    _log.info("%s: %s, %.1f us", key, best, times[best])
    return best


def _on_this_gpu(key: str) -> str:
    """A shape class where its times hold: on GPUs of this name, with these versions of what
    compiles and starts kernels.
    """
    return f"{torch.cuda.get_device_name()}, {_versions()}: {key}"


@cache
def _versions() -> str:
    """Of the libraries; read once, for every launch that is chosen looks its class up."""
    return ", ".join(f"{name} {version}" for name, version in library_versions().items())


def known_choice(key: str, candidates: Sequence[KernelChoice]) -> KernelChoice:
    """What `pick` gives outside `tuning()`."""
    found = _table.known().get(_on_this_gpu(key))
    return found if found is not None and found in candidates else candidates[0]


def kind_of(choice: KernelChoice) -> tuple[object, ...]:
    """What choices of one kind have in common; plain ones differ by when and how they load."""
    return choice.stages == 0, choice.tile, choice.num_warps, choice.run, choice.parts


def first_of_kinds(candidates: Sequence[KernelChoice]) -> list[KernelChoice]:
    """The model's best of each kind, of few kinds."""
    first: dict[tuple[object, ...], KernelChoice] = {}
    for choice in candidates:
        first.setdefault(kind_of(choice), choice)
    by_kernel = ([c for c in first.values() if bool(c.stages) == tma] for tma in (True, False))
    return [
        choice
        for kind, count in zip(by_kernel, (NUM_TMA, NUM_PLAIN), strict=True)
        for choice in kind[:count]
    ]


def _measured(
    choices: Sequence[KernelChoice],
    prepare: Callable[[Sequence[KernelChoice]], object],
    run: Callable[[KernelChoice], object],
) -> dict[KernelChoice, float]:
    if not choices:
        return {}
    prepare(choices)
    return _median_us(choices, run)


def _median_us(
    choices: Sequence[KernelChoice], run: Callable[[KernelChoice], object]
) -> dict[KernelChoice, float]:
    """Time on the GPU of a run of each, in turn, whose inputs have left the cache; in every other
    round backwards, so that none always follows the same one.
    """
    for choice in choices:
        run(choice)
    times = _turns_us(choices, run, NUM_RUNS)
    if min(times.values()) < SHORT_US:
        times = _turns_us(choices, run, NUM_SHORT_RUNS)
    return times


def _turns_us(
    choices: Sequence[KernelChoice], run: Callable[[KernelChoice], object], num_runs: int
) -> dict[KernelChoice, float]:
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    events = {choice: [(_event(), _event()) for _ in range(num_runs)] for choice in choices}
    for number in range(num_runs):
        for choice in choices[:: -1 if number % 2 else 1]:
            start, end = events[choice][number]
            flush.zero_()
            start.record()
            run(choice)
            end.record()
    torch.cuda.synchronize()
    spans = {
        choice: sorted(float(start.elapsed_time(end)) for start, end in pairs)
        for choice, pairs in events.items()
    }
    return {choice: times[num_runs // 2] * 1e3 for choice, times in spans.items()}


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@contextmanager
def tuning(path: Path = CHOICES) -> Iterator[None]:
    """Calls of kernels in the block measure what is not known yet; at its end the table is written
    to `path`, or there is a warning where it can't be, and ranks of a process group, all of which
    must be in the block, take over rank 0's.
    """
    _table.measuring = True
    _table.version += 1
    before = dict(_table.known())
    try:
        yield
    except BaseException:
        _table.entries = before  # other ranks have not measured what this one has
        raise
    finally:
        _table.measuring = False
    many = dist.is_initialized() and dist.get_world_size() > 1
    if many:
        text = _as_text(_table.known()).encode()
        first, *_ = gather_bytes(text, dist.get_world_size(), None)
        _table.entries = _of_text(str(first, "utf-8"))
    _table.version += 1
    if not many or dist.get_rank() == 0:
        try:
            write_choices(path, _table.known())
        except OSError as error:
            _log.warning("choices of kernels can't be kept in %s (%s)", path, error.strerror)


def read_choices(path: Path) -> dict[str, KernelChoice]:
    """The table of a file; empty if there is none or it is damaged: it can be measured anew."""
    try:
        return _of_stored(read_json_file(path))
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        _log.warning("choices of kernels in %s can't be read (%s); measuring anew", path, error)
        return {}


def write_choices(path: Path, entries: dict[str, KernelChoice]) -> None:
    """Replaces the file in one step, so that no reader sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, _as_text(entries))


def _as_text(entries: Mapping[str, KernelChoice]) -> str:
    return json.dumps({key: asdict(choice) for key, choice in entries.items()}, indent=1)


def _of_text(text: str) -> dict[str, KernelChoice]:
    """What _as_text was given."""
    return _of_stored(parse_json_text(text))


def _of_stored(stored: Any) -> dict[str, KernelChoice]:
    choices = {
        key: KernelChoice(**{**fields, "tile": tuple(fields["tile"])})
        for key, fields in stored.items()
    }
    for key, choice in choices.items():
        counts = choice.num_warps, choice.stages, choice.buffers, choice.run, choice.parts
        numbers = (*choice.tile, *counts)
        if not all(type(number) is int and 0 <= number < 2**31 for number in numbers):
            raise ValueError(f"{choice} of {key[:80]!r}")
    return choices
