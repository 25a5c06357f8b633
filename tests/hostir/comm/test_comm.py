"""Exchanges between real processes, and of a rank with itself."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from distmega.errors import MeshError, RankFailure
from distmega.hostir.comm import groups
from distmega.hostir.comm.collectives import combine_parts
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.sharding.layout.mesh import DeviceMesh
from tests.hostir.ranks import spawn


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_exchanges_and_programs(num_ranks: int, tmp_path: Path):
    spawn("run_all_checks", num_ranks, tmp_path)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_programs_that_are_gone_leave_no_threads_and_sockets(num_ranks: int, tmp_path: Path):
    spawn("open_often", num_ranks, tmp_path)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_what_is_closed_leaves_no_threads_and_sockets(num_ranks: int, tmp_path: Path):
    spawn("close_often", num_ranks, tmp_path)


def test_what_fails_as_it_opens_leaves_no_threads(tmp_path: Path):
    spawn("fail_often", 2, tmp_path)


@pytest.mark.parametrize("told", [{0: ["a", "b"], 1: ["b"]}, {0: ["a", "b"], 1: []}])
def test_groups_are_closed_once_all_their_ranks_have_left_them(monkeypatch, told):
    """Group c is of ranks that have not met; d ended with torch.distributed."""
    members = {"a": [0, 1], "b": [0, 1], "c": [0, 5]}
    left = {name: SimpleNamespace(group_name=name) for name in "bacd"}
    destroyed = []
    monkeypatch.setattr(groups, "_left", list(left.values()))
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: members[group.group_name])
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    monkeypatch.setattr(dist, "destroy_process_group", destroyed.append)
    asked = []

    def gather(mine):
        asked.append(mine)
        return [mine, told[1]]

    groups.close_left(gather, (0, 1), 60.0)
    assert asked == [["a", "b", "c"]]
    assert destroyed == [left[name] for name in told[1]]
    kept = {"a", "b", "c"} - {*told[1]}
    assert {group.group_name for group in groups._left} == kept


def test_a_lost_peer_is_reported(tmp_path: Path):
    spawn("lose_a_peer", 2, tmp_path)


def test_a_rank_alone_copies():
    comm = SingleCommunicator(DeviceMesh(tp=1))
    x, out = torch.randn(2, 3), torch.empty(2, 3)
    for handle in (
        comm.all_reduce("tp", [x], [out], "sum"),
        comm.all_gather("tp", x, out, 1),
        comm.reduce_scatter("tp", x, out, 0, "max"),
        comm.all_to_all("tp", x, out, 0, 1),
        comm.broadcast("tp", x, out, 0),
    ):
        out.zero_()
        handle.wait()
        assert torch.equal(out, x)
    comm.signal("tp", "s", 0)
    comm.wait_signal("tp", "s", 0)
    comm.barrier()
    assert comm.all_gather_object("me") == ["me"]


def test_a_rank_alone_cannot_wait_for_what_it_never_sent():
    comm = SingleCommunicator(DeviceMesh(tp=1))
    with pytest.raises(RankFailure, match=r"from the rank itself; expected a send or signal"):
        comm.wait_signal("tp", "s", 0)


def test_a_single_communicator_is_for_one_rank():
    with pytest.raises(MeshError, match=r"one process for mesh\(tp=2\)"):
        SingleCommunicator(DeviceMesh(tp=2))


def test_sums_are_taken_in_rank_order():
    parts = [(torch.tensor([value]),) for value in (1e8, 1.0, -1e8)]
    assert combine_parts(parts, "sum")[0].item() == 0.0
    assert combine_parts([parts[0], parts[2], parts[1]], "sum")[0].item() == 1.0


def test_the_largest_of_ranks_has_the_lowest_index_and_nan_is_largest():
    nan = float("nan")
    values = torch.tensor([[1.0, 2.0, nan, 0.0], [3.0, 2.0, nan, nan], [3.0, 2.0, 5.0, nan]])
    indices = torch.tensor([[0, 9, 4, 1], [7, 8, 3, 6], [5, 10, 2, 5]])
    value, index = combine_parts([*zip(values, indices, strict=True)], "argmax")
    torch.testing.assert_close(value, torch.tensor([3.0, 2.0, nan, nan]), equal_nan=True)
    assert index.tolist() == [5, 8, 3, 5]


def test_halves_are_summed_in_fp32_and_rounded_once():
    parts = [(torch.tensor([value], dtype=torch.bfloat16),) for value in (256.0, 1.0, 1.0)]
    out = torch.empty(1, dtype=torch.bfloat16)
    out.copy_(combine_parts(parts, "sum")[0])
    assert out.item() == 258.0  # 256 + 1 alone is rounded to 256
