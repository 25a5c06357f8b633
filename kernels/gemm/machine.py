"""The machine that matmuls on GPUs are chosen for: built-in rates, or measured ones.

In: a communicator of a mesh of GPUs. Out: a Machine, the same on all ranks. Next: api.py.
"""

from dataclasses import replace
from functools import cache

import torch

from distmega.hostir.comm.machine import machine_of
from distmega.hostir.comm.nccl import NcclCommunicator
from distmega.kernels.runtime.gpus import num_sms
from distmega.sharding.search.cost import H100, H200, Machine

_machines: dict[NcclCommunicator, Machine] = {}


@cache
def built_in(index: int) -> Machine:
    """What is known of a CUDA device without measuring, of as many SMs as it has."""
    known = H100 if "H100" in torch.cuda.get_device_name(index) else H200
    sms = num_sms(index)
    return replace(known, num_sms=sms, overlap=replace(known.overlap, num_sms=sms))


def measured(comm: NcclCommunicator) -> Machine:
    """With the rates that `distmega doctor --calibrate` has kept, if any; collective when first
    asked for. RequestError, on all ranks, for a file of rates that does not fit.
    """
    if comm not in _machines:
        index = torch.cuda.current_device()
        name = torch.cuda.get_device_name(index)
        _machines[comm] = machine_of(comm, built_in(index), name)
    return _machines[comm]
