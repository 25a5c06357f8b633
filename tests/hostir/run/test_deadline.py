"""Calls on a GPU end in time or raise; a host that never asks is ended."""

import threading
import time

import pytest
import torch

from distmega.errors import HangError
from distmega.hostir.run import deadline
from distmega.hostir.run.deadline import Deadline, ends_within


class Event:
    """Reached when asked often enough."""

    needed = 0

    def __init__(self) -> None:
        self.asked = 0

    def record(self, stream: object = None) -> None:
        """Behind what is queued."""

    def query(self) -> bool:
        self.asked += 1
        return self.asked > Event.needed


@pytest.fixture(autouse=True)
def events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "needed", 0)
    monkeypatch.setattr(deadline, "GRACE_S", 0.0)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set where the process would have been ended."""
    found = threading.Event()
    monkeypatch.setattr(deadline.os, "_exit", lambda status: found.set())
    return found


def test_an_event_is_asked_until_it_is_reached(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Event, "needed", 3)
    event = Event()
    assert ends_within(event, 60.0)
    assert event.asked == 4


def test_an_event_that_is_not_reached_ends_the_wait(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Event, "needed", 10**9)
    since = time.monotonic()
    assert not ends_within(Event(), 0.05)
    assert time.monotonic() - since >= 0.05


def test_a_wait_in_vain_says_what_for_and_the_host_goes_on(
    monkeypatch: pytest.MonkeyPatch, ended: threading.Event
):
    monkeypatch.setattr(Event, "needed", 10**9)
    monkeypatch.setattr(deadline, "GRACE_S", 1e6)
    calls = Deadline("calls of program 'p' on rank 1", 0.05)
    calls.note()
    with pytest.raises(HangError, match=r"program 'p' on rank 1: still under way after 0\.05 s"):
        calls.wait()
    assert calls._mark is None, "what the thread would look at"
    assert not ended.is_set()


def test_a_host_that_never_asks_is_ended(monkeypatch: pytest.MonkeyPatch, ended: threading.Event):
    monkeypatch.setattr(Event, "needed", 10**9)
    Deadline("calls", 0.05).note()
    assert ended.wait(60)


def test_calls_that_end_leave_nothing_to_watch(ended: threading.Event):
    calls = Deadline("calls", 0.05)
    for _ in range(3):
        calls.note()
        calls.wait()
    calls.note()
    assert not ended.wait(0.3)


def test_one_event_stands_for_one_call_after_the_other(
    monkeypatch: pytest.MonkeyPatch, ended: threading.Event
):
    """The thread asks for a call while the host, which found it ended, records a later one: what it
    hears is of the later one.
    """
    monkeypatch.setattr(Deadline, "_watch", lambda calls: None)
    calls = Deadline("calls", 0.05)
    calls.note()
    num_asked = 0

    def query() -> bool:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 1:
            calls.note()
        return num_asked == 2  # asked by that call; then it stands for that, under way

    monkeypatch.setattr(calls._event, "query", query)
    calls._look(time.monotonic() + 1)
    assert num_asked == 2
    assert not ended.is_set()
    calls._look(time.monotonic() + 1)
    assert ended.is_set()
