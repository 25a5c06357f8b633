"""What operators of torch become in a program, one rule an operator.

A node's arguments come in, tensors as values (values.py), with a Build (build.py); the value of its
result goes out. Start at table.py, which has operators that are one expression an element; the
files beside it have a rule for each other one, by what operators do.
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
from distmega.torch_import.operators.table import EXPRESSIONS, RULES, Rule

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
