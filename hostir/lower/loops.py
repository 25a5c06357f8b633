"""Host loops as nodes: iterations that take turns on streams, or that pass parts around a ring.

Comes in: a HostLoop, its ops, and whoever makes nodes of the ops of one iteration. Goes out: for-
loops with streams, events and transfers around them. An iteration that adds to a result waits for
the one before just then. Used by lower.py; chunks.py says what an iteration does.
"""

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from distmega.hostir.ir.nodes import (
    EndCoalescing,
    ForLoop,
    LibraryOp,
    Node,
    Peer,
    RecordEvent,
    Recv,
    Send,
    SetStream,
    Slot,
    StartCoalescing,
    Wait,
    WaitEvent,
)
from distmega.hostir.lower.chunks import ChunkBody, GatherRing, chunk_bodies
from distmega.hostir.lower.host_streams import FORK, MAIN, StreamOrder, Touched
from distmega.hostir.lower.scope import Scope
from distmega.program.ops.data_movement import copy
from distmega.program.types import Op, Tensor
from distmega.sharding.streams.host_loops import HostLoop
from distmega.sharding.streams.streams import is_sum

Around = Mapping[str, tuple[Sequence[Node], Sequence[Node]]]
"""Op that the host runs by itself -> nodes before it and after it."""

MakeBody = Callable[[Sequence[Op], Scope, Around], Iterator[Node]]


def touched(ops: Sequence[Op], scope: Scope) -> Touched:
    """Storage that ops read and write; what is allocated anew in each iteration doesn't matter."""
    reads = {scope.storage(access.tensor) for op in ops for access in op.reads}
    return Touched(reads, {scope.storage(access.tensor) for op in ops for access in op.writes})


@dataclass(slots=True)
class LoopLowering:
    """Makes the nodes of host loops of one program.

    chunked: what is allocated by chunk. chunks: buffers made for iterations, by name.
    """

    chunked: Mapping[str, tuple[int, int]]
    max_streams: int
    make_body: MakeBody
    order: StreamOrder = field(default_factory=StreamOrder)
    chunks: dict[str, Tensor] = field(default_factory=dict)
    num_streams: int = 1
    num_events: int = 0

    def loop(
        self, loop: HostLoop, ops: Sequence[Op], scope: Scope, ending: set[str]
    ) -> Iterator[Node]:
        """A host loop. ending: storage that nothing uses after it.

        Where iterations end by adding to a result, the last addition follows all that they did.
        """
        by_name = {op.name: op for op in ops}
        bodies = chunk_bodies(loop, by_name, scope.tensors, scope.views, self.chunked)
        every = touched(ops, scope)
        work = Touched(every.reads - self.chunked.keys(), every.writes - self.chunked.keys())
        rings = any(body.gathers or body.scatters for body in bodies)
        count = 0 if rings else min(self.max_streams, loop.num_chunks)
        yield from self.order.before(work, count)
        made = dict.fromkeys(scope.storage(a.tensor) for op in ops for a in op.writes)
        new = tuple(scope.allocated(name for name in made if name not in self.chunked))
        self.order.note(Touched(set(), {node.buffer for node in new}))
        yield from new
        if rings:
            yield from self.ring(bodies, scope)
            self.order.note(work)
            return
        sums = [name for name, split in loop.splits if is_sum(by_name[name], split)]
        chained = count > 1 and sums[-1:] == [loop.splits[-1][0]]
        targets = {access.tensor for name in sums for access in by_name[name].writes}
        begins = self.order.must_follow(work, count)
        rest = Touched(work.reads, work.writes - targets) if count > 1 else work
        waiting = [
            body for body in bodies if body.shift == 0 or self.order.must_follow(rest, count)
        ]
        waiting = [body for body in waiting if begins and body.shift < count]
        if begins:
            self.order.follow(count)
            yield FORK
        yield from self.streams(bodies, scope, count, waiting, marked=not chained)
        self.order.open.append((work, frozenset(range(count))))
        if chained:
            yield WaitEvent(event=self.sum_event(len(sums) - 1))
            self.order.close(frozenset(range(count)))
        yield from self.order.before_freeing(ending)

    def sum_event(self, number: int) -> Slot:
        """The event that marks the latest addition to a result; one is free of each ring's."""
        self.num_events = max(self.num_events, 2 + self.max_streams + number)
        return Slot(base=1 + self.max_streams + number)

    def streams(
        self,
        bodies: Sequence[ChunkBody],
        scope: Scope,
        count: int,
        waiting: Sequence[ChunkBody],
        *,
        marked: bool,
    ) -> Iterator[Node]:
        """Iterations on a ring of streams. waiting: those that begin after the main stream's work
        so far. marked: an event tells how far each stream has come.
        """
        self.num_streams = max(self.num_streams, 1 + count)
        self.num_events = max(self.num_events, 1 + count)
        for body in bodies:
            slot = Slot(base=1 + body.shift % count)
            if body.extent > 1 and count > 1:
                slot = Slot(base=1, index=body.index, count=count, shift=body.shift % count)
            nodes: list[Node] = [SetStream(stream=slot)]
            if body in waiting:
                nodes.append(WaitEvent(event=MAIN))
            nodes += self.iteration(body, scope, self.turns(body, count))
            nodes += [RecordEvent(event=slot)] * marked
            yield ForLoop(index=body.index, extent=body.extent, body=tuple(nodes))
        yield SetStream(stream=MAIN)

    def turns(self, body: ChunkBody, count: int) -> Around:
        """Lets additions to a result come one after the other, where streams don't anyway."""
        around: dict[str, tuple[Sequence[Node], Sequence[Node]]] = {}
        for name in body.whole:
            around[name] = (), ()
        for name, number in body.sums.items() if count > 1 else ():
            event = self.sum_event(number)
            before = [WaitEvent(event=event)] if body.shift else []
            around[name] = before, [RecordEvent(event=event)]
        return around

    def ring(self, bodies: Sequence[ChunkBody], scope: Scope) -> Iterator[Node]:
        """A loop around a ring of ranks: it stays on the main stream, where sends and receives run
        beside the work.
        """
        for ring in bodies[0].gathers:
            self.chunks[ring.own.view] = bodies[0].tensors[ring.own.view]
            yield from scope.named(ring.source)
            yield from _own_part(ring, self.chunks[ring.own.view])
        for body in bodies:
            around: dict[str, tuple[Sequence[Node], Sequence[Node]]] = {}
            around |= dict.fromkeys(body.whole, ((), ()))
            around |= {ring.add: ([Wait(handle=ring.name)], ()) for ring in body.scatters}
            nodes = tuple(self.iteration(body, scope, around))
            yield ForLoop(index=body.index, extent=body.extent, body=nodes)

    def iteration(self, body: ChunkBody, scope: Scope, around: Around) -> Iterator[Node]:
        """One iteration's nodes, on whatever stream is current."""
        self.chunks |= body.tensors
        inner = Scope(
            tensors=ChainMap(body.tensors, scope.tensors),
            views=ChainMap(body.views, scope.views),
            slices=body.slices,
            placed=set(),
            outer=scope,
        )
        for gather in body.gathers:
            yield from inner.named(gather.here)
            yield gather.following
            yield from _pass_on(gather.name, gather.mesh_axis, gather.here, gather.following.view)
        for scatter in body.scatters:
            yield from inner.allocated([scatter.incoming])
            yield from _pass_on(scatter.name, scatter.mesh_axis, scatter.target, scatter.incoming)
        yield from self.make_body(body.ops, inner, around)
        for gather in body.gathers:
            yield Wait(handle=gather.name)


def _pass_on(handle: str, axis: str, given: str, taken: str) -> Iterator[Node]:
    """Sends one part back around the ring while the next comes."""
    back, ahead = (Peer(mesh_axis=axis, offset=n, ring=True) for n in (-1, 1))
    yield StartCoalescing()
    yield Send(buffer=given, peer=back)
    yield Recv(buffer=taken, peer=ahead)
    yield EndCoalescing(handle=handle)


def _own_part(ring: GatherRing, part: Tensor) -> Iterator[Node]:
    """A rank's own part of what a ring gathers, copied to where the others come."""
    built, _ = copy(f"{ring.name}.own", replace(part, name=ring.source), part)
    yield ring.own
    yield LibraryOp(op=built)
