"""Ranks get a GPU each, or share what there are."""

import os
from unittest.mock import patch

import pytest

from distmega.launch.host.devices import allow_sharing, gpu_of
from distmega.launch.worker import make_context


@pytest.mark.parametrize(
    ("shared", "num_gpus", "expected"),
    [("1", 2, [0, 1, 0, 1]), ("1", 1, [0] * 4), ("0", 2, [0, 1, 2, 3]), ("1", 0, [0, 1, 2, 3])],
)
def test_ranks_take_gpus_in_turn(shared: str, num_gpus: int, expected: list[int], monkeypatch):
    monkeypatch.setenv("DISTMEGA_SHARE_GPUS", shared)
    with patch("torch.cuda.device_count", return_value=num_gpus):
        assert [gpu_of(number) for number in range(4)] == expected
        context = make_context(
            rank=3, world_size=4, local=(3, 4), node="a", kind="cuda", index=3, timeout_s=60.0
        )
    assert context.device == f"cuda:{expected[3]}"


@pytest.mark.parametrize("shared", ["0", "1"])
def test_only_ranks_that_share_are_hosts_of_their_own_to_nccl(shared: str):
    with patch.dict(os.environ, {"DISTMEGA_SHARE_GPUS": shared}):
        os.environ.pop("NCCL_HOSTID", None)
        allow_sharing(5)
        found = os.environ.get("NCCL_HOSTID")
    assert found == ("distmega-5" if shared == "1" else None)
