"""Calls on a GPU end in time or raise; a host that never asks is ended."""

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

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
    monkeypatch.setattr(deadline, "IDLE_S", 0.0)
    monkeypatch.setattr(deadline, "_watcher", deadline._Watcher())  # other tests have left calls


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
    assert not calls._marks, "what the thread would look at"
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


@pytest.fixture
def watching() -> Callable[[], list[threading.Thread]]:
    """The threads that have been started to watch since."""
    before = threading.enumerate()

    def found() -> list[threading.Thread]:
        started = (thread for thread in threading.enumerate() if thread not in before)
        return [thread for thread in started if thread.name == "distmega-watch"]

    return found


def until(holds: Callable[[], bool]) -> bool:
    """Whether something holds within a minute."""
    end = time.monotonic() + 60
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()


def test_one_thread_watches_all_deadlines_and_ends_with_their_calls(
    ended: threading.Event, watching: Callable[[], list[threading.Thread]]
):
    programs = [Deadline(f"calls {number}", 60.0) for number in range(20)]
    for _ in range(3):
        for calls in programs:
            calls.note()
        assert len(watching()) == 1
    for calls in programs[1:]:
        calls.wait()
    assert len(watching()) == 1
    programs[0].wait()
    assert until(lambda: not watching())
    assert not ended.is_set()


def test_a_program_whose_gpu_failed_leaves_others_watched(
    monkeypatch: pytest.MonkeyPatch, ended: threading.Event
):
    failed, other = Deadline("failed", 0.05), Deadline("other", 0.05)
    monkeypatch.setattr(failed, "look", Mock(side_effect=RuntimeError("CUDA error")))
    monkeypatch.setattr(Event, "needed", 10**9)
    failed.note()
    assert until(lambda: not failed.has_marks)
    other.note()
    assert ended.wait(60)


def test_calls_behind_the_end_of_the_thread_are_watched_by_another(
    monkeypatch: pytest.MonkeyPatch,
    ended: threading.Event,
    watching: Callable[[], list[threading.Thread]],
):
    calls = Deadline("calls", 0.05)
    calls.note()
    calls.wait()
    assert until(lambda: not watching())
    monkeypatch.setattr(Event, "needed", 10**9)
    calls.note()
    assert ended.wait(60)


def test_the_thread_stays_for_calls_that_come_soon(
    monkeypatch: pytest.MonkeyPatch,
    ended: threading.Event,
    watching: Callable[[], list[threading.Thread]],
):
    monkeypatch.setattr(deadline, "IDLE_S", 3600.0)
    calls = Deadline("calls", 0.02)
    calls.note()
    calls.wait()
    (thread,) = watching()
    assert until(lambda: not calls.is_watched)
    monkeypatch.setattr(Event, "needed", 10**9)
    calls.note()
    assert watching() == [thread]
    assert ended.wait(60)
    calls.forget()
    monkeypatch.setattr(deadline, "IDLE_S", 0.0)
    assert until(lambda: not watching())


def test_a_call_that_comes_as_the_thread_ends_is_watched(
    ended: threading.Event, watching: Callable[[], list[threading.Thread]]
):
    """Whatever the two do first: many threads' calls, each looked at for a moment."""
    programs = [Deadline(f"calls {number}", 0.004) for number in range(4)]

    def call(calls: Deadline) -> None:
        for _ in range(200):
            calls.note()
            calls.wait()
            time.sleep(random.random() / 500)
        calls.note()

    with ThreadPoolExecutor(len(programs)) as pool:
        list(pool.map(call, programs))
    assert until(lambda: not any(calls.has_marks for calls in programs)), "nobody looked"
    assert until(lambda: not watching())


class Queue:
    """A GPU that does one call after the other; an event is reached with the call it stands for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.num_queued = self.num_done = 0
        queue = self

        class Recorded(Event):
            stands_for = 0

            def record(self, stream: object = None) -> None:
                self.stands_for = queue.num_queued

            def query(self) -> bool:
                return self.stands_for <= queue.num_done

        monkeypatch.setattr(torch.cuda, "Event", Recorded)
        monkeypatch.setattr(deadline, "_watcher", Mock())
        monkeypatch.setattr(deadline.time, "monotonic", lambda: self.now)
        self.calls = Deadline("calls", 3.0)

    def call(self) -> None:
        self.num_queued += 1
        self.calls.note()

    def pass_time(self, num_s: int) -> None:
        """The thread looks once a second."""
        for _ in range(num_s):
            self.now += 1
            self.calls.look(self.now)


def test_a_call_that_hangs_behind_one_under_way_is_ended(
    monkeypatch: pytest.MonkeyPatch, ended: threading.Event
):
    """Its host, which queued it ahead, makes no other."""
    queue = Queue(monkeypatch)
    for _ in range(3):
        queue.call()
    queue.num_done = 1
    queue.pass_time(2)
    assert not ended.is_set()
    queue.pass_time(3)
    assert ended.is_set()


@pytest.mark.parametrize("seed", range(20))
def test_calls_that_end_in_time_are_left_alone_and_others_ended(
    seed: int, monkeypatch: pytest.MonkeyPatch, ended: threading.Event
):
    """Whatever is under way while others are queued; from some call on none ends."""
    numbers, queue = random.Random(seed), Queue(monkeypatch)
    queued_at: list[int] = []
    for _ in range(60):
        for _ in range(numbers.choice((0, 0, 1, 3))):
            queue.call()
            queued_at.append(queue.now)
        queue.num_done = numbers.randint(queue.num_done, queue.num_queued)
        while queue.num_done < len(queued_at) and queued_at[queue.num_done] < queue.now - 1:
            queue.num_done += 1
        queue.pass_time(1)
        assert not ended.is_set()
    queue.call()
    for _ in range(numbers.randint(0, 4)):
        queue.call()
        queue.pass_time(numbers.randint(0, 1))
    queue.pass_time(5)
    assert ended.is_set()


def test_an_event_stands_for_one_call_after_the_other(
    monkeypatch: pytest.MonkeyPatch, ended: threading.Event
):
    """The thread asks for a call while the host, which has waited for it, queues a later one: what
    it hears is of the later one.
    """
    queue = Queue(monkeypatch)
    queue.call()
    (event, _) = queue.calls._marks[0]
    query = event.query

    def ask() -> bool:
        queue.num_done = queue.num_queued
        queue.calls.wait()
        queue.call()
        monkeypatch.setattr(event, "query", query)
        return event.query()

    monkeypatch.setattr(event, "query", ask)
    queue.pass_time(4)
    assert not ended.is_set()
    queue.pass_time(3)
    assert ended.is_set()
