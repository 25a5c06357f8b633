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
NUM_PROCESSES = 2


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER.is_dir(), reason="no newest Triton beside this one (make venv)")
def test_kernels_compile_under_the_newest_triton(tmp_path):
    env = os.environ | {"PYTHONPATH": f"{FOLDER}{os.pathsep}{ROOT}"}
    asked = [sys.executable, "-c", "import triton; print(triton.__version__, triton.__file__)"]
    found = subprocess.run(asked, env=env, capture_output=True, text=True, check=True).stdout
    version, place = found.split(maxsplit=1)
    assert Path(place.strip()).is_relative_to(FOLDER)
    files = sorted(map(str, Path(__file__).parent.glob("test_*_code.py")))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    runs = [
        subprocess.Popen(
            [*command, *files[part::NUM_PROCESSES]],
            env=env,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for part in range(NUM_PROCESSES)
    ]
    try:
        outputs = [run.communicate()[0] for run in runs]
    finally:
        for run in runs:
            run.kill()
            run.wait()
    for run, output in zip(runs, outputs, strict=True):
        assert run.returncode == 0, f"Triton {version}\n{output[-8000:]}"
        summary = [line for line in output.splitlines() if " passed" in line][-1]
        assert "skipped" not in summary  # elsewhere it may be of what libraries say at their end
        print(f"Triton {version}: {summary}")
