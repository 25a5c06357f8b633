"""Expressions of chains of pointwise ops: one put into another, arguments in one order.

In: expressions. Out: expressions of the same value. Next on the walk: segment.py.
"""

from collections.abc import Sequence
from dataclasses import replace

from distmega.program import expr

COMMUTATIVE = ("add", "mul")


def substitute(tree: expr.Expr, arguments: Sequence[expr.Expr]) -> expr.Expr:
    """The expression with argument i replaced by arguments[i]."""
    match tree:
        case expr.Arg(index):
            return arguments[index]
        case expr.Call(args=parts):
            return replace(tree, args=tuple(substitute(part, arguments) for part in parts))
    return tree


def canonical(tree: expr.Expr) -> expr.Expr:
    """The expression with the arguments of commutative functions in one order: the same bits."""
    if not isinstance(tree, expr.Call):
        return tree
    args = tuple(map(canonical, tree.args))
    return replace(tree, args=tuple(sorted(args, key=str)) if tree.fn in COMMUTATIVE else args)
