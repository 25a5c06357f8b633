"""Every kernel compiles, with the same checks, under the newest release of Triton as well, which
`make venv` puts into a folder of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repo.source import ROOT

FOLDER = Path(sys.prefix) / "triton-newest"
SPECIAL = "drawing or sampl or kinds or programs or row_pointwise or expert or sending"
"""What is compiled in beside the common parts of kernels: by night alone."""
SIZES = (
    "(norms and (128 or 1024 or 5000 or 16384)) or rms_norm-65536 or layer_norm-65536 or 134217728 "
    "or test_plain[128] or gathering or two_weights or test_mixing[128 or test_mixing[256-False]"
)
REPEATED = f"qwen3 or smollm2 or barriers or {SIZES}"
"""Kernels that are compiled for other sizes too: by night alone, as those."""
BY_NIGHT = f"{SPECIAL} or {REPEATED}"


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER.is_dir(), reason="no newest Triton beside this one (make venv)")
@pytest.mark.parametrize(
    "chosen", [f"not ({BY_NIGHT})", pytest.param(BY_NIGHT, marks=pytest.mark.nightly)]
)
def test_kernels_compile_under_the_newest_triton(chosen: str):
    env = {name: x for name, x in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    env |= {"PYTHONPATH": f"{FOLDER}{os.pathsep}{ROOT}"}
    asked = [sys.executable, "-c", "import triton; print(triton.__version__, triton.__file__)"]
    found = subprocess.run(asked, env=env, capture_output=True, text=True, check=True).stdout
    version, place = found.split(maxsplit=1)
    assert Path(place.strip()).is_relative_to(FOLDER)
    files = sorted(map(str, Path(__file__).parent.rglob("test_*_code.py")))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, "-k", chosen, *files], env=env, cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, f"Triton {version}\n{(run.stdout + run.stderr)[-8000:]}"
    summary = [line for line in run.stdout.splitlines() if " passed" in line][-1]
    assert "skipped" not in summary  # elsewhere it may be of what libraries say at their end
    print(f"Triton {version}: {summary}")
