"""Lets communication run beside as much work as may be: each wait moves down to what needs it.

Comes in: a host program that waits for each communication where it starts. Goes out: the program
with the waits before the first node that must follow them. The first of PASSES. Next: coalesce.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
from distmega.hostir.ir.uses import node_reads, node_writes, shown, storage_of, view_sources
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

    def must_end_before(self, node: "_Work") -> bool:
        """Whether this communication must: the node touches what it writes, overwrites what it
        reads, or communicates along other axes.
        """
        touches = self.writes & (node.reads | node.writes) or self.reads & node.writes
        return bool(touches) or (bool(node.axes) and node.axes != self.axes)


_HANDS_ON = RecordEvent | SetStream | Signal | ForLoop | StartCoalescing
"""Nodes before which a stream must have waited: they hand its progress on, or may not be parted."""


def sink_waits(host: HostProgram) -> HostProgram:
    """Moves each wait for a communication down to just before the first node that needs it.

    That is a node which touches what it writes or overwrites what it reads, one of _HANDS_ON, a
    link of the chain of kernel_order.py that may not run beside it, or the end of the body. The
    node's allocations, slices and views come after the wait, so that what the wait lets go can be
    freed before.
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
        group = _Work()
        waiting: list[Wait] = []
        named: list[Node] = []
        out: list[Node] = []
        for node in body:
            if isinstance(node, Wait):
                waiting.append(node)
                continue
            if isinstance(node, Allocate) or shown(node):
                named.append(node)
                continue
            work, hands_on = work_of(node), isinstance(node, _HANDS_ON | FILLING)
            for wait in tuple(waiting):
                if hands_on or started[wait.handle].must_end_before(work):
                    out.append(wait)
                    waiting.remove(wait)
            if isinstance(node, ForLoop):
                node = replace(node, body=sink(node.body))
            out += [*named, node]
            named.clear()
            match node:
                case StartCoalescing():
                    group = _Work()
                case EndCoalescing(handle=handle):
                    started[handle] = group
                case Collective() | Send() | Recv() if node.handle:
                    started[node.handle] = work
                case Send() | Recv():
                    group |= work
        return (*out, *named, *waiting)

    return replace(host, body=sink(host.body))
