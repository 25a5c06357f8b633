"""Groups of communicators that are gone: closed where all of their ranks have left them, never
forgotten; and the memory that their ranks write into.
"""

import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

from distmega.errors import HangError
from distmega.hostir.comm import groups
from distmega.hostir.comm.groups import close_left
from distmega.hostir.comm.nccl import NcclCommunicator
from distmega.hostir.comm.waits import await_gpu


def test_a_group_that_is_left_while_ranks_meet_is_told_of_the_next_time(
    monkeypatch: pytest.MonkeyPatch,
):
    """Garbage is collected anywhere, here between what a rank looks up and what it tells."""
    early, late = (SimpleNamespace(group_name=name) for name in ("early", "late"))
    closed: list[object] = []
    monkeypatch.setattr(groups, "_left", [early])
    monkeypatch.setattr(groups, "_is_open", lambda group: group not in closed)
    monkeypatch.setattr(groups.dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(groups.dist, "get_backend", lambda group: "gloo")
    monkeypatch.setattr(groups.dist, "destroy_process_group", closed.append)
    told: list[list[str]] = []

    def gather(mine: list[str]) -> list[list[str]]:
        told.append(mine)
        if late not in groups._left and len(told) == 1:
            groups._left.append(late)
        return [mine, ["early", "late"]]

    close_left(gather, (0, 1), 60.0)
    assert (told, closed, groups._left) == ([["early"]], [early], [late])
    close_left(gather, (0, 1), 60.0)
    assert (told[1:], closed, groups._left) == ([["late"]], [early, late], [])


def test_a_gpu_that_waits_for_a_dead_peer_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
):
    group, never = SimpleNamespace(group_name="nccl of both"), threading.Event()
    monkeypatch.setattr(groups, "_left", [group])
    monkeypatch.setattr(groups, "_is_open", lambda group: True)
    monkeypatch.setattr(groups.dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: never.wait(60.0))
    with pytest.raises(HangError, match=r"GPU 3 of this rank is still at work after 0\.1 s"):
        close_left(lambda mine: pytest.fail("peers are told"), (0, 1), 0.1)
    assert groups._left == [group]
    never.set()


def test_what_a_gpu_fails_with_is_raised(monkeypatch: pytest.MonkeyPatch):
    def fail(device: int) -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    with pytest.raises(RuntimeError, match="illegal memory"):
        await_gpu(60.0)


class _Memory:
    """What peers write into; a GPU's is freed only when the GPU is idle, which may be never."""


def test_memory_of_a_rank_that_leaves_lasts_until_its_peers_have_left(
    monkeypatch: pytest.MonkeyPatch,
):
    """A rank that fails waits for nobody; what its peers write meanwhile goes where it should."""
    events: list[str] = []
    group = SimpleNamespace(group_name="nccl of both")
    closed: list[object] = []
    monkeypatch.setattr(groups, "_left", [])
    monkeypatch.setattr(groups, "_kept", [])
    monkeypatch.setattr(groups, "_is_open", lambda group: group not in closed)
    monkeypatch.setattr(groups.dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(groups.dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: events.append("GPU idle"))

    def close(group: object) -> None:
        events.append("closed")
        closed.append(group)

    monkeypatch.setattr(groups.dist, "destroy_process_group", close)
    comm = NcclCommunicator.__new__(NcclCommunicator)
    comm._opened, comm._groups, comm._is_closed = [group], {"tp": group}, False
    comm._control = SimpleNamespace(leave=lambda: events.append("control left"))
    comm.kept, comm.signals = {"workspace": _Memory()}, _Memory()
    for name, memory in (("workspace", comm.kept["workspace"]), ("signals", comm.signals)):
        weakref.finalize(memory, events.append, f"{name} freed")
    del memory
    comm.leave()
    assert events == ["control left"]
    assert comm.kept == {}
    assert comm.signals is None

    def told_by(peer: list[str]) -> None:
        events.clear()
        close_left(lambda mine: events.append("told") or [mine, peer], (0, 1), 60.0)

    told_by([])
    assert events == ["GPU idle", "told"], "the peer may still write"
    told_by(["nccl of both"])
    freed = ["signals freed", "workspace freed"]
    assert [*events[:2], *sorted(events[2:4]), *events[4:]] == [
        "GPU idle",
        "told",
        *freed,
        "closed",
    ]
    told_by([])
    assert events == ["told"]
