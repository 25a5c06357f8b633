"""Whom a launcher names, whatever order reports come in: played by a team without processes."""

import itertools
import pickle
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmega.errors import (
    DistmegaError,
    HangError,
    LaunchError,
    LostPeerError,
    RankFailure,
    RequestError,
)
from distmega.launch import supervise as supervise_module
from distmega.launch.contract import Emitted, Job, RayOptions
from distmega.launch.host.reports import Died, Done, Failed, Position, Ready, Report, Value
from distmega.launch.supervise import supervise

NUM_RANKS = 4
LIMIT_S = 8.0
KILLED = "was killed by SIGKILL (signal 9)"


@dataclass
class PlayedTeam:
    """Gives batches of reports in turn; time passes only while there is none."""

    batches: list[Sequence[Report]]
    answers: Sequence[Report] = ()
    stopped: Sequence[int] = ()
    now_s: float = 0.0
    calls: list[str] = field(default_factory=list)

    def start(self) -> float:
        self.calls.append("start")
        return self.now_s

    def poll(self, timeout_s: float) -> Sequence[Report]:
        if self.batches:
            return self.batches.pop(0)
        self.now_s += max(timeout_s, 1e-3)
        return []

    def ask_positions(self) -> Sequence[Report]:
        return self.answers

    def find_stopped(self) -> Sequence[int]:
        return self.stopped

    def finish(self) -> None:
        self.calls.append("finish")

    def kill(self) -> None:
        self.calls.append("kill")


JOB = Job(
    target="module:function",
    payload=b"",
    num_ranks=NUM_RANKS,
    device="cpu",
    timeout_s=LIMIT_S,
    start_timeout_s=LIMIT_S,
    ray=RayOptions(),
)
READY = [Ready(rank=rank) for rank in range(NUM_RANKS)]


def failed(rank: int, error: DistmegaError | None = None, *, lost_peer: bool = False) -> Failed:
    return Failed(
        rank=rank,
        error=error,
        summary="RuntimeError: Connection closed by peer",
        traceback="",
        lost_peer=lost_peer,
    )


def hang(waits: int, owes: int) -> HangError:
    return HangError(f"rank {waits} waits for rank {owes}", expected="none", remedy="look")


def error_of(team: PlayedTeam, monkeypatch: pytest.MonkeyPatch) -> DistmegaError:
    monkeypatch.setattr(supervise_module.time, "monotonic", lambda: team.now_s)
    with pytest.raises(DistmegaError) as failure:
        list(supervise(team, JOB))
    assert team.calls == ["start", "kill"]
    return failure.value


@given(data=st.data(), victim=st.integers(0, NUM_RANKS - 1))
def test_a_death_is_named_in_whatever_batches_reports_come(data: st.DataObject, victim: int):
    losers = [failed(rank, lost_peer=True) for rank in range(NUM_RANKS) if rank != victim]
    reports = data.draw(st.permutations([*losers, Died(rank=victim, how=KILLED)]))
    cuts = sorted(data.draw(st.sets(st.integers(1, NUM_RANKS - 1))))
    batches = [reports[a:b] for a, b in itertools.pairwise([0, *cuts, NUM_RANKS])]
    with pytest.MonkeyPatch.context() as patch:
        error = error_of(PlayedTeam([READY, *batches]), patch)
    assert isinstance(error, RankFailure)
    assert error.found == f"rank {victim} of {NUM_RANKS} {KILLED}"


@pytest.mark.parametrize("own", [RequestError("2", expected="1", remedy="ask"), None])
def test_an_own_mistake_comes_before_lost_peers_and_after_a_death(own, monkeypatch):
    lost, mistake = failed(0, lost_peer=True), failed(2, own)
    error = error_of(PlayedTeam([READY, [lost], [mistake]]), monkeypatch)
    assert error is own if own else "rank 2 of 4 raised RuntimeError" in error.found
    dead = Died(rank=3, how=KILLED)
    error = error_of(PlayedTeam([READY, [mistake], [dead]]), monkeypatch)
    assert error.found == f"rank 3 of 4 {KILLED}"


def test_what_comes_while_positions_are_asked_is_judged(monkeypatch: pytest.MonkeyPatch):
    answers = [Position(rank=0, where="f (a.py:1)"), Died(rank=1, how=KILLED)]
    error = error_of(PlayedTeam([READY, [], []], answers), monkeypatch)
    assert error.found == f"rank 1 of 4 {KILLED}"


def test_ranks_that_start_too_slowly_are_named_whatever_others_report(
    monkeypatch: pytest.MonkeyPatch,
):
    """The limit is of the whole start, not of each silence in it."""
    value = Value(rank=0, data=pickle.dumps(1))
    team = PlayedTeam([READY[:2]], [Position(rank=3, where="f (a.py:1)")])

    def poll(timeout_s: float) -> Sequence[Report]:
        team.now_s += min(timeout_s, LIMIT_S / 4)
        assert team.now_s <= LIMIT_S, "longer than the start may take"
        return [value] if timeout_s > LIMIT_S / 4 else []

    team.poll = lambda timeout_s: team.batches.pop(0) if team.batches else poll(timeout_s)
    error = error_of(team, monkeypatch)
    assert error.found == (
        "of 4 ranks not all run 8 s after their start: rank 2 (starting, at an unknown place: it"
        " does not answer), rank 3 (starting, at f (a.py:1))"
    )


def test_a_silent_team_is_described_rank_by_rank(monkeypatch: pytest.MonkeyPatch):
    answers = [Position(rank=0, where="f (a.py:1)"), Position(rank=2, where="g (a.py:2)")]
    team = PlayedTeam([READY, [Done(rank=3, data=b"")]], answers, stopped=[1])
    error = error_of(team, monkeypatch)
    assert error.found == (
        "no news for 8 s from rank 0 (running, at f (a.py:1)), "
        "rank 1 (running, at an unknown place: it does not answer, stopped by a signal), "
        "rank 2 (running, at g (a.py:2))"
    )


def test_a_stopped_rank_is_named_as_soon_as_another_waited_in_vain(monkeypatch):
    for error in (hang(0, 1), LostPeerError("rank 0 lost", expected="all", remedy="look")):
        is_lost = isinstance(error, LostPeerError)
        team = PlayedTeam([READY, [failed(0, error, lost_peer=is_lost)]], stopped=[1])
        found = error_of(team, monkeypatch)
        assert type(found) is type(error)
        assert found.found == f"rank 1 of 4 is stopped by a signal: {error.found}"
        assert team.now_s < 1.0


def test_a_rank_that_returned_is_named_where_another_waited_in_vain(monkeypatch):
    for error in (hang(0, 1), LostPeerError("rank 0 lost", expected="all", remedy="look")):
        is_lost = isinstance(error, LostPeerError)
        batches = [READY, [Done(rank=1, data=b"")], [failed(0, error, lost_peer=is_lost)]]
        found = error_of(PlayedTeam(batches), monkeypatch)
        assert type(found) is type(error)
        assert found.found == f"rank 1 of 4 had returned: {error.found}"


def test_values_emitted_before_a_death_come_out_before_its_error(monkeypatch: pytest.MonkeyPatch):
    """News of a death can overtake them on their way."""
    value, dead = Value(rank=0, data=DONE), Died(rank=1, how=KILLED)
    for batches in ([[dead, value]], [[dead], [], [value]], [[dead], [value], [], [value]]):
        team = PlayedTeam([READY, *batches])
        monkeypatch.setattr(supervise_module.time, "monotonic", lambda team=team: team.now_s)
        events = supervise(team, JOB)
        assert next(events) == Emitted(value=None)
        with pytest.raises(RankFailure, match=f"rank 1 of 4 {re.escape(KILLED)}"):
            list(events)
        assert not team.batches


def test_values_that_come_while_positions_are_asked_come_out(monkeypatch: pytest.MonkeyPatch):
    team = PlayedTeam([READY, [], []], [Value(rank=0, data=DONE), Died(rank=1, how=KILLED)])
    monkeypatch.setattr(supervise_module.time, "monotonic", lambda: team.now_s)
    assert next(supervise(team, JOB)) == Emitted(value=None)


def test_ranks_that_wait_for_each_other_are_all_told_of(monkeypatch: pytest.MonkeyPatch):
    waits = [failed(0, hang(0, 1)), failed(1, hang(1, 0))]
    team = PlayedTeam([READY, *([one] for one in waits)])
    assert error_of(team, monkeypatch).found == "rank 0 waits for rank 1; rank 1 waits for rank 0"
    assert team.now_s < 2 * supervise_module.ROOT_CAUSE_S


def test_what_came_while_the_launcher_stood_still_is_heard(monkeypatch: pytest.MonkeyPatch):
    """A poll that ends by its limit is followed by one more look."""
    done = [Done(rank=rank, data=DONE if rank == 0 else b"") for rank in range(NUM_RANKS)]
    team = PlayedTeam([READY, [], [Value(rank=0, data=DONE)], [], done])
    monkeypatch.setattr(supervise_module.time, "monotonic", lambda: team.now_s)
    events = list(supervise(team, JOB))
    assert [type(event) for event in events[:-1]] == [Emitted]
    assert team.calls == ["start", "finish", "kill"]


def test_a_value_that_cannot_be_read_here_is_named(monkeypatch: pytest.MonkeyPatch):
    strange = b"cnowhere\nThing\n."
    error = error_of(PlayedTeam([READY, [Value(rank=0, data=strange)]]), monkeypatch)
    assert isinstance(error, LaunchError)
    assert error.found.startswith("rank 0 gave a value that can't be read here (ModuleNotFound")


DONE = b"\x80\x05N."
"""None, pickled."""
