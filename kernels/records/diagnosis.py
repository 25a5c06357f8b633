"""Says who waits for what and who owes it, after waits of the kernel of records were given up.

In: the kernel's queues, and the least wait that was given up, as kernel.py left it in the report.
Out: a HangError. Torch-free. Next on the walk: runner.py.
"""

from distmega.errors import HangError
from distmega.kernels.isa.events import QueuedTask, tasks_signalling, tasks_waiting
from distmega.kernels.megakernel import Megakernel
from distmega.kernels.runtime.report import Report, hang_error


def explain_record_hang(
    kernel: Megakernel, report: Report, *, limit_s: float, rank: int
) -> HangError:
    """The error for a report of the rank; never fails, whatever the words say."""
    encoded, team = kernel.encoded, kernel.team(rank)
    event, source = divmod(report.word, len(team))
    # of an SM's tasks one waits for an event: those behind it need not (tasks/schedule.py)
    waiting = [one for one in tasks_waiting(encoded, event) if one.task.sm == report.last]
    waiter, count = waiting[0] if waiting else (None, 0)
    owner = team[source]
    owing = [
        one
        for one in tasks_signalling(encoded, event)
        if not (waiter and owner == rank and _is_before(one, waiter))
    ]
    return hang_error(
        f"rank {rank}, SM {report.last} ({describe(waiter) if waiter else 'no instruction'})",
        f"event {event} from rank {owner}",
        limit_s=limit_s,
        expected=f"count {report.flag * count} (launch {report.flag}, {count} each)",
        debtors=[f"rank {owner}, SM {one.sm}, {describe(one)}" for one in owing],
    )


def _is_before(one: QueuedTask, waiter: QueuedTask) -> bool:
    """Whether it is done, as the SM that waits has come further."""
    return one.sm == waiter.sm and one.position < waiter.position


def describe(one: QueuedTask) -> str:
    """Its place in the queue, its op and which task of that it is."""
    return f"instruction {one.position}, {one.name}"
