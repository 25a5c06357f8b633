"""Memory of the host that a GPU's kernels read and write by themselves.

In: a pinned tensor. Out: the same memory as a tensor of a GPU. Where a kernel of a few microseconds
takes rows from there, no copy engine has to wake up for them. Used by engine/prefill.py.
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


def as_seen_by(device: torch.device, memory: Tensor) -> Tensor:
    """Pinned, contiguous memory of the host as a tensor of a GPU: what one writes the other reads,
    with the order of streams alone between them.
    """
    return torch.as_tensor(_Pinned(memory), device=device)
