"""What operators of torch become in a program, one rule an operator.

A node's arguments come in, tensors as values (values.py), with a Build (build.py); the value of its
result goes out. Start at table.py; the files beside it fill its table, by what operators do, and
expressions.py has those that are one expression an element.
"""

from distmega.torch_import.operators import (
    attention,
    custom_ops,
    lookups,
    norms,
    pointwise,
    products,
    reductions,
    views,
)
from distmega.torch_import.operators.expressions import EXPRESSIONS
from distmega.torch_import.operators.table import RULES, Rule

__all__ = [
    "EXPRESSIONS",
    "RULES",
    "Rule",
    "attention",
    "custom_ops",
    "lookups",
    "norms",
    "pointwise",
    "products",
    "reductions",
    "views",
]
