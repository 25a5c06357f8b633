"""Chains of pointwise ops as one expression each.

In: a draft. Out: the same with one op in place of those whose results it alone takes. Used by
`normalise`; next on the walk: views.py.
"""

from collections.abc import Sequence
from dataclasses import replace

from distmega.kernels.tasks.fuse import substitute
from distmega.program import expr
from distmega.program.kinds import kind_of
from distmega.program.ops.compute import pointwise
from distmega.program.types import Op
from distmega.torch_import.forms.draft import Draft
from distmega.torch_import.operators.values import is_float

MAX_CHARS = 2000
"""Of a joined expression."""


def join_chains(draft: Draft) -> None:
    """Takes pointwise ops on floats into the one op that reads their results."""
    producers, users = draft.producers(), draft.users()
    num_users = {name: len(ops) for name, ops in users.items()}
    changes: dict[str, list[Op]] = {}
    gone: set[str] = set()
    for op in reversed(draft.ops):
        if op.name in gone or not _is_chain(draft, op):
            continue
        out = draft.tensors[op.writes[0].tensor]
        names = [read.tensor for read in op.reads]
        tree = expr.parse(str(op.attr("expr")))
        joined = False
        position = 0
        while position < len(names):
            before = producers.get(names[position])
            fits = (
                before is not None
                and _is_chain(draft, before)
                and num_users[names[position]] == 1
                and names[position] not in draft.outputs
                and draft.tensors[names[position]].shape == out.shape
            )
            if before is None or not fits:
                position += 1
                continue
            inner = [read.tensor for read in before.reads]
            merged = [*names[:position], *names[position + 1 :]]
            merged += [name for name in inner if name not in merged]
            at = {name: expr.Arg(n) for n, name in enumerate(merged)}
            deep = substitute(expr.parse(str(before.attr("expr"))), [at[name] for name in inner])
            found = substitute(
                tree, [deep if n == position else at[name] for n, name in enumerate(names)]
            )
            if len(str(found)) > MAX_CHARS:
                position += 1
                continue
            for name in inner:
                if name in names:
                    num_users[name] -= 1
            tree, names, position, joined = found, merged, 0, True
            gone.add(before.name)
            changes[before.name] = []
        if joined:
            tree, names = in_order(tree, names)
            operands = [draft.tensors[name] for name in names]
            made, _ = pointwise(out.name, str(tree), *operands, dtype=out.dtype)
            changes[op.name] = [replace(made, name=op.name)]
    draft.replace(changes)


def in_order(tree: expr.Expr, names: Sequence[str]) -> tuple[expr.Expr, list[str]]:
    """The expression with its arguments numbered as they come."""
    order: list[int] = []
    _collect(tree, order)
    at = {index: expr.Arg(position) for position, index in enumerate(order)}
    arguments = [at.get(index, expr.Arg(0)) for index in range(len(names))]
    return substitute(tree, arguments), [names[index] for index in order]


def _collect(tree: expr.Expr, order: list[int]) -> None:
    if isinstance(tree, expr.Arg) and tree.index not in order:
        order.append(tree.index)
    for part in tree.args if isinstance(tree, expr.Call) else ():
        _collect(part, order)


def _is_chain(draft: Draft, op: Op) -> bool:
    """Whether an op computes floats of floats, whose results have its shape."""
    if not kind_of(op).is_elementwise:
        return False
    names = [access.tensor for access in (*op.reads, *op.writes)]
    return all(is_float(draft.tensors[name].dtype) for name in names)
