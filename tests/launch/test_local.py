"""Ranks as local processes: values, results, and every way in which a rank can fail."""

import os
import signal
import struct
import subprocess
import sys
from multiprocessing.connection import Pipe
from pathlib import Path

import pytest

from distmega.engine.ranks.context import RankContext
from distmega.errors import LaunchError, RankFailure, RequestError
from distmega.launch.contract import Emitted, Event, Job, LauncherOptions, RayOptions, Result
from distmega.launch.host.reports import Died
from distmega.launch.launchers import launch
from distmega.launch.local import LocalTeam, _Rank
from tests.interrupts import interruptible
from tests.launch.conftest import is_gone, wait_until
from tests.launch.targets import Begun, Trap

NEVER_S = 10_000.0
"""A limit that no test lives to see: what comes before it comes of itself."""


FORKED = pytest.mark.usefixtures("forked")
MORE_TARGETS = ("tests.launch.targets:missing", "targets")


def start(target: str, payload: object, *, num_ranks: int = 2, **options) -> list[Event]:
    chosen = LauncherOptions(num_ranks=num_ranks, device="cpu", **options)
    return list(launch(f"tests.launch.targets:{target}", payload, chosen))


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.nightly), 4])
def test_values_come_in_order_and_the_result_last(
    num_ranks: int, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    if num_ranks == 4:
        request.getfixturevalue("forked")
    monkeypatch.delenv("DISTMEGA_THREADS", raising=False)
    *values, result = start("sum_ranks", 3, num_ranks=num_ranks)
    assert values == [Emitted(value=step) for step in range(3)]
    assert isinstance(result, Result)
    assert [seen.context for seen in result.value] == [
        RankContext(
            rank=rank,
            world_size=num_ranks,
            local_rank=rank,
            local_world_size=num_ranks,
            node=result.value[0].context.node,
            backend="gloo",
            device="cpu",
            timeout_s=300.0,
        )
        for rank in range(num_ranks)
    ]
    num_cores = len(os.sched_getaffinity(0))
    for seen in result.value:
        assert seen.total == num_ranks * (num_ranks + 1) // 2
        assert seen.num_threads == max(1, num_cores // num_ranks)
        assert seen.multicast == ("0", "1", "1")
        assert is_gone(seen.pid)


@pytest.mark.parametrize(
    ("payload", "how"),
    [(signal.SIGKILL, "was killed by SIGKILL (signal 9)"), (None, "exited with code 7")],
)
def test_a_rank_that_dies_is_named_and_ends_the_others_at_once(
    payload, how: str, request: pytest.FixtureRequest
):
    if payload is None:
        request.getfixturevalue("forked")
    options = LauncherOptions(num_ranks=3, device="cpu", timeout_s=NEVER_S)
    events = launch("tests.launch.targets:kill_last", payload, options)
    survivor = next(events).value
    with pytest.raises(RankFailure, match="rank 2 of 3") as failure:
        next(events)
    assert how in str(failure.value)
    assert is_gone(survivor)


def test_a_rank_that_dies_in_the_midst_of_a_report_is_named():
    """As one that memory runs out for while it sends a large result."""
    job = Job(
        target="module:function",
        payload=b"",
        num_ranks=1,
        device="cpu",
        timeout_s=60.0,
        start_timeout_s=60.0,
        ray=RayOptions(),
    )
    team, (ours, theirs) = LocalTeam(job), Pipe()
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as process:
        team.ranks.append(_Rank(process=process, connection=ours))
        team.open[ours] = 0
        os.write(theirs.fileno(), struct.pack("!i", 1000) + b"the first of a thousand bytes")
        theirs.close()
        assert team.poll(60.0) == [Died(rank=0, how="exited with code 3")]
        team.kill()


def test_what_a_dead_rank_started_ends_with_it():
    events = launch("tests.launch.targets:leave_a_child", None, LauncherOptions(device="cpu"))
    child = next(events).value
    with pytest.raises(RankFailure, match="rank 0 of 1 exited with code 7"):
        list(events)
    assert wait_until(lambda: is_gone(child))


@FORKED
def test_an_error_of_ours_comes_back_as_it_was_raised():
    with pytest.raises(RequestError) as refusal:
        start("refuse", "bad")
    assert str(refusal.value) == "payload bad; expected a better one; send that"
    assert "rank 1 of 2:\nTraceback" in refusal.value.__notes__[0]


@FORKED
def test_any_other_error_becomes_a_rank_failure_that_names_the_rank():
    with pytest.raises(RankFailure, match=r"rank 1 of 2 raised KeyError: 'x'; .* DISTMEGA_LOG"):
        start("stumble", "x")


def test_a_rank_logs_its_own_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """Also of a caller who has set up no logging and shows the message alone."""
    monkeypatch.setenv("DISTMEGA_LOG", "debug")
    with pytest.raises(RankFailure, match="set DISTMEGA_LOG=debug to see its traceback"):
        start("stumble", "x")
    logged = capfd.readouterr().err
    assert "DEBUG rank 1 distmega.launch.worker: failed\nTraceback" in logged
    assert "KeyError: 'x'" in logged


@FORKED
def test_a_rank_that_raises_in_set_up_is_named():
    with pytest.raises(RankFailure, match="rank 0 of 1 raised OSError: trapped"):
        start("sum_ranks", Trap(0.0), num_ranks=1)


@FORKED
def test_ranks_that_hang_in_set_up_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("distmega.launch.local.POSITION_S", 60.0)  # all answer
    with pytest.raises(
        RankFailure, match=r"of 1 rank not all run 5 s after their start: rank 0 \(starting, at "
    ):
        start("sum_ranks", Trap(300.0), num_ranks=1, start_timeout_s=5)


@FORKED
def test_ranks_that_hang_are_named_with_their_place(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("distmega.launch.local.POSITION_S", 60.0)  # all answer
    with pytest.raises(RankFailure) as failure:
        start("hang", None, timeout_s=2)
    message = str(failure.value)
    assert "no news for 2 s from rank 0 (running, at hang (targets.py:" in message
    assert "rank 1 (running, at hang (targets.py:" in message


@FORKED
def test_a_frozen_rank_is_told_from_one_that_answers():
    with pytest.raises(RankFailure, match=r"rank 1 \(running, at an unknown place: it does not"):
        start("kill_last", signal.SIGSTOP, timeout_s=2)


@FORKED
def test_a_result_that_cannot_be_pickled_is_the_ranks_failure():
    with pytest.raises(RankFailure, match=r"rank 0 of 1 raised .*pickle") as raised:
        start("return_function", None, num_ranks=1)
    assert "its result of type function can't be pickled" in raised.value.found


@pytest.mark.parametrize(
    "target",
    ["nowhere:run", *(pytest.param(name, marks=pytest.mark.nightly) for name in MORE_TARGETS)],
)
def test_a_target_that_cannot_be_imported_is_refused(target: str):
    with pytest.raises(LaunchError, match=f"target '{target}' can't be loaded"):
        list(launch(target, None, LauncherOptions(device="cpu")))


@FORKED
def test_closing_the_iterator_ends_the_ranks():
    events = launch("tests.launch.targets:hang", None, LauncherOptions(num_ranks=2, device="cpu"))
    pid = next(events).value
    assert not is_gone(pid)
    events.close()
    assert is_gone(pid)


@FORKED
def test_a_restart_repeats_the_job_but_no_value(tmp_path: Path):
    events = start("kill_last_once", tmp_path / "died", max_restarts=1)
    events.remove(Emitted(value=Begun()))  # of the second run alone
    assert events == [*(Emitted(value=step) for step in range(5)), Result(value="survived")]


CALLER = """
from distmega.launch.contract import LauncherOptions
from distmega.launch.launchers import launch

options = LauncherOptions(num_ranks=2, device="cpu")
for event in launch("tests.launch.targets:hang", None, options):
    print(event.value, flush=True)
"""


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_the_ranks_end_with_their_caller(end: signal.Signals):
    # a script without a main guard, which the start method spawn of multiprocessing would not take
    with interruptible():
        caller = subprocess.Popen(
            [sys.executable, "-c", CALLER],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    with caller:
        assert caller.stdout is not None
        pid = int(caller.stdout.readline())
        caller.send_signal(end)
        assert caller.wait(60) == -end
    assert wait_until(lambda: is_gone(pid))


def test_interruptible_children_heed_sigint_though_the_tests_ignore_it():
    tell = [sys.executable, "-c", "import signal; print(signal.getsignal(2) is signal.SIG_IGN)"]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        ignoring = subprocess.check_output(tell, text=True)
        with interruptible():
            heeding = subprocess.check_output(tell, text=True)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert (ignoring, heeding) == ("True\n", "False\n")
