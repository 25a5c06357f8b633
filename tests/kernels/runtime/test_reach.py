"""Whether a GPU reaches the others of its host, as ranks ask before they plan."""

import pytest
import torch

from distmega.kernels.runtime.symmetric import reach_problem


@pytest.mark.parametrize(
    ("count", "far", "expected"),
    [
        (3, set(), ""),
        (3, {2}, "no peer access from GPU 0 to [2]"),
        (1, set(), "no GPU but its own"),
    ],
)
def test_gpus_that_can_not_be_reached_are_named(
    count: int, far: set[int], expected: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("DISTMEGA_SHARE_GPUS", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda here, other: other not in far)
    found = reach_problem(0)
    assert expected in found
    assert bool(found) == bool(expected)
    monkeypatch.setenv("DISTMEGA_SHARE_GPUS", "1")
    assert bool(reach_problem(0)) == bool(far)
