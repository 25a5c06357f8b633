"""Machines to plan for, by the name a user types: the rates of devices and links, and what this
package's kernels take beside collectives.

Comes in: constants. Goes out: Machines, which planners are given; gemm/machine.py has those of the
GPUs that are here. Needs no torch.
"""

from dataclasses import fields

from distmega.kernels.gemm.times.rates import CPU_RATES, H100_RATES, H200_RATES, OverlapRates
from distmega.kernels.gemm.times.ways import MatmulModel
from distmega.sharding.search.cost import (
    CPU_DEVICE,
    H100_DEVICE,
    H200_DEVICE,
    DeviceRates,
    Machine,
)


def _machine(device: DeviceRates, rates: OverlapRates) -> Machine:
    known = {field.name: getattr(device, field.name) for field in fields(device)}
    return Machine(**known, overlap=MatmulModel(rates))


CPU = _machine(CPU_DEVICE, CPU_RATES)
"""A core or two of a server, ranks joined by gloo over the loopback."""

H200 = _machine(H200_DEVICE, H200_RATES)
"""One H200 of a node joined by NVLink."""

H100 = _machine(H100_DEVICE, H100_RATES)
"""An H100 joined alike, by its memory; nothing else was measured on one."""

MACHINES: dict[str, Machine] = {machine.name: machine for machine in (CPU, H100, H200)}
"""Machines by the name a user types."""
