"""What `distmega doctor --calibrate` has ranks do. Launchers call `measure` by name.

`machine_of` is for whoever plans on ranks: the measured machine, the same on all of them.
"""

from distmega.errors import DistmegaError
from distmega.hostir.comm import Communicator
from distmega.kernels.copy_engines import CopyCommunicator
from distmega.kernels.gemm.calibrate import measure_rates
from distmega.ranks import Emit, RankContext
from distmega.sharding.cost import Machine
from distmega.sharding.mesh import DeviceMesh
from distmega.sharding.rates_file import calibrated, library_versions


def measure(context: RankContext, payload: None, emit: Emit) -> None:
    """Measures the team of all ranks; rank 0 emits the rates."""
    comm = CopyCommunicator(DeviceMesh(tp=context.world_size), context.rank)
    rates = measure_rates(comm, "tp")
    if context.rank == 0:
        emit(rates)


def machine_of(comm: Communicator, machine: Machine, device: str) -> Machine:
    """`machine` with the rates that the mesh's first rank finds measured for its GPUs.
    RequestError, on all ranks, for a file there that does not fit.
    """
    found: Machine | DistmegaError
    try:
        found = calibrated(machine, device, comm.mesh.num_ranks, library_versions())
    except DistmegaError as error:
        found = error
    first: Machine | DistmegaError = comm.all_gather_object(found)[0]
    if isinstance(first, DistmegaError):
        raise first
    return first
