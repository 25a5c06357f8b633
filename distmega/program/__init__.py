"""The tensor program: every op is stated once, as iteration axes and access maps.

A ProgramBuilder, or a printed text, comes in; a frozen Program goes out, which sharding, hostir
and kernels all read. Start at types.py; ops/ has the op kinds, expr.py the pointwise expressions.
"""
