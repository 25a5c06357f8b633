"""What `distmega doctor` has ranks try: whether a backend of symmetric memory works here.

A process can use one backend only, so every backend gets ranks of its own. Launchers call `probe`
by name.
"""

from distmega.engine.ranks.context import Emit, RankContext
from distmega.hostir.comm.nccl import NcclCommunicator
from distmega.kernels.runtime.symmetric import Backend, open_symmetric
from distmega.sharding.layout.mesh import DeviceMesh

PROBE_BYTES = 4096


def probe(context: RankContext, backend: Backend, emit: Emit) -> None:
    """Opens memory of all ranks with one backend; raises what stands in the way."""
    comm = NcclCommunicator(DeviceMesh(tp=context.world_size), context.rank)
    open_symmetric(comm, "tp", PROBE_BYTES, (backend,))
