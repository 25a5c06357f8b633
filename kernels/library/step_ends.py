"""What ends a decode step of library ops on a GPU, in one launch: its tokens are those that the
next step takes, positions go on, and tokens are kept for the host.

In: tokens that a step chose, and tensors of steps, i64. Out: those tensors, changed. Used by
engine/library_steps.py.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
from torch import Tensor
from triton import language as tl

from distmega.kernels.runtime.ahead import launch


@triton.jit
def end_step_kernel(found, tokens, positions, counted, kept, number, batch, most,
                    padded: tl.constexpr):  # fmt: skip
    """One program. found, counted: [batch], read; tokens, positions: [batch], written; kept:
    [most, batch], row `number` written; number: [1], written. All i64 and in local memory.
    """
    row = tl.arange(0, padded)
    there = row < batch
    token = tl.load(found + row, mask=there)
    position = tl.load(positions + row, mask=there) + tl.load(counted + row, mask=there)
    at = tl.load(number)
    tl.store(tokens + row, token, mask=there)
    tl.store(positions + row, position, mask=there)
    tl.store(kept + at * batch + row, token, mask=there & (at < most))
    tl.debug_barrier()  # all threads have read the number
    tl.store(number, at + 1)


def end_step(
    found: Tensor, tokens: Tensor, positions: Tensor, counted: Tensor, kept: Tensor, number: Tensor
) -> None:
    """tokens become `found`, positions those behind by `counted`, all [batch], and row `number`
    [1] of kept [most, batch] `found`, if there is one; number becomes one more. Contiguous, i64.
    """
    batch = len(tokens)
    padded = triton.next_power_of_2(batch)
    arguments = found, tokens, positions, counted, kept, number, batch, len(kept)
    launch(end_step_kernel, (1,), *arguments, padded=padded, num_warps=1)
