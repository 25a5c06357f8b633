"""Kernels compiled before they run, several at once.

In: a block in which kernels are launched, or warmed up. Out: the kernels, compiled, and those that
were launched, ready to run. Used by pipelined/families.py, engine/prefill.py,
engine/library_steps.py, and for their launches by kernels of library ops; next:
../pipelined/tuning.py.
"""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton

from distmega.collecting import gc_paused
from distmega.kernels.runtime.extension_modules import make_launcher_beside
from distmega.kernels.runtime.switching import short_turns

MOST_THREADS = 16
_PARSING = threading.Lock()
_parse = triton.JITFunction.parse
_parse_uninterrupted = gc_paused(_parse)
_here = threading.local()
_guarding = threading.Lock()
_num_parsing = 0
"""Blocks that are under way in which threads parse one at a time."""


def _parse_alone(function: triton.JITFunction) -> Any:
    with _PARSING:
        return _parse_uninterrupted(function)


@contextmanager
def compiling(num_kernels: int) -> Iterator[None]:
    """Within it kernels' warmup only starts to compile; all are done when it ends."""
    threads = min(num_kernels, os.cpu_count() or 1)
    with (
        short_turns(),
        parsing_in_turn(),
        ThreadPoolExecutor(threads) as pool,
        triton.AsyncCompileMode(pool),
    ):
        yield


@contextmanager
def launching_nothing(device: torch.device) -> Iterator[None]:
    """Within it `launch`, in this thread, only starts to compile for a GPU; when it ends all those
    kernels are compiled and loaded, so that a launch waits for nothing. One that can't be raises
    its error when it is launched.
    """
    threads = min(MOST_THREADS, os.cpu_count() or 1)
    with (
        short_turns(),
        parsing_in_turn(),
        ThreadPoolExecutor(threads) as pool,
        triton.AsyncCompileMode(_Loading(pool, device), ignore_errors=True),
    ):
        _here.launches_nothing = True
        try:
            yield
        finally:
            _here.launches_nothing = False


def launches_nothing() -> bool:
    """Whether this thread is in a block of that kind."""
    return getattr(_here, "launches_nothing", False)


def launch(
    kernel: triton.JITFunction, grid: tuple[int, ...], *arguments: object, **options: object
) -> None:
    """kernel[grid](...), but within launching_nothing."""
    if launches_nothing():
        _here.launched = kernel, arguments, options
        try:
            kernel.warmup(*arguments, grid=grid, **options)
        finally:
            _here.launched = None
    else:
        kernel[grid](*arguments, **options)


class _Loading(Executor):
    """Threads that load what they have compiled. Triton has a C compiler make each launcher, which
    takes as long as a small kernel does: beside the kernel, of those that `launch` launches.
    """

    def __init__(self, pool: ThreadPoolExecutor, device: torch.device) -> None:
        self._pool = pool
        self._index = -1  # no GPU
        if device.type == "cuda":
            self._index = torch.cuda.current_device() if device.index is None else device.index

    def submit(self, compile_kernel: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]
        launched = getattr(_here, "launched", None)
        launcher = make_launcher_beside(*launched) if launched else None
        return self._pool.submit(self._load, compile_kernel, launcher)

    def _load(self, compile_kernel: Callable[[], Any], launcher: threading.Thread | None) -> Any:
        if self._index >= 0:
            torch.cuda.set_device(self._index)
        kernel = compile_kernel()
        if launcher is not None:
            launcher.join()
        kernel.run  # noqa: B018  makes the launcher, unless it is there, and loads both
        return kernel


@contextmanager
def parsing_in_turn() -> Iterator[None]:
    """Within it, until the last such block ends, threads parse kernels one at a time, and without
    garbage collection, for others may parse something else (distmega/collecting.py).
    """
    global _num_parsing
    with _guarding:
        _num_parsing += 1
        triton.JITFunction.parse = _parse_alone
    try:
        yield
    finally:
        with _guarding:
            _num_parsing -= 1
            if not _num_parsing:
                triton.JITFunction.parse = _parse
