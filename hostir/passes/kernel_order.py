"""Kernels whose programs wait for each other: two of them must not share a GPU, where each might
hold what the other needs to begin.

Comes in: a host program whose waits stand where they will. Goes out: the pass that lets each such
kernel wait for the one before. Used by passes.py.
"""

from collections.abc import Sequence
from dataclasses import replace

from distmega.hostir.ir.nodes import (
    ForLoop,
    HostProgram,
    LaunchMegakernel,
    Node,
    RecordEvent,
    SetStream,
    Slot,
    WaitEvent,
    walk_nodes,
)
from distmega.hostir.lower.matmul_nodes import FusedMatmul

FILLING = LaunchMegakernel | FusedMatmul
"""Kernels whose programs must all be resident at once."""


def order_kernels(host: HostProgram) -> HostProgram:
    """Where kernels of FILLING are on several streams, each waits for an event that the one before
    records: all ranks run them in the order of the program.
    """
    streams, stream = set(), Slot(base=0)
    for node in walk_nodes(host.body):
        if isinstance(node, SetStream):
            stream = node.stream
        elif isinstance(node, FILLING):
            streams.add(stream)
    if len(streams) < 2 and not any(each.index for each in streams):
        return host
    event = Slot(base=host.num_events)
    body = RecordEvent(event=event), *_in_turn(host.body, event)
    return replace(host, body=body, num_events=host.num_events + 1)


def _in_turn(body: Sequence[Node], event: Slot) -> list[Node]:
    out: list[Node] = []
    for node in body:
        if isinstance(node, ForLoop):
            node = replace(node, body=tuple(_in_turn(node.body, event)))
        filling = isinstance(node, FILLING)
        out += [WaitEvent(event=event)] * filling
        out.append(node)
        out += [RecordEvent(event=event)] * filling
    return out
