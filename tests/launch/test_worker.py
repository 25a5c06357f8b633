"""How a rank tells of an error, and which errors mean that it lost another rank."""

import pytest
import torch
import torch.distributed as dist

from distmega.errors import LostPeerError, RankFailure, RequestError
from distmega.hostir.comm.communicator import GlooCommunicator
from distmega.launch.host.stores import DistNetworkError
from distmega.launch.worker import _describe_failure, _is_lost_peer
from distmega.sharding.layout.mesh import DeviceMesh


@pytest.fixture
def _alone():
    """A process group of this process, in which nobody answers for rank 1."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def raised(call) -> BaseException:
    with pytest.raises(Exception) as failure:  # noqa: PT011  any: it is what is looked at
        call()
    return failure.value


@pytest.mark.usefixtures("_alone")
def test_an_error_of_torch_in_set_up_or_an_exchange_is_a_lost_peer():
    comm = GlooCommunicator(DeviceMesh(tp=1), 0)

    def fail() -> None:
        with comm._guard("set-up", ""):
            raise RuntimeError("got 0 bytes")

    error = raised(fail)
    assert isinstance(error, LostPeerError)
    assert _is_lost_peer(error)
    at = error.at("node 3")
    assert isinstance(at, LostPeerError)
    wrapped = RankFailure("set-up failed", expected="all", remedy="look")
    wrapped.__cause__ = error
    assert _is_lost_peer(wrapped)
    assert _is_lost_peer(raised(lambda: dist.recv(torch.zeros(1), src=0)))


def test_what_has_no_such_cause_is_the_rank_s_own():
    assert _is_lost_peer(DistNetworkError("got 0 bytes"))
    assert _is_lost_peer(ConnectionResetError())
    assert not _is_lost_peer(RuntimeError("set-up failed: a gloomy day"))
    assert not _is_lost_peer(RequestError("a", expected="b", remedy="c"))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_rank_alone_has_lost_nobody(num_ranks: int):
    """A target has connections of its own: to a server, say."""
    report = _describe_failure(0, ConnectionRefusedError("no server there"), num_ranks)
    assert report.lost_peer == (num_ranks > 1)


class MuteError(Exception):
    """Fails where it is to be shown."""

    def __str__(self) -> str:
        raise LookupError("no words")


def test_an_error_that_has_no_text_is_told_of():
    report = _describe_failure(1, MuteError(), 2)
    assert report.summary == "MuteError: its text raised LookupError"
    assert "MuteError" in report.traceback


def test_an_error_that_cannot_be_sent_is_told_of_in_words():
    class LocalError(RequestError):
        """Nobody finds it."""

    report = _describe_failure(1, LocalError("a", expected="b", remedy="c"), 2)
    assert (report.error, report.summary) == (None, "LocalError: a; expected b; c")
    found = _describe_failure(1, RequestError("a", expected="b", remedy="c"), 2)
    assert found.error is not None
