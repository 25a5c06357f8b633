"""Threads of ranks wait for each other without spinning, which no busy machine can afford."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from distmega.launch.contract import rank_environment

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LOCAL = """
from distmega.launch import LauncherOptions, launch
list(launch("tests.launch.targets:sum_ranks", 1, LauncherOptions(num_ranks=2)))
"""


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        (("-c", LOCAL), ""),
        pytest.param(("-c", LOCAL), "active", marks=pytest.mark.nightly),
        pytest.param(
            (*TORCHRUN, "-m", "tests.launch.command", "sum_ranks", "1", "2", "60"),
            "",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_openmp_of_the_ranks_waits_passively_unless_asked(arguments: tuple[str, ...], asked: str):
    """As libgomp says when it is loaded: how often its threads look before they sleep."""
    environment = {**os.environ, "OMP_DISPLAY_ENV": "VERBOSE", "OMP_WAIT_POLICY": asked}
    if not asked:
        del environment["OMP_WAIT_POLICY"]
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    counts = list(map(int, re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)))
    if not counts:
        pytest.skip("torch uses another OpenMP than GNU's here")
    if asked:
        assert min(counts) > 0
    else:
        assert counts.count(0) == 2


def test_a_rank_gets_the_caller_s_own_settings():
    assert rank_environment({})["OMP_WAIT_POLICY"] == "passive"
    assert rank_environment({"OMP_WAIT_POLICY": "active"})["OMP_WAIT_POLICY"] == "active"
