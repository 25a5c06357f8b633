"""How the ranks of a job reach each other: a RankContext and a mesh in, a Communicator out."""

from collections.abc import Iterator
from contextlib import contextmanager

from distmega.engine.ranks.context import RankContext, require_context
from distmega.engine.ranks.devices import find_device
from distmega.errors import MeshError, counted
from distmega.hostir.comm.communicator import (
    Communicator,
    GlooCommunicator,
    SingleCommunicator,
    require_mesh,
)
from distmega.hostir.comm.nccl import NcclCommunicator
from distmega.hostir.comm.nccl_native import NativeNccl
from distmega.hostir.library.torch_types import ordinary_tensors
from distmega.sharding.layout.mesh import DeviceMesh


@ordinary_tensors()
def open_communicator(
    context: RankContext,
    mesh: DeviceMesh,
    wait_s: float | None = None,
    *,
    native: bool = False,
) -> Communicator:
    """How this rank reaches the others of the mesh: NCCL between GPUs, gloo between CPUs. wait_s:
    bound on a wait for another CPU rank inside a program, that of the context bounds others.
    native: NCCL takes sums itself, which costs less than summing in rank order.

    MeshError for a mesh that is not of the job's ranks, ProgramError for what is no RankContext,
    RequestError for a device that this machine hasn't.
    """
    require_context(context)
    require_mesh(mesh)
    if sorted(mesh.ranks) != list(range(context.world_size)):
        raise MeshError(
            f"{mesh} in a job of {counted(context.world_size, 'rank')}",
            expected="a mesh of just these ranks",
            remedy=f"start {counted(mesh.num_ranks, 'rank')}, or correct the sizes of the mesh",
        )
    find_device(context.device)
    if mesh.num_ranks == 1:
        return SingleCommunicator(mesh)
    if context.backend == "nccl":
        return (NativeNccl if native else NcclCommunicator)(mesh, context.rank, context.timeout_s)
    return GlooCommunicator(mesh, context.rank, context.timeout_s, wait_s)


@contextmanager
def left_on_failure(comm: Communicator) -> Iterator[Communicator]:
    """Around what makes something that keeps a communicator: an error leaves it, or whoever keeps
    the error would keep it too.
    """
    try:
        yield comm
    except BaseException:
        comm.leave()
        raise
