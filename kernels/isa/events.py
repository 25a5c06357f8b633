"""Who waits for an event and who owes it, as encoded queues say: what hang reports name.

In: Encoded, an event. Out: tasks by SM, place in its queue and name. The CPU's interpreter and the
kernel of records (records/diagnosis.py) share it. Next on the walk: encoder.py.
"""

from collections.abc import Iterator
from typing import NamedTuple

from distmega.kernels.isa.encoding import Encoded, Header, unpack_header


class QueuedTask(NamedTuple):
    """The record of a task that waits or signals; name: op and task, as "up[3]"."""

    sm: int
    position: int
    name: str


class TaskWaiting(NamedTuple):
    """A task that waits for an event, and for how many triggers from each rank in a launch."""

    task: QueuedTask
    triggers: int


def name_task(encoded: Encoded, group: int, task: int) -> str:
    """The op and the task of it, as "up[3]"."""
    return f"{encoded.names[group]}[{task}]"


def tasks_signalling(encoded: Encoded, event: int) -> list[QueuedTask]:
    """The tasks that trigger an event, the same on every rank."""
    return [
        queued
        for queued, header in queued_tasks(encoded)
        if event in encoded.signals[header.signal :][: header.num_signals, 0]
    ]


def tasks_waiting(encoded: Encoded, event: int) -> list[TaskWaiting]:
    """The tasks that wait for an event."""
    return [
        TaskWaiting(queued, count)
        for queued, header in queued_tasks(encoded)
        for one, count, _ in encoded.waits[header.wait :][: header.num_waits].tolist()
        if one == event
    ]


def queued_tasks(encoded: Encoded) -> Iterator[tuple[QueuedTask, Header]]:
    """All records, SM by SM in the order of its queue."""
    for sm, (queue, length) in enumerate(zip(encoded.queues, encoded.lengths, strict=True)):
        for position, record in enumerate(queue[:length]):
            header = unpack_header(record)
            yield QueuedTask(sm, position, name_task(encoded, header.group, header.task)), header
