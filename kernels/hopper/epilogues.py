"""What kernels ask of an epilogue when they are compiled.

In: the constant EPILOGUES or FORMULAS of a kernel, plan/types.py's or batch_plan/types.py's, and
the number of one of them, or ENTRY. Out: a constant. Used by both linear bodies; next on the walk:
one_row/bodies/linear.py.
"""

from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

ENTRY = gl.constexpr(-1)
"""In place of an epilogue's number: what becomes of the rows that come in."""


@constexpr_function
def count(epilogues):
    return len(epilogues.each)


@constexpr_function
def field(epilogues, number, name):
    """One of the fields of an epilogue or of a row's formula, which plan/types.py and
    batch_plan/types.py state, as a constant that may be passed on.
    """
    if number <= gathered(0):
        return getattr(epilogues.gathers[gathered(0) - number], name)
    return getattr(epilogues.each[number] if number >= 0 else epilogues.entry, name)


@constexpr_function
def count_gathers(epilogues):
    return len(epilogues.gathers)


@constexpr_function
def gathered(number):
    """In place of an epilogue's number: what becomes of a gather."""
    return -2 - number
