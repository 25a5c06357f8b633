"""Collectives around a library matmul by peer memory, for rows too few to run beside it: quicker
to start than NCCL's.

In: bf16 operands, a Workspace. Out: results of this rank. All-gather and reduce-scatter are copies
by copy engines, each followed by an event word that the receiver's stream waits for; all-reduce
pushes flagged words where these are few (pushed.py), else it is torch's, which sums parts on their
ranks and shares them. Next: api.py.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from distmega.kernels.gemm.overlap import gather_rows
from distmega.kernels.gemm.pushed import PUSHED_BYTES, pushed_by
from distmega.kernels.gemm.times.tile_times import PUSHING_RANKS
from distmega.kernels.gemm.workspace import Workspace
from distmega.kernels.hopper.sum_norm import FOUR
from distmega.kernels.pipelined.api import pointwise
from distmega.sharding.overlap.products import Extents

NORMED_BYTES = 2**22
"""Most of a sum that the kernel which sums its rows normalises too: over two ranks it is quicker
than two kernels at all sizes from 32 KB on, and not timed beyond (docs/notes/tensor-parallel.md).
"""
MAX_COLUMNS = 2**14
"""Of rows that a program has in registers."""


def all_gather(own: Tensor, workspace: Workspace, *, is_final: bool = False) -> Tensor:
    """Rows of all ranks, [M, K] for own [M / num_ranks, K], until the second call after this.
    is_final: nobody will write into own.
    """
    own = own.contiguous()
    workspace.begin()
    workspace.follow()
    rows = own.shape[0]
    full = workspace.buffer((rows * workspace.num_ranks, own.shape[1]), own.dtype)
    gather_rows(own, workspace, [rows])
    full[workspace.rank * rows :][:rows].copy_(own)
    workspace.await_peers(0)
    workspace.end([0], copied=own, is_final=is_final)
    return full


def matmul_reduce_scatter(a: Tensor, b: Tensor, workspace: Workspace) -> Tensor:
    """This rank's rows [M / num_ranks, N] of the sum over ranks of A B^T; a [M, K], b [N, K]."""
    workspace.begin()
    rank, num_ranks = workspace.rank, workspace.num_ranks
    rows, columns = a.shape[0] // num_ranks, b.shape[0]
    slots = workspace.buffer((2, num_ranks, rows, columns), a.dtype)
    torch.mm(a, b.T, out=slots[1].view(a.shape[0], columns))
    workspace.follow()
    num_bytes = slots[0, 0].nbytes
    for step in range(1, num_ranks):
        peer = (rank + step) % num_ranks
        target = workspace.symmetric_address(peer) + rank * num_bytes
        workspace.send(target, slots[1, peer].data_ptr(), num_bytes)
        workspace.tell(peer, 0)
    workspace.await_peers(0)
    workspace.end([0])
    parts = [slots[int(source == rank), source] for source in range(num_ranks)]
    found = pointwise(" + ".join(f"a{i}" for i in range(num_ranks)), *parts)
    assert isinstance(found, Tensor)
    return found


def matmul_all_reduce(a: Tensor, b: Tensor, workspace: Workspace) -> Tensor:
    """The sum over ranks of A B^T, [M, N], the same bits on all ranks; a [M, K], b [N, K], 8
    num_ranks dividing N. Unless is_pushed, until the second call after this, and by NCCL in memory
    that torch's op can't use.
    """
    if is_pushed(a.shape[0], b.shape[0], workspace.num_ranks):
        partial = torch.mm(a, b.T)
        found = torch.empty_like(partial)
        pushed_by(workspace).sum(partial, found)
        return found
    workspace.begin()
    total = workspace.buffer((a.shape[0], b.shape[0]), a.dtype)
    torch.mm(a, b.T, out=total)
    workspace.sum(total)
    return total


def is_pushed(rows: int, columns: int, num_ranks: int) -> bool:
    """Whether a sum of [rows, columns] is pushed, into memory of its own: quicker than torch's of
    up to 1 MB over two ranks, 256 KB over four (bench/collectives.py).
    """
    return 2 * rows * columns * (num_ranks - 1) <= PUSHED_BYTES


def sums_rows(extents: Extents, residual: Tensor, vectors: Sequence[Tensor]) -> bool:
    """Whether matmul_sum_norm takes such operands, and should, the same on all ranks: it sends each
    peer whole rows, which to one is no more than two shots send.
    """
    return (
        extents.num_ranks == PUSHING_RANKS
        and 0 < 2 * extents.rows * extents.columns <= NORMED_BYTES
        and extents.columns % FOUR == 0
        and extents.columns <= MAX_COLUMNS
        and all(x.dtype is torch.bfloat16 for x in (residual, *vectors))
    )


def matmul_sum_norm(
    a: Tensor,
    b: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    kind: Literal["rms_norm", "layer_norm"],
    eps: float,
    workspace: Workspace,
) -> tuple[Tensor, Tensor]:
    """The norm of residual + the sum over ranks of A B^T, and that total, [M, N], the same bits on
    all ranks; a [M, K], b [N, K], operands as sums_rows takes them.
    """
    return pushed_by(workspace).sum_norm(torch.mm(a, b.T), residual, weight, bias, kind, eps)
