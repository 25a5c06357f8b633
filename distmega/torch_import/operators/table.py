"""The table of rules: what each operator of torch becomes, a function each.

A rule takes a Build, and the operator's arguments by the names of torch's schema, tensors as
values. It gives the value of the result, a list of them, or NotImplemented: then the operator stays
opaque. Filled by the files beside it, used by ../conversion/. Operators that are one expression an
element stand here; where an argument changes the expression, pointwise.py has a rule instead.
"""

from collections.abc import Callable
from typing import Any

Rule = Callable[..., Any]


RULES: dict[str, Rule] = {}
"""Operator, or operator and overload -> its rule."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Enters a function for operators of torch's own."""

    def enter(function: Rule) -> Rule:
        RULES.update({f"aten.{name}": function for name in names})
        return function

    return enter


EXPRESSIONS: dict[str, str] = {
    "aten.abs": "abs({self})",
    "aten.ceil": "-floor(-{self})",
    "aten.cos": "cos({self})",
    "aten.div.Scalar": "{self} / {other}",
    "aten.div.Tensor": "{self} / {other}",
    "aten.eq": "eq({self}, {other})",
    "aten.erf": "erf({self})",
    "aten.exp": "exp({self})",
    "aten.expm1": "tanh({self} / 2) * (1 + exp({self}))",
    "aten.exp2": "2 ** {self}",
    "aten.floor": "floor({self})",
    "aten.ge": "le({other}, {self})",
    "aten.gt": "lt({other}, {self})",
    "aten.isnan": "1 - eq({self}, {self})",
    "aten.isinf": "eq(abs({self}), -log(0))",
    "aten.le": "le({self}, {other})",
    "aten.leaky_relu": "where(lt({self}, 0), {self} * {negative_slope}, {self})",
    "aten.lerp": "{self} + ({end} - {self}) * {weight}",
    "aten.log": "log({self})",
    "aten.log2": "log2({self})",
    "aten.log10": "log10({self})",
    "aten.log1p": "where(lt(1e10, {self}), log({self}), where(eq(1 + {self}, 1), {self},"
    " log(1 + {self}) * {self} / ((1 + {self}) - 1)))",
    "aten.logical_and": "(1 - eq({self}, 0)) * (1 - eq({other}, 0))",
    "aten.logical_not": "eq({self}, 0)",
    "aten.logical_or": "1 - eq({self}, 0) * eq({other}, 0)",
    "aten.logical_xor": "1 - eq(eq({self}, 0), eq({other}, 0))",
    "aten.lt": "lt({self}, {other})",
    "aten.maximum": "maximum({self}, {other})",
    "aten.minimum": "minimum({self}, {other})",
    "aten.mul": "{self} * {other}",
    "aten.ne": "1 - eq({self}, {other})",
    "aten.neg": "-{self}",
    "aten.reciprocal": "1 / {self}",
    "aten.relu": "relu({self})",
    "aten.rsqrt": "rsqrt({self})",
    "aten.sigmoid": "sigmoid({self})",
    "aten.sign": "lt(0, {self}) - lt({self}, 0)",
    "aten.silu": "silu({self})",
    "aten.sin": "sin({self})",
    "aten.sqrt": "sqrt({self})",
    "aten.square": "{self} * {self}",
    "aten.tanh": "tanh({self})",
    "aten.trunc": "where(lt({self}, 0), -floor(-{self}), floor({self}))",
    "aten.where": "where({condition}, {self}, {other})",
}
"""Operator, with its overload where others of the name differ -> the expression over the names of
its arguments.
"""
