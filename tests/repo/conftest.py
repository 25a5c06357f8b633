"""A wheel of the working tree, built once and offline."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repo.source import ROOT

SOURCES = ("distmega", "sharding", "hostir", "kernels", "launch")
FILES = ("pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of the wheel. Built from a copy: setuptools puts stale files of build/ into a wheel."""
    copy = tmp_path_factory.mktemp("source")
    for folder in SOURCES:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignore)
    for file in FILES:
        shutil.copy(ROOT / file, copy / file)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    done = subprocess.run([*command, str(copy)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for sys.path into which the wheel, and nothing else, is installed."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, "--target", str(target), str(wheel)], check=True)
    return target
