"""Groups of ranks: they stay from one body to the next, and a broken one makes room for another."""

import os
import time

import pytest
import torch

from distmega.hostir.comm.communicator import Communicator
from tests.multigpu import ranks
from tests.multigpu.ranks import Groups, RanksFailed, is_under_torchrun

HERE = "tests.multigpu.test_ranks"

pytestmark = pytest.mark.skipif(is_under_torchrun(), reason="torchrun's processes are not replaced")


def note_process(comm: Communicator, folder: str) -> None:
    found = torch.zeros(comm.mesh.num_ranks)
    comm.all_gather("tp", torch.tensor([float(comm.rank)]), found, 0).wait()
    assert found.tolist() == [0.0, 1.0]
    with open(f"{folder}/{comm.rank}", "a") as file:
        file.write(f"{os.getpid()}\n")


def fail(comm: Communicator, how: str) -> None:
    """Rank 1 fails, rank 0 hangs."""
    if comm.rank == 0:
        time.sleep(60)
    if how == "die":
        os._exit(3)
    raise ValueError("a value of rank 1")


def test_a_group_stays_until_it_breaks(monkeypatch, tmp_path):
    monkeypatch.setattr(ranks, "GRACE_S", 0.5)
    groups = Groups()
    for how, problem in (("raise", "a value of rank 1"), ("die", "rank 1: died, exit code 3")):
        for _ in range(2):
            groups.run(f"{HERE}:note_process", "cpu", 2, str(tmp_path))
        with pytest.raises(RanksFailed, match=problem) as caught:
            groups.run(f"{HERE}:fail", "cpu", 2, how)
        assert f"rank 0: no answer from {HERE}:fail" in str(caught.value)
    groups.end()
    for rank in range(2):
        first, again, second, same = (tmp_path / str(rank)).read_text().split()
        assert first == again
        assert second == same
        assert first != second
