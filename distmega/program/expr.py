"""Pointwise expressions: a closed set of functions over arguments a0, a1, ..., printed and parsed
as Python arithmetic.

`parse("silu(a0) * a1")` gives a tree; `evaluate` runs it over any values whose functions the caller
supplies (torch tensors on the CPU path). Next on the walk: ops/compute.py.
"""

import ast
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import TypeVar

from distmega.arguments import shown
from distmega.collecting import parse_tree
from distmega.errors import ProgramError, counted
from distmega.program.dtypes import INTEGER_BITS, is_integer

T = TypeVar("T")

FUNCTIONS: dict[str, int] = {
    "exp": 1, "log": 1, "sqrt": 1, "rsqrt": 1, "abs": 1, "neg": 1, "relu": 1, "silu": 1, "gelu": 1,
    "tanh": 1, "sigmoid": 1, "sin": 1, "cos": 1, "erf": 1, "floor": 1,
    "add": 2, "sub": 2, "mul": 2, "div": 2, "maximum": 2, "minimum": 2, "pow": 2,
    "eq": 2, "lt": 2, "le": 2, "where": 3, "log2": 1, "log10": 1,
}  # fmt: skip
"""Function name -> number of arguments. Infix + - * / ** are add, sub, mul, div, pow; gelu is the
exact one (erf). eq, lt and le are 1 where they hold, else 0; where(a, b, c) is b where a isn't 0,
else c.
"""

_INFIX: dict[type[ast.operator], str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "pow",
}  # fmt: skip
_LARGEST = sys.float_info.max

MAX_CHARS = 50_000
MAX_DEPTH = 200
"""Of functions inside each other; in `a0 + a0 + ...` each term is one deeper."""
MAX_PARTS = 1000
"""Arguments, constants and functions; as many print in MAX_CHARS."""
MAX_WORD_CHARS = 1000
_PART = re.compile(r"[\w.]+|[-+*/]")
"""At most four make a part of an Expr, as in `+ 1e-6`."""
_LONG = re.compile(rf"\w{{{MAX_WORD_CHARS + 1},}}")
_SIGNS = re.compile(rf"(?:[-+~]\s*){{{MAX_DEPTH + 1},}}")
_SHOWN_CHARS = 500
_ARG = re.compile(r"a([0-9]{1,4})")
_SYMBOL = {"add": "+", "sub": "-", "mul": "*", "div": "/", "pow": "**"}


@dataclass(frozen=True, slots=True)
class Arg:
    """The value of operand `index`."""

    index: int

    def __str__(self) -> str:
        return f"a{self.index}"


@dataclass(frozen=True, slots=True, eq=False)
class Const:
    """A finite scalar constant; an int only where no float equals it. -0.0 is not equal to 0.0."""

    value: float | int

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Const):
            return NotImplemented
        return self.value == other.value and self._sign == other._sign

    def __hash__(self) -> int:
        return hash(self.value)

    @property
    def _sign(self) -> float:
        return math.copysign(1.0, self.value)

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
    """Reads an expression such as "silu(a0) * a1 + 0.5"; ProgramError names what can't be read, and
    where.
    """
    if not isinstance(text, str):
        raise _unreadable(text, type(text).__name__)
    return _parse(text)


@lru_cache(maxsize=4096)
def _parse(text: str) -> Expr:
    """parse of a text. Programs of layers ask for few texts thousands of times."""
    if len(text) > MAX_CHARS:
        raise _too_large(text, MAX_CHARS, f"{len(text)} characters", f"{MAX_CHARS}")
    for parts, found, most in (
        (islice(_PART.finditer(text), 4 * MAX_PARTS, None), "too many parts", MAX_PARTS),
        (_LONG.finditer(text), "a word of too many characters", MAX_WORD_CHARS),
        (_SIGNS.finditer(text), "too many signs", MAX_DEPTH),
    ):
        if part := next(parts, None):
            raise _too_large(text, part.start() + 1, found, f"{most}")
    try:
        tree = parse_tree(text, mode="eval").body
    except (SyntaxError, ValueError) as error:
        at = getattr(error, "offset", None)
        raise _unreadable(text, text, at and f"{error.args[0]} at character {at}") from error
    except (RecursionError, MemoryError) as error:
        raise _too_large(
            text, 0, "too many brackets or terms", f"a depth of {MAX_DEPTH}"
        ) from error
    return _Reader(text).read(tree, 1)


def within_limits(tree: Expr) -> bool:
    """Whether an expression that was put together is no deeper, and of no more parts, than one that
    parse reads.
    """
    left, num_parts = [(tree, 1)], 0
    while left:
        part, depth = left.pop()
        num_parts += 1
        if depth > MAX_DEPTH or num_parts > MAX_PARTS:
            return False
        if isinstance(part, Call):
            left += [(each, depth + 1) for each in part.args]
    return True


class _Reader:
    """Turns Python's tree of a text into an Expr, and counts its parts."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_parts = 0

    def read(self, node: ast.expr, depth: int) -> Expr:
        """The Expr of a node that is `depth` functions deep."""
        self.num_parts += 1
        if depth > MAX_DEPTH:
            raise self.too_large(node, f"functions {depth} deep", f"a depth of {MAX_DEPTH}")
        if self.num_parts > MAX_PARTS:
            raise self.too_large(node, f"{self.num_parts} parts", f"{MAX_PARTS}")
        match node:
            case ast.Name(id=name) if found := _ARG.fullmatch(name):
                return Arg(int(found[1]))
            case ast.Constant(value=int() | float() as value) if _is_finite_number(value):
                return Const(float(value) if float(value) == value else value)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                inner = self.read(operand, depth + 1)
                return Const(-inner.value) if isinstance(inner, Const) else Call("neg", (inner,))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _INFIX:
                return self.call(_INFIX[type(op)], (left, right), depth)
            case ast.Call(func=ast.Name(id=fn), args=args, keywords=[]) if FUNCTIONS.get(fn) == len(
                args
            ):
                return self.call(fn, args, depth)
        raise _unreadable(self.text, _shown(node, self.text), f"at character {self.location(node)}")

    def call(self, fn: str, args: Sequence[ast.expr], depth: int) -> Call:
        return Call(fn, tuple(self.read(arg, depth + 1) for arg in args))

    def location(self, node: ast.expr) -> int:
        """Where a node begins, in characters from 1."""
        lines = self.text.splitlines(keepends=True)[: node.lineno]
        before = lines[-1].encode()[: node.col_offset].decode()
        return sum(map(len, lines[:-1])) + len(before) + 1

    def too_large(self, node: ast.expr, found: str, most: str) -> ProgramError:
        return _too_large(self.text, self.location(node), found, most)


def _shown(node: ast.expr, text: str) -> str:
    try:
        return ast.unparse(node)
    except (ValueError, RecursionError):  # digits beyond what Python prints, or brackets
        return text


def _is_finite_number(value: int | float) -> bool:
    return not isinstance(value, bool) and -_LARGEST <= value <= _LARGEST


def _short(text: object) -> str:
    found = repr(text[: _SHOWN_CHARS + 1]) if isinstance(text, str) else shown(text)
    return found if len(found) <= _SHOWN_CHARS else f"{found[:_SHOWN_CHARS]}..."


def _unreadable(text: object, part: str, location: str | None = None) -> ProgramError:
    return ProgramError(
        f"pointwise expression {_short(text)} holds {_short(part)}"
        + (f", {location}" if location else ""),
        expected=f"arguments a0, a1, ..., numbers, + - * / ** and {', '.join(FUNCTIONS)}",
        remedy="rewrite the expression with these",
    )


def _too_large(text: str, location: int, found: str, most: str) -> ProgramError:
    return ProgramError(
        f"pointwise expression {_short(text)} holds {found} at character {location}",
        expected=f"at most {most}",
        remedy="divide it over several ops",
    )


_EXACT_IN_INTEGERS = {
    "abs", "neg", "relu", "floor", "add", "sub", "mul", "maximum", "minimum", "pow",
    "eq", "lt", "le", "where",
}  # fmt: skip


def inexact_part(expr: Expr, dtypes: Sequence[str]) -> str:
    """What of an expression has no exact value where the result is in integers; empty if all has,
    or if the result is a float. dtypes: of the arguments; the result has that of a0.

    Sums and products that leave the range of the type wrap around, as in torch; of a bool what
    isn't 0 is true.
    """
    if not is_integer(dtypes[0]):
        return ""
    for index, dtype in enumerate(dtypes):
        if INTEGER_BITS.get(dtype, 64) > INTEGER_BITS[dtypes[0]] or not is_integer(dtype):
            return f"a{index} in {dtype}"
    return _inexact(expr, INTEGER_BITS[dtypes[0]])


def _inexact(expr: Expr, num_bits: int) -> str:
    match expr:
        case Const(value):
            least, most = (0, 1) if num_bits == 1 else (-(2 ** (num_bits - 1)), 2 ** (num_bits - 1))
            fits = value == math.floor(value) and least <= value <= most - (num_bits > 1)
            return "" if fits else str(expr)
        case Call(fn, args):
            whole_power = isinstance(args[-1], Const) and args[-1].value >= 0
            if fn not in _EXACT_IN_INTEGERS or (fn == "pow" and not whole_power):
                return str(expr)
            return next(filter(None, (_inexact(arg, num_bits) for arg in args)), "")
    return ""


def evaluate(
    expr: Expr,
    args: Sequence[T],
    functions: Mapping[str, Callable[..., T]],
    lift: Callable[[float | int], T],
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


def expected_args(expr: Expr) -> str:
    """How many operands an expression takes, in words; one that uses none is no op."""
    num = num_args(expr)
    if num == 0:
        return "an expression that uses a0"
    return counted(num, "operand")


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
