"""Pointwise expressions inside kernels: a tree of distmega.program.expr is a constexpr of the
kernel, and one jitted function takes it apart while the kernel is compiled.

In: expr.Expr. Out: `evaluate`, in Triton and Gluon kernels alike. Next: pointwise_kernel.py.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

import triton
from triton import language as tl
from triton.language.extra import libdevice

from distmega.program.expr import Arg, Call, Const, Expr


@triton.constexpr_function
def _function(expr: Expr) -> str:
    """What stands at the root: "arg", "const" or a function's name."""
    if isinstance(expr, Arg):
        return "arg"
    return "const" if isinstance(expr, Const) else expr.fn


@triton.constexpr_function
def _index(expr: Arg) -> int:
    return expr.index


@triton.constexpr_function
def _value(expr: Const) -> float:
    return float(expr.value)


@triton.constexpr_function
def _num_parts(expr: Expr) -> int:
    return 0 if isinstance(expr, Arg | Const) else len(expr.args)


@triton.constexpr_function
def _part(expr: Expr, index: int) -> Expr:
    assert not isinstance(expr, Arg | Const)
    return expr.args[index]


@triton.constexpr_function
def _is_square(expr: Expr) -> bool:
    return isinstance(expr, Call) and expr.fn == "pow" and expr.args[1] == Const(2.0)


@triton.jit
def evaluate(expr: tl.constexpr, args):
    """Value of an expression over a tuple of fp32 blocks of one shape; all branches are constexpr.

    An expression without arguments gives a scalar.
    """
    fn: tl.constexpr = _function(expr)
    if fn == "arg":
        return args[_index(expr)]
    elif fn == "const":
        return tl.cast(_value(expr), tl.float32)
    elif _is_square(expr):
        base = evaluate(_part(expr, 0), args)
        return base * base
    elif _num_parts(expr) == 1:
        return unary(fn, evaluate(_part(expr, 0), args))
    elif fn == "where":
        condition = evaluate(_part(expr, 0), args)
        chosen, other = evaluate(_part(expr, 1), args), evaluate(_part(expr, 2), args)
        return tl.where(condition != 0.0, chosen, other)
    else:
        return binary(fn, evaluate(_part(expr, 0), args), evaluate(_part(expr, 1), args))


@triton.jit
def unary(fn: tl.constexpr, x):
    if fn == "exp":
        return tl.exp(x)
    elif fn == "log":
        return tl.log(x)
    elif fn == "log2":
        return libdevice.log2(x)
    elif fn == "log10":
        return libdevice.log10(x)
    elif fn == "sqrt":
        return tl.sqrt_rn(x)
    elif fn == "rsqrt":
        return tl.rsqrt(x)
    elif fn == "abs":
        return tl.abs(x)
    elif fn == "neg":
        return -x
    elif fn == "relu":
        return tl.where(x < 0.0, 0.0, x)
    elif fn == "silu":
        return x * _sigmoid(x)
    elif fn == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif fn == "tanh":
        return libdevice.tanh(x)
    elif fn == "sigmoid":
        return _sigmoid(x)
    elif fn == "sin":
        return libdevice.sin(x)
    elif fn == "erf":
        return tl.erf(x)
    elif fn == "floor":
        return tl.floor(x)
    else:
        tl.static_assert(fn == "cos")
        return libdevice.cos(x)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def binary(fn: tl.constexpr, x, y):
    if fn == "add":
        return x + y
    elif fn == "sub":
        return x - y
    elif fn == "mul":
        return x * y
    elif fn == "div":
        return x / y
    elif fn == "maximum":
        return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)
    elif fn == "minimum":
        return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)
    elif fn == "eq":
        return tl.where(x == y, 1.0, 0.0)
    elif fn == "lt":
        return tl.where(x < y, 1.0, 0.0)
    elif fn == "le":
        return tl.where(x <= y, 1.0, 0.0)
    else:
        tl.static_assert(fn == "pow")
        return libdevice.pow(x, y)
