"""Constants of a program that a rewrite need not know: what a proof lets vary, what a match binds.

Comes in: a Program. Goes out: Symbols, its constants by their size; and programs and graphs with
others in their place. 0, a half, 1 and 2 are structure, as of a sigmoid, and so are powers. Next:
equivalence.py and resize.py.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from distmega.program import expr
from distmega.program.kinds import kind_of
from distmega.program.types import Attr, Op, Program
from distmega.superopt.graph.axes import Axes
from distmega.superopt.graph.ugraph import UGraph

STRUCTURE = frozenset({0.0, 0.5, 1.0, 2.0})
"""Constants that stay as they are."""

NUMBERS = {"rms_norm": "eps", "layer_norm": "eps", "attend": "scale"}
"""The attribute of an op kind that is such a constant."""


@dataclass(frozen=True, slots=True)
class Symbols:
    """literals: constants that the program states. shares: one over the extent of each axis that a
    norm takes the mean along. axes: those axes of the program (axes.py).
    """

    literals: frozenset[float]
    shares: frozenset[float]
    axes: frozenset[str]

    @property
    def values(self) -> frozenset[float]:
        """All of them."""
        return self.literals | self.shares


def find_symbols(program: Program, axes: Axes) -> Symbols:
    """Constants of a program, by their absolute value."""
    literals: set[float] = set()
    shares: set[float] = set()
    along: set[str] = set()
    for op in program.ops:
        if op.kind in NUMBERS:
            literals.add(abs(number_of(op)))
        if kind_of(op).is_elementwise:
            literals.update(constants_of(expr.parse(str(op.attr("expr")))))
        if kind_of(op).scales_elements:
            shares.add(share_of(op))
            along.update(axes.ops[op.name]["r"])
    return Symbols(frozenset(literals - STRUCTURE), frozenset(shares - STRUCTURE), frozenset(along))


def number_of(op: Op) -> float:
    """The constant of an op that has one as an attribute, as a norm's eps."""
    value = op.attr(NUMBERS[op.kind])
    assert isinstance(value, int | float), "a number by the op's definition"
    return float(value)


def share_of(op: Op) -> float:
    """What a norm's mean multiplies its sum by."""
    return 1.0 / op.axis("r").extent


def constants_of(tree: expr.Expr) -> Iterator[float]:
    """Absolute values of the constants in an expression, but for powers."""
    match tree:
        case expr.Const(value):
            yield abs(float(value))
        case expr.Call(fn, args):
            for arg in args[:1] if fn == "pow" else args:
                yield from constants_of(arg)


def with_constants(tree: expr.Expr, changed: Mapping[float, float]) -> expr.Expr:
    """The expression with other constants, given by absolute values; signs stay."""
    match tree:
        case expr.Const(value):
            new = changed.get(abs(float(value)), abs(float(value)))
            return expr.Const(-new if value < 0 else new)
        case expr.Call(fn, args):
            kept = args[1:] if fn == "pow" else ()
            others = args[:1] if fn == "pow" else args
            return expr.Call(fn, (*(with_constants(a, changed) for a in others), *kept))
    return tree


def program_with_constants(program: Program, changed: Mapping[float, float]) -> Program:
    """The program with other constants."""
    return replace(program, ops=tuple(_op_with(op, changed) for op in program.ops))


def _op_with(op: Op, changed: Mapping[float, float]) -> Op:
    def attr(name: str, value: Attr) -> Attr:
        if name == NUMBERS.get(op.kind):
            return changed.get(number_of(op), number_of(op))
        if name == "expr" and kind_of(op).is_elementwise:
            return str(with_constants(expr.parse(str(value)), changed))
        return value

    return replace(op, attrs=tuple((name, attr(name, value)) for name, value in op.attrs))


def graph_with_constants(graph: UGraph, changed: Mapping[float, float]) -> UGraph:
    """The graph with other constants."""
    kernels = tuple(
        replace(
            kernel,
            ops=tuple(
                replace(op, expr=str(with_constants(expr.parse(op.expr), changed)))
                if op.kind == "map"
                else op
                for op in kernel.ops
            ),
        )
        for kernel in graph.kernels
    )
    return replace(graph, kernels=kernels)
