"""Threads take short turns while a block is open, those of before when none is."""

import sys
from collections.abc import Iterator
from threading import Event, Thread

import pytest
import torch

from distmega.kernels.runtime import warm_up
from distmega.kernels.runtime.switching import TURN_S, short_turns

LONG_S = 0.01


@pytest.fixture(autouse=True)
def _long_turns() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(LONG_S)
    yield
    sys.setswitchinterval(before)


def test_turns_are_short_until_the_last_block_ends():
    inside, leave = Event(), Event()

    def other() -> None:
        with short_turns():
            inside.set()
            leave.wait()

    thread = Thread(target=other)
    thread.start()
    inside.wait()
    with short_turns(), short_turns():
        assert sys.getswitchinterval() == pytest.approx(TURN_S)
    assert sys.getswitchinterval() == pytest.approx(TURN_S)
    leave.set()
    thread.join()
    assert sys.getswitchinterval() == pytest.approx(LONG_S)


@pytest.mark.parametrize("us", [201, 1015, 4999, 5000])
def test_turns_of_before_come_back_to_the_microsecond(us: int):
    sys.setswitchinterval((us + 0.5) * 1e-6)
    before = sys.getswitchinterval()
    for _ in range(3):
        with short_turns():
            assert sys.getswitchinterval() == pytest.approx(TURN_S)
    assert sys.getswitchinterval() == before == pytest.approx(us * 1e-6)


def test_an_error_ends_a_block():
    with pytest.raises(KeyError), short_turns():
        raise KeyError
    assert sys.getswitchinterval() == pytest.approx(LONG_S)


def test_other_turns_stay_as_somebody_chose_them():
    with short_turns():
        sys.setswitchinterval(0.02)
    assert sys.getswitchinterval() == pytest.approx(0.02)
    with short_turns():
        sys.setswitchinterval(5e-5)
    assert sys.getswitchinterval() == pytest.approx(5e-5)
    sys.setswitchinterval(1e-5)
    with short_turns():
        assert sys.getswitchinterval() == pytest.approx(1e-5)
    assert sys.getswitchinterval() == pytest.approx(1e-5)


def test_they_are_short_while_a_gpu_warms_up(monkeypatch: pytest.MonkeyPatch):
    found = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    warm_up._start(0, lambda: found.append(sys.getswitchinterval())).join()
    assert found == [pytest.approx(TURN_S)]
    assert sys.getswitchinterval() == pytest.approx(LONG_S)
