"""The rules of a host program: `verify_host` returns it or raises VerifyError naming the node.

RULES lists them; each is a generator of violations, and the first one found is raised. A node's
index in a message is its place in printed order. passes.py verifies after every pass; check.py
proves the order of reads and writes, which these rules do not look at.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from distmega.errors import VerifyError
from distmega.hostir.ir.matmul_nodes import FusedMatmul, SymmetricBuffer
from distmega.hostir.ir.nodes import (
    Allocate,
    Deallocate,
    EndCoalescing,
    ForLoop,
    HostProgram,
    LaunchMegakernel,
    RecordEvent,
    Recv,
    Send,
    SetStream,
    Slot,
    StartCoalescing,
    Wait,
    WaitEvent,
)
from distmega.hostir.ir.rules import (
    Violation,
    Walked,
    fitting_collectives,
    fitting_matmuls,
    fitting_operands,
    fitting_views,
    known_names,
    loop_indices,
    written_roles,
)
from distmega.hostir.ir.text import print_node
from distmega.hostir.ir.uses import (
    named_buffers,
    node_writes,
    shown,
    started_handle,
    storage_of,
    team_axes,
)
from distmega.program.types import Tensor

Rule = Callable[[Walked], Iterator[Violation]]


def verify_host(
    host: HostProgram,
    *,
    freed: bool = True,
    finalized: Sequence[Tensor] = (),
    symmetric_buffers: Sequence[SymmetricBuffer] = (),
) -> HostProgram:
    """Checks every rule and returns the program; VerifyError names the first node that breaks one.

    freed: temps that are no outputs must be deallocated, as after insert_deallocations. finalized:
    buffers whose declarations are final and must stand in the program as they are; so must
    symmetric_buffers.
    """
    walked = Walked.of(host)
    _keep(walked, (*RULES, no_leak) if freed else RULES)
    _raise_first(
        walked, "final_allocations", final_allocations(walked, finalized, symmetric_buffers)
    )
    return host


def verify_nodes(host: HostProgram) -> HostProgram:
    """Checks NODE_RULES alone, without which no order of a program's nodes can be looked at, and
    returns the program; VerifyError names the first node that breaks one.
    """
    _keep(Walked.of(host), NODE_RULES)
    return host


def _keep(walked: Walked, rules: Sequence[Rule]) -> None:
    for rule in rules:
        _raise_first(walked, rule.__name__, rule(walked))


def _raise_first(walked: Walked, rule: str, violations: Iterator[Violation]) -> None:
    for index, found, expected in violations:
        node_text = f", node {index} ({print_node(walked.nodes[index])})" if index >= 0 else ""
        raise VerifyError(
            f"host program {walked.host.name!r}{node_text}: {found} [rule {rule}]",
            expected=expected,
            remedy="correct its text, or the pass that made it",
        )


def buffer_lifetimes(walked: Walked) -> Iterator[Violation]:
    """Temps are allocated before use, once, and neither used nor freed after they are freed."""
    scopes: list[set[str]] = [{b.name for b in walked.host.buffers if b.role != "temp"}]
    alive, sources = set(scopes[0]), walked.sources
    kept = {storage_of(name, sources) for name in walked.host.outputs}
    named: dict[str, set[str]] = {}
    for view in sources:
        named.setdefault(storage_of(view, sources), set()).add(view)
    for index, node in walked.steps:
        match node:
            case None:
                alive -= scopes.pop().difference(*scopes)
            case ForLoop():
                scopes.append(set())
            case Allocate(buffer=buffer):
                if buffer in alive:
                    yield index, f"{buffer!r} is allocated already", "one allocation"
                scopes[-1].add(buffer)
                alive.add(buffer)
            case Deallocate(buffer=buffer):
                if buffer not in scopes[-1]:
                    where = "outside of this body" if buffer in alive else "not here"
                    yield index, f"{buffer!r} is allocated {where}", "a free where it was allocated"
                if buffer in kept:
                    yield index, f"output {buffer!r} is freed", "outputs stay"
                gone = {buffer} | named.get(buffer, set())
                alive -= gone
                for scope in scopes:
                    scope -= gone
            case _:
                view, _ = shown(node) or ("", "")
                for name in named_buffers(node):
                    if name == view:
                        scopes[-1].add(name)
                        alive.add(name)
                    elif name not in alive:
                        yield index, f"{name!r} has no storage here", "an allocation above"


def no_leak(walked: Walked) -> Iterator[Violation]:
    """Every temp that is no output is freed in the body that allocates it."""
    outputs = {storage_of(name, walked.sources) for name in walked.host.outputs}
    scopes: list[dict[str, int]] = [{}]
    for index, node in walked.steps:
        match node:
            case ForLoop():
                scopes.append({})
            case Allocate(buffer=buffer):
                scopes[-1][buffer] = index
            case Deallocate(buffer=buffer):
                scopes[-1].pop(buffer, None)
            case None:
                yield from _leaks(scopes.pop(), frozenset())
    yield from _leaks(scopes[0], outputs)


def _leaks(allocated: Mapping[str, int], kept: set[str] | frozenset[str]) -> Iterator[Violation]:
    for name, index in allocated.items():
        if name not in kept:
            yield index, f"{name!r} is never freed", "a free after its last use"


def waited_communication(walked: Walked) -> Iterator[Violation]:
    """Every collective, send and receive is waited for, once, in the body that starts it, and
    before a kernel of several ranks.
    """
    scopes: list[dict[str, int]] = [{}]
    for index, node in walked.steps:
        match node:
            case ForLoop():
                scopes.append({})
            case None:
                yield from _unwaited(scopes.pop())
            case Wait(handle=handle):
                if scopes[-1].pop(handle, None) is None:
                    yield index, f"nothing pending is called {handle!r}", "a handle started above"
            case LaunchMegakernel() | FusedMatmul() if team_axes(node, walked.segments):
                if busy := [name for scope in scopes for name in scope]:
                    yield index, f"{busy} under way beside it", "a wait before"
            case _ if handle := started_handle(node):
                if any(handle in scope for scope in scopes):
                    yield index, f"handle {handle!r} is pending already", "a wait before reuse"
                scopes[-1][handle] = index
    yield from _unwaited(scopes[0])


def _unwaited(pending: Mapping[str, int]) -> Iterator[Violation]:
    for handle, index in pending.items():
        yield index, f"{handle!r} is never waited for", "a wait in the same body"


def bounded_rings(walked: Walked) -> Iterator[Violation]:
    """Streams and events lie within the program's counts; a waited event was recorded before."""
    loops: list[ForLoop] = []
    numbers: set[int] = set()
    symbolic: list[set[Slot]] = [set()]
    for index, node in walked.steps:
        match node:
            case ForLoop():
                loops.append(node)
                symbolic.append(set())
            case None:
                loop = loops.pop()
                for slot in symbolic.pop():
                    if slot.index == loop.index:
                        numbers |= slot.numbers(loop.extent)
                    else:
                        symbolic[-1].add(slot)
            case SetStream(stream=slot):
                yield from _outside(index, slot, "stream", walked.host.num_streams)
            case RecordEvent(event=slot):
                yield from _outside(index, slot, "event", walked.host.num_events)
                if slot.index:
                    symbolic[-1].add(slot)
                else:
                    numbers.add(slot.base)
            case WaitEvent(event=slot):
                yield from _outside(index, slot, "event", walked.host.num_events)
                extent = next((x.extent for x in loops if x.index == slot.index), 1)
                known = any(slot in scope for scope in symbolic)
                if not known and not slot.numbers(extent) <= numbers:
                    yield index, "the event was not recorded before", "a record above"


def _outside(index: int, slot: Slot, what: str, num: int) -> Iterator[Violation]:
    last = slot.base + slot.count - 1
    if last >= num:
        yield index, f"{what} {last} of {num}", f"{what}s 0 to {num - 1}"


def closed_groups(walked: Walked) -> Iterator[Violation]:
    """Coalescing groups hold transfers only, and are closed in the body that opens them."""
    start, num_members = -1, 0
    for index, node in walked.steps:
        match node:
            case StartCoalescing():
                if start >= 0:
                    yield index, "a group inside a group", "the end of the open group"
                start, num_members = index, 0
            case EndCoalescing():
                if start < 0 or not num_members:
                    yield index, "the end of no group or an empty one", "coalesce, then transfers"
                start = -1
            case Send(handle=handle) | Recv(handle=handle):
                if bool(handle) == (start >= 0):
                    yield index, f"handle {handle!r}", "a handle outside of groups, none inside"
                num_members += 1
            case _ if start >= 0:
                yield index, "not a transfer, inside a coalescing group", "sends and receives"
    if start >= 0:
        yield start, "the coalescing group is never closed", "an end in the same body"


def written_outputs(walked: Walked) -> Iterator[Violation]:
    """Outputs are written, or given by the caller."""
    sources, segments = walked.sources, walked.segments
    written = {storage_of(n, sources) for x in walked.host.body for n in node_writes(x, segments)}
    for name in walked.host.outputs:
        root = storage_of(name, sources)
        if walked.buffers[root].role == "temp" and root not in written:
            yield -1, f"output {name!r} is never written", "a node that writes it"


def final_allocations(
    walked: Walked, finalized: Sequence[Tensor], symmetric_buffers: Sequence[SymmetricBuffer]
) -> Iterator[Violation]:
    """Buffers and symmetric buffers whose allocation was final before still have it."""
    host, buffers = walked.host, walked.buffers
    for symmetric_buffer in symmetric_buffers:
        if symmetric_buffer not in host.symmetric_buffers:
            yield (
                -1,
                f"symmetric buffers became {list(host.symmetric_buffers)}",
                f"{symmetric_buffer}",
            )
    for buffer in finalized:
        if buffers.get(buffer.name) != buffer:
            yield -1, f"buffer {buffer.name!r} became {buffers.get(buffer.name)}", f"{buffer}"


RULES: tuple[Rule, ...] = (
    known_names,
    loop_indices,
    fitting_collectives,
    fitting_operands,
    fitting_matmuls,
    fitting_views,
    written_roles,
    buffer_lifetimes,
    closed_groups,
    waited_communication,
    bounded_rings,
    written_outputs,
)
"""All rules but no_leak and final_allocations, which need to be asked for."""

NODE_RULES: tuple[Rule, ...] = (
    known_names,
    loop_indices,
    fitting_operands,
    fitting_views,
    written_roles,
    closed_groups,
)
"""What nodes name is there and fits, whatever runs before or after, on however many ranks."""
