"""Operators of one expression an element where an argument changes the expression.

In: as table.py says. Out: rules of its table. The others are in table.py. Next: products.py.
"""

import math

from distmega.torch_import.operators.build import Build
from distmega.torch_import.operators.table import EXPRESSIONS, RULES, Rule, rule
from distmega.torch_import.operators.values import TensorValue, Value, is_float


def _added(sign: str) -> Rule:
    def added(b: Build, self: Value, other: Value, alpha: float = 1) -> Value:
        text = f"{{0}} {sign} {{1}}" + (" * {2}" if alpha != 1 else "")
        return b.pointwise(text, *([self, other, alpha] if alpha != 1 else [self, other]))

    return added


def _subtracted_from(b: Build, self: Value, other: Value, alpha: float = 1) -> Value:
    text = "{1} - {0}" + (" * {2}" if alpha != 1 else "")
    return b.pointwise(text, *([self, other, alpha] if alpha != 1 else [self, other]))


RULES.update({"aten.add": _added("+"), "aten.sub": _added("-"), "aten.rsub": _subtracted_from})


@rule("div.Tensor_mode", "div.Scalar_mode")
def div_mode(b: Build, self: TensorValue, other: Value, rounding_mode: str | None) -> Value:
    """What is rounded stays with torch: the quotient may be rounded up before."""
    return NotImplemented if rounding_mode else b.pointwise("{0} / {1}", self, other)


ROOTS = {0.5: "sqrt({0})", -0.5: "rsqrt({0})"}
"""Powers that differ from what torch computes for them, below zero."""


@rule("pow.Scalar", "pow.Tensor_Scalar", "pow.Tensor_Tensor")
def power(b: Build, self: Value, exponent: Value) -> Value:
    """Whole numbers to powers that vary or are negative stay with torch, which multiplies them."""
    known = exponent if isinstance(exponent, int | float) else None
    if not is_float(b.dtype) and (known is None or known < 0):
        return NotImplemented
    if known in ROOTS:
        return b.pointwise(ROOTS[known], self)
    return b.pointwise("{0} ** {1}", self, exponent)


@rule("clamp")
def clamp(b: Build, self: TensorValue, min: Value = None, max: Value = None) -> Value:
    operands, text = [self], "{0}"
    for bound, name in ((min, "maximum"), (max, "minimum")):
        if bound is not None:
            text = f"{name}({text}, {{{len(operands)}}})"
            operands.append(bound)  # type: ignore[arg-type]
    return b.pointwise(text, *operands)


@rule("clamp_min")
def clamp_min(b: Build, self: TensorValue, min: Value) -> Value:
    return clamp(b, self, min=min)


@rule("clamp_max")
def clamp_max(b: Build, self: TensorValue, max: Value) -> Value:
    return clamp(b, self, max=max)


@rule("hardtanh")
def hardtanh(b: Build, self: TensorValue, min_val: float = -1, max_val: float = 1) -> Value:
    return clamp(b, self, min_val, max_val)


@rule("gelu")
def gelu(b: Build, self: TensorValue, approximate: str = "none") -> Value:
    if approximate == "none":
        return b.pointwise("gelu({0})", self)
    inner = f"{math.sqrt(2 / math.pi)!r} * ({{0}} + 0.044715 * {{0}} * {{0}} * {{0}})"
    return b.pointwise(f"0.5 * {{0}} * (1 + tanh({inner}))", self)


@rule("elu")
def elu(
    b: Build, self: TensorValue, alpha: float = 1, scale: float = 1, input_scale: float = 1
) -> Value:
    """By expm1: exp(x) - 1 would lose the digits of a small x."""
    grown = EXPRESSIONS["aten.expm1"].format(self="minimum({0} * {3}, 0)")
    text = f"where(lt(0, {{0}}), {{0}}, {{1}} * ({grown})) * {{2}}"
    return b.pointwise(text, self, alpha, scale, input_scale)


def _of_bools(text: str) -> Rule:
    """A rule for bools; bits of whole numbers stay with torch."""

    def on_bools(b: Build, self: Value, other: Value = None) -> Value:
        if b.dtype != "bool":
            return NotImplemented
        return b.pointwise(text, *([self] if other is None else [self, other]))

    return on_bools


RULES.update(
    {
        "aten.bitwise_and": _of_bools("{0} * {1}"),
        "aten.bitwise_or": _of_bools("maximum({0}, {1})"),
        "aten.bitwise_xor": _of_bools("1 - eq({0}, {1})"),
        "aten.bitwise_not": _of_bools("1 - {0}"),
    }
)
