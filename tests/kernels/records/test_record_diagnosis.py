"""The report that waits of the kernel of records leave, and what the host makes of it."""

import pytest

from distmega.kernels.isa.events import tasks_signalling, tasks_waiting
from distmega.kernels.megakernel import Megakernel, compile_megakernel
from distmega.kernels.records.diagnosis import explain_record_hang
from distmega.kernels.runtime.report import Report
from distmega.sharding.layout.mesh import DeviceMesh
from tests.kernels.programs import decoder

NUM_SMS = 4


def kernel_of(tp: int) -> Megakernel:
    return compile_megakernel(decoder(2, tp), DeviceMesh(tp=tp), num_sms=NUM_SMS)


KERNEL = kernel_of(2)


def explain(event: int, source: int, sm: int, rank: int) -> tuple[str, str, str]:
    report = Report(flag=3, word=2 * event + source, last=sm)
    error = explain_record_hang(KERNEL, report, limit_s=2.0, rank=rank)
    return error.found, error.expected, error.remedy


def test_every_wait_has_a_waiter_and_debtors():
    encoded, num_waits = KERNEL.encoded, 0
    for event in range(encoded.num_events):
        owing = tasks_signalling(encoded, event)
        for task, count in tasks_waiting(encoded, event):
            found, expected, remedy = explain(event, 1, task.sm, rank=0)
            assert found == (
                f"rank 0, SM {task.sm} (instruction {task.position}, {task.name}) waited 2 s for "
                f"event {event} from rank 1"
            )
            assert expected == f"count {3 * count} (launch 3, {count} each)"
            first = owing[0]
            assert remedy.startswith(
                f"it is owed by rank 1, SM {first.sm}, instruction {first.position}, {first.name}"
            )
            assert count == len(owing)
            num_waits += 1
    assert num_waits == sum(len(task.waits) for queue in KERNEL.schedule.queues for task in queue)


def test_an_sm_waits_for_an_event_once():
    """So the SM and the event say which task it is."""
    for event in range(KERNEL.encoded.num_events):
        sms = [one.task.sm for one in tasks_waiting(KERNEL.encoded, event)]
        assert len(sms) == len(set(sms))


def test_what_an_sm_has_done_it_does_not_owe():
    for event in range(KERNEL.encoded.num_events):
        for task, _ in tasks_waiting(KERNEL.encoded, event):
            _, _, remedy = explain(event, 1, task.sm, rank=1)
            assert f"rank 1, SM {task.sm}, instruction {task.position}" not in remedy
            assert "owed by rank 1" in remedy
            for before in range(task.position):
                assert f"SM {task.sm}, instruction {before}," not in remedy


@pytest.mark.parametrize("word", [0, 10**6, 2**24 - 1])
@pytest.mark.parametrize("sm", [0, NUM_SMS - 1, 255])
def test_no_report_is_beyond_telling(word: int, sm: int):
    for tp in (1, 2):
        report = Report(flag=2**32 - 1, word=word, last=sm)
        error = explain_record_hang(kernel_of(tp), report, limit_s=2.0, rank=0)
        assert error.found.startswith(f"rank 0, SM {sm} (")
