"""The predicted timeline of one rank: when each instruction of its host program begins and ends.

Comes in: a host program and a Machine. Goes out: spans by track, a track a stream and one a mesh
axis for collectives. Ops of a megakernel stand one after another, as library calls would; what its
queues gain by overlap is not predicted. Waits for other ranks take no time of their own: all ranks
run the same program.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from distmega.cli.explain.facts import PredictedSpan
from distmega.hostir.ir.matmul_nodes import FusedMatmul
from distmega.hostir.ir.nodes import (
    Collective,
    EndCoalescing,
    ForLoop,
    HostProgram,
    LaunchMegakernel,
    LibraryOp,
    Node,
    RecordEvent,
    Recv,
    Send,
    SetStream,
    Slot,
    StartCoalescing,
    Wait,
    WaitEvent,
)
from distmega.program.kinds import kind_of
from distmega.sharding.search.cost import Machine, collective_time_us
from distmega.sharding.search.predict import local_op_us


def predict_timeline(
    host: HostProgram, machine: Machine, fused_us: Mapping[str, float]
) -> tuple[PredictedSpan, ...]:
    """Spans of one run. fused_us: time of a matmul with its collective, by the tensor that comes
    out.
    """
    walk = _Walk(host, machine, fused_us)
    walk.run(host.body)
    return tuple(walk.spans)


class _Walk:
    """Clocks of the streams, of collectives by mesh axis, of events and handles."""

    def __init__(self, host: HostProgram, machine: Machine, fused_us: Mapping[str, float]) -> None:
        self.host, self.machine, self.fused_us = host, machine, fused_us
        self.buffers, self.segments = host.buffer_map(), host.segment_map()
        self.spans: list[PredictedSpan] = []
        self.stream = 0
        self.clocks: dict[int, float] = defaultdict(float)
        self.links: dict[str, float] = defaultdict(float)
        self.events: dict[int, float] = defaultdict(float)
        self.handles: dict[str, float] = {}
        self.indices: dict[str, int] = {}
        self.group: list[Send | Recv] | None = None

    def run(self, body: Sequence[Node]) -> None:
        for node in body:
            self.step(node)

    def step(self, node: Node) -> None:
        """Moves the clocks on by one instruction."""
        match node:
            case ForLoop():
                for number in range(node.extent):
                    self.indices[node.index] = number
                    self.run(node.body)
            case SetStream():
                self.stream = self.number(node.stream)
            case RecordEvent():
                self.events[self.number(node.event)] = self.clocks[self.stream]
            case WaitEvent():
                self.wait_until(self.events[self.number(node.event)])
            case Wait():
                self.wait_until(self.handles[node.handle])
            case LibraryOp() if not node.op.is_view:
                us = local_op_us(node.op, self.buffers, self.host.mesh, self.machine)
                self.work(node.op.name, node.op.kind, us)
            case LaunchMegakernel():
                self.launch(node)
            case FusedMatmul():
                self.work(node.out, node.kind, self.fused_us.get(node.out, 0.0))
            case Collective():
                whole = max(self.buffers[name].num_bytes for name in (*node.ins, *node.outs))
                size = self.host.mesh.size(node.mesh_axis)
                us = collective_time_us(node.kind, whole, size, self.machine)
                self.communicate(node.outs[0], node.kind, node.mesh_axis, us, node.handle)
            case StartCoalescing():
                self.group = []
            case Send() | Recv():
                if self.group is not None:
                    self.group.append(node)
                else:
                    self.send([node], node.handle)
            case EndCoalescing():
                self.send(self.group or [], node.handle)
                self.group = None

    def number(self, slot: Slot) -> int:
        """The stream or event that a slot means in this iteration."""
        if not slot.index:
            return slot.base
        return slot.base + (self.indices[slot.index] + slot.shift) % slot.count

    def wait_until(self, time_us: float) -> None:
        self.clocks[self.stream] = max(self.clocks[self.stream], time_us)

    def work(self, name: str, kind: str, us: float) -> None:
        start = self.clocks[self.stream]
        self.clocks[self.stream] = start + us
        track = f"stream {self.stream}"
        self.spans.append(
            PredictedSpan(track=track, name=name, kind=kind, start_us=start, end_us=start + us)
        )

    def launch(self, node: LaunchMegakernel) -> None:
        segment = self.segments[node.kernel]
        tensors = segment.tensor_map()
        for op in segment.ops:
            if op.is_view:
                continue
            us = local_op_us(op, tensors, self.host.mesh, self.machine)
            if kind_of(op).communicates:
                axis = str(op.attr("mesh_axis"))
                self.communicate(op.writes[0].tensor, op.kind, axis, us, op.name)
                self.wait_until(self.handles[op.name])
            else:
                self.work(op.name, op.kind, us)

    def communicate(self, name: str, kind: str, axis: str, us: float, handle: str) -> None:
        start = max(self.clocks[self.stream], self.links[axis])
        self.links[axis] = self.handles[handle] = start + us
        track = f"collectives {axis}"
        self.spans.append(
            PredictedSpan(track=track, name=name, kind=kind, start_us=start, end_us=start + us)
        )

    def send(self, nodes: Sequence[Send | Recv], handle: str) -> None:
        """Sends and receives that progress together, as long as the larger direction takes."""
        both = [
            sum(self.buffers[n.buffer].num_bytes for n in nodes if isinstance(n, way))
            for way in (Send, Recv)
        ]
        us = self.machine.collective_us + max(both) / self.machine.link_bandwidth_bytes_per_us
        axis = nodes[0].peer.mesh_axis if nodes else ""
        names = ", ".join(node.buffer for node in nodes)
        self.communicate(names, "send and receive", axis, us, handle)
