"""Chains of pointwise ops as one expression each.

In: a draft. Out: the same with one op in place of those whose results it alone takes. Used by
`normalise`; next on the walk: views.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
    for op in reversed(draft.ops):
        if op.name in changes or not _is_chain(draft, op):
            continue
        joined = _JoinedFormula(
            expr.parse(str(op.attr("expr"))), [read.tensor for read in op.reads]
        )
        out, taken = draft.tensors[op.writes[0].tensor], list[Op]()
        while before := joined.take_one(draft, out.shape, producers, num_users):
            taken.append(before)
        if taken:
            tree, names = in_order(joined.tree, joined.names)
            operands = [draft.tensors[name] for name in names]
            made, _ = pointwise(out.name, str(tree), *operands, dtype=out.dtype)
            changes |= {before.name: [] for before in taken}
            changes[op.name] = [replace(made, name=op.name)]
    draft.replace(changes)


@dataclass(slots=True)
class _JoinedFormula:
    """An expression and the tensors that its arguments are, which grow as ops are taken in."""

    tree: expr.Expr
    names: list[str]

    def take_one(
        self,
        draft: Draft,
        shape: tuple[int, ...],
        producers: Mapping[str, Op],
        num_users: dict[str, int],
    ) -> Op | None:
        """Takes in the first op before it whose result it alone reads and that has this shape; None
        where there is none. num_users: ops that read a tensor, with those that are taken in.
        """
        for name in self.names:
            before = producers.get(name)
            if before is None or num_users[name] != 1 or name in draft.outputs:
                continue
            if not _is_chain(draft, before) or draft.tensors[name].shape != shape:
                continue
            inner = [read.tensor for read in before.reads]
            tree, names = self._with(name, inner, expr.parse(str(before.attr("expr"))))
            if len(str(tree)) > MAX_CHARS:
                continue
            for each in inner:
                if each in self.names:
                    num_users[each] -= 1
            self.tree, self.names = tree, names
            return before
        return None

    def _with(
        self, name: str, inner: Sequence[str], tree: expr.Expr
    ) -> tuple[expr.Expr, list[str]]:
        """The expression and its arguments with `tree` of `inner` in the place of an argument."""
        names = [each for each in self.names if each != name]
        names += [each for each in inner if each not in names]
        at = {each: expr.Arg(n) for n, each in enumerate(names)}
        deep = substitute(tree, [at[each] for each in inner])
        return substitute(self.tree, [at.get(each, deep) for each in self.names]), names


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
