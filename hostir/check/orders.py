"""The graph of what a host program orders: vertices of all ranks, edges between them, accesses of
buffers.

Comes in: one host program a rank. Goes out: an OrderGraph, which check.py searches. What one rank's
host does is walked in program order with loops unrolled; afterwards the communications of all ranks
are matched.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from distmega.errors import CheckError
from distmega.hostir.check.order_graph import (
    Box,
    BufferUse,
    Communication,
    Communications,
    Label,
    Link,
    Meeting,
    OrderGraph,
)
from distmega.hostir.ir.matmul_nodes import FusedMatmul
from distmega.hostir.ir.nodes import (
    Allocate,
    Collective,
    Deallocate,
    EndCoalescing,
    ForLoop,
    HostProgram,
    LaunchMegakernel,
    LibraryOp,
    Node,
    Peer,
    RecordEvent,
    Recv,
    Send,
    SetStream,
    Signal,
    SliceView,
    StartCoalescing,
    Wait,
    WaitEvent,
    WaitSignal,
    walk_nodes,
)
from distmega.hostir.ir.uses import node_reads, node_writes, team_axes
from distmega.program.types import updates


@dataclass(frozen=True, slots=True)
class _Region:
    """Where a name's storage is: allocation number `instance` of `buffer`, and the part of it.

    viewed: the name has other dims than the buffer, so a chunk of it may be anywhere in the box.
    """

    buffer: str
    instance: int
    box: Box
    viewed: bool = False


class _RankWalk:
    """Adds one rank's vertices and accesses to the graph."""

    def __init__(self, graph: OrderGraph, host: HostProgram, rank: int) -> None:
        self.graph, self.host, self.rank = graph, host, rank
        self.buffers, self.segments = host.buffer_map(), host.segment_map()
        self.coordinate = host.mesh.coordinate(rank)
        self.communications = Communications()
        self.regions: dict[str, _Region] = {}
        self.indices: dict[str, int] = {}
        self.streams: dict[int, int] = {}
        self.stream = 0
        self.events: dict[int, int] = {}
        self.handles: dict[str, list[int]] = {}
        self.group: list[tuple[Label, Send | Recv]] | None = None
        self.busy: dict[str, list[int]] = {}
        self.last_issued: list[int] = []
        self.label = Label(rank, f"the start of {host.name!r}")

    def run(self) -> None:
        begin = self.vertex()
        given = [buffer.name for buffer in self.host.buffers if buffer.role != "temp"]
        for name in given:
            self.allocate(name)
            self.access(name, begin, begin, writes=True, fills=True)
        self.numbers = {id(node): n for n, node in enumerate(walk_nodes(self.host.body))}
        self.body(self.host.body)
        if self.handles:
            raise _in_vain(f"rank {self.rank} never waits for {sorted(self.handles)}")
        self.stream, self.label = 0, Label(self.rank, f"the end of {self.host.name!r}")
        end = self.vertex()
        for name in dict.fromkeys((*given, *self.host.outputs)):
            self.access(name, end, end, needs_contents=True)

    def vertex(self, *follows: int) -> int:
        """A vertex on the current stream, after its work so far and `follows`."""
        tail = [self.streams[self.stream]] if self.stream in self.streams else []
        self.streams[self.stream] = self.beside(*tail, *follows)
        return self.streams[self.stream]

    def beside(self, *follows: int) -> int:
        """A vertex beside the streams, issued by the host after all before."""
        number = self.graph.add(self.label, follows, self.last_issued)
        self.last_issued = [number]
        return number

    def allocate(self, name: str) -> None:
        """A new allocation of a buffer."""
        instance = self.regions[name].instance + 1 if name in self.regions else 0
        box = tuple((0, extent) for extent in self.buffers[name].shape)
        self.regions[name] = _Region(name, instance, box)

    def region(self, name: str) -> _Region:
        """Where a name's storage is now. CheckError where it has none."""
        if name not in self.regions:
            raise CheckError(
                f"{self.label} uses {name!r}, which has no storage there",
                expected="an allocation before it, or what shows it as a view",
                remedy="allocate the buffer where the program first uses it",
            )
        return self.regions[name]

    def access(
        self,
        name: str,
        start: int,
        done: int,
        *,
        writes: bool = False,
        fills: bool = False,
        needs_contents: bool = False,
    ) -> None:
        region = self.region(name)
        access = BufferUse(
            buffer=name,
            box=region.box,
            start=start,
            done=done,
            writes=writes,
            fills=fills and (not region.viewed or self.is_whole(name, region.box)),
            needs_contents=needs_contents,
        )
        key = self.rank, region.buffer, region.instance
        self.graph.accesses.setdefault(key, []).append(access)

    def is_whole(self, name: str, box: Box) -> bool:
        """Whether a name has as many elements as the part of a buffer that it may be in."""
        return self.buffers[name].num_elements == prod(stop - start for start, stop in box)

    def uses(self, node: Node, start: int, done: int) -> None:
        """The accesses of a node's operands. What it both reads and writes it reads first."""
        kept = updates(node.op) if isinstance(node, LibraryOp) and not node.op.is_view else ()
        for name in (*node_reads(node, self.segments), *(access.tensor for access in kept)):
            self.access(name, start, done, needs_contents=True)
        for name in node_writes(node, self.segments):
            self.access(name, start, done, writes=True, fills=True)

    def body(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            if isinstance(node, ForLoop):
                for value in range(node.extent):
                    self.indices[node.index] = value
                    self.body(node.body)
                del self.indices[node.index]
                continue
            number = self.numbers[id(node)]
            self.label = Label(self.rank, "", node, number, (*self.indices.items(),))
            self.node(node)

    def node(self, node: Node) -> None:
        match node:
            case SetStream(stream=slot):
                self.stream = slot.at(self.indices)
            case RecordEvent(event=slot):
                self.events[slot.at(self.indices)] = self.vertex()
            case WaitEvent(event=slot):
                recorded = self.events.get(slot.at(self.indices))
                if recorded is None:
                    raise _in_vain(f"{self.label} waits for an event never recorded")
                self.vertex(recorded)
            case Allocate(buffer=buffer):
                self.allocate(buffer)
                vertex = self.vertex()
                self.access(buffer, vertex, vertex, writes=True)
            case Deallocate(buffer=buffer):
                vertex = self.vertex()
                self.access(buffer, vertex, vertex, writes=True)
            case SliceView():
                self.slice_view(node)
            case LibraryOp(op=op) if op.is_view:
                source = self.region(op.reads[0].tensor)
                self.regions[op.writes[0].tensor] = replace(source, viewed=True)
            case LibraryOp():
                vertex = self.vertex()
                self.uses(node, vertex, vertex)
            case LaunchMegakernel():
                self.launch(node)
            case FusedMatmul():
                self.fused(node)
            case _:
                self.communication(node)

    def slice_view(self, node: SliceView) -> None:
        whole = self.region(node.buffer)
        if whole.viewed:
            self.regions[node.view] = whole
            return
        shapes = self.buffers[node.buffer].shape, self.buffers[node.view].shape
        start = whole.box[node.dim][0] + node.start(self.indices, self.coordinate, *shapes)
        box = [*whole.box]
        box[node.dim] = (start, start + shapes[1][node.dim])
        self.regions[node.view] = _Region(whole.buffer, whole.instance, tuple(box))

    def launch(self, node: LaunchMegakernel) -> None:
        """A kernel; with collectives inside, its ranks run it together, so it can end only when all
        have begun.
        """
        start, done = self.filling(node, ("launch", node.kernel))
        self.uses(node, start, done)

    def fused(self, node: FusedMatmul) -> None:
        """One kernel of the whole team, which ends when all have begun."""
        shapes = tuple(self.buffers[name].shape for name in (node.x, node.w, node.out))
        start, done = self.filling(node, (node.kind, node.num_rows, shapes, bool(node.norm)))
        self.uses(node, start, done)

    def filling(
        self, node: LaunchMegakernel | FusedMatmul, terms: tuple[object, ...]
    ) -> tuple[int, int]:
        """Start and end of a kernel beside which there is no other link of the chain."""
        start = self.vertex()
        axes = team_axes(node, self.segments)
        done = self.vertex() if axes else start
        for axis in axes:
            self.meet_team(axis, start, done, terms)
        self.link(Link(start=start, done=done, fills=True))
        return start, done

    def link(self, link: Link) -> None:
        self.graph.links.setdefault(self.rank, []).append(link)

    def communication(self, node: Node) -> None:
        match node:
            case Collective(mesh_axis=axis):
                start, done = self.communicate(axis)
                shapes = tuple(self.buffers[name].shape for name in node.ins)
                self.meet_team(axis, start, done, (node.kind, node.attrs, shapes))
                self.uses(node, start, done)
                self.handles[node.handle] = [done]
            case Send() | Recv():
                if self.group is not None:
                    self.group.append((self.label, node))
                else:
                    self.handles[node.handle] = [
                        self.transfer(node, *self.communicate(node.peer.mesh_axis))
                    ]
            case StartCoalescing():
                self.group = []
            case EndCoalescing(handle=handle):
                self.end_group(handle)
            case Wait(handle=handle):
                if handle not in self.handles:
                    raise _in_vain(f"{self.label} waits for a handle never started")
                self.vertex(*self.handles.pop(handle))
            case Signal():
                self.count(node, self.vertex())
            case WaitSignal():
                vertex = self.vertex()
                self.link(Link(start=vertex, done=vertex))
                self.count(node, vertex)

    def count(self, node: Signal | WaitSignal, vertex: int) -> None:
        """A signal, which adds one to a counter, or a wait for one more."""
        outward = isinstance(node, Signal)
        sides = self.communications.sends if outward else self.communications.recvs
        meeting = self.pair(node.peer, node.name, outward=outward)
        sides.setdefault(meeting, []).append(Communication(vertex, vertex, ()))
        self.graph.counts.setdefault((*meeting, outward), []).append(vertex)

    def communicate(self, axis: str) -> tuple[int, int]:
        """Start and end of a communication beside the stream; one communicator does one after the
        other.
        """
        tail = [self.streams[self.stream]] if self.stream in self.streams else []
        start = self.beside(*tail)
        self.graph.issued[start] += self.busy.get(axis, [])
        done = self.graph.add(self.label, [start], [])
        self.busy[axis] = [done]
        self.link(Link(start=start, done=done, axis=axis))
        return start, done

    def end_group(self, handle: str) -> None:
        members, self.group = self.group or [], None
        busy, ends = dict(self.busy), []
        for self.label, member in members:
            self.busy = dict(busy)
            start, done = self.communicate(member.peer.mesh_axis)
            ends.append((member.peer.mesh_axis, self.transfer(member, start, done)))
        self.busy = busy | {axis: [end for a, end in ends if a == axis] for axis, _ in ends}
        self.handles[handle] = [end for _, end in ends]

    def transfer(self, node: Send | Recv, start: int, done: int) -> int:
        sides = self.communications.sends if isinstance(node, Send) else self.communications.recvs
        meeting = self.pair(node.peer, "", outward=isinstance(node, Send))
        buffer = self.buffers[node.buffer]
        sides.setdefault(meeting, []).append(
            Communication(start, done, (buffer.shape, buffer.dtype))
        )
        self.uses(node, start, done)
        return done

    def meet_team(self, axis: str, start: int, done: int, terms: tuple[object, ...]) -> None:
        meeting = "team", axis, self.host.mesh.team(axis, self.rank)
        self.communications.teams.setdefault(meeting, []).append(Communication(start, done, terms))

    def pair(self, peer: Peer, name: str, *, outward: bool) -> Meeting:
        team = self.host.mesh.team(peer.mesh_axis, self.rank)
        other = team[peer.of(self.coordinate, self.host.mesh)]
        ends = (self.rank, other) if outward else (other, self.rank)
        return "pair", peer.mesh_axis, name, *ends


def build_orders(programs: Sequence[HostProgram]) -> OrderGraph:
    """The graph of all ranks. CheckError where communications of two ranks do not match."""
    graph = OrderGraph()
    mesh = programs[0].mesh
    walks = [_RankWalk(graph, host, rank) for host, rank in zip(programs, mesh.ranks, strict=True)]
    for walk in walks:
        walk.run()
    by_rank = {walk.rank: walk.communications for walk in walks}
    _join_teams(graph, by_rank)
    _join_pairs(graph, by_rank)
    return graph


def _join_teams(graph: OrderGraph, by_rank: Mapping[int, Communications]) -> None:
    """The n-th communications of a team's ranks are one: none has completed before all have
    started.
    """
    meetings = dict.fromkeys(m for communications in by_rank.values() for m in communications.teams)
    for meeting in meetings:
        team = meeting[2]
        assert isinstance(team, tuple), "built by meet_team"
        rows = [by_rank[rank].teams.get(meeting, []) for rank in team]
        for row in rows:
            agreed = [each.terms for each in row] == [each.terms for each in rows[0]]
            if not agreed:
                raise _in_vain(_difference(graph, team, rows[0], row))
        for sides in zip(*rows, strict=True):
            for side in sides:
                graph.follows[side.done] += [other.start for other in sides]


def _difference(
    graph: OrderGraph,
    team: tuple[int, ...],
    one: Sequence[Communication],
    two: Sequence[Communication],
) -> str:
    for a, b in zip(one, two, strict=False):
        if a.terms != b.terms:
            return f"{graph.labels[a.start]} meets {graph.labels[b.start]}"
    extra = (one if len(one) > len(two) else two)[min(len(one), len(two))]
    return f"{graph.labels[extra.start]} is not met by the other ranks of {team}"


def _join_pairs(graph: OrderGraph, by_rank: Mapping[int, Communications]) -> None:
    """A rank's n-th receive is of the n-th send; neither ends before the other has started."""
    sends = {m: x for communications in by_rank.values() for m, x in communications.sends.items()}
    recvs = {m: x for communications in by_rank.values() for m, x in communications.recvs.items()}
    for meeting in dict.fromkeys((*sends, *recvs)):
        givers, takers = sends.get(meeting, []), recvs.get(meeting, [])
        if len(givers) != len(takers):
            extra = max(givers, takers, key=len)[min(len(givers), len(takers))]
            raise _in_vain(f"{graph.labels[extra.start]} finds no counterpart")
        for giver, taker in zip(givers, takers, strict=True):
            if giver.terms != taker.terms:
                raise _in_vain(f"{graph.labels[giver.start]} meets {graph.labels[taker.start]}")
            graph.follows[taker.done].append(giver.start)
            if taker.start != taker.done:
                graph.follows[giver.done].append(taker.start)


def _in_vain(found: str) -> CheckError:
    return CheckError(
        found,
        expected="the same communications in the same order on all ranks, each waited for",
        remedy="give every start its wait, and every rank of the team its part",
    )
