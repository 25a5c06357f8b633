"""Runs part of a benchmark on several GPUs of this machine, one process each, joined by NCCL.

In: a function of this folder and its arguments. Out: it is called as function(communicator, ...) on
every rank; with one rank it is called here.
"""

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from distmega.hostir.comm import Communicator, SingleCommunicator
from distmega.hostir.nccl import NcclCommunicator
from distmega.launch.contract import MULTICAST_OFF
from distmega.sharding.mesh import DeviceMesh

TIMEOUT_S = 120.0


def run_on_ranks(function: Callable[..., None], num_ranks: int, *args: object) -> None:
    """Calls function(communicator, *args) on each rank of a mesh with the axis "tp"."""
    if num_ranks == 1:
        function(SingleCommunicator(DeviceMesh(tp=1)), *args)
        return
    for name, off in MULTICAST_OFF.items():
        os.environ.setdefault(name, off)
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        mp.spawn(_enter, (function, num_ranks, store, args), nprocs=num_ranks)


def _enter(
    rank: int,
    function: Callable[..., None],
    num_ranks: int,
    store: str,
    args: tuple[object, ...],
) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        store=dist.FileStore(store, num_ranks),
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=TIMEOUT_S),
        device_id=torch.device("cuda", rank),
    )
    comm: Communicator = NcclCommunicator(DeviceMesh(tp=num_ranks), rank, TIMEOUT_S)
    function(comm, *args)
    comm.barrier()
    dist.destroy_process_group()
