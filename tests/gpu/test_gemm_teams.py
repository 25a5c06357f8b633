"""Matmuls with their collective by two to four ranks on one GPU: see gemm_teams.py."""

import os
import subprocess
import sys

import pytest

from tests.repo.source import ROOT

pytestmark = pytest.mark.gpu
pytest.importorskip("triton", reason="triton is not installed (pip install 'distmega[gpu]')")


@pytest.mark.parametrize(
    ("num_ranks", "tile_n"), [(2, 128), (2, 256), (3, 128), (4, 128), (4, 256)]
)
def test_calls_of_random_kinds_find_what_all_ranks_gave(num_ranks: int, tile_n: int):
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.gemm_teams", str(num_ranks), str(tile_n)],
        env={**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "32"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "calls as expected" in done.stdout
