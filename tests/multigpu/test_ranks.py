"""Groups of ranks: they stay from one body to the next, and a broken one makes room for another."""

import os
import time

import pytest
import torch

from distmega.hostir.comm import Communicator
from tests.multigpu import ranks
from tests.multigpu.ranks import Group, Groups, RanksFailed, is_under_torchrun

HERE = "tests.multigpu.test_ranks"

pytestmark = pytest.mark.skipif(is_under_torchrun(), reason="torchrun's processes are not replaced")


def note_process(comm: Communicator, folder: str) -> None:
    found = torch.zeros(comm.mesh.num_ranks)
    comm.all_gather("tp", torch.tensor([float(comm.rank)]), found, 0).wait()
    assert found.tolist() == [0.0, 1.0]
    with open(f"{folder}/{comm.rank}", "a") as file:
        file.write(f"{os.getpid()}\n")


def fail(comm: Communicator, how: str) -> None:
    if comm.rank == 1:
        assert how != "raise", "a value of rank 1"
        if how == "die":
            os._exit(3)
        time.sleep(60)


def test_a_group_stays_until_it_breaks(tmp_path):
    groups = Groups()
    for problem, how in (("a value of rank 1", "raise"), ("rank 1: died, exit code 3", "die")):
        for _ in range(2):
            groups.run(f"{HERE}:note_process", "cpu", 2, str(tmp_path))
        with pytest.raises(RanksFailed, match=problem):
            groups.run(f"{HERE}:fail", "cpu", 2, how)
    groups.end()
    for rank in range(2):
        first, again, second, same = (tmp_path / str(rank)).read_text().split()
        assert first == again
        assert second == same
        assert first != second


def test_a_rank_that_hangs_is_named(monkeypatch, tmp_path):
    group = Group("cpu", 2)
    group.run(f"{HERE}:note_process", (str(tmp_path),))
    monkeypatch.setattr(ranks, "BODY_S", 0.5)
    with pytest.raises(RanksFailed, match="rank 1: no answer from "):
        group.run(f"{HERE}:fail", ("hang",))
    group.end()
