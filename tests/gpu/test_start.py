"""What a new process does until its first tokens, counted, its caches empty and filled."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.repo.source import ROOT

pytestmark = pytest.mark.gpu


def start(folder: Path) -> dict[str, Any]:
    """What a new process with these caches says."""
    caches = {"TRITON_CACHE_DIR": str(folder / "triton"), "XDG_CACHE_HOME": str(folder / "own")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.started"],
        env={**os.environ, **caches},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_second_process_plans_and_compiles_nothing(tmp_path: Path):
    first, second = start(tmp_path), start(tmp_path)
    assert first["rehearsals"] == 1
    assert first["compiled before the first run"] >= 5, "the decode kernel and the prompt's"
    assert first["compiled in all"] == first["compiled before the first run"]
    assert first["plans"] == 1
    assert second["plans"] == second["rehearsals"] == second["compiled in all"] == 0
    assert first["tokens"] == second["tokens"]


def test_a_damaged_plan_is_made_again(tmp_path: Path):
    start(tmp_path)
    (file,) = (tmp_path / "own").rglob("decode-*.pickle")
    file.write_bytes(file.read_bytes()[:1000])
    again = start(tmp_path)
    assert again["plans"] == 1
