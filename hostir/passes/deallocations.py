"""Frees buffers at their last use, and says how much a program then holds at most.

Comes in: a host program that only allocates, its waits in their final places. Goes out: the program
with a free a temp; of a freed program, bytes. Next: borrow.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

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
    SliceView,
    Wait,
    WaitEvent,
    walk_nodes,
)
from distmega.hostir.ir.uses import node_reads, node_writes, storage_of, view_sources
from distmega.program.types import Program


def insert_deallocations(host: HostProgram) -> HostProgram:
    """Frees each temp after its last use in the body that allocates it, unless that body does, and
    never an output.

    With several streams the free comes after the streams have joined: past the events and loops of
    events that follow the last use.
    """
    sources, segments = view_sources(host.body), host.segment_map()
    outputs = {storage_of(name, sources) for name in host.outputs}
    declared = {buffer.name: number for number, buffer in enumerate(host.buffers)}

    def insert(body: Sequence[Node]) -> tuple[Node, ...]:
        last_use: dict[str, int] = {}
        owned = {node.buffer for node in body if isinstance(node, Allocate)} - outputs
        owned -= {node.buffer for node in body if isinstance(node, Deallocate)}
        pending: dict[str, set[str]] = {}
        group: set[str] = set()
        for at, node in enumerate(body):
            names = {storage_of(name, sources) for name in _touched(node, segments)}
            if isinstance(node, Wait):
                names = pending.pop(node.handle, set())
            elif isinstance(node, Send | Recv) and not node.handle:
                group |= names
            elif isinstance(node, EndCoalescing):
                pending[node.handle], group = group, set()
            elif isinstance(node, Collective | Send | Recv):
                pending[node.handle] = names
            used = sorted(names & owned, key=declared.__getitem__)  # the same in every process
            last_use.update(dict.fromkeys(used, at))
        last_use |= {name: at for at, n in enumerate(body) for name in _unused(n, last_use, owned)}
        frees: dict[int, list[Node]] = {}
        for name, at in last_use.items():
            frees.setdefault(_after_join(body, at), []).append(Deallocate(buffer=name))
        out: list[Node] = []
        for at, node in enumerate(body):
            if isinstance(node, ForLoop):
                node = replace(node, body=insert(node.body))
            out += [node, *frees.get(at, ())]
        return tuple(out)

    return replace(host, body=insert(host.body))


def _touched(node: Node, segments: dict[str, Program]) -> set[str]:
    names = {*node_reads(node, segments), *node_writes(node, segments)}
    if isinstance(node, ForLoop):
        names |= {x.buffer for x in walk_nodes(node.body) if isinstance(x, SliceView)}
    return names | {node.buffer} if isinstance(node, SliceView) else names


def _unused(node: Node, used: dict[str, int], owned: set[str]) -> set[str]:
    if isinstance(node, Allocate) and node.buffer in owned and node.buffer not in used:
        return {node.buffer}
    return set()


def _after_join(body: Sequence[Node], at: int) -> int:
    while at + 1 < len(body) and _only_orders(body[at + 1]):
        at += 1
    return at


def _only_orders(node: Node) -> bool:
    if isinstance(node, ForLoop):
        return all(_only_orders(inner) for inner in node.body)
    return isinstance(node, SetStream | RecordEvent | WaitEvent)


def peak_memory(host: HostProgram) -> int:
    """Most bytes a rank holds at once: what the caller gives, peer memory, and the temps alive."""
    buffers = host.buffer_map()
    given = sum(buffer.num_bytes for buffer in host.buffers if buffer.role != "temp")
    given += sum(2 * symmetric_buffer.num_bytes for symmetric_buffer in host.symmetric_buffers)
    peak = alive = 0
    for change in _changes(host.body):
        match change:
            case Allocate(buffer=buffer):
                alive += buffers[buffer].num_bytes
            case Deallocate(buffer=buffer):
                alive -= buffers[buffer].num_bytes
        peak = max(peak, alive)
    return given + peak


def _changes(body: Sequence[Node]) -> Iterator[Node]:
    """Allocations and frees; a verified loop leaves nothing behind, so once through its body is
    enough.
    """
    return (node for node in walk_nodes(body) if isinstance(node, Allocate | Deallocate))
