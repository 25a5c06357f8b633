"""What garbage collection does not interrupt.

Planning: Python would look again and again for cycles among the many objects that a plan is made
of, and find none. Syntax trees: Python 3.11 counts the depth of those that all threads make
together, and raises SystemError where a collection lets another thread in (python/cpython#106905).
"""

import ast
import gc
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def gc_paused(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which no garbage collection interrupts."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not gc.isenabled():
            return function(*args, **kwargs)
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            gc.enable()

    return run


parse_tree = gc_paused(ast.parse)
parse_literal = gc_paused(ast.literal_eval)
