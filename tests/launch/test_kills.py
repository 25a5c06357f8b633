"""A hundred ranks killed at any time, half of them on a busy machine and with a launcher that stood
still meanwhile: each is named. `python -m pytest -m nightly tests/launch/test_kills.py`
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NUM_KILLS = 10
"""Of a case."""
NUM_LOOPS = 4
STOPPED_S = 1.0
START_S = 3.0
"""Ranks are killed within this time of their start, or soon after they began."""
BEGAN_S = 0.3


@contextmanager
def busy(num_loops: int) -> Iterator[None]:
    """Processes that take all the time they get."""
    with ExitStack() as stack:
        for _ in range(num_loops):
            loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(loop.wait)
            stack.callback(loop.kill)
        yield


class Launcher:
    """A process of kills.py."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.launch.kills"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, num_ranks: int) -> list[int]:
        """The processes of so many ranks, which it starts."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{num_ranks}\n")
        self.process.stdin.flush()
        return list(self.hear())

    def hear(self) -> Any:
        """The next thing that it tells."""
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    @contextmanager
    def stopped(self) -> Iterator[None]:
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
            time.sleep(STOPPED_S)
        finally:
            self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        with self.process:  # which closes its pipes
            self.process.kill()


def kill_one(launcher: Launcher, chance: random.Random, *, stops: bool) -> tuple[str, str]:
    """What is told of a rank that was killed, and what should have been."""
    num_ranks = chance.choice((2, 2, 3))
    victim, soon = chance.randrange(num_ranks), chance.random() < 0.5
    pids = launcher.ask(num_ranks)
    told: Any = ""
    if not soon:
        assert launcher.hear() == "began"
    time.sleep(chance.uniform(0, START_S if soon else BEGAN_S))
    with ExitStack() as stack:
        if stops:
            stack.enter_context(launcher.stopped())
        os.kill(pids[victim], signal.SIGKILL)
    while not isinstance(told, list):
        told = launcher.hear()
    wanted = ["RankFailure", f"rank {victim} of {num_ranks} was killed by SIGKILL (signal 9)"]
    return " ".join(told), " ".join(wanted)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_whoever_is_killed_is_named(seed: int, stops: bool):
    """stops: beside busy loops, with a launcher that stands still for a second."""
    chance, launcher = random.Random(f"{seed} {stops}"), Launcher()
    with busy(NUM_LOOPS if stops else 0):
        try:
            found = [kill_one(launcher, chance, stops=stops) for _ in range(NUM_KILLS)]
        finally:
            launcher.end()
    assert [told for told, _ in found] == [wanted for _, wanted in found]
