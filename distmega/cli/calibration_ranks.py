"""What `distmega doctor --calibrate` has ranks do. Launchers call `measure` by name."""

from distmega.engine.ranks.context import Emit, RankContext
from distmega.kernels.gemm.calibrate import measure_rates
from distmega.kernels.runtime.streams.copy_engines import CopyCommunicator
from distmega.sharding.layout.mesh import DeviceMesh


def measure(context: RankContext, payload: None, emit: Emit) -> None:
    """Measures the team of all ranks; rank 0 emits the rates."""
    comm = CopyCommunicator(DeviceMesh(tp=context.world_size), context.rank)
    rates = measure_rates(comm, "tp")
    if context.rank == 0:
        emit(rates)
