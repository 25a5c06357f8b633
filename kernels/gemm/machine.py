"""The machine that matmuls on GPUs are chosen for: built-in rates, or measured ones.

In: a communicator of a mesh of GPUs. Out: a Machine, the same on all ranks. Next: api.py.
"""

from dataclasses import replace
from functools import cache

import torch

from distmega.errors import RequestError
from distmega.hostir.comm.communicator import Communicator
from distmega.hostir.comm.nccl import NcclCommunicator
from distmega.kernels.gemm.times.rates_file import (
    calibrated,
    library_versions,
    rates_fields,
    rates_of_fields,
)
from distmega.kernels.gemm.times.ways import MatmulModel, rates_of
from distmega.kernels.machines import H100, H200
from distmega.kernels.runtime.gpus import num_sms
from distmega.sharding.search.cost import Machine


@cache
def built_in(index: int) -> Machine:
    """What is known of a CUDA device without measuring, of as many SMs as it has."""
    known = H100 if "H100" in torch.cuda.get_device_name(index) else H200
    sms = num_sms(index)
    return replace(known, num_sms=sms, overlap=MatmulModel(replace(rates_of(known), num_sms=sms)))


def measured(comm: NcclCommunicator) -> Machine:
    """With the rates that `distmega doctor --calibrate` has kept, if any; collective when first
    asked for. RequestError, on all ranks, for a file of rates that does not fit.
    """
    known = comm.kept.get(Machine)
    if not isinstance(known, Machine):
        index = torch.cuda.current_device()
        name = torch.cuda.get_device_name(index)
        known = comm.kept[Machine] = machine_of(comm, built_in(index), name)
    return known


def machine_of(comm: Communicator, machine: Machine, device: str) -> Machine:
    """`machine` with the rates that the mesh's first rank finds measured for its GPUs.
    RequestError, on all ranks, for a file there that does not fit.
    """
    rates, problem = None, None
    try:
        found = calibrated(machine, device, comm.mesh.num_ranks, library_versions())
        rates = rates_fields(rates_of(found))
    except RequestError as error:
        problem = error.found, error.expected, error.remedy
    rates, problem = comm.all_gather_object((rates, problem))[0]
    if problem:
        wrong, expected, remedy = problem
        raise RequestError(wrong, expected=expected, remedy=remedy)
    assert rates is not None, "there are rates or a problem with them"
    return replace(machine, overlap=MatmulModel(rates_of_fields(rates)))
