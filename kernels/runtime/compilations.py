"""Whether there is Triton, and how many kernels it compiled in this process: what a first call
costs beside its work.

In: nothing. Out: a number that grows; kernels that Triton finds in its cache don't count. Used by
distmega/compiled/program.py, and by those who ask for Triton before they import kernels.
"""

import importlib
import importlib.util
import threading
from functools import cache


class _Counter:
    """Stands in for Triton's listener, and calls the one that was there."""

    def __init__(self, others: object) -> None:
        self.num, self._others, self._lock = 0, others, threading.Lock()

    def __call__(self, *, cache_hit: bool, **details: object) -> None:
        with self._lock:
            self.num += not cache_hit
        if callable(self._others):
            self._others(cache_hit=cache_hit, **details)


@cache
def has_triton() -> bool:
    """Whether Triton is installed; a machine without a GPU need not have it."""
    return importlib.util.find_spec("triton") is not None


def is_interpreted() -> bool:
    """Whether Triton runs kernels on CPUs, as TRITON_INTERPRET=1 asks it to."""
    if not has_triton():
        return False
    return bool(importlib.import_module("triton.knobs").runtime.interpret)


@cache
def _counter() -> _Counter:
    """Counts from the first call on; never, where there is no Triton."""
    if not has_triton():
        return _Counter(None)
    knobs = importlib.import_module("triton.knobs").compilation
    knobs.listener = counter = _Counter(knobs.listener)
    return counter


def num_compiled() -> int:
    """Kernels compiled since this was first asked for."""
    return _counter().num
