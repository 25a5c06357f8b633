"""Lets communication run beside as much work as may be: each wait moves down to what needs it.

Comes in: a host program that waits for each communication where it starts. Goes out: the program
with the waits before the first node that must follow them. The first of PASSES. Next: coalesce.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import count
from operator import or_

from distmega.hostir.ir.nodes import (
    Allocate,
    Collective,
    Deallocate,
    EndCoalescing,
    ForLoop,
    HostProgram,
    Node,
    RecordEvent,
    Recv,
    Send,
    SetStream,
    Signal,
    StartCoalescing,
    Wait,
)
from distmega.hostir.ir.uses import (
    node_reads,
    node_writes,
    shown,
    started_handle,
    storage_of,
    view_sources,
)
from distmega.hostir.passes.kernel_order import FILLING, communication_axes


@dataclass(frozen=True, slots=True)
class _Work:
    """Storage that a node, or a group of them, reads and writes, and the mesh axes along which it
    communicates.
    """

    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    axes: frozenset[str] = frozenset()

    def __or__(self, other: "_Work") -> "_Work":
        return _Work(self.reads | other.reads, self.writes | other.writes, self.axes | other.axes)


class _Waiting:
    """Communications whose waits move down, by the handle, in the order of the waits.

    reading, writing: of storage, those that do so. along: of mesh axes, those that communicate
    there.
    """

    def __init__(self) -> None:
        self.works: dict[str, _Work] = {}
        self.numbers: dict[str, int] = {}
        self.next_number = count()
        self.reading: dict[str, set[str]] = {}
        self.writing: dict[str, set[str]] = {}
        self.along: dict[frozenset[str], set[str]] = {}

    def add(self, handle: str, work: _Work) -> None:
        """One more, behind the others."""
        self.works[handle] = work
        self.numbers[handle] = next(self.next_number)
        for users in self.users(work):
            users.add(handle)

    def remove(self, handle: str) -> None:
        """One that is waited for."""
        for users in self.users(self.works.pop(handle)):
            users.remove(handle)

    def users(self, work: _Work) -> Iterator[set[str]]:
        """The sets that a communication is in."""
        yield self.along.setdefault(work.axes, set())
        for name in work.reads:
            yield self.reading.setdefault(name, set())
        for name in work.writes:
            yield self.writing.setdefault(name, set())

    def before(self, node: _Work) -> list[str]:
        """Those that must end before a node: it touches what they write, overwrites what they read,
        or communicates along other axes.
        """
        found = set[str]()
        for name in node.reads | node.writes:
            found |= self.writing.get(name, set())
        for name in node.writes:
            found |= self.reading.get(name, set())
        for axes, handles in self.along.items() if node.axes else ():
            found |= handles if axes != node.axes else set()
        return sorted(found, key=self.numbers.__getitem__)


_HANDS_ON = RecordEvent | SetStream | Signal | ForLoop | StartCoalescing
"""Nodes before which a stream must have waited: they hand its progress on, or may not be parted."""


def _transfers(body: Sequence[Node], start: int) -> Sequence[Node]:
    """The transfers outside of groups that stand side by side, from the first of them on; none for
    another node.
    """

    def is_one(at: int) -> bool:
        inside = 0 <= at < len(body) and isinstance(body[at], Send | Recv)
        return inside and bool(started_handle(body[at]))

    if is_one(start - 1):
        return ()
    return body[start : next(at for at in count(start) if not is_one(at))]


def sink_waits(host: HostProgram) -> HostProgram:
    """Moves each wait for a communication down to just before the first node that needs it.

    That is a node which touches what it writes or overwrites what it reads, one of _HANDS_ON, a
    link of the chain of kernel_order.py that may not run beside it, one that starts another
    communication of its handle, or the end of the body. Before transfers that stand side by side
    come the waits that any of them needs: coalesce.py makes them one exchange. The node's
    allocations, slices and views come after the wait, so that what the wait lets go can be freed
    before.
    """
    sources, segments = view_sources(host.body), host.segment_map()

    def work_of(node: Node) -> _Work:
        reads, writes = (
            frozenset(storage_of(name, sources) for name in names)
            for names in (node_reads(node, segments), node_writes(node, segments))
        )
        if isinstance(node, Deallocate):
            writes = frozenset({node.buffer})
        return _Work(reads, writes, frozenset(communication_axes(node)))

    def sink(body: Sequence[Node]) -> tuple[Node, ...]:
        started: dict[str, _Work] = {}
        joined = _Work()
        waiting = _Waiting()
        named: list[Node] = []
        out: list[Node] = []
        for at, node in enumerate(body):
            if isinstance(node, Wait):
                waiting.add(node.handle, started[node.handle])
                continue
            if isinstance(node, Allocate) or shown(node):
                named.append(node)
                continue
            work, hands_on = work_of(node), isinstance(node, _HANDS_ON | FILLING)
            group = _transfers(body, at) or (node,)
            whole = reduce(or_, map(work_of, group))
            before = [*waiting.works] if hands_on else waiting.before(whole)
            again = {*map(started_handle, group)} & waiting.works.keys() - {*before}
            for handle in (*before, *sorted(again)):
                out.append(Wait(handle=handle))
                waiting.remove(handle)
            if isinstance(node, ForLoop):
                node = replace(node, body=sink(node.body))
            out += [*named, node]
            named.clear()
            match node:
                case StartCoalescing():
                    joined = _Work()
                case EndCoalescing(handle=handle):
                    started[handle] = joined
                case Send(handle="") | Recv(handle=""):
                    joined |= work
                case Collective() | Send() | Recv():
                    started[node.handle] = work
        return (*out, *named, *(Wait(handle=handle) for handle in waiting.works))

    return replace(host, body=sink(host.body))
