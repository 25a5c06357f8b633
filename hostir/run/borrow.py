"""Results of fused matmuls that lie in peer memory: who may use them until when.

Comes in: a host program. Goes out: the pass that leaves sums over ranks where they are, and the
uses that come too late. Peers write into a symmetric buffer again once this rank has started the
next fused matmul of the mesh axis, so a result left there is used up before. Used by passes.py and
rules.py.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import replace

from distmega.hostir.ir.nodes import (
    Allocate,
    Deallocate,
    ForLoop,
    HostProgram,
    Node,
    walk_nodes,
)
from distmega.hostir.ir.uses import named_buffers, storage_of, view_sources
from distmega.hostir.lower.matmul_nodes import FusedMatmul


def late_uses(host: HostProgram, borrowed: Container[str]) -> Iterator[tuple[int, list[str]]]:
    """Uses of results after the next fused matmul of their axis has begun, if those in `borrowed`
    lie in its buffer: a node's index and names; -1 for outputs.
    """
    sources = view_sources(host.body)
    symmetric_buffers: dict[str, set[str]] = {}
    expired: set[str] = set()
    for index, node in enumerate(walk_nodes(host.body)):
        roots = {storage_of(name, sources) for name in named_buffers(node)}
        if isinstance(node, Allocate):
            expired -= roots
        if isinstance(node, FusedMatmul):
            expired |= symmetric_buffers.pop(node.mesh_axis, set())
            if node.out in borrowed:
                expired.discard(node.out)
                symmetric_buffers[node.mesh_axis] = {storage_of(node.out, sources)}
        if expired & roots and not isinstance(node, Deallocate):
            yield index, sorted(expired & roots)
    kept = {storage_of(name, sources) for name in host.outputs}
    left = kept & expired.union(*symmetric_buffers.values())
    if left:
        yield -1, sorted(left)


def borrow_results(host: HostProgram) -> HostProgram:
    """Leaves sums of fused matmuls in peer memory where they are used up before the next one."""
    buffers = host.buffer_map()
    sums = {
        node.out
        for node in walk_nodes(host.body)
        if isinstance(node, FusedMatmul) and node.kind == "matmul_all_reduce" and node.norm is None
    }
    if not sums:
        return host
    borrowed = {name for name in sums if buffers[name].role == "temp"} - view_sources(
        host.body
    ).keys()
    borrowed -= {name for _, names in late_uses(host, borrowed) for name in names}
    return replace(host, body=_borrow(host.body, borrowed)) if borrowed else host


def _borrow(body: Sequence[Node], borrowed: set[str]) -> tuple[Node, ...]:
    out: list[Node] = []
    for node in body:
        if isinstance(node, ForLoop):
            node = replace(node, body=_borrow(node.body, borrowed))
        elif isinstance(node, FusedMatmul) and node.out in borrowed:
            node = replace(node, borrows=True)
        out.append(node)
    return tuple(out)
