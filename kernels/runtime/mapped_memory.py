"""Mapped memory: pinned memory of the host that kernels of a GPU read and write by themselves.

In: a pinned tensor. Out: the same memory as a tensor of a GPU. A kernel brings a few KB from there
in microseconds, where a copy engine has to wake up first. Used by engine/pass_memory.py.
"""

import torch
from torch import Tensor


class _Pinned:
    """What torch takes for memory of a GPU. It lasts as long as tensors that were made of it."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": tuple(memory.shape),
            "typestr": memory.numpy().dtype.str,
            "data": (memory.data_ptr(), False),
            "version": 3,
        }


def map_pinned(memory: Tensor, device: torch.device) -> Tensor | None:
    """Pinned, contiguous memory as a tensor of a GPU: what one side writes the other reads. Nothing
    orders the host's accesses with those of a stream; their owner does. None where it was pinned
    for another GPU of this process, for torch would make a copy then.
    """
    mapped = torch.as_tensor(_Pinned(memory), device=device)
    return mapped if mapped.data_ptr() == memory.data_ptr() else None
