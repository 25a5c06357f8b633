"""Facts of a GPU for the cost model of pipelined kernels.

In: a CUDA device's index. Out: `device_facts`, `num_programs`. Next: pointwise.py.
"""

from functools import cache

import torch

from distmega.kernels.pipelined.choices import GpuModel, KernelChoice
from distmega.kernels.runtime.gpus import num_sms

INT32 = 2**31
"""Coordinates of a descriptor stay below."""
_BANDWIDTH = {"H200": 4.3e6, "H100": 3.0e6, "GH200": 3.6e6}
"""Bytes per us that a device copy moves, by a word of the GPU's name; others as an H100."""


@cache
def device_facts(index: int) -> GpuModel:
    """Facts of a CUDA device; equal for equal GPUs, so that ranks choose alike."""
    name = torch.cuda.get_device_name(index)
    rates = [rate for word, rate in _BANDWIDTH.items() if word in name]
    return GpuModel(
        num_sms=num_sms(index),
        bandwidth_bytes_per_us=max(rates, default=_BANDWIDTH["H100"]),
    )


def num_programs(choice: KernelChoice, num_tiles: int, index: int) -> int:
    """Programs of a launch over tiles: one a run, or as many as the device takes at once."""
    if choice.run:
        return -(-num_tiles // choice.run)
    return min(num_tiles, choice.programs_per_sm * num_sms(index))
