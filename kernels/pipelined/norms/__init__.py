"""Rms norm, layer norm and softmax of rows.

Tensors come in; rows that are normalized go out, by TMA where it helps. Read norms.py first: it
chooses between the kernels beside it and plain Triton.
"""
