"""Ruff and mypy find nothing. Types are checked in the built copy, which has no path mapping."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.repo.source import ROOT


def run_module(*args: str, cwd: Path = ROOT) -> None:
    """Fails with what the tool printed."""
    command = [sys.executable, "-m", *args]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_finds_nothing():
    run_module("ruff", "check", "--output-format", "concise", ".")


def test_files_are_formatted():
    run_module("ruff", "format", "--check", ".")


@pytest.mark.slow
def test_types_check_in_the_built_copy(installed: Path):
    config, cache = str(ROOT / "pyproject.toml"), str(ROOT / ".mypy_cache")
    options = ("--config-file", config, "--cache-dir", cache)
    run_module("mypy", *options, "--package", "distmega", cwd=installed)
