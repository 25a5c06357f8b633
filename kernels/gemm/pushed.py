"""What the ranks of a workspace push to each other by kernels that need no other: small sums,
gathers and argmaxes.

In: a Workspace, whose team shares memory. Out: PushedCollectives, one a workspace, used like it by
one stream at a time. Each kind of call opens its memory when it is first made, on all ranks and in
no capture. For a rank that does not come calls wait as long as torch's would: that is told by the
deadline of the caller. Next: peer_collectives.py.
"""

from typing import Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from distmega.kernels.gemm.workspace import Workspace
from distmega.kernels.hopper.all_gather import PushedAllGather
from distmega.kernels.hopper.all_reduce import PushedAllReduce
from distmega.kernels.hopper.argmax import PushedArgmax
from distmega.kernels.hopper.sum_norm import FOUR, LEAST_CAPACITY, PushedSumNorm
from distmega.kernels.runtime.memory import packed
from distmega.kernels.runtime.symmetric import Team

LONGEST_WAIT_S = 86400.0
PUSHED_BYTES = 2**20
"""Most that a rank pushes to the others together, flags not counted."""
GATHERED_BYTES = 2**24
"""Of a gather's result, at most: that of a short pass. Its peer memory is twice as much."""
COMPARED_ROWS = 1024
SUM_MULTIPLE = 8
"""Of elements a rank, as words of a sum are read."""


class PushedCollectives:
    """Of a team of two ranks or more; operands on its GPU."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._sums: dict[int, PushedAllReduce] = {}
        self._sum_norms: dict[tuple[int, int], PushedSumNorm] = {}
        self._gather: PushedAllGather | None = None
        self._argmax: PushedArgmax | None = None

    def sum(self, x: Tensor, out: Tensor) -> None:
        """out = the sum of all ranks' x, bf16, 8 num_ranks dividing its size; in rank order."""
        num = x.numel()
        if num not in self._sums:
            self._sums[num] = PushedAllReduce(self._team, num, timeout_s=LONGEST_WAIT_S)
        given, into = packed(x), _writable(out)
        self._sums[num](given.view(-1), into.view(-1))
        _bring(into, out)

    def takes_sum(self, x: Tensor) -> bool:
        """Whether `sum` does so, and as quickly as others; the same on all ranks."""
        divides = x.numel() % (SUM_MULTIPLE * self._team.size) == 0
        small = 0 < x.nbytes * (self._team.size - 1) <= PUSHED_BYTES
        return x.dtype is torch.bfloat16 and divides and small

    def sum_norm(
        self,
        partial: Tensor,
        residual: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        kind: Literal["rms_norm", "layer_norm"],
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """The norm of residual + the sum of all ranks' partial, bf16 [rows, columns], and that
        total. FOUR divides columns. Calls share the memory of a power of two of rows.
        """
        rows, columns = partial.shape
        key = columns, max(LEAST_CAPACITY, 1 << (rows - 1).bit_length())
        if key not in self._sum_norms:
            self._sum_norms[key] = PushedSumNorm(self._team, *key)
        shift = None if bias is None else _in_fours(bias)
        run = self._sum_norms[key]
        return run(partial, _in_fours(residual), _in_fours(weight), shift, kind, eps)

    def gather(self, x: Tensor, out: Tensor, dim: int) -> bool:
        """out = all ranks' x along a dim, in rank order, unless it is one for others: then False,
        the same on all ranks.
        """
        whole = out.shape[dim] == self._team.size * x.shape[dim]
        if not whole or not 0 < out.nbytes <= GATHERED_BYTES:
            return False
        if self._gather is None:
            self._gather = PushedAllGather(self._team, GATHERED_BYTES // self._team.size)
        if not self._gather.takes(x, dim):
            return False
        into = _writable(out)
        self._gather(packed(x), into, dim)
        _bring(into, out)
        return True

    def argmax(self, values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor] | None:
        """The largest of all ranks' values and its index, i64, each as given; None if it is one for
        others, the same on all ranks.
        """
        is_narrow = values.is_floating_point() and values.element_size() <= torch.float32.itemsize
        is_known = is_narrow and indices.dtype is torch.int64
        if not is_known or not 0 < values.numel() <= COMPARED_ROWS:
            return None
        if self._argmax is None:
            self._argmax = PushedArgmax(self._team, COMPARED_ROWS, LONGEST_WAIT_S)
        largest, where = self._argmax(packed(values).view(-1), packed(indices).view(-1))
        return largest.view(values.shape), where.view(indices.shape)


_known: WeakKeyDictionary[Workspace, PushedCollectives] = WeakKeyDictionary()


def pushed_by(workspace: Workspace) -> PushedCollectives:
    """Those of a workspace's team."""
    return _known.setdefault(workspace, PushedCollectives(workspace.team))


def _in_fours(x: Tensor) -> Tensor:
    return packed(x, FOUR * x.element_size())


def _writable(out: Tensor) -> Tensor:
    """Where results go that belong into `out`: itself, if words can be written there."""
    fits = out.is_contiguous() and packed(out) is out
    return out if fits else torch.empty_like(out, memory_format=torch.contiguous_format)


def _bring(into: Tensor, out: Tensor) -> None:
    if into is not out:
        out.copy_(into)
