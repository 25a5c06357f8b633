"""compute-sanitizer's memcheck finds nothing in our kernels: in a short program of each, each in a
process of its own; in many of the kernels of 1 to 16 rows, several a process.

First programs run without it, beside each other, so that their kernels are compiled; then with it.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import pytest

from tests.gpu.memchecked import CASES, OVERRUN, SMALL

SANITIZER = shutil.which("compute-sanitizer")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.nightly,
    pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer is not on PATH"),
]

FOUND = 99
"""Exit status where the checker found something."""
LIMIT_S = 280


def run(
    names: Sequence[str], *, checked: bool, kernels: str = "decode"
) -> subprocess.CompletedProcess[str]:
    """The programs of these names in a process of their own. kernels: a part of the names of those
    that are looked at.
    """
    command = [sys.executable, "-m", "tests.gpu.memchecked", *names]
    if checked:
        assert SANITIZER is not None
        options = ["--tool", "memcheck", "--kernel-name", f"kernel_substring={kernels}"]
        command = [SANITIZER, *options, "--error-exitcode", str(FOUND), *command]
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


@dataclass(frozen=True, slots=True)
class Checked:
    """One of SMALL, run twice: without the checker, then with it. errors: its count, -1 where it
    gave none; seconds: of either run.
    """

    name: str
    errors: int
    seconds: tuple[float, float]
    text: str


def check_one(name: str) -> Checked:
    """A program of SMALL; a run that lasts longer than its limit has no count."""
    taken, text = [], ""
    for checked in (False, True):
        start = time.monotonic()
        try:
            done = run([name], checked=checked, kernels=SMALL[name][0])
        except subprocess.TimeoutExpired as error:
            return Checked(name, -1, (*taken, LIMIT_S, LIMIT_S)[:2], f"{error}")
        taken.append(round(time.monotonic() - start, 1))
        text = describe([name], done)
    found = re.search(r"ERROR SUMMARY: (\d+) error", text)
    ended = name == OVERRUN or f"done: {name}" in text
    errors = int(found[1]) if found and ended else -1
    return Checked(name, errors, (taken[0], taken[1]), text)


def check_each() -> list[Checked]:
    """All of SMALL, beside each other."""
    with ThreadPoolExecutor(len(SMALL)) as pool:
        return list(pool.map(check_one, SMALL))


def table_of(found: Sequence[Checked]) -> str:
    """A line a program: its name, errors, seconds without and with the checker."""
    lines = [f"{one.name:24} {one.errors:6} {one.seconds[0]:6} {one.seconds[1]:6}" for one in found]
    return "\n".join(["program                  errors   run  check", *lines])


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


def test_a_program_of_each_kernel_stays_within_its_memory():
    found = check_each()
    print(table_of(found))
    wrong = [one.text for one in found if (one.errors != 0) != (one.name == OVERRUN)]
    assert not wrong, "\n".join([table_of(found), *wrong])


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
