"""Pointwise expressions: a closed set of functions over arguments a0, a1, ..., printed and parsed
as Python arithmetic.

`parse("silu(a0) * a1")` gives a tree; `evaluate` runs it over any values whose functions the caller
supplies (torch tensors on the CPU path). Next on the walk: ops/compute.py.
"""

import ast
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from distmega.errors import ProgramError

T = TypeVar("T")

FUNCTIONS: dict[str, int] = {
    "exp": 1, "log": 1, "sqrt": 1, "rsqrt": 1, "abs": 1, "neg": 1, "relu": 1, "silu": 1, "gelu": 1,
    "tanh": 1, "sigmoid": 1, "sin": 1, "cos": 1, "erf": 1, "floor": 1,
    "add": 2, "sub": 2, "mul": 2, "div": 2, "maximum": 2, "minimum": 2, "pow": 2,
    "eq": 2, "lt": 2, "le": 2, "where": 3,
}  # fmt: skip
"""Function name -> number of arguments. Infix + - * / ** are add, sub, mul, div, pow; gelu is the
exact one (erf). eq, lt and le are 1 where they hold, else 0; where(a, b, c) is b where a isn't 0,
else c.
"""

_INFIX: dict[type[ast.operator], str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "pow",
}  # fmt: skip
_LARGEST = sys.float_info.max
_SYMBOL = {"add": "+", "sub": "-", "mul": "*", "div": "/", "pow": "**"}


@dataclass(frozen=True, slots=True)
class Arg:
    """The value of operand `index`."""

    index: int

    def __str__(self) -> str:
        return f"a{self.index}"


@dataclass(frozen=True, slots=True)
class Const:
    """A finite scalar constant."""

    value: float

    def __str__(self) -> str:
        text = repr(self.value)
        return f"({text})" if text.startswith("-") else text


@dataclass(frozen=True, slots=True)
class Call:
    """A function of FUNCTIONS applied to sub-expressions."""

    fn: str
    args: tuple["Expr", ...]

    def __str__(self) -> str:
        if self.fn in _SYMBOL:
            return f"({self.args[0]} {_SYMBOL[self.fn]} {self.args[1]})"
        return f"{self.fn}({', '.join(map(str, self.args))})"


Expr = Arg | Const | Call


def parse(text: str) -> Expr:
    """Reads an expression such as "silu(a0) * a1 + 0.5"; ProgramError names what can't be read."""
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise _unreadable(text, text) from error
    return _convert(tree, text)


def _convert(node: ast.expr, text: str) -> Expr:
    match node:
        case ast.Name(id=name) if name[:1] == "a" and name[1:].isdigit():
            return Arg(int(name[1:]))
        case ast.Constant(value=int() | float() as value) if _is_finite_number(value):
            return Const(float(value))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            inner = _convert(operand, text)
            return Const(-inner.value) if isinstance(inner, Const) else Call("neg", (inner,))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _INFIX:
            return Call(_INFIX[type(op)], (_convert(left, text), _convert(right, text)))
        case ast.Call(func=ast.Name(id=fn), args=args, keywords=[]) if FUNCTIONS.get(fn) == len(
            args
        ):
            return Call(fn, tuple(_convert(a, text) for a in args))
    raise _unreadable(text, ast.unparse(node))


def _is_finite_number(value: int | float) -> bool:
    return not isinstance(value, bool) and -_LARGEST <= value <= _LARGEST


def _unreadable(text: str, part: str) -> ProgramError:
    return ProgramError(
        f"pointwise expression {text!r} holds {part!r}",
        expected=f"arguments a0, a1, ..., numbers, + - * / ** and {', '.join(FUNCTIONS)}",
        remedy="rewrite the expression with these",
    )


def evaluate(
    expr: Expr,
    args: Sequence[T],
    functions: Mapping[str, Callable[..., T]],
    lift: Callable[[float], T],
) -> T:
    """Value of `expr` over `args`; `functions` maps names of FUNCTIONS, `lift` turns a constant
    into a value.
    """
    match expr:
        case Arg(index):
            return args[index]
        case Const(value):
            return lift(value)
        case Call(fn, parts):
            return functions[fn](*(evaluate(part, args, functions, lift) for part in parts))


def num_args(expr: Expr) -> int:
    """One more than the highest argument index used."""
    match expr:
        case Arg(index):
            return index + 1
        case Const():
            return 0
        case Call(_, parts):
            return max(map(num_args, parts))


def num_flops(expr: Expr) -> int:
    """Function applications per element, each counted once."""
    return 1 + sum(map(num_flops, expr.args)) if isinstance(expr, Call) else 0


_ZERO_AT_ZERO = {"sqrt", "abs", "neg", "relu", "silu", "gelu", "tanh", "sin", "erf", "floor"}
_FINITE_AT_FINITE = {
    "abs", "neg", "relu", "silu", "gelu", "tanh", "sigmoid", "sin", "cos", "erf", "floor",
    "add", "sub", "mul", "maximum", "minimum", "eq", "lt", "le", "where",
}  # fmt: skip


def is_sum(expr: Expr) -> bool:
    """Whether arguments are added and subtracted, and nothing else."""
    match expr:
        case Arg():
            return True
        case Call(fn="add" | "sub" | "neg", args=args):
            return all(map(is_sum, args))
    return False


def is_zero(expr: Expr, zero_args: frozenset[int]) -> bool:
    """Whether `expr` is provably exactly zero when the named arguments are zero and the others any
    finite numbers.

    This is what lets zero padding pass through a pointwise op: padded elements stay zero.
    """
    match expr:
        case Arg(index):
            return index in zero_args
        case Const(value):
            return value == 0.0
        case Call("mul", (left, right)):
            return (is_zero(left, zero_args) and is_finite(right)) or (
                is_zero(right, zero_args) and is_finite(left)
            )
        case Call("add" | "sub" | "maximum" | "minimum", (left, right)):
            return is_zero(left, zero_args) and is_zero(right, zero_args)
        case Call("div", (left, Const(value))):
            return value != 0.0 and is_zero(left, zero_args)
        case Call("where", (_, chosen, other)):
            return is_zero(chosen, zero_args) and is_zero(other, zero_args)
        case Call(fn, (inner,)):
            return fn in _ZERO_AT_ZERO and is_zero(inner, zero_args)
    return False


def is_finite(expr: Expr, zero_args: frozenset[int] = frozenset()) -> bool:
    """Whether `expr` is provably finite, short of overflow in sums and products, when the named
    arguments are zero and the others any finite numbers.
    """
    match expr:
        case Arg() | Const():
            return True
        case Call("div", (left, Const(value))):
            return value != 0.0 and is_finite(left, zero_args)
        case Call("exp" | "sqrt", (inner,)):
            return is_zero(inner, zero_args)
        case Call(fn, parts):
            return fn in _FINITE_AT_FINITE and all(is_finite(part, zero_args) for part in parts)
