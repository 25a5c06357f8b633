"""The machine that ranks plan for, the same on all of them.

Comes in: a communicator, a built-in Machine. Goes out: it with the rates that were measured for its
GPUs, if any were (sharding/overlap/rates_file.py).
"""

from dataclasses import replace

from distmega.errors import RequestError
from distmega.hostir.comm.communicator import Communicator
from distmega.sharding.overlap.rates_file import (
    calibrated,
    library_versions,
    rates_fields,
    rates_of_fields,
)
from distmega.sharding.search.cost import Machine


def machine_of(comm: Communicator, machine: Machine, device: str) -> Machine:
    """`machine` with the rates that the mesh's first rank finds measured for its GPUs.
    RequestError, on all ranks, for a file there that does not fit.
    """
    rates, problem = None, None
    try:
        found = calibrated(machine, device, comm.mesh.num_ranks, library_versions())
        rates = rates_fields(found.overlap)
    except RequestError as error:
        problem = error.found, error.expected, error.remedy
    rates, problem = comm.all_gather_object((rates, problem))[0]
    if problem:
        wrong, expected, remedy = problem
        raise RequestError(wrong, expected=expected, remedy=remedy)
    assert rates is not None, "there are rates or a problem with them"
    return replace(machine, overlap=rates_of_fields(rates))
