"""The machine that ranks plan for, the same on all of them.

Comes in: a communicator, a built-in Machine. Goes out: it with the rates that were measured for its
GPUs, if any were (sharding/overlap/rates_file.py).
"""

from distmega.errors import DistmegaError
from distmega.hostir.comm.communicator import Communicator
from distmega.sharding.overlap.rates_file import calibrated, library_versions
from distmega.sharding.search.cost import Machine


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
