"""Library ops of a host program on GPUs: this package's kernels where they beat torch's.

Comes in: a communicator. Goes out: PeerOps, which an Evaluator takes as `ops`. Pointwise ops and
norms are those of pipelined/, a matmul with its collective is one kernel of gemm/, all else is
torch's. On a CPU the same functions fall back on torch. Next: gemm/api.py, pipelined/api.py.
"""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from distmega import expr
from distmega.hostir.axis_views import access_axes, is_plain
from distmega.hostir.fused import TorchOps
from distmega.hostir.fused_nodes import FusedMatmul, Room
from distmega.hostir.library import OpFunction
from distmega.hostir.nccl import NcclCommunicator
from distmega.kernels.gemm import api as gemm
from distmega.kernels.gemm.workspace import workspace_of
from distmega.kernels.pipelined import api as pipelined
from distmega.program import Op

MAX_INPUTS = pipelined.MAX_INPUTS


class PeerOps(TorchOps):
    """See hostir.fused.DeviceOps. Every rank of the mesh makes one."""

    def compile(self, op: Op, coordinate: Mapping[str, int]) -> OpFunction:
        """See DeviceOps."""
        if op.kind == "pointwise" and _is_aligned(op):
            tree = expr.parse(str(op.attr("expr")))
            return lambda xs: _one(pipelined.pointwise(tree, *xs))
        if op.kind == "rms_norm":
            eps = op.get("eps", 0.0)
            assert isinstance(eps, int | float), f"eps={eps!r} of a verified norm"
            return lambda xs: _one(pipelined.rms_norm(xs[0], xs[2], eps=eps))
        return super().compile(op, coordinate)

    def open_rooms(self, rooms: Sequence[Room]) -> None:
        """Peer memory through NCCL's teams; LaunchError, on all ranks, where they do not reach each
        other's memory.
        """
        if isinstance(self.comm, NcclCommunicator):
            for room in rooms:
                workspace_of(self.comm, room.mesh_axis, room.num_bytes)

    def fuse(self, node: FusedMatmul) -> Callable[[Tensor, Tensor], Tensor]:
        """See DeviceOps. RequestError from the first call where the kernel can't do the shapes."""
        if not isinstance(self.comm, NcclCommunicator):
            return super().fuse(node)
        comm, axis = self.comm, node.mesh_axis
        match node.kind:
            case "all_gather_matmul":
                return lambda x, w: gemm.all_gather_matmul(x, w, comm, axis, overlap=True)
            case "matmul_reduce_scatter":
                return lambda x, w: gemm.matmul_reduce_scatter(x, w, comm, axis, overlap=True)
            case "matmul_all_reduce":
                return lambda x, w: gemm.matmul_all_reduce(
                    x, w, comm, axis, overlap=True, borrow=node.borrows
                )


def _is_aligned(op: Op) -> bool:
    """Whether all operands are indexed as the result is, one dim an axis."""
    out = access_axes(op.writes[0])
    operands = (*op.reads, *op.writes)
    return len(op.reads) <= MAX_INPUTS and all(
        is_plain(a) and access_axes(a) == out for a in operands
    )


def _one(found: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)
