"""One chain of all work that waits for peers or fills a GPU: two of its links side by side might
each hold what the other needs to begin.

A kernel whose programs wait for each other needs all of them on the GPU at once; a communication
and a kernel of several ranks need their peers there. On two GPUs two of these may stand half begun
in opposite order, for ever. So each begins after the one before has ended, in the order of the
program, which is the same on all ranks. Communications along one mesh axis need no event for that:
one communicator does one after the other. The wait for a signal, one warp, needs no place in the
chain: it leaves room for kernels that fill a GPU.

Comes in: a host program whose kernels are not ordered yet. Goes out: the pass that adds the events
of the chain. check.py proves it. Used by passes.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from distmega.hostir.ir.matmul_nodes import FusedMatmul
from distmega.hostir.ir.nodes import (
    Collective,
    EndCoalescing,
    ForLoop,
    HostProgram,
    LaunchMegakernel,
    Node,
    RecordEvent,
    Recv,
    Send,
    SetStream,
    Slot,
    StartCoalescing,
    Wait,
    WaitEvent,
    WaitSignal,
    walk_nodes,
)

FILLING = LaunchMegakernel | FusedMatmul
"""Kernels whose programs must all be resident at once."""


def communication_axes(node: Node) -> tuple[str, ...]:
    """The mesh axis of a communication that a node starts, or puts into an open group; none of any
    other node.
    """
    match node:
        case Collective(mesh_axis=axis):
            return (axis,)
        case Send(peer=peer) | Recv(peer=peer):
            return (peer.mesh_axis,)
    return ()


def order_kernels(host: HostProgram) -> HostProgram:
    """Makes the chain: all ranks run its links in the order of the program.

    What is under way is waited for before a link that may not run beside it. Where links are on
    several streams, each also waits for an event that the one before records.
    """
    links = _Links.of(host.body)
    if not links.fills and len(links.axes) < 2:
        return host
    event = Slot(base=host.num_events) if links.on_several_streams else None
    body = _Chain(event).body(host.body)
    if event is None:
        return host if body == host.body else replace(host, body=body)
    return replace(host, body=(RecordEvent(event=event), *body), num_events=host.num_events + 1)


@dataclass(slots=True)
class _Links:
    """What links of the chain there are. axes: of communications; fills: whether there are
    kernels.
    """

    axes: set[str] = field(default_factory=set)
    streams: set[Slot] = field(default_factory=set)
    fills: bool = False

    @staticmethod
    def of(nodes: Sequence[Node]) -> "_Links":
        """Those of some nodes, loops included."""
        links, stream = _Links(), Slot(base=0)
        for node in walk_nodes(nodes):
            if isinstance(node, SetStream):
                stream = node.stream
            axes, fills = communication_axes(node), isinstance(node, FILLING)
            if axes or fills or isinstance(node, WaitSignal):
                links.streams.add(stream)
                links.axes.update(axes)
                links.fills = links.fills or fills
        return links

    @property
    def on_several_streams(self) -> bool:
        return len(self.streams) > 1 or any(each.index for each in self.streams)


class _Chain:
    """Adds waits and, with an event, its waits and records."""

    def __init__(self, event: Slot | None) -> None:
        self.before: Sequence[Node] = () if event is None else (WaitEvent(event=event),)
        self.behind: Sequence[Node] = () if event is None else (RecordEvent(event=event),)
        self.stream = Slot(base=0)
        self.last: Slot | None = None
        """The stream on which the event was recorded last, where that is known."""

    def turn(self) -> Sequence[Node]:
        """What lets the current stream follow the links so far."""
        return () if self.last == self.stream else self.before

    def body(self, body: Sequence[Node]) -> tuple[Node, ...]:
        """A wait for the event before each link, a record behind its end, which is behind the wait
        for its handle if it is a communication.
        """
        self.last = None
        pending: dict[str, set[str]] = {}
        waited: dict[str, Slot] = {}
        out: list[Node] = []
        group: set[str] | None = None
        for at, node in enumerate(body):
            begins: Sequence[Node] = [node]
            if isinstance(node, SetStream):
                self.stream = node.stream
            if isinstance(node, StartCoalescing):
                begins = body[at : at + _group_size(body[at:])]
            if isinstance(node, Wait) and node.handle in waited:
                out += () if waited.pop(node.handle) == self.stream else self.before
                continue
            links = _Links.of(begins)
            if group is None and (links.axes or links.fills):
                apart = (h for h, axes in pending.items() if links.fills or axes != links.axes)
                for handle in tuple(apart):
                    del pending[handle]
                    waited[handle] = self.last = self.stream
                    out += [Wait(handle=handle), *self.behind]
            match node:
                case ForLoop():
                    node = replace(node, body=self.body(node.body))
                    self.last = None
                case StartCoalescing():
                    out += self.turn()
                    group = links.axes
                case EndCoalescing(handle=handle):
                    pending[handle], group = group or set(), None
                case Collective() | Send() | Recv() if group is None:
                    out += self.turn()
                    pending[node.handle] = links.axes
                case Wait(handle=handle):
                    pending.pop(handle, None)
                case LaunchMegakernel() | FusedMatmul() | WaitSignal():
                    out += self.turn()
            out.append(node)
            if isinstance(node, FILLING | WaitSignal | Wait):
                out += self.behind
                self.last = self.stream
        return tuple(out)


def _group_size(nodes: Sequence[Node]) -> int:
    """Nodes of the coalescing group that begins here."""
    return next(at for at, node in enumerate(nodes, 1) if isinstance(node, EndCoalescing))
