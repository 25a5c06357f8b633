"""What a CUDA device is, and how the host gets ahead of it. Used by all kernels for GPUs, by what
keeps plans for them, and by what times them.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

AHEAD_CYCLES = 2_000_000
"""Clock cycles, about 1 ms, that a GPU sleeps before what is timed, so that the host, which queues
it meanwhile, runs ahead.
"""


_CURRENT = nullcontext()


def made_current(device: torch.device) -> AbstractContextManager[object]:
    """Within it a GPU is the current one, where kernels are launched and graphs captured whatever
    memory they are given; at no cost if it is, or for a CPU.
    """
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return _CURRENT
    return torch.cuda.device(device)


@cache
def is_hopper(index: int) -> bool:
    """Whether kernels built for sm_90a run on a CUDA device."""
    return torch.cuda.get_device_capability(index) == (9, 0)


@cache
def num_sms(index: int) -> int:
    """SMs of a CUDA device."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def facts_of(device: torch.device) -> tuple[object, ...]:
    """What plans may depend on of a GPU."""
    if device.type != "cuda":
        return ()
    facts = torch.cuda.get_device_properties(device)
    return facts.name, facts.major, facts.minor, facts.multi_processor_count
