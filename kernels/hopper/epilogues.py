"""What kernels ask of an epilogue when they are compiled.

In: the constant EPILOGUES of a kernel, plan/types.py's or batch_plan/types.py's, and the number of
one of them, or ENTRY. Out: a constant. Both linear bodies use these; next on the walk:
one_row/linear.py.
"""

from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

ENTRY = gl.constexpr(-1)
"""In place of an epilogue's number: what becomes of the rows that come in."""


@constexpr_function
def count(epilogues):
    return len(epilogues.each)


@constexpr_function
def epilogue_of(epilogues, number):
    return epilogues.each[number] if number >= 0 else epilogues.entry


@constexpr_function
def streams_of(epilogues, number):
    return epilogue_of(epilogues, number).num_streams


@constexpr_function
def formula_of(epilogues, number):
    return epilogue_of(epilogues, number).formula


@constexpr_function
def num_carried(epilogues, number):
    return epilogue_of(epilogues, number).num_carried


@constexpr_function
def publishes(epilogues, number):
    """In which form linears and others take the result; false where none does."""
    return epilogue_of(epilogues, number).publishes


@constexpr_function
def is_summed(epilogues, number):
    """Whether the product is summed over ranks first."""
    return epilogue_of(epilogues, number).summed


@constexpr_function
def is_ranked(epilogues, number):
    """Whether a token is chosen from the results."""
    return epilogue_of(epilogues, number).ranked
