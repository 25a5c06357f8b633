"""From one rank's tensor program to a host program: megakernel launches, library ops, collectives.

Comes in: a LocalProgram of sharding/localize.py. Goes out: a HostProgram whose temps are allocated
before their first write; passes.py frees them and moves waits. It runs on one stream but for host
loops, whose iterations take turns on several. With `megakernel`,
maximal runs of ops that kernels can do become segments. A view costs nothing, so it is stated again
wherever it is used and never crosses a segment's edge. Next: passes.py, then kernels/task_graph.py
for the segments.
"""

from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Protocol

from distmega.hostir.chunks import ChunkBody, GatherRing, chunk_bodies, verify_homes
from distmega.hostir.nodes import (
    Arg,
    Collective,
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
    Slot,
    StartCoalescing,
    Wait,
    WaitEvent,
    segment_args,
    walk_nodes,
)
from distmega.hostir.rules import named_buffers
from distmega.hostir.scope import Scope
from distmega.moves import copy
from distmega.ops import COLLECTIVES
from distmega.program import Op, Program, Role, Tensor, accesses
from distmega.sharding.allocation import AllocationDomain
from distmega.sharding.finalize import verify_storage
from distmega.sharding.host_loops import HostLoop
from distmega.sharding.mesh import DeviceMesh

KERNEL_KINDS = frozenset({
    "linear", "pointwise", "reduce", "rms_norm", "rope", "attention", "kv_append", "embedding",
    "slice", "concat", "reshape", "transpose", "set", "argmax", "take_shard",
})  # fmt: skip
"""Op kinds that a megakernel does, unless the caller knows better."""

PEER_KINDS = frozenset({"all_reduce", "all_gather"})
"""Collectives that stay inside a megakernel where ranks can write into each other's memory."""

MAX_STREAMS = 4
"""Streams besides the main one that a host loop uses, unless the caller knows better."""

LOCAL_KINDS = frozenset({"take_shard"})
"""Kinds of ops.COLLECTIVES that move no bytes between ranks."""


class Localized(Protocol):
    """What is needed of a LocalProgram: one rank's program, the rank symbolic, its mesh, its final
    allocations and its host loops.
    """

    @property
    def program(self) -> Program: ...

    @property
    def mesh(self) -> DeviceMesh: ...

    @property
    def allocations(self) -> Mapping[str, AllocationDomain]: ...

    @property
    def host_loops(self) -> tuple[HostLoop, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Consecutive ops of one segment or one host loop, or else a single op for the host."""

    ops: tuple[Op, ...]
    segment: bool
    loop: HostLoop | None = None


class _Lowering:
    """Makes the nodes of one program."""

    def __init__(
        self,
        local: Localized,
        fits: Callable[[Op], bool],
        max_streams: int,
    ) -> None:
        self.local, self.program, self.mesh = local, local.program, local.mesh
        self.fits, self.max_streams = fits, max_streams
        self.chunked = {
            name: domain.chunk for name, domain in local.allocations.items() if domain.chunk
        }
        self.loops = {name: loop for loop in local.host_loops for name, _ in loop.splits}
        self.segments: list[Program] = []
        self.chunks: dict[str, Tensor] = {}
        self.num_streams = 1
        self.num_events = 0

    def run(self) -> HostProgram:
        program = self.program
        verify_homes(program.ops, self.loops, self.chunked)
        tensors = program.tensor_map()
        given = {tensor.name for tensor in program.tensors if tensor.role != "temp"}
        views = {op.writes[0].tensor: op for op in program.ops if op.kind == "view"}
        scope = Scope(tensors=tensors, views=views, slices={}, placed=given)
        body = list(self.body(program.ops, scope, program.outputs))
        for name in program.outputs:
            body += scope.named(name)
        used = {name for node in walk_nodes(body) for name in named_buffers(node)}
        used |= set(program.outputs)
        whole = [t for t in program.tensors if t.role != "temp" or t.name in used]
        parts = [t for t in self.chunks.values() if t.name not in tensors]
        host = HostProgram(
            name=program.name,
            mesh=self.mesh,
            buffers=(*(self.stored(t) for t in whole), *parts),
            body=tuple(body),
            outputs=program.outputs,
            segments=tuple(self.segments),
            num_streams=self.num_streams,
            num_events=self.num_events,
        )
        verify_storage(host.buffers, self.local.allocations)
        return host

    def stored(self, tensor: Tensor) -> Tensor:
        return self.chunks.get(tensor.name, tensor) if tensor.name in self.chunked else tensor

    def body(self, ops: Sequence[Op], scope: Scope, kept: Sequence[str]) -> Iterator[Node]:
        """Nodes of ops in order. kept: what must outlive them."""
        runs = self.split_runs(ops, scope)
        last_use = self.last_uses(runs, scope, kept)
        for position, run in enumerate(runs):
            if run.loop is not None:
                yield from self.loop(run.loop, run.ops, scope)
            elif run.segment:
                needed = {each for each, last in last_use.items() if last > position}
                yield from self.segment(run.ops, scope, needed)
            else:
                yield from _host_nodes(run.ops[0], scope)

    def segment(self, ops: Sequence[Op], scope: Scope, needed: set[str]) -> Iterator[Node]:
        names = dict.fromkeys(scope.storage(a.tensor) for op in ops for a in accesses(op))
        for name in names:
            if name in scope.slices:
                yield from scope.named(name)
        name = f"{self.program.name}.{len(self.segments)}"
        segment = _make_segment(name, ops, scope, needed)
        self.segments.append(segment)
        given = segment_args(segment)
        yield from scope.allocated([tensor.name for tensor in given])
        args = tuple(Arg(name=tensor.name, buffer=tensor.name) for tensor in given)
        yield LaunchMegakernel(kernel=name, args=args)

    def loop(self, loop: HostLoop, ops: Sequence[Op], scope: Scope) -> Iterator[Node]:
        """A host loop on a ring of streams, joined afterwards; around a ring of ranks it stays on
        the main stream, where sends and receives run beside the work.
        """
        by_name = {op.name: op for op in ops}
        bodies = chunk_bodies(loop, by_name, scope.tensors, scope.views, self.chunked)
        made = dict.fromkeys(scope.storage(a.tensor) for op in ops for a in op.writes)
        yield from scope.allocated(name for name in made if name not in self.chunked)
        inner = [list(self.chunk_nodes(body, scope)) for body in bodies]
        if bodies[0].gathers:
            for ring in bodies[0].gathers:
                self.chunks[ring.own.view] = bodies[0].tensors[ring.own.view]
                yield from scope.named(ring.source)
                yield from _own_part(ring, self.chunks[ring.own.view])
            for body, nodes in zip(bodies, inner, strict=True):
                yield ForLoop(index=body.index, extent=body.extent, body=tuple(nodes))
            return
        count = min(self.max_streams, loop.num_chunks)
        self.num_streams = max(self.num_streams, 1 + count)
        self.num_events = max(self.num_events, 1 + count)
        yield RecordEvent(event=Slot(base=0))
        for body, nodes in zip(bodies, inner, strict=True):
            slot = Slot(base=1 + body.shift % count)
            if body.extent > 1 and count > 1:
                slot = Slot(base=1, index=body.index, count=count)
            begin: list[Node] = [SetStream(stream=slot)]
            if body.shift < count:
                begin.append(WaitEvent(event=Slot(base=0)))
            nodes = [*begin, *nodes, RecordEvent(event=slot)]
            yield ForLoop(index=body.index, extent=body.extent, body=tuple(nodes))
        yield SetStream(stream=Slot(base=0))
        for number in range(count):
            yield WaitEvent(event=Slot(base=1 + number))

    def chunk_nodes(self, body: ChunkBody, scope: Scope) -> Iterator[Node]:
        """One iteration's nodes, on whatever stream is current."""
        self.chunks |= body.tensors
        inner = Scope(
            tensors=ChainMap(body.tensors, scope.tensors),
            views=ChainMap(body.views, scope.views),
            slices=body.slices,
            placed=set(),
            outer=scope,
        )
        for ring in body.gathers:
            yield from inner.named(ring.here)
            yield ring.following
            back, ahead = (Peer(mesh_axis=ring.mesh_axis, offset=n, ring=True) for n in (-1, 1))
            yield StartCoalescing()
            yield Send(buffer=ring.here, peer=back)
            yield Recv(buffer=ring.following.view, peer=ahead)
            yield EndCoalescing(handle=ring.name)
        yield from self.body(body.ops, inner, ())
        for ring in body.gathers:
            yield Wait(handle=ring.name)

    def split_runs(self, ops: Sequence[Op], scope: Scope) -> list[_Run]:
        """Ops but views, in order: host loops, maximal runs that fit a kernel, over one mesh axis
        each, and the rest one by one.
        """
        runs: list[_Run] = []
        loops = {} if scope.outer is not None else self.loops
        made: set[str] = set()
        computing = (op for op in ops if op.kind != "view")
        for loop, group in groupby(computing, key=lambda op: loops.get(op.name)):
            if loop is not None:
                runs.append(_Run(ops=tuple(group), segment=False, loop=loop))
            else:
                runs += _kernel_runs(group, self.mesh, self.fits, scope, made)
        return runs

    def last_uses(self, runs: Sequence[_Run], scope: Scope, kept: Sequence[str]) -> dict[str, int]:
        """Storage -> the last run that reads or writes it, one past the end for what is kept."""
        last: dict[str, int] = {}
        for position, run in enumerate(runs):
            for op in run.ops:
                last |= {scope.storage(access.tensor): position for access in accesses(op)}
        return last | {scope.storage(name): len(runs) for name in kept}


def _own_part(ring: GatherRing, part: Tensor) -> Iterator[Node]:
    """A rank's own part of what a ring gathers, copied to where the others come."""
    built, _ = copy(f"{ring.name}.own", replace(part, name=ring.source), part)
    yield ring.own
    yield LibraryOp(op=built)


def lower_program(
    local: Localized,
    *,
    megakernel: bool,
    peer_memory: bool,
    kernel_kinds: frozenset[str] = KERNEL_KINDS,
    is_encodable: Callable[[Op, Mapping[str, Tensor]], bool] | None = None,
    max_streams: int = MAX_STREAMS,
) -> HostProgram:
    """One rank's host program, not yet freed: run passes.run_passes on it.

    kernel_kinds, is_encodable: which ops a megakernel can do; the others become library ops between
    segments. peer_memory: all_reduce and all_gather stay in the kernel, over one mesh axis a
    segment. max_streams: of how many streams the iterations of a host loop take turns.
    """
    tensors = local.program.tensor_map()

    def fits(op: Op) -> bool:
        if not megakernel:
            return False
        if op.kind in PEER_KINDS:
            return peer_memory
        return op.kind in kernel_kinds and (is_encodable is None or is_encodable(op, tensors))

    return _Lowering(local, fits, max_streams).run()


def _kernel_runs(
    ops: Iterable[Op],
    mesh: DeviceMesh,
    fits: Callable[[Op], bool],
    scope: Scope,
    made: set[str],
) -> list[_Run]:
    """Runs of ops outside of loops. An op that overwrites a temp of an earlier run, or part of what
    isn't the run's own, is no part of a kernel, which changes nothing outside of its arenas; made:
    temps of earlier runs.
    """
    runs: list[_Run] = []
    pending: list[Op] = []
    axis = ""

    def close() -> None:
        nonlocal axis
        if pending:
            runs.append(_Run(ops=tuple(pending), segment=True))
            made.update(name for op in pending for name in stored_writes(op))
        pending.clear()
        axis = ""

    def stored_writes(op: Op) -> set[str]:
        names = {scope.storage(access.tensor) for access in op.writes}
        return {name for name in names if scope.tensors[name].role == "temp"}

    for op in ops:
        written = stored_writes(op)
        if not fits(op) or written & made or scope.changes_part(op):
            close()
            runs.append(_Run(ops=(op,), segment=False))
            made.update(written)
            continue
        over = str(op.attr("mesh_axis")) if op.kind in PEER_KINDS else ""
        if over and mesh.size(over) > 1:
            if axis not in ("", over):
                close()
            axis = over
        pending.append(op)
        made.update(scope.slices.keys() & {scope.storage(a.tensor) for a in accesses(op)})
    close()
    return runs


def _view_chain(name: str, views: Mapping[str, Op]) -> Iterator[Op]:
    """The view ops that lead to a tensor, from its storage on; none if it is no view."""
    if name in views:
        yield from _view_chain(views[name].reads[0].tensor, views)
        yield views[name]


def _make_segment(name: str, ops: Sequence[Op], scope: Scope, needed: set[str]) -> Program:
    """The program of a run. Temps that exist before it become inputs, but for chunks of buffers
    that it writes: those are outputs.
    """
    stated: dict[str, Op] = {}
    for op in ops:
        for access in accesses(op):
            stated |= {view.name: view for view in _view_chain(access.tensor, scope.views)}
        stated[op.name] = op
    used = dict.fromkeys(a.tensor for op in stated.values() for a in accesses(op))
    written = {scope.storage(a.tensor) for op in ops for a in op.writes}

    def role(tensor: Tensor) -> Role:
        given = scope.is_placed(tensor.name) and tensor.name not in scope.views
        given = given and not (tensor.name in scope.slices and tensor.name in written)
        return "input" if given and tensor.role == "temp" else tensor.role

    declared = tuple(replace(t, role=role(t)) for t in scope.tensors.values() if t.name in used)
    leaving = (t.name for t in declared if t.role == "temp" and t.name not in scope.views)
    kept = needed | scope.slices.keys()
    outputs = tuple(each for each in leaving if each in written and each in kept)
    return Program(name=name, tensors=declared, ops=tuple(stated.values()), outputs=outputs)


def _host_nodes(op: Op, scope: Scope) -> Iterator[Node]:
    """An op outside of segments: what its operands stand for, allocations of what it writes,
    itself, and a wait.
    """
    for access in op.reads:
        yield from scope.named(access.tensor)
    yield from scope.allocated(access.tensor for access in op.writes)
    for access in op.writes:
        yield from scope.named(access.tensor)
    if op.kind not in COLLECTIVES or op.kind in LOCAL_KINDS:
        yield LibraryOp(op=op)
        return
    yield Collective(
        kind=op.kind,  # type: ignore[arg-type]
        mesh_axis=str(op.attr("mesh_axis")),
        ins=tuple(access.tensor for access in op.reads),
        outs=tuple(access.tensor for access in op.writes),
        handle=op.name,
        attrs=tuple((key, value) for key, value in op.attrs if key != "mesh_axis"),
    )
    yield Wait(handle=op.name)
