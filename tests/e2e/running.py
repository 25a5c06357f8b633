"""Runs a Measure on ranks, and compares logits."""

import numpy as np
import torch

from distmega.launch.contract import LauncherOptions, Result
from distmega.launch.launchers import launch
from tests.e2e.targets import Logits, Measure, Measured


def run_measure(request: Measure, num_ranks: int) -> Measured:
    """The result of rank 0 of a real job of `num_ranks` processes."""
    options = LauncherOptions(launcher="local", num_ranks=num_ranks, timeout_s=120.0, device="cpu")
    *_, last = launch("tests.e2e.targets:measure", request, options)
    assert isinstance(last, Result)
    assert isinstance(last.value, Measured)
    return last.value


def token_ids(num: int) -> list[int]:
    """Random tokens of the tiny models of tests/models/files.py, the same each time."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 288, (num,), generator=generator).tolist()


def relative_error(found: Logits, expected: Logits) -> float:
    """Largest over positions of ||found - expected|| / ||expected||; NaN where anything is NaN."""
    assert found.shape == expected.shape
    wide = expected.astype(np.float64)
    norms = np.linalg.norm(found - wide, axis=-1) / np.linalg.norm(wide, axis=-1)
    return float(norms.max())
