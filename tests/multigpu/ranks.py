"""Runs a test's body on several ranks: on processes started here, or on those of torchrun.

A body is a function of this folder that takes a communicator. It runs with the rank's device as
torch's default, so the same body serves GPUs over NCCL and CPUs over gloo.
"""

import importlib
import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from distmega.hostir.comm import Communicator, GlooCommunicator
from distmega.hostir.nccl import NcclCommunicator
from distmega.sharding.mesh import DeviceMesh

TIMEOUT_S = 60.0
ON_EITHER = [
    pytest.param("cpu", 2, id="cpu-2"),
    pytest.param("cuda", 2, id="cuda-2", marks=pytest.mark.multigpu(2)),
    pytest.param("cuda", 4, id="cuda-4", marks=pytest.mark.multigpu(4)),
]
"""Device and number of ranks of bodies that need no GPU."""
ON_GPUS = ON_EITHER[1:]


def run_ranks(body: str, device: str, num_ranks: int, folder: Path, *args: object) -> None:
    """Calls `body`, "module:function", with (communicator, *args) on every rank."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        if int(os.environ["WORLD_SIZE"]) != num_ranks:
            pytest.skip(f"torchrun started {os.environ['WORLD_SIZE']} ranks, not {num_ranks}")
        _run(int(os.environ["RANK"]), body, device, num_ranks, None, args)
    else:
        given = body, device, num_ranks, str(folder / "store"), args
        mp.spawn(_run, given, nprocs=num_ranks)


def is_under_torchrun() -> bool:
    """Whether all tests share the processes that torchrun started."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def _run(
    rank: int, body: str, device: str, num_ranks: int, store: str | None, args: tuple[object, ...]
) -> None:
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    place = torch.device("cuda", rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(place)
    if not dist.is_initialized():
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            store=dist.FileStore(store, num_ranks) if store else None,
            rank=rank if store else -1,
            world_size=num_ranks if store else -1,
            timeout=timedelta(seconds=TIMEOUT_S),
            device_id=place if device == "cuda" else None,
        )
    module, _, function = body.partition(":")
    with torch.device(place):
        mesh = DeviceMesh(tp=num_ranks)
        kind = NcclCommunicator if device == "cuda" else GlooCommunicator
        comm: Communicator = kind(mesh, rank, TIMEOUT_S)
        getattr(importlib.import_module(module), function)(comm, *args)
        comm.barrier()
    if store:
        dist.destroy_process_group()
