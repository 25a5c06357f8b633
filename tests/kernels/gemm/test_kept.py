"""What kernels keep for the ranks of a communicator ends with it."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (pip install 'distmega[gpu]')")
from distmega.hostir.comm.communicator import TeamCommunicator
from distmega.hostir.comm.nccl import NcclCommunicator
from distmega.kernels.gemm import machine, workspace
from distmega.kernels.machines import H200
from distmega.sharding.layout.mesh import DeviceMesh


class Workspace:
    """Without a GPU."""

    def __init__(self, team: object, symmetric_bytes: int) -> None:
        self.team, self.symmetric_bytes = team, symmetric_bytes


def communicator() -> NcclCommunicator:
    """One of two ranks that has opened nothing."""
    comm = object.__new__(NcclCommunicator)
    comm.mesh, comm.rank = DeviceMesh(tp=2), 0
    comm.kept, comm.signals = {}, None
    comm._opened, comm._groups, comm._is_closed = [], {}, False
    comm._control = SimpleNamespace(barrier=lambda: None, close=lambda: None)
    return comm


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: None)
    monkeypatch.setattr(workspace, "Workspace", Workspace)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr(machine, "built_in", lambda index: H200)
    monkeypatch.setattr(machine, "machine_of", lambda comm, known, name: known)


def test_a_team_has_one_workspace_and_another_where_it_needs_a_larger_one():
    comm = communicator()
    small = workspace.workspace_of(comm, "tp", 64)
    assert workspace.workspace_of(comm, "tp", 32) is small
    large = workspace.workspace_of(comm, "tp", 128)
    assert large is not small
    assert workspace.workspace_of(comm, "tp", 64) is large
    assert workspace.workspace_of(communicator(), "tp", 64) is not large
    assert machine.measured(comm) is H200


@pytest.mark.parametrize("closes", [False, True])
def test_a_communicator_that_is_closed_or_gone_leaves_nothing(closes: bool):
    comm = communicator()
    opened = weakref.ref(workspace.workspace_of(comm, "tp", 64))
    machine.measured(comm)
    gone = weakref.ref(comm)
    if closes:
        comm.close()
        assert not comm.kept
    else:
        del comm
    gc.collect()
    assert opened() is None
    assert (gone() is None) == (not closes)


def test_a_communicator_ends_what_it_has_kept_before_its_groups(monkeypatch: pytest.MonkeyPatch):
    """Memory that ranks share is gone on all of them before NCCL is."""
    comm, done = communicator(), []
    comm.kept["memory"] = Workspace(None, 0)
    weakref.finalize(comm.kept["memory"], done.append, "memory")
    comm._control = SimpleNamespace(
        barrier=lambda: done.append("barrier"), close=lambda: done.append("control")
    )
    close = TeamCommunicator.close
    monkeypatch.setattr(
        TeamCommunicator, "close", lambda comm: (close(comm), done.append("groups"))
    )
    for _ in range(2):
        comm.close()
    assert done == ["barrier", "memory", "barrier", "groups", "control"]
