"""Which GPU a rank has: one of its own or, with DISTMEGA_SHARE_GPUS=1, one that it shares.

In: a rank's number on its node. Out: the number of a CUDA device, and what lets NCCL and symmetric
memory take several ranks of one. The GPU then runs its processes in turns of milliseconds, and a
wait for another rank takes as long: for tests of many ranks on few GPUs, never for speed. Used by
worker.py, by launchers.py, which asks before ranks start, and by tests.
"""

import os

import torch

from distmega.env import read_settings


def num_gpus() -> int:
    """GPUs that torch can use on this machine."""
    return torch.cuda.device_count()


def gpu_of(number: int) -> int:
    """The CUDA device of rank number `number` of a node. Whether there is one is not asked."""
    num = num_gpus() if read_settings().share_gpus else 0
    return number % num if num else number


def allow_sharing(rank: int) -> None:
    """To be called before torch.distributed begins: NCCL, which takes one rank of a GPU, is told
    that each rank is a host of its own, so that ranks talk over sockets.
    """
    if read_settings().share_gpus:
        os.environ["NCCL_HOSTID"] = f"distmega-{rank}"
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
