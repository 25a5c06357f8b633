"""Tensors that share storage through views, and those of them that must.

Comes in: a program. Goes out: the temporaries of which a resharded copy must not be kept, because
the storage is written again, and the views that must be of the storage itself, where a copy would
show another value or take what is meant for it. Used by steps.py and resolve.py.
"""

from collections import Counter

from distmega.program.types import Program, accesses


def alias_roots(program: Program) -> dict[str, str]:
    """For each tensor the one whose storage it shares; itself if it is no view."""
    roots = {tensor.name: tensor.name for tensor in program.tensors}
    for op in program.ops:
        if op.is_view:
            roots[op.writes[0].tensor] = roots[op.reads[0].tensor]
    return roots


def bound_views(program: Program) -> frozenset[str]:
    """Views, by the names of their results, that can't be of a copy: their storage is written, by
    whatever name, while they or views of them are still to be used. All others are only read, and
    see what was there when they were made.
    """
    roots, last, bound = alias_roots(program), dict.fromkeys(program.outputs, len(program.ops)), []
    written: dict[str, int] = {}
    for position, op in reversed(list(enumerate(program.ops))):
        if op.is_view:
            source, result = op.reads[0].tensor, op.writes[0].tensor
            used = last.get(result, position)
            if written.get(roots[source], used + 1) <= used:
                bound.append(result)
            last[source] = max(last.get(source, position), used)
            continue
        for access in accesses(op):
            last.setdefault(access.tensor, position)
        for access in op.writes:
            written[roots[access.tensor]] = position
    return frozenset(bound)


def volatile_tensors(program: Program) -> frozenset[str]:
    """Temporaries whose storage is written more than once, or is that of a written state; views
    that may be of a copy are none of them.
    """
    roots, bound = alias_roots(program), bound_views(program)
    tensors = program.tensor_map()
    writes = Counter(
        roots[access.tensor] for op in program.ops if not op.is_view for access in op.writes
    )
    rewritten = {root for root, n in writes.items() if n + (tensors[root].role != "temp") > 1}
    return frozenset(
        name
        for name, root in roots.items()
        if root in rewritten and tensors[name].role == "temp" and (name == root or name in bound)
    )
