"""What a CUDA device is, asked once. Used by all kernels for GPUs."""

from functools import cache

import torch


@cache
def is_hopper(index: int) -> bool:
    """Whether kernels built for sm_90a run on a CUDA device."""
    return torch.cuda.get_device_capability(index) == (9, 0)


@cache
def num_sms(index: int) -> int:
    """SMs of a CUDA device."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)
