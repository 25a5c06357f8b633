"""Which waits order the main stream and the ring of streams that host loops run on.

Comes in: what each piece of work touches, in order. Goes out: joins, records and waits, only where
work on one side touches what the other side wrote, or writes what it touched. A loop stays open
until something needs it, so that loops which have nothing in common run side by side. Used by
loops.py.
"""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field

from distmega.hostir.ir.nodes import Node, RecordEvent, Slot, WaitEvent


@dataclass(frozen=True, slots=True)
class Touched:
    """Storage that a piece of work reads and writes, by name."""

    reads: Set[str]
    writes: Set[str]

    def conflicts(self, other: "Touched") -> bool:
        """Whether one writes what the other touches."""
        either = self.reads | self.writes
        return bool(self.writes & (other.reads | other.writes) or either & other.writes)


@dataclass(slots=True)
class StreamOrder:
    """Event 0 marks the main stream, event 1 + n stream 1 + n of the ring.

    written, touched: storage -> the last moment of the main stream that did; what the caller gives
    is written at moment 0. known: stream of the ring -> the moment that it has waited for. open:
    what loops did, and on which streams the main stream has not waited for it.
    """

    moment: int = 0
    written: dict[str, int] = field(default_factory=dict)
    touched: dict[str, int] = field(default_factory=dict)
    known: dict[int, int] = field(default_factory=dict)
    open: list[tuple[Touched, frozenset[int]]] = field(default_factory=list)

    def join(self, streams: Set[int] | None = None) -> Iterator[Node]:
        """Lets the main stream wait for streams of the ring, by default all that are open."""
        if streams is None:
            streams = _all_streams(self.open)
        for number in sorted(streams):
            yield WaitEvent(event=Slot(base=1 + number))
        self.close(streams)

    def close(self, streams: Set[int]) -> None:
        """Notes that the main stream has waited for all that streams of the ring did."""
        left = [(work, rest - streams) for work, rest in self.open]
        for work, rest in left:
            if not rest:
                self.note(work)
        self.open = [(work, rest) for work, rest in left if rest]

    def before(self, work: Touched, count: int = 0) -> Iterator[Node]:
        """What must come before work on the main stream, or on `count` of the ring, that may not
        overtake an open loop. Loops on one and the same stream can't.
        """
        same = frozenset({0}) if count == 1 else frozenset()
        ahead = [each for each in self.open if work.conflicts(each[0]) and each[1] != same]
        yield from self.join(_all_streams(ahead))

    def before_freeing(self, names: Set[str]) -> Iterator[Node]:
        """What must come before storage is freed on the main stream."""
        users = [each for each in self.open if names & (each[0].reads | each[0].writes)]
        yield from self.join(_all_streams(users))

    def note(self, work: Touched) -> None:
        """Work that is on the main stream, or that the main stream has waited for."""
        self.moment += 1
        for name in work.writes:
            self.written[name] = self.touched[name] = self.moment
        for name in work.reads:
            self.touched[name] = self.moment

    def must_follow(self, work: Touched, count: int) -> bool:
        """Whether one of streams 1 to `count` must wait for the main stream to do this work."""
        seen = min(self.known.get(1 + number, -1) for number in range(count))
        needed = any(self.written.get(name, 0) > seen for name in work.reads)
        return needed or any(self.touched.get(name, 0) > seen for name in work.writes)

    def follow(self, count: int) -> None:
        """Streams 1 to `count` wait for the main stream."""
        self.known |= dict.fromkeys(range(1, 1 + count), self.moment)


def _all_streams(loops: Sequence[tuple[Touched, frozenset[int]]]) -> frozenset[int]:
    return frozenset().union(*(streams for _, streams in loops))


MAIN = Slot(base=0)
"""The main stream, and the event that marks it."""

FORK = RecordEvent(event=MAIN)
