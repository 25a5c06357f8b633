"""Tensors that share storage through views, and those of them that are overwritten.

Comes in: a program. Goes out: the temporaries of which a resharded copy must not be kept, because
the storage is written again. Used by steps.py and resolve.py.
"""

from collections import Counter

from distmega.program.types import Program


def alias_roots(program: Program) -> dict[str, str]:
    """For each tensor the one whose storage it shares; itself if it is no view."""
    roots = {tensor.name: tensor.name for tensor in program.tensors}
    for op in program.ops:
        if op.is_view:
            roots[op.writes[0].tensor] = roots[op.reads[0].tensor]
    return roots


def volatile_tensors(program: Program) -> frozenset[str]:
    """Temporaries whose storage is written more than once, or is that of a written state."""
    roots = alias_roots(program)
    tensors = program.tensor_map()
    writes = Counter(
        roots[access.tensor] for op in program.ops if not op.is_view for access in op.writes
    )
    rewritten = {root for root, n in writes.items() if n + (tensors[root].role != "temp") > 1}
    return frozenset(
        name for name, root in roots.items() if root in rewritten and tensors[name].role == "temp"
    )
