"""The host's end of bounded waits, on a CPU: who gives up writes a word of the host."""

from ctypes import c_int32

import torch

from distmega.kernels.runtime.alarm import Alarm
from distmega.kernels.runtime.report import (
    NO_REPORT,
    REPORT_ALARM,
    REPORT_FIRST,
    REPORT_LIMIT,
    REPORT_WORDS,
)
from tests.calls import num_calls


def test_a_wait_that_is_given_up_is_taken_once():
    words = torch.zeros(REPORT_WORDS, dtype=torch.int64)
    alarm = Alarm(words, 1.5)
    assert int(words[REPORT_LIMIT]) == 1_500_000_000
    assert alarm.take() is None
    words[REPORT_FIRST] = 5 << 32 | 7 << 8 | 9
    c_int32.from_address(int(words[REPORT_ALARM])).value = 1
    found = alarm.take()
    assert found is not None
    assert (found.flag, found.word, found.last) == (5, 7, 9)
    assert int(words[REPORT_FIRST]) == NO_REPORT
    assert alarm.take() is None


def test_asking_asks_torch_nothing():
    alarm = Alarm(torch.zeros(REPORT_WORDS, dtype=torch.int64), 1.0)
    assert num_calls(alarm.take) <= 2
