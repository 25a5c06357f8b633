"""Runs and times part of a benchmark on several GPUs of this machine, a process each, with NCCL.

In: a function of this folder and its arguments. Out: it is called as function(communicator, ...) on
every rank; with one rank it is called here.
"""

import gc
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench.timing import Call, alternating_us
from distmega.hostir.comm.communicator import Communicator, SingleCommunicator
from distmega.hostir.comm.nccl import NcclCommunicator
from distmega.hostir.run.cuda_graph import release_graphs
from distmega.kernels.runtime.gpus import AHEAD_CYCLES
from distmega.launch.contract import MULTICAST_OFF
from distmega.sharding.layout.mesh import DeviceMesh

TIMEOUT_S = 120.0
ROUNDS = 9
"""Rounds of which median_us takes the median."""


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
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # else it keeps graphs of a compiled peer
    gc.collect()  # graphs of torch, too, end before their communicators
    comm.barrier()
    release_graphs()
    dist.destroy_process_group()


def median_us(calls: Mapping[str, Call]) -> dict[str, float]:
    """Time of each call on the slowest rank, all calls in turn in every round. Calls begin when all
    ranks are there, behind work that hides their host's.
    """
    token = torch.zeros(1, device="cuda")

    def meet() -> None:
        torch.cuda._sleep(AHEAD_CYCLES)
        dist.all_reduce(token)

    times = alternating_us(calls, ROUNDS, meet)
    found = torch.tensor(list(times.values()), device="cuda")
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return dict(zip(calls, found.tolist(), strict=True))
