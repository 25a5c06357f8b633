"""Drops waits of streams for each other that order nothing which others don't.

Comes in: a host program with all its events, those of kernel_order.py among them. Goes out: the
program without the waits that others imply. Next: deallocations.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count, takewhile

from distmega.hostir.ir.nodes import (
    ForLoop,
    HostProgram,
    Node,
    RecordEvent,
    SetStream,
    WaitEvent,
)
from distmega.hostir.ir.uses import shown


def prune_event_waits(host: HostProgram) -> HostProgram:
    """Drops waits for events whose record the current stream already follows, or will by the waits
    that stand directly behind; of a loop where that is so in all iterations.
    """
    prune = _Prune()
    prune.follow(host.body, 0)
    numbers = count()

    def kept(body: Sequence[Node]) -> tuple[Node, ...]:
        out: list[Node] = []
        for node in body:
            number = next(numbers)
            if isinstance(node, ForLoop):
                node = replace(node, body=kept(node.body))
            if not isinstance(node, WaitEvent) or number in prune.needed:
                out.append(node)
        return tuple(out)

    return replace(host, body=kept(host.body))


class _Prune:
    """Follows a program, its loops unrolled.

    known: of each stream, how many nodes of work of each stream it comes after, itself included.
    records: of each event, what its latest record comes after. needed: the waits that order
    something, by their place in the printed order.
    """

    def __init__(self) -> None:
        self.stream = 0
        self.known: dict[int, dict[int, int]] = {0: {0: 1}}  # what was before the program
        self.records: dict[int, dict[int, int]] = {}
        self.indices: dict[str, int] = {}
        self.needed: set[int] = set()

    def follow(self, body: Sequence[Node], first: int) -> int:
        """The nodes of a body, the first of which has that place; the place behind the last."""
        number = first
        for at, node in enumerate(body):
            mine = self.known.setdefault(self.stream, {})
            behind = number + 1
            match node:
                case SetStream(stream=slot):
                    self.stream = slot.at(self.indices)
                case ForLoop(index=index, extent=extent):
                    for value in range(extent):
                        self.indices[index] = value
                        behind = self.follow(node.body, number + 1)
                    del self.indices[index]
                case RecordEvent(event=slot):
                    self.records[slot.at(self.indices)] = dict(mine)
                case WaitEvent(event=slot):
                    theirs = self.records.get(slot.at(self.indices))
                    follows = _later(mine, self.awaited(body[at + 1 :]))
                    if theirs is None or _later(follows, theirs) != follows:
                        self.needed.add(number)
                        mine |= _later(mine, theirs or {})
                case _ if shown(node) is None:
                    mine[self.stream] = mine.get(self.stream, 0) + 1
            number = behind
        return number

    def awaited(self, body: Sequence[Node]) -> dict[int, int]:
        """What the waits at the front of a body follow."""
        found: dict[int, int] = {}
        for node in takewhile(lambda node: isinstance(node, WaitEvent), body):
            assert isinstance(node, WaitEvent)
            found = _later(found, self.records.get(node.event.at(self.indices), {}))
        return found


def _later(one: Mapping[int, int], other: Mapping[int, int]) -> dict[int, int]:
    """The larger number of each stream."""
    return {each: max(one.get(each, 0), other.get(each, 0)) for each in {*one, *other}}
