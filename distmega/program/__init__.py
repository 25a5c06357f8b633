"""The tensor program: every op is stated once, as iteration axes and access maps.

A ProgramBuilder, or a printed text, comes in; a frozen Program goes out, which sharding, hostir
and kernels all read. Start at types.py; ops/ has the op kinds, which kinds.py answers questions
about, expr.py the pointwise expressions.
"""

from distmega.program.ops import (
    attention,
    compute,
    data_movement,
    experts,
    lookups,
    norms,
    opaque,
    sampling,
)

__all__ = [
    "attention",
    "compute",
    "data_movement",
    "experts",
    "lookups",
    "norms",
    "opaque",
    "sampling",
]
