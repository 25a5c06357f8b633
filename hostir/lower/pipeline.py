"""Links the host programs of a pipeline's stages: what they send each other, several micro-batches
under way.

Comes in: a stage, and its lowered host programs for a micro-batch of each size, with how many of
them there are. Goes out: one host program for all of them, not yet freed: run passes.run_passes on
it. A stage receives what it needs of a micro-batch, works, and sends on what others need:

    signal free to pp[0]             as often as micro-batches may be under way
    for chunk in 3:
      slice tokens#0 of tokens dim 0 by chunk step 4
      recv x from pp[0] as x.recv
      wait x.recv
      ...                            the stage's own nodes
      wait signal free from pp[2]
      send y to pp[2] as y.send
      wait y.send
      signal free to pp[0]
    wait signal free from pp[2]      as often: by then all have been taken
    recv next from pp[2] as next.recv

The event `free` says that a receiver is done with a micro-batch, so that a sender is never more
than IN_FLIGHT ahead. Stages are coordinates of the mesh axis STAGE_AXIS; ranks with equal other
coordinates talk to each other. Next: passes.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from distmega.arguments import require_whole
from distmega.arguments import shown as shown_value
from distmega.errors import PlanError
from distmega.hostir.ir.matmul_nodes import largest_symmetric_buffers
from distmega.hostir.ir.nodes import (
    FREE,
    Allocate,
    Deallocate,
    EndCoalescing,
    ForLoop,
    HostProgram,
    LibraryOp,
    Node,
    Peer,
    Recv,
    Send,
    Signal,
    SliceView,
    StartCoalescing,
    Wait,
    WaitSignal,
    walk_nodes,
)
from distmega.hostir.ir.rename import Names, rename_node
from distmega.hostir.ir.uses import shown, storage_of, view_sources
from distmega.program.ops.data_movement import copy
from distmega.program.ops.parts import fresh_name
from distmega.program.types import Tensor
from distmega.sharding.layout.mesh import STAGE_AXIS
from distmega.sharding.stages import Stage, Transfer

IN_FLIGHT = 2
"""Micro-batches that a stage may have sent and the next one not yet have done."""

CHUNK = "chunk"


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePart:
    """A stage, its host program for micro-batches of one size, and how many there are. PlanError
    for no whole number of them, or none.
    """

    stage: Stage
    host: HostProgram
    count: int = 1

    def __post_init__(self) -> None:
        require_whole("count", self.count, 1, error=PlanError)


def link_stage(
    parts: Sequence[StagePart], chunk_dims: Mapping[str, int] | None = None
) -> HostProgram:
    """One program for the micro-batches of all parts, one after the other.

    chunk_dims: inputs and results that are cut into micro-batches, and the dim; of other results
    the last micro-batch's stays. All parts but the last have one size, the last may be smaller.
    One micro-batch of the only stage stays as it is, unless a result is an input, which no stage's
    own program gives. PlanError if programs share a name, and for dims that can't be cut so.
    """
    names = [part.host.name for part in parts]
    if len(set(names)) < len(names):
        raise PlanError(
            f"parts of a stage named {names}",
            expected="different names",
            remedy="name the program of each size of micro-batch after it",
        )
    if sum(part.count for part in parts) > 1:
        for name, dim in (chunk_dims or {}).items():
            _require_cut(parts, name, dim)
    first = parts[0]
    is_alone = first.stage.num_stages == len(parts) == first.count == 1
    if is_alone and {tensor.name for tensor in first.stage.results} <= {*first.host.outputs}:
        return first.host
    return _Link(parts, chunk_dims or {}).run()


def _require_cut(parts: Sequence[StagePart], name: str, dim: int) -> None:
    """PlanError for a tensor that is no input or result, a dim that it doesn't have, and sizes of
    which not all but the last are equal. A stage knows nothing of the inputs of others.
    """
    sizes = []
    for part in parts:
        results = {tensor.name: tensor for tensor in part.stage.results}
        inner = {transfer.tensor.name for transfer in part.stage.transfers} - {*results}
        tensor = part.host.buffer_map().get(name) or results.get(name)
        if tensor is None:
            return
        given_or_result = tensor.role == "input" or (tensor.role == "temp" and name in results)
        if name in inner or not given_or_result:
            raise PlanError(
                f"micro-batches of {name!r}",
                expected="inputs and results of the whole program, no weights and states",
                remedy="leave it out",
            )
        if type(dim) is not int or not 0 <= dim < len(tensor.shape):
            raise PlanError(
                f"micro-batches along dim {shown_value(dim)} of {name!r}, which is {tensor.shape}",
                expected="a dim that it has, counted from 0",
                remedy="name another, or leave it out",
            )
        sizes.append(tensor.shape[dim])
    is_rest = sizes[-1] < sizes[0] and parts[-1].count == 1
    if {*sizes[:-1]} - {sizes[0]} or not (sizes[-1] == sizes[0] or is_rest):
        many = ", ".join(f"{part.count} x {size}" for part, size in zip(parts, sizes, strict=True))
        raise PlanError(
            f"micro-batches of {name!r} with {many} along dim {dim}",
            expected="equal ones, but for the last, which may be smaller",
            remedy="cut it evenly, and put what is left over last",
        )


class _Link:
    """Makes the linked program."""

    def __init__(self, parts: Sequence[StagePart], chunk_dims: Mapping[str, int]) -> None:
        stage = parts[0].stage
        num_batches = sum(part.count for part in parts)
        self.parts = parts
        self.chunk_dims = chunk_dims if num_batches > 1 else {}
        self.credits = min(IN_FLIGHT, num_batches) if num_batches > 1 else 0
        self.results = tuple(tensor.name for tensor in stage.results)
        self.taken = {*self.results, *(b.name for part in parts for b in part.host.buffers)}
        self.received = [t for t in stage.transfers if t.target == stage.index]
        self.sent = [t for t in stage.transfers if t.source == stage.index]
        self.sources = sorted({t.source for t in self.received if not t.final})
        self.targets = sorted({t.target for t in self.sent if not t.final})
        self.buffers: dict[str, Tensor] = {}

    def run(self) -> HostProgram:
        for part in self.parts:
            self.declare_whole(part)
        body = [self.signal(source) for source in self.sources for _ in range(self.credits)]
        body += [Allocate(buffer=n) for n in self.results if self.buffers[n].role == "temp"]
        for number, part in enumerate(self.parts):
            nodes = tuple(self.part_nodes(number, part))
            looped = ForLoop(index=CHUNK, extent=part.count, body=nodes)
            body += [looped] if part.count > 1 else nodes
        body += [self.await_free(target) for target in self.targets for _ in range(self.credits)]
        body += _transfer([t for t in self.received if t.final], [t for t in self.sent if t.final])
        first = self.parts[0].host
        return HostProgram(
            name=first.name,
            mesh=first.mesh,
            buffers=tuple(self.buffers.values()),
            body=tuple(body),
            outputs=self.results,
            segments=tuple(segment for part in self.parts for segment in part.host.segments),
            num_streams=max(part.host.num_streams for part in self.parts),
            num_events=max(part.host.num_events for part in self.parts),
            symmetric_buffers=largest_symmetric_buffers(
                symmetric_buffer
                for part in self.parts
                for symmetric_buffer in part.host.symmetric_buffers
            ),
        )

    def declare_whole(self, part: StagePart) -> None:
        """Buffers of all micro-batches: what is cut into them, in full, and the caller's."""
        mine = part.stage.index
        more = [t.tensor for t in part.stage.transfers if t.target == mine and t.final]
        more += [tensor for tensor in part.stage.results if tensor.role == "input"]
        here = {tensor.name: tensor for tensor in more} | part.host.buffer_map()
        for buffer in here.values():
            dim = self.chunk_dims.get(buffer.name)
            if dim is not None:
                so_far = self.buffers.get(buffer.name)
                extent = part.count * buffer.shape[dim] + (so_far.shape[dim] if so_far else 0)
                shape = (*buffer.shape[:dim], extent, *buffer.shape[dim + 1 :])
                self.buffers[buffer.name] = replace(self.as_temp(buffer), shape=shape)
            elif buffer.role != "temp" or buffer.name in self.results:
                self.buffers.setdefault(buffer.name, self.as_temp(buffer))

    def as_temp(self, buffer: Tensor) -> Tensor:
        """A buffer as it stands in the linked program: what other stages send is no input."""
        given = any(t.tensor.name == buffer.name for t in self.received)
        return replace(buffer, role="temp") if given else buffer

    def part_nodes(self, number: int, part: StagePart) -> Iterator[Node]:
        """The nodes of one micro-batch of a part. Its streams may use what it received until they
        join at the end, since to the part's own program that is the caller's. Results that only
        show other storage there are copied, and so is what is cut so that no view would fit it.
        """
        buffers = part.host.buffer_map()
        own = [n for n, b in buffers.items() if self.as_temp(b).role == "temp"]
        own = [name for name in own if name not in self.results]
        anew = dict.fromkeys((*self.chunk_dims, *(own if number else ())))
        names = {name: self.fresh(f"{name}#{number}") for name in anew}
        views = {view for view, _ in filter(None, map(shown, part.host.body))}
        copied = [name for name in self.results if name in views]
        packed = [name for name in self.gapped(part) if name not in copied]
        given = [name for name in packed if buffers[name].role != "temp"]
        inside = names | {name: self.fresh(f"{name}#{number}.view") for name in copied}
        inside |= {name: self.fresh(f"{name}#{number}.packed") for name in packed}

        def name_of(name: str) -> str:
            return names.get(name, name)

        def name_inside(name: str) -> str:
            return inside.get(name, name)

        def copy_of(name: str, source: Names, target: Names) -> Node:
            read, written = (replace(buffers[name], name=of(name)) for of in (source, target))
            return LibraryOp(op=copy(written.name, read, written)[0])

        for name in (*own, *copied, *packed):
            here = name_inside(name)
            self.buffers[here] = replace(buffers[name], name=here, role="temp")
        yield from self.slices(number, part, name_of)
        flowing = [t for t in self.received if not t.final]
        alone = [t.tensor.name for t in flowing if t.tensor.name not in self.results]
        yield from (Allocate(buffer=name_of(name)) for name in alone)
        yield from _receive(flowing, name_of)
        for name in given:
            yield Allocate(buffer=name_inside(name))
            yield copy_of(name, name_of, name_inside)
        whole = {*self.results} - {*packed}
        for node in part.host.body:
            if not (isinstance(node, Allocate) and node.buffer in whole):
                yield rename_node(node, name_inside, name_of)
        for name in (*copied, *packed):
            if name not in given:
                yield copy_of(name, name_inside, name_of)
        if self.credits:
            yield from map(self.await_free, self.targets)
        yield from _send([t for t in self.sent if not t.final], name_of)
        if part.host.num_streams > 1:  # what was sent may have been a view of what came
            yield from (Deallocate(buffer=name_of(name)) for name in alone)
            yield from (Deallocate(buffer=name_inside(name)) for name in given)
        if self.credits:
            yield from map(self.signal, self.sources)

    def gapped(self, part: StagePart) -> list[str]:
        """What is cut along a dim that isn't its outermost, and viewed by ops: there are gaps
        between a micro-batch's elements, and views want them to follow each other.
        """
        buffers, sources = part.host.buffer_map(), view_sources(part.host.body)
        ops = [node.op for node in walk_nodes(part.host.body) if isinstance(node, LibraryOp)]
        viewed = {storage_of(op.reads[0].tensor, sources) for op in ops if op.is_view}
        cut = {name: dim for name, dim in self.chunk_dims.items() if name in viewed}
        return [name for name, dim in cut.items() if prod(buffers[name].shape[:dim]) > 1]

    def slices(self, number: int, part: StagePart, name_of: Names) -> Iterator[Node]:
        """The micro-batch's parts of what is cut into them."""
        first, here = self.parts[0].host.buffer_map(), part.host.buffer_map()
        for name, dim in self.chunk_dims.items():
            if name not in here:
                continue
            view = name_of(name)
            self.buffers[view] = replace(here[name], name=view, role="temp")
            yield SliceView(
                view=view,
                buffer=name,
                dim=dim,
                index=CHUNK if part.count > 1 else "",
                shift=sum(before.count for before in self.parts[:number]),
                step=first[name].shape[dim],
            )

    def fresh(self, name: str) -> str:
        """A name that no buffer has."""
        name = fresh_name(name, self.taken)
        self.taken.add(name)
        return name

    def signal(self, stage: int) -> Node:
        return Signal(name=FREE, peer=Peer(mesh_axis=STAGE_AXIS, offset=stage))

    def await_free(self, stage: int) -> Node:
        return WaitSignal(name=FREE, peer=Peer(mesh_axis=STAGE_AXIS, offset=stage))


def _receive(transfers: Sequence[Transfer], name_of: Names) -> list[Node]:
    recvs = [_recv(name_of(t.tensor.name), t) for t in transfers]
    return [*recvs, *(Wait(handle=recv.handle) for recv in recvs)]


def _send(transfers: Sequence[Transfer], name_of: Names) -> list[Node]:
    sends = [_send_one(name_of(t.tensor.name), t) for t in transfers]
    return [*sends, *(Wait(handle=send.handle) for send in sends)]


def _transfer(received: Sequence[Transfer], sent: Sequence[Transfer]) -> list[Node]:
    """All receives and sends at once, where there are both: of two stages that send each other
    something, neither can take before it gives.
    """
    if not (received and sent):
        return [*_receive(received, str), *_send(sent, str)]
    recvs = [_recv(t.tensor.name, t) for t in received]
    members: list[Send | Recv] = [*recvs, *(_send_one(t.tensor.name, t) for t in sent)]
    handle = recvs[0].handle
    bare = (replace(member, handle="") for member in members)
    return [StartCoalescing(), *bare, EndCoalescing(handle=handle), Wait(handle=handle)]


def _recv(name: str, t: Transfer) -> Recv:
    return Recv(
        buffer=name, peer=Peer(mesh_axis=STAGE_AXIS, offset=t.source), handle=f"{name}.recv"
    )


def _send_one(name: str, t: Transfer) -> Send:
    handle = f"{name}.to{t.target}"
    return Send(buffer=name, peer=Peer(mesh_axis=STAGE_AXIS, offset=t.target), handle=handle)
