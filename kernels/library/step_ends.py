"""What ends a step whose results the next one takes, on a GPU, in one launch: ids that it chose
take the place of those that it had, positions go on, and ids are kept for the host.

In: ids that a step chose, and tensors of steps, i64. Out: those tensors, changed. Used by
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
def end_step_kernel(found, ids, positions, counted, kept, number, batch, most,
                    padded: tl.constexpr):  # fmt: skip
    """One program. found, counted: [batch], read; ids: [batch], written; positions: [batch], read
    and written; kept: [most, batch], row `number` written; number: [1], 0 where keeping begins,
    read and written. All i64 and in local memory.
    """
    row = tl.arange(0, padded)
    there = row < batch
    chosen = tl.load(found + row, mask=there)
    position = tl.load(positions + row, mask=there) + tl.load(counted + row, mask=there)
    at = tl.load(number)
    tl.store(ids + row, chosen, mask=there)
    tl.store(positions + row, position, mask=there)
    tl.store(kept + at * batch + row, chosen, mask=there & (at < most))
    tl.debug_barrier()  # all threads have read the number
    tl.store(number, at + 1)


def end_step(
    found: Tensor, ids: Tensor, positions: Tensor, counted: Tensor, kept: Tensor, number: Tensor
) -> None:
    """Sets ids to `found`, adds `counted` to positions, all [batch], copies `found` into row
    `number` [1] of kept [most, batch], if there is one, and adds 1 to number. All contiguous, i64.
    """
    batch = len(ids)
    padded = triton.next_power_of_2(batch)
    arguments = found, ids, positions, counted, kept, number, batch, len(kept)
    launch(end_step_kernel, (1,), *arguments, padded=padded, num_warps=1)
