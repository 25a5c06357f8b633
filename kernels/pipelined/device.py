"""What a GPU can do, asked once: whether the TMA kernels run there, and facts for the cost model.

In: a CUDA device's index. Out: `has_tma`, `device_facts`, `num_programs`. Next: pointwise.py.
"""

from functools import cache

import torch

from distmega.kernels.pipelined.choices import Choice, Device

INT32 = 2**31
"""Coordinates of a descriptor stay below."""
_BANDWIDTH = {"H200": 4.3e6, "H100": 3.0e6, "GH200": 3.6e6}
"""Bytes per us that a device copy moves, by a word of the GPU's name; others as an H100."""


@cache
def has_tma(index: int) -> bool:
    """Whether kernels built for sm_90a run on a CUDA device."""
    return torch.cuda.get_device_capability(index) == (9, 0)


@cache
def device_facts(index: int) -> Device:
    """Facts of a CUDA device; equal for equal GPUs, so that ranks choose alike."""
    properties = torch.cuda.get_device_properties(index)
    rates = [rate for word, rate in _BANDWIDTH.items() if word in properties.name]
    return Device(
        num_sms=properties.multi_processor_count,
        bandwidth_bytes_per_us=max(rates, default=_BANDWIDTH["H100"]),
    )


def num_programs(choice: Choice, num_tiles: int, index: int) -> int:
    """Programs of a launch over tiles: one a run, or as many as the device takes at once."""
    if choice.run:
        return -(-num_tiles // choice.run)
    return min(num_tiles, choice.programs_per_sm * device_facts(index).num_sms)
