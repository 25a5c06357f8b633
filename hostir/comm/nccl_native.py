"""Collectives that NCCL itself combines: less traffic than combining in rank order, same meeting of
ranks.

NativeNccl is what overlapped programs run on. Sums are taken in NCCL's order, which gives the same
bits on all ranks of a team, though not those of another team size. What NCCL has no call for falls
back on NcclCommunicator: argmax, uneven parts, teams whose ranks don't ascend. Results that lie
densely are written in place, others through a copy once the communication is over.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from distmega.hostir.comm.collectives import CommHandle
from distmega.hostir.comm.communicator import flat_bytes
from distmega.hostir.comm.nccl import NcclCommunicator
from distmega.hostir.comm.torch_names import reduce_scatter_single

_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class NativeNccl(NcclCommunicator):
    """See NcclCommunicator; reductions inside the network, one communicator a mesh axis, each with
    a stream of its own beside the caller's.
    """

    def _native(self, axis: str, combine: str = "sum") -> dist.ProcessGroup | None:
        """The group, if NCCL's order of ranks is the mesh's and it knows how to combine."""
        group = self._group(axis)
        return group if self._is_ascending(axis) and combine in _REDUCTIONS else None

    def all_reduce(
        self, axis: str, xs: Sequence[Tensor], outs: Sequence[Tensor], combine: str
    ) -> CommHandle:
        group = self._native(axis, combine)
        if group is None:
            return super().all_reduce(axis, xs, outs, combine)
        (x,), (out,) = xs, outs
        data = out if out.is_contiguous() else torch.empty_like(x)
        data.copy_(x)
        with self._guard("all-reduce", axis):
            work = dist.all_reduce(data, _REDUCTIONS[combine], group=group, async_op=True)
        return self._handle(axis, work, data, out)

    def reduce_scatter(
        self, axis: str, x: Tensor, out: Tensor, dim: int, combine: str
    ) -> CommHandle:
        group = self._native(axis, combine)
        size = self.mesh.size(axis)
        if group is None or x.shape[dim] != size * out.shape[dim]:
            return super().reduce_scatter(axis, x, out, dim, combine)
        given, there = x.movedim(dim, 0).contiguous(), out.movedim(dim, 0)
        data = there if there.is_contiguous() else torch.empty_like(there).contiguous()
        with self._guard("reduce-scatter", axis):
            work = reduce_scatter_single(
                data, given, _REDUCTIONS[combine], group=group, async_op=True
            )
        return self._handle(axis, work, data, there)

    def recv(self, axis: str, out: Tensor, peer: int) -> CommHandle:
        if self._group(axis) is None or not out.is_contiguous():
            return super().recv(axis, out, peer)
        return self._transfer(axis, dist.irecv, flat_bytes(out), peer)

    def _handle(self, axis: str, work: dist.Work | None, data: Tensor, out: Tensor) -> CommHandle:
        assert work is not None, "this rank is in the team"

        def finish() -> None:
            with self._guard("collective", axis):
                work.wait()
            if data is not out:
                out.copy_(data)

        return CommHandle(finish, work.wait)
