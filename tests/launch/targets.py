"""Toy targets for the launcher tests; they are imported on the ranks by name."""

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from distmega.errors import RequestError
from distmega.ranks import Emit, RankContext


def sum_ranks(context: RankContext, payload: int, emit: Emit) -> dict[str, object]:
    """Emits 0 .. payload - 1, one all-reduce a value; returns what every rank saw."""
    for step in range(payload):
        emit(step)
        total = torch.tensor([context.rank + 1])
        dist.all_reduce(total)
    seen: list[object] = [None] * context.world_size
    dist.all_gather_object(seen, (context, torch.get_num_threads(), int(total), os.getpid()))
    names = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS")
    return {"seen": seen, "multicast": [os.environ[name] for name in names]}


def die(context: RankContext, payload: dict[str, object], emit: Emit) -> str:
    """Rank 1 kills itself at step 2, the others are in a collective then; `once` names a file that
    stops it.
    """
    once = payload.get("once")
    for step in range(5):
        emit((step, os.getpid()))
        if context.rank == 1 and step == 2 and not (once and Path(str(once)).exists()):
            if once:
                Path(str(once)).touch()
            end = payload["signal"]
            os.kill(os.getpid(), int(str(end))) if end else os._exit(7)
        dist.barrier()
    return "alive"


def refuse(context: RankContext, payload: object, emit: Emit) -> None:
    """Rank 1 raises one of ours; the others wait for it."""
    if context.rank == context.world_size - 1:
        raise RequestError(f"payload {payload!r}", expected="a better one", remedy="send it")
    dist.barrier()


def stumble(context: RankContext, payload: object, emit: Emit) -> None:
    """Rank 1 raises something else; the others wait for it."""
    if context.rank == context.world_size - 1:
        raise KeyError(payload)
    dist.barrier()


def hang(context: RankContext, payload: object, emit: Emit) -> None:
    """Emits its process id, then rank 1 sleeps and the others wait for it in a collective."""
    emit(os.getpid())
    if context.rank == context.world_size - 1:
        time.sleep(300)
    dist.barrier()


def stop(context: RankContext, payload: object, emit: Emit) -> None:
    """The last rank is frozen, so that its process exists but answers nothing."""
    if context.rank == context.world_size - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()


def return_unpicklable(context: RankContext, payload: object, emit: Emit) -> object:
    return lambda: None
