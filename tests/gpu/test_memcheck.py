"""compute-sanitizer's memcheck finds nothing in the kernels of 1 to 16 rows.

First all programs run without it, beside each other, so that their kernels are compiled; then
with it, several processes beside each other.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.gpu.memchecked import CASES, OVERRUN

SANITIZER = shutil.which("compute-sanitizer")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.nightly,
    pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer is not on PATH"),
]

FOUND = 99
"""Exit status where the checker found something."""
LIMIT_S = 280


def run(names: Sequence[str], *, checked: bool) -> subprocess.CompletedProcess[str]:
    """The programs of these names in a process of their own."""
    command = [sys.executable, "-m", "tests.gpu.memchecked", *names]
    if checked:
        assert SANITIZER is not None
        options = ["--tool", "memcheck", "--kernel-name", "kernel_substring=decode"]
        command = [SANITIZER, *options, "--error-exitcode", str(FOUND), *command]
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def groups(num: int) -> list[list[str]]:
    """All cases but the one that is wrong, dealt out."""
    names = [name for name in CASES if name != OVERRUN]
    return [names[nth::num] for nth in range(num)]


def describe(names: Sequence[str], done: subprocess.CompletedProcess[str]) -> str:
    return f"{names}: exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def test_the_checker_sees_a_write_behind_memory():
    done = run([OVERRUN], checked=True)
    assert done.returncode == FOUND, describe([OVERRUN], done)
    assert "Invalid __global__ write" in done.stdout


def test_nothing_is_read_or_written_out_of_bounds():
    parts = groups(max(4, (os.cpu_count() or 4) - 2))
    with ThreadPoolExecutor(len(parts)) as pool:
        for checked in (False, True):
            for names, done in zip(
                parts, pool.map(partial(run, checked=checked), parts), strict=True
            ):
                assert done.returncode == 0, describe(names, done)
                assert done.stdout.count("done: ") == len(names), describe(names, done)
                if checked:
                    assert "ERROR SUMMARY: 0 errors" in done.stdout, describe(names, done)
