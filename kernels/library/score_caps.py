"""Soft caps of attention's scores: softcap * tanh(score / softcap), in powers of two.

In: what q k' is multiplied by and the cap, 0 for none. Out: the kernels' factors, and the function
that they apply to products. Used by packed_attention.py and row_attention.py.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
from triton import language as tl

from distmega.kernels.powers import LOG2_E


def score_factors(scale: float, softcap: float) -> tuple[float, float]:
    """What products are multiplied by, and the `cap` of cap_scores; without a soft cap scores in
    powers of two and 0.
    """
    if not softcap:
        return scale * LOG2_E, 0.0
    return 2 * LOG2_E * scale / softcap, softcap * LOG2_E


@triton.jit
def cap_scores(scores, cap):
    """cap * tanh(scores / (2 log2 e)). Where exp2 gives 0 or infinity, that is -cap or cap."""
    return cap - 2.0 * cap / (tl.exp2(scores) + 1.0)
