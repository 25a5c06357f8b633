"""Leaves results of fused matmuls in peer memory.

Comes in: a host program. Goes out: the program whose sums over ranks stay where they are, if they
are used up in time. Peers write into a symmetric buffer again once this rank has started the next
fused matmul of the mesh axis; see late_uses. Next: passes.py.
"""

from collections.abc import Sequence
from dataclasses import replace

from distmega.hostir.ir.matmul_nodes import FusedMatmul
from distmega.hostir.ir.nodes import (
    ForLoop,
    HostProgram,
    Node,
    walk_nodes,
)
from distmega.hostir.ir.uses import late_uses, view_sources


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
