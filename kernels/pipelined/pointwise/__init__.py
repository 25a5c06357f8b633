"""Pointwise ops, several fused into one pass.

Expressions and tensors come in; results go out, by TMA where it helps. Read pointwise.py first;
formula.py is how an expression becomes part of a kernel.
"""
