"""Pointwise expressions over operands of any types, as hostir/library/pointwise.py computes them.

In: a tree of distmega.program.expr, a constexpr, and blocks in the types in which they are computed
with. Out: a block. Whole numbers stay i64 where all operands are whole and the function has a whole
result; they become floats where they meet one. Next on the walk: elementwise.py.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, no-any-return"

import triton
from triton import language as tl
from triton.language.extra import libdevice

from distmega.kernels.pipelined.pointwise.formula import binary, unary
from distmega.program.expr import Arg, Call, Const, Expr

STAYS_WHOLE = ("abs", "neg", "relu", "floor")
"""Functions of one argument that give whole numbers of whole numbers."""
WHOLE_PAIRS = ("add", "sub", "mul", "eq", "lt", "le", "maximum", "minimum", "pow")
"""Likewise of two."""


@triton.constexpr_function
def root_of(expr: Expr):
    """ "arg", "const", or the name of the function at the root."""
    if isinstance(expr, Arg):
        return "arg"
    return "const" if isinstance(expr, Const) else expr.fn


@triton.constexpr_function
def part_of(expr: Call, nth):
    return expr.args[nth]


@triton.constexpr_function
def num_parts(expr: Expr):
    return 0 if isinstance(expr, Arg | Const) else len(expr.args)


@triton.constexpr_function
def argument_of(expr: Arg):
    return expr.index


@triton.constexpr_function
def value_of(expr: Const):
    return expr.value


@triton.constexpr_function
def is_whole_constant(expr: Const):
    return expr.value == int(expr.value) and -(2**63) <= expr.value < 2**63


@triton.constexpr_function
def whole_value(expr: Const):
    return int(expr.value)


@triton.constexpr_function
def is_whole_power(expr: Expr):
    """Whether a whole number to this power is whole: a constant that isn't negative."""
    return isinstance(expr, Const) and expr.value >= 0


@triton.constexpr_function
def stays_whole(fn):
    return fn in STAYS_WHOLE


@triton.constexpr_function
def pairs_whole(fn):
    return fn in WHOLE_PAIRS


@triton.jit
def constant(expr: tl.constexpr, wide: tl.constexpr):
    """A constant among operands of a type."""
    if tl.int64 != wide:
        return tl.full([1], value_of(expr), wide)
    elif is_whole_constant(expr):
        return tl.full([1], whole_value(expr), tl.int64)
    else:
        return tl.full([1], value_of(expr), tl.float32)


@triton.jit
def whole_power(x, y):
    """x to the power y, both whole, y at least 0, by squaring."""
    result = x * 0 + y * 0 + 1
    base, left = x + y * 0, y + x * 0
    for _ in range(63):
        result = tl.where(left % 2 == 1, result * base, result)
        base = base * base
        left = left // 2
    return result


@triton.jit
def one(fn: tl.constexpr, x):
    """A function of one argument."""
    if x.dtype.is_int():
        if not stays_whole(fn):
            return unary(fn, x.to(tl.float32))
        elif fn == "abs":
            return tl.where(x < 0, -x, x)
        elif fn == "neg":
            return -x
        elif fn == "relu":
            return tl.where(x < 0, x * 0, x)
        else:
            return x
    elif x.dtype == tl.float64:
        return one_wide(fn, x)
    else:
        return unary(fn, x)


@triton.jit
def one_wide(fn: tl.constexpr, x):
    """Of f64."""
    if fn == "exp":
        return libdevice.exp(x)
    elif fn == "log":
        return libdevice.log(x)
    elif fn == "sqrt":
        return libdevice.sqrt(x)
    elif fn == "rsqrt":
        return 1.0 / libdevice.sqrt(x)
    elif fn == "silu":
        return x / (1.0 + libdevice.exp(-x))
    elif fn == "sigmoid":
        return 1.0 / (1.0 + libdevice.exp(-x))
    elif fn == "gelu":
        return 0.5 * x * (1.0 + libdevice.erf(x * 0.70710678118654752440))
    elif fn == "erf":
        return libdevice.erf(x)
    elif fn == "floor":
        return libdevice.floor(x)
    else:
        return unary(fn, x)


@triton.jit
def two(fn: tl.constexpr, x, y):
    """A function of two arguments."""
    if x.dtype.is_int() and y.dtype.is_int():
        if not pairs_whole(fn):
            return binary(fn, x.to(tl.float32), y.to(tl.float32))
        elif fn == "add":
            return x + y
        elif fn == "sub":
            return x - y
        elif fn == "mul":
            return x * y
        elif fn == "eq":
            return (x == y).to(tl.int64)
        elif fn == "lt":
            return (x < y).to(tl.int64)
        elif fn == "le":
            return (x <= y).to(tl.int64)
        elif fn == "maximum":
            return tl.where(x < y, y, x)
        elif fn == "minimum":
            return tl.where(x < y, x, y)
        else:
            return whole_power(x, y)
    elif x.dtype == tl.float64 or y.dtype == tl.float64:
        return two_wide(fn, x.to(tl.float64), y.to(tl.float64))
    else:
        return binary(fn, x.to(tl.float32), y.to(tl.float32))


@triton.jit
def two_wide(fn: tl.constexpr, x, y):
    """Of f64."""
    if fn == "eq":
        return (x == y).to(tl.float64)
    elif fn == "lt":
        return (x < y).to(tl.float64)
    elif fn == "le":
        return (x <= y).to(tl.float64)
    else:
        return binary(fn, x, y)


@triton.jit
def evaluate(expr: tl.constexpr, args, wide: tl.constexpr):
    """Value over a tuple of blocks; wide: i64 where all are whole, else the widest float."""
    fn: tl.constexpr = root_of(expr)
    if fn == "arg":
        return args[argument_of(expr)]
    elif fn == "const":
        return constant(expr, wide)
    elif fn == "where":
        condition = evaluate(part_of(expr, 0), args, wide)
        chosen = evaluate(part_of(expr, 1), args, wide)
        other = evaluate(part_of(expr, 2), args, wide)
        return choose(condition != 0, chosen, other)
    elif num_parts(expr) == 1:
        return one(fn, evaluate(part_of(expr, 0), args, wide))
    else:
        left = evaluate(part_of(expr, 0), args, wide)
        right = evaluate(part_of(expr, 1), args, wide)
        if fn == "pow":
            return power(left, right, is_whole_power(part_of(expr, 1)))
        else:  # without it the compiler would read both returns
            return two(fn, left, right)


@triton.jit
def power(x, y, stays: tl.constexpr):
    """x to the power y; stays: whole numbers stay whole."""
    if x.dtype.is_int() and y.dtype.is_int() and not stays:
        return two("pow", x.to(tl.float32), y)
    else:
        return two("pow", x, y)


@triton.jit
def choose(condition, x, y):
    """Between two of any types."""
    if x.dtype.is_int() and y.dtype.is_int():
        return tl.where(condition, x, y)
    elif x.dtype == tl.float64 or y.dtype == tl.float64:
        return tl.where(condition, x.to(tl.float64), y.to(tl.float64))
    else:
        return tl.where(condition, x.to(tl.float32), y.to(tl.float32))
