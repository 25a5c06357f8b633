"""Other packages work with distmega installed and from the repository root, where ours has the
bare name of Hugging Face's `kernels`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repo.source import ROOT

LLAMA = "from transformers import LlamaForCausalLM; print(LlamaForCausalLM.__name__)"


def run_python(*args: str, cwd: Path, path: Path | None = None) -> str:
    """Standard output of a fresh Python; `path` goes on PYTHONPATH."""
    env = {**os.environ, "PYTHONPATH": str(path) if path else "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *args]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def other_kernels(tmp_path: Path) -> Path:
    """A folder with another package `kernels`, standing for Hugging Face's."""
    package = tmp_path / "site" / "kernels"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from kernels.layer import Mode\n")
    (package / "layer.py").write_text("class Mode: pass\n")
    return package.parent


@pytest.mark.parametrize(
    "outside",
    [
        pytest.param(False, id="repository root"),
        pytest.param(True, id="elsewhere", marks=pytest.mark.nightly),
    ],
)
def test_transformers_imports(outside: bool, tmp_path: Path):
    assert run_python("-c", LLAMA, cwd=tmp_path if outside else ROOT) == "LlamaForCausalLM"


def test_bare_kernels_is_the_other_package_where_there_is_one(other_kernels: Path):
    code = (
        "import distmega.kernels, kernels, kernels.layer\n"
        "assert kernels.layer.Mode is kernels.Mode\n"
        "print(kernels.__file__, distmega.kernels.__file__)"
    )
    bare, ours = run_python("-c", code, cwd=ROOT, path=other_kernels).split()
    assert bare == str(other_kernels / "kernels" / "__init__.py")
    assert ours == str(ROOT / "kernels" / "__init__.py")


def test_bare_kernels_is_empty_where_there_is_no_other_package():
    code = "import kernels; print([n for n in vars(kernels) if n == 'Mode'], kernels.__file__)"
    assert run_python("-c", code, cwd=ROOT) == f"[] {ROOT / 'kernels' / '__init__.py'}"


def test_module_runs_from_the_repository_root():
    assert "generate" in run_python("-m", "distmega", "--help", cwd=ROOT)


def test_module_runs_from_the_repository_root_beside_an_installed_wheel(installed: Path):
    """-S leaves out an editable install; the packages that the command needs are named."""
    site = os.pathsep.join([str(installed), *(p for p in sys.path if p.endswith("-packages"))])
    env = {**os.environ, "PYTHONPATH": site}
    command = [sys.executable, "-S", "-m", "distmega", "explain", "tiny-llama"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
