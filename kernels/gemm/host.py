"""Matmuls with a collective as host programs run them on GPUs.

Comes in: the communicator of a mesh of GPUs that reach each other's memory. Goes out: PeerMatmuls,
which an Evaluator is given. Next: api.py.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from distmega.hostir.comm.collectives import CommHandle
from distmega.hostir.comm.nccl import NcclCommunicator
from distmega.hostir.ir.matmul_nodes import FusedMatmul, SumNorm, SymmetricBuffer
from distmega.hostir.ir.nodes import Collective
from distmega.hostir.library.matmuls import NormedProduct, StartCollective
from distmega.kernels.gemm import late
from distmega.kernels.gemm.api import (
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
    matmul_sum_norm,
    means_of,
    mix_columns,
)
from distmega.kernels.gemm.machine import measured
from distmega.kernels.gemm.workspace import Workspace, workspace_of
from distmega.kernels.pipelined.api import normalise_rows
from distmega.program import expr

DONE = CommHandle(lambda: None)
"""Of what the current stream does."""


class PeerMatmuls:
    """See Matmuls of hostir/library/matmuls.py: one kernel each where asked for or quicker, else
    another way through peer memory or NCCL. Every rank of the mesh makes one.
    """

    def __init__(self, comm: NcclCommunicator) -> None:
        self.comm = comm
        self._opened: dict[str, list[Workspace]] = {}
        """By mesh axis."""

    def open_symmetric_buffers(self, symmetric_buffers: Sequence[SymmetricBuffer]) -> None:
        """LaunchError, on all ranks, where they do not reach each other's memory; RequestError for
        rates that do not fit, which later calls choose by.
        """
        if symmetric_buffers:
            measured(self.comm)
        for symmetric_buffer in symmetric_buffers:
            found = workspace_of(self.comm, symmetric_buffer.mesh_axis, symmetric_buffer.num_bytes)
            opened = self._opened.setdefault(symmetric_buffer.mesh_axis, [])
            if found not in opened:
                opened.append(found)

    def settle(self) -> None:
        """See Matmuls: every workspace, also of programs that were captured before."""
        for opened in self._opened.values():
            for workspace in opened:
                workspace.settle()

    def rewind(self) -> None:
        """See Matmuls."""
        for opened in self._opened.values():
            for workspace in opened:
                workspace.rewind()

    def compile(
        self, node: FusedMatmul, *, is_final: bool = False
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """See Matmuls. ProgramError from a call with what the kernel can't do."""
        comm, axis, overlap = self.comm, node.mesh_axis, True if node.forced else None
        workspace = self._opened[axis][-1]
        match node.kind:
            case "all_gather_matmul":
                return lambda x, w: all_gather_matmul(
                    x,
                    w,
                    comm,
                    axis,
                    replicated=node.replicated,
                    overlap=overlap,
                    workspace=workspace,
                    mixes=node.mixes or None,
                    is_final=is_final,
                )
            case "matmul_reduce_scatter":
                return lambda x, w: matmul_reduce_scatter(
                    x, w, comm, axis, overlap=overlap, workspace=workspace
                )
            case "matmul_all_reduce":
                return lambda x, w: matmul_all_reduce(
                    x,
                    w,
                    comm,
                    axis,
                    overlap=overlap,
                    workspace=workspace,
                    borrow=node.borrows,
                )

    def compile_normed(self, node: FusedMatmul, norm: SumNorm) -> NormedProduct:
        """See Matmuls."""
        workspace = self._opened[node.mesh_axis][-1]

        def run(x: Tensor, w: Tensor, given: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
            residual, weight, *bias = given
            return matmul_sum_norm(
                x,
                w,
                residual,
                weight,
                bias[0] if bias else None,
                self.comm,
                node.mesh_axis,
                kind=norm.kind,
                eps=norm.eps,
                workspace=workspace,
            )

        return run

    def compile_collective(self, node: Collective, otherwise: StartCollective) -> StartCollective:
        """See Matmuls: what is small goes by a kernel, if the program has a workspace. All ranks of
        the mesh open its memory together, when the first call comes: so they must be one team, for
        stages of a pipeline make calls of their own.
        """
        workspace = self._pushing_workspace(node)
        if workspace is None:
            return otherwise
        return _by_kernel(node, late.pushed_by(workspace), otherwise)

    def stand_in(self) -> "PeerMatmuls":
        """See Matmuls."""
        return _StandIn(self)

    def _pushing_workspace(self, node: Collective) -> Workspace | None:
        opened, mesh = self._opened.get(node.mesh_axis), self.comm.mesh
        is_team = mesh.size(node.mesh_axis) == mesh.num_ranks
        return opened[-1] if opened and is_team else None


class _StandIn(PeerMatmuls):
    """See Matmuls.stand_in."""

    def __init__(self, matmuls: PeerMatmuls) -> None:
        super().__init__(matmuls.comm)
        self._opened = {
            axis: [late.StandInWorkspace(opened[-1])] for axis, opened in matmuls._opened.items()
        }

    def compile(
        self, node: FusedMatmul, *, is_final: bool = False
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """See Matmuls."""
        run = super().compile(node)
        formula = expr.parse(node.mixes) if node.mixes else None

        def rehearse(x: Tensor, w: Tensor) -> Tensor:
            if self._by_nccl(node, x, w):
                return mix_columns(self._empty_product(node, x, w), formula)
            return run(x, w)

        return rehearse

    def compile_normed(self, node: FusedMatmul, norm: SumNorm) -> NormedProduct:
        """See Matmuls."""
        run = super().compile_normed(node, norm)

        def rehearse(x: Tensor, w: Tensor, given: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
            if self._by_nccl(node, x, w):
                residual, weight, *bias = given
                total = self._empty_product(node, x, w)
                shift = bias[0] if bias else None
                return normalise_rows(norm.kind, total, residual, weight, shift, norm.eps)
            return run(x, w, given)

        return rehearse

    def _by_nccl(self, node: FusedMatmul, x: Tensor, w: Tensor) -> bool:
        """Whether it takes all ranks, and torch's kernels."""
        overlap = True if node.forced else None
        axis, replicated = node.mesh_axis, node.replicated
        found = means_of(node.kind, x, w, self.comm, axis, replicated=replicated, overlap=overlap)
        return found == "nccl"

    def _empty_product(self, node: FusedMatmul, x: Tensor, w: Tensor) -> Tensor:
        size, rows = self.comm.mesh.size(node.mesh_axis), x.shape[0]
        rows = {
            "all_gather_matmul": size * rows,
            "matmul_reduce_scatter": rows // size,
            "matmul_all_reduce": rows,
        }[node.kind]
        return x.new_empty(rows, w.shape[0])


def _by_kernel(
    node: Collective, pushed: "late.PushedCollectives", otherwise: StartCollective
) -> StartCollective:
    combine, dim = node.get("combine", "sum"), node.get("dim", 0)
    assert isinstance(dim, int), "of a verified collective"

    def gather(xs: Sequence[Tensor], outs: Sequence[Tensor]) -> CommHandle:
        return DONE if pushed.gather(xs[0], outs[0], dim) else otherwise(xs, outs)

    def add(xs: Sequence[Tensor], outs: Sequence[Tensor]) -> CommHandle:
        if not pushed.takes_sum(xs[0]):
            return otherwise(xs, outs)
        pushed.sum(xs[0], outs[0])
        return DONE

    def find_largest(xs: Sequence[Tensor], outs: Sequence[Tensor]) -> CommHandle:
        found = pushed.argmax(*xs)
        if found is None:
            return otherwise(xs, outs)
        for out, result in zip(outs, found, strict=True):
            out.copy_(result)
        return DONE

    match node.kind, combine:
        case "all_gather", _:
            return gather
        case "all_reduce", "sum":
            return add
        case "all_reduce", "argmax":
            return find_largest
    return otherwise
