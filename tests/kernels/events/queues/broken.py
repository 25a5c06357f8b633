"""Queues with a fault, for tests of what finds it."""

from dataclasses import replace

from distmega.kernels.events.graph import EventId
from distmega.kernels.events.queues.assign import Drain, Entry, Queues


def without_wait(queues: Queues, number: int) -> Queues:
    """The queues without one of their waits: numbers count those of SMs, then those of regions."""
    left = number

    def cut(events: tuple[EventId, ...]) -> tuple[EventId, ...]:
        nonlocal left
        here, left = left, left - len(events)
        return events[:here] + events[here + 1 :] if 0 <= here < len(events) else events

    def entry(each: Entry | Drain) -> Entry | Drain:
        if isinstance(each, Drain):
            return replace(each, first=cut(each.first))
        return replace(each, first=cut(each.first), waits=cut(each.waits))

    sms = tuple(tuple(map(entry, queue)) for queue in queues.sms)
    regions = []
    for region in queues.regions:
        entries = tuple(e for e in map(entry, region.entries) if isinstance(e, Entry))
        regions.append(replace(region, entries=entries))
    return replace(queues, sms=sms, regions=tuple(regions))
