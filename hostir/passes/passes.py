"""Passes over host programs, in one list, and the runner that verifies after each.

Comes in: what lower.py made. Goes out: the program the evaluator runs. A pass is a plain function
from program to program; the runner logs its time and can write the text after each pass to numbered
files. `peak_memory` reports what a program holds at most. Next: evaluator.py.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, takewhile
from pathlib import Path

from distmega.collecting import gc_paused
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
    SliceView,
    StartCoalescing,
    Wait,
    WaitEvent,
    walk_nodes,
)
from distmega.hostir.ir.text import print_host
from distmega.hostir.ir.uses import (
    node_reads,
    node_writes,
    shown,
    storage_of,
    view_sources,
)
from distmega.hostir.ir.verify import verify_host
from distmega.hostir.passes.borrow import borrow_results
from distmega.hostir.passes.kernel_order import FILLING, communication_axes, order_kernels
from distmega.program.types import Program

logger = logging.getLogger(__name__)

Pass = Callable[[HostProgram], HostProgram]


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


@gc_paused
def run_passes(
    host: HostProgram, dump: Path | None = None, passes: Sequence[Pass] | None = None
) -> HostProgram:
    """Applies `passes` (PASSES by default), verifying after each that changes something; buffers'
    allocations stay as they come in.

    dump: a folder for the text after each pass, "01_sink_waits.hostir" and so on. Raises
    VerifyError.
    """
    passes = PASSES if passes is None else passes
    finalized, symmetric_buffers = verify_host(host, freed=False).buffers, host.symmetric_buffers
    freed = False
    _dump(host, dump, 0, "lowered")
    for number, each in enumerate(passes, start=1):
        start = time.perf_counter()
        before, host = host, each(host)
        frees = each is insert_deallocations
        freed = freed or frees
        if frees or host != before:
            verify_host(host, freed=freed, finalized=finalized, symmetric_buffers=symmetric_buffers)
        elapsed_us = (time.perf_counter() - start) * 1e6
        logger.debug("%s: pass %s took %.0f us", host.name, each.__name__, elapsed_us)
        _dump(host, dump, number, each.__name__)
    return host


def _dump(host: HostProgram, folder: Path | None, number: int, name: str) -> None:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:02}_{name}.hostir").write_text(print_host(host))


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


def coalesce_send_recv(host: HostProgram) -> HostProgram:
    """Puts consecutive sends and receives into one group with one handle, waited for where the
    first was.
    """

    def coalesce(body: Sequence[Node]) -> tuple[Node, ...]:
        out: list[Node] = []
        members: list[Send | Recv] = []
        joined: dict[str, str] = {}
        done: set[str] = set()

        def close() -> None:
            if len(members) < 2:
                out.extend(members)
            else:
                handle = members[0].handle
                joined.update({member.handle: handle for member in members})
                bare = (replace(member, handle="") for member in members)
                out.extend((StartCoalescing(), *bare, EndCoalescing(handle=handle)))
            members.clear()

        for node in body:
            if isinstance(node, Send | Recv) and node.handle:
                members.append(node)
                continue
            close()
            if isinstance(node, Wait):
                handle = joined.get(node.handle, node.handle)
                if handle not in done:
                    out.append(Wait(handle=handle))
                if handle in joined:
                    done.add(handle)
            elif isinstance(node, ForLoop):
                out.append(replace(node, body=coalesce(node.body)))
            else:
                out.append(node)
        close()
        return tuple(out)

    return replace(host, body=coalesce(host.body))


def prune_event_waits(host: HostProgram) -> HostProgram:
    """Drops waits for events whose record the current stream already follows, or will by the waits
    that stand directly behind; of a loop where that is so in all iterations.
    """
    prune = _Prune()
    prune.follow(host.body, 0)
    numbers = count()

    def kept(body: Sequence[Node]) -> tuple[Node, ...]:
        out: list[Node] = []
        for node in body:
            number = next(numbers)
            if isinstance(node, ForLoop):
                node = replace(node, body=kept(node.body))
            if not isinstance(node, WaitEvent) or number in prune.needed:
                out.append(node)
        return tuple(out)

    return replace(host, body=kept(host.body))


class _Prune:
    """Follows a program, its loops unrolled.

    known: of each stream, how many nodes of work of each stream it comes after, itself included.
    records: of each event, what its latest record comes after. needed: the waits that order
    something, by their place in the printed order.
    """

    def __init__(self) -> None:
        self.stream = 0
        self.known: dict[int, dict[int, int]] = {0: {0: 1}}  # what was before the program
        self.records: dict[int, dict[int, int]] = {}
        self.indices: dict[str, int] = {}
        self.needed: set[int] = set()

    def follow(self, body: Sequence[Node], first: int) -> int:
        """The nodes of a body, the first of which has that place; the place behind the last."""
        number = first
        for at, node in enumerate(body):
            mine = self.known.setdefault(self.stream, {})
            behind = number + 1
            match node:
                case SetStream(stream=slot):
                    self.stream = slot.at(self.indices)
                case ForLoop(index=index, extent=extent):
                    for value in range(extent):
                        self.indices[index] = value
                        behind = self.follow(node.body, number + 1)
                    del self.indices[index]
                case RecordEvent(event=slot):
                    self.records[slot.at(self.indices)] = dict(mine)
                case WaitEvent(event=slot):
                    theirs = self.records.get(slot.at(self.indices))
                    follows = _later(mine, self.awaited(body[at + 1 :]))
                    if theirs is None or _later(follows, theirs) != follows:
                        self.needed.add(number)
                        mine |= _later(mine, theirs or {})
                case _ if shown(node) is None:
                    mine[self.stream] = mine.get(self.stream, 0) + 1
            number = behind
        return number

    def awaited(self, body: Sequence[Node]) -> dict[int, int]:
        """What the waits at the front of a body follow."""
        found: dict[int, int] = {}
        for node in takewhile(lambda node: isinstance(node, WaitEvent), body):
            assert isinstance(node, WaitEvent)
            found = _later(found, self.records.get(node.event.at(self.indices), {}))
        return found


def _later(one: Mapping[int, int], other: Mapping[int, int]) -> dict[int, int]:
    """The larger number of each stream."""
    return {each: max(one.get(each, 0), other.get(each, 0)) for each in {*one, *other}}


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


PASSES: tuple[Pass, ...] = (
    sink_waits,
    coalesce_send_recv,
    order_kernels,
    prune_event_waits,
    insert_deallocations,
    borrow_results,
)
"""All passes, in order."""


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
