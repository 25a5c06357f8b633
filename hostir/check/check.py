"""Happens-before checker: proves that streams and ranks are ordered enough, and that no wait is in
vain.

Comes in: a host program for all ranks of its mesh, or one a rank. Loops are unrolled and every node
becomes one vertex of a graph, every communication two (start, done). Edges are what the device
promises: stream order, events, handles, the meeting of a team, sends and signals. Proved on it:
conflicting accesses of one buffer are ordered, a read follows a write, frees follow all uses,
communications match across ranks, everything started is waited for, there is no cycle, and all that
waits for peers or fills a GPU stands in one chain (passes/kernel_order.py says why). Raises
CheckError. orders.py builds the graph.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import combinations_with_replacement, pairwise

import numpy as np

from distmega.errors import CheckError, counted
from distmega.hostir.check.order_graph import Before, Box, BufferUse, Link, OrderGraph, without
from distmega.hostir.check.orders import build_orders
from distmega.hostir.ir.nodes import (
    HostProgram,
    Recv,
    Send,
    Signal,
    SliceView,
    WaitSignal,
    walk_nodes,
)
from distmega.hostir.ir.verify import verify_nodes
from distmega.sharding.layout.mesh import DeviceMesh


def check_host(programs: HostProgram | Sequence[HostProgram]) -> None:
    """Checks a program that all ranks of its mesh run, or a program for each of mesh.ranks, in
    order.

    VerifyError names the first node of which a name or an operand is none, as in a text from
    elsewhere; CheckError the two nodes that are not ordered, the wait that nobody satisfies, the
    cycle, or a use without storage. It also refuses another number of programs than ranks.
    """
    if isinstance(programs, HostProgram):
        programs = [programs] * programs.mesh.num_ranks
    _require_one_a_rank(programs)
    for host in {id(each): each for each in programs}.values():
        verify_nodes(host)
    _prove(programs)


def _prove(programs: Sequence[HostProgram]) -> None:
    """As check_host, of programs whose nodes are verified, one for each rank."""
    graph = build_orders(programs)
    order = _topological_order(graph)
    before = Before(graph, order)
    for links in graph.links.values():
        _check_apart(graph, links, before)
    for counts in graph.counts.values():
        for earlier, later in pairwise(counts):
            _check_counted(graph, earlier, later, before)
    for accesses in graph.accesses.values():
        _check_buffer(graph, accesses, before)


def _require_one_a_rank(programs: Sequence[HostProgram]) -> None:
    meshes = [*dict.fromkeys(host.mesh for host in programs)]
    if len(meshes) != 1 or len(programs) != meshes[0].num_ranks:
        on = ", ".join(map(str, meshes)) or "no mesh"
        raise CheckError(
            f"{counted(len(programs), 'host program')} on {on}",
            expected="a program for each rank of one mesh, in the order of mesh.ranks",
            remedy="give the programs of all ranks, or one alone that all of them run",
        )


@lru_cache(maxsize=256)
def prove_once(programs: HostProgram | tuple[HostProgram, ...]) -> None:
    """As check_host, once in a process for programs that are equal, found by their hash.

    Where all ranks run one program that names no rank, two along each mesh axis stand for all:
    what they do is alike. One program is as run_passes leaves it, which has verified its nodes.
    """
    if isinstance(programs, tuple):
        check_host(programs)
    else:
        host = _on_few_ranks(programs)
        _prove([host] * host.mesh.num_ranks)


_NAMES_RANKS = Send | Recv | Signal | WaitSignal


def _on_few_ranks(host: HostProgram) -> HostProgram:
    nodes = [*walk_nodes(host.body)]
    swizzled = any(isinstance(node, SliceView) and node.swizzle for node in nodes)
    if swizzled or any(isinstance(node, _NAMES_RANKS) for node in nodes):
        return host
    few = {name: min(2, size) for name, size in host.mesh.axes}
    return replace(host, mesh=DeviceMesh(**few))


def _check_apart(graph: OrderGraph, links: Sequence[Link], before: Before) -> None:
    """Two that exclude each other might begin on one rank in one order and on another in the other,
    and wait for ever.
    """
    sorts: dict[tuple[bool, str], list[Link]] = {}
    for link in links:
        sorts.setdefault((link.fills, link.axis), []).append(link)
    for ones, others in combinations_with_replacement(sorts.values(), 2):
        if not ones[0].excludes(others[0]):
            continue
        starts, ends = [each.start for each in others], [each.done for each in others]
        for one in ones:
            ordered = before.each(one.done, starts) | before.each_of(ends, one.start)
            for at in np.flatnonzero(~ordered):
                if others[at] != one:
                    raise _beside(graph, *sorted((one, others[at]), key=lambda link: link.start))


def _beside(graph: OrderGraph, one: Link, other: Link) -> CheckError:
    return CheckError(
        f"{graph.labels[one.start]} may run beside {graph.labels[other.start]}",
        expected="one to end before the other begins",
        remedy="wait for the first before the second",
    )


def _check_counted(graph: OrderGraph, one: int, other: int, before: Before) -> None:
    """Signals of one name, or waits for these: a counter does not tell one of them from another."""
    if not before(one, other):
        raise CheckError(
            f"{graph.labels[other]} may come before {graph.labels[one]}, which counts as the same",
            expected="signals of one name to come one behind the other, and waits for them too",
            remedy="wait for the first before the second, or give them two names",
        )


def _topological_order(graph: OrderGraph) -> list[int]:
    """All vertices, each after what it waits for; CheckError with the cycle if there is none."""
    after: list[list[int]] = [[] for _ in graph.labels]
    num_open = [0] * len(graph.labels)
    for vertex, (first, second) in enumerate(zip(graph.follows, graph.issued, strict=True)):
        for previous in (*first, *second):
            after[previous].append(vertex)
            num_open[vertex] += 1
    ready = [vertex for vertex, num in enumerate(num_open) if not num]
    order = []
    while ready:
        vertex = ready.pop()
        order.append(vertex)
        for following in after[vertex]:
            num_open[following] -= 1
            if not num_open[following]:
                ready.append(following)
    if len(order) < len(num_open):
        _raise_cycle(graph, num_open)
    return order


def _raise_cycle(graph: OrderGraph, num_open: Sequence[int]) -> None:
    vertex = next(each for each, num in enumerate(num_open) if num)
    path: list[int] = []
    while vertex not in path:
        path.append(vertex)
        vertex = next(p for p in (*graph.follows[vertex], *graph.issued[vertex]) if num_open[p])
    cycle = path[path.index(vertex) :]
    labels = dict.fromkeys(graph.labels[each] for each in cycle)
    raise CheckError(
        f"these wait for each other: {' <- '.join(map(str, labels))}",
        expected="no cycle of waits",
        remedy="start communications in one order on all ranks; coalesce sends with receives",
    )


def _check_buffer(graph: OrderGraph, accesses: Sequence[BufferUse], before: Before) -> None:
    """Accesses of one buffer in the order in which the host issues them. Reads of it need no order
    among themselves.
    """
    uses: list[BufferUse] = []
    writes: list[BufferUse] = []
    """But those that a later write covers: what follows that write follows them too."""
    for later in accesses:
        unwritten = [later.box] if later.needs_contents else []
        for earlier in uses if later.writes else writes:
            if earlier.start == later.start or not earlier.overlaps(later):
                continue
            if earlier.fills:
                unwritten = [rest for box in unwritten for rest in without(box, earlier.box)]
            if not before(earlier.done, later.start):
                raise CheckError(
                    f"buffer {later.buffer!r}: {graph.labels[later.start]} is not ordered after "
                    f"{graph.labels[earlier.done]}",
                    expected="a stream, event, handle or signal that orders them",
                    remedy="record an event after the first and wait for it before the second",
                )
        if unwritten:
            what = "what" if unwritten == [later.box] else f"{_shown(unwritten[0])}, which"
            raise CheckError(
                f"buffer {later.buffer!r}: {graph.labels[later.start]} reads {what} nobody wrote",
                expected="a write before it",
                remedy="write the buffer first",
            )
        if later.fills:
            uses, writes = (
                [each for each in found if without(each.box, later.box)] for found in (uses, writes)
            )
        uses.append(later)
        if later.writes:
            writes.append(later)


def _shown(box: Box) -> str:
    """A part of a buffer, in words."""
    return "elements [" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"
