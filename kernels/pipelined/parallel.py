"""Compiles several Triton kernels at once. Used by families.py; next: tuning.py."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import triton

_PARSING = threading.Lock()
_parse = triton.JITFunction.parse


def _parse_alone(function: triton.JITFunction) -> Any:
    with _PARSING:
        return _parse(function)


@contextmanager
def compiling(num_kernels: int) -> Iterator[None]:
    """Within it kernels' warmup only starts to compile; all are done when it ends.

    Triton's threads parse one at a time meanwhile: Python 3.11 counts the depth of all threads'
    syntax trees together, and raises SystemError where the garbage collector lets another thread in
    (python/cpython#106905).
    """
    threads = min(num_kernels, os.cpu_count() or 1)
    triton.JITFunction.parse = _parse_alone
    try:
        with ThreadPoolExecutor(threads) as pool, triton.AsyncCompileMode(pool):
            yield
    finally:
        triton.JITFunction.parse = _parse
