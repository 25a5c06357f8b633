"""The table of rules: what each operator of torch becomes, a function each.

A rule takes a Build, and the operator's arguments by the names of torch's schema, tensors as
values. It gives the value of the result, a list of them, or NotImplemented: then the operator stays
opaque. Filled by the files beside it, used by ../convert.py.
"""

from collections.abc import Callable
from typing import Any

Rule = Callable[..., Any]


RULES: dict[str, Rule] = {}
"""Operator, or operator and overload -> its rule."""


HALF = ("bf16", "f16")


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Enters a function for operators of torch's own."""

    def enter(function: Rule) -> Rule:
        RULES.update({f"aten.{name}": function for name in names})
        return function

    return enter
