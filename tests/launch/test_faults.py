"""Faults in the middle of a request: each ends in time, and the message says who owes what."""

import re
import time
from functools import cache
from pathlib import Path

import pytest

from distmega.engine.requests import Collectives
from distmega.errors import DistmegaError, HangError, LostPeerError, RankFailure
from distmega.launch.contract import Emitted, Event, LauncherOptions, Result
from distmega.launch.launchers import launch
from tests.launch.faults import DELAY_S, Fault

pytestmark = pytest.mark.usefixtures("forked")

LIMIT_S = 60.0
"""Start of the ranks included; a wait on its own ends after two seconds."""


def run(
    fault: Fault, *, target: str = "decode", num_ranks: int = 2, max_restarts: int = 0
) -> list[Event]:
    options = LauncherOptions(
        num_ranks=num_ranks, timeout_s=LIMIT_S, max_restarts=max_restarts, device="cpu"
    )
    return list(launch(f"tests.launch.faults:{target}", fault, options))


@cache
def sound_tokens() -> list[int]:
    *_, last = run(Fault(timeout_s=LIMIT_S))
    assert isinstance(last, Result)
    return last.value


def failure_of(fault: Fault, **options) -> DistmegaError:
    """Which the ranks found: the launcher's own would name no peer, task or event."""
    with pytest.raises((RankFailure, HangError)) as failure:
        run(fault, **options)
    return failure.value


def test_a_killed_rank_is_named_and_replaced_and_the_request_finished(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fault = Fault(kind="kill", timeout_s=LIMIT_S, once=tmp_path / "killed")
    *tokens, last = run(fault, max_restarts=1)
    assert isinstance(last, Result)
    emitted = [event.value for event in tokens if isinstance(event, Emitted)]
    assert emitted == last.value == sound_tokens()
    assert "rank 1 of 2 was killed by SIGKILL" in caplog.text


@pytest.mark.parametrize("collectives", ["kernel", "host"])
def test_a_stopped_rank_is_named_whoever_waits_for_it(collectives: Collectives) -> None:
    """By the megakernel, whose wait is a HangError, or in an exchange over gloo."""
    error = failure_of(Fault(kind="stop", timeout_s=6.0, exchange_s=6.0, collectives=collectives))
    assert str(error).startswith("rank 1 of 2 is stopped by a signal: ")
    assert isinstance(error, HangError if collectives == "kernel" else LostPeerError)


def test_a_delayed_rank_delays_the_others_and_no_more() -> None:
    start = time.monotonic()
    *_, last = run(Fault(kind="delay", timeout_s=LIMIT_S))
    assert isinstance(last, Result)
    assert last.value == sound_tokens()
    assert time.monotonic() - start > DELAY_S


def assert_names_rank_task_and_event(error: DistmegaError, waits: int, owes: int) -> None:
    assert isinstance(error, HangError)
    place = rf"rank {waits} SM \d+: \S+\[\d+\] waits for event \d+, at \d+ of \d+ from rank {owes}"
    assert re.search(rf"{place}, owed by rank {owes}: \S+\[\d+\] on SM \d+", str(error)), str(error)


def test_a_rank_delayed_beyond_the_timeout() -> None:
    error = failure_of(Fault(kind="delay", timeout_s=2.0))
    assert_names_rank_task_and_event(error, waits=0, owes=1)


def test_a_dropped_signal() -> None:
    error = failure_of(Fault(kind="drop"))
    assert_names_rank_task_and_event(error, waits=0, owes=1)


def test_a_wrong_target() -> None:
    """A rank that waits for more than comes says what did come, and who it believes to owe it."""
    error = failure_of(Fault(kind="target", rank=0))
    assert isinstance(error, HangError)
    place = r"rank 0 SM \d+: \S+\[\d+\] waits for event \d+, at \d+ of \d+ from rank \d"
    assert re.search(rf"{place}, owed by rank \d: ", str(error)), str(error)


def test_a_dropped_signal_between_stages() -> None:
    fault = Fault(rank=1, pp=2, timeout_s=6.0)  # of all exchanges, set-up too
    error = failure_of(fault, target="prefill_without_signals")
    text = str(error)
    assert re.search(r"'free' over mesh axis 'pp', ranks \[0, 1\], failed on rank 0: ", text)
    assert re.search(r"at node \d+ \(wait signal free from pp\[1\]\) of host program", text)
