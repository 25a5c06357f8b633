"""Toy targets for the launcher tests; they are imported on the ranks by name."""

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

import distmega
from distmega.engine.ranks.context import Emit, ProgressReport, RankContext
from distmega.errors import RequestError

MULTICAST = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one rank saw."""

    context: RankContext
    total: int
    num_threads: int
    multicast: tuple[str | None, ...]
    niceness: int
    pid: int


def sum_ranks(context: RankContext, payload: int, emit: Emit) -> list[Seen]:
    """Emits 0 .. payload - 1, one all-reduce of rank + 1 after each."""
    total = torch.tensor([0])
    for step in range(payload):
        emit(step)
        total[0] = context.rank + 1
        dist.all_reduce(total)
    seen = Seen(
        context=context,
        total=int(total),
        num_threads=torch.get_num_threads(),
        multicast=tuple(map(os.environ.get, MULTICAST)),
        niceness=os.nice(0),
        pid=os.getpid(),
    )
    everything: list[Seen] = [seen] * context.world_size
    dist.all_gather_object(everything, seen)
    return everything


def hang_opening(context: RankContext, payload: None, emit: Emit) -> None:
    """The last rank goes no further once it has loaded its part of a model."""

    def tell(done_bytes: int, all_bytes: int) -> None:
        if done_bytes == all_bytes and context.rank == context.world_size - 1:
            time.sleep(3600)

    source = distmega.open_model("tiny-llama")
    options = distmega.EngineOptions(max_context=64)
    distmega.open_engine(context, source, context.world_size, options, progress=tell)


def listeners(context: RankContext, payload: None, emit: Emit) -> list[tuple[str, int]]:
    """Addresses and ports at which the ranks listen while they exchange something."""
    dist.barrier()
    mine = [
        tuple(each.laddr)
        for each in psutil.Process().net_connections(kind="inet")
        if each.status == psutil.CONN_LISTEN
    ]
    everything: list[list[tuple[str, int]]] = [mine] * context.world_size
    dist.all_gather_object(everything, mine)
    return [place for one in everything for place in one]


def kill_last(context: RankContext, payload: signal.Signals | None, emit: Emit) -> None:
    """Emits rank 0's process id; then the last rank ends itself while the others are in a
    collective.
    """
    emit(os.getpid())
    dist.barrier()
    if _is_last(context):
        os.kill(os.getpid(), payload) if payload else os._exit(7)
    dist.barrier()


def leave_a_child(context: RankContext, payload: None, emit: Emit) -> None:
    """Emits the process id of what it starts; then the rank ends itself."""
    emit(subprocess.Popen(["sleep", "300"]).pid)
    os._exit(7)


def reduce_forever(context: RankContext, payload: None, emit: Emit) -> None:
    """Emits that it began; then all ranks exchange something until they are ended."""
    total = torch.zeros(1)
    emit("began")
    while True:
        dist.all_reduce(total)


@dataclass(frozen=True)
class Begun(ProgressReport):
    """That a run has begun."""


def kill_last_once(context: RankContext, payload: Path, emit: Emit) -> str:
    """Emits 0 .. 4; the last rank ends itself at 2, unless the file says that it did so before.
    The run after that tells its progress, as one that is slower to load may.
    """
    if payload.exists():
        emit(Begun())
    for step in range(5):
        emit(step)
        dist.barrier()
        if _is_last(context) and step == 2 and not payload.exists():
            payload.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
    return "survived"


def refuse(context: RankContext, payload: str, emit: Emit) -> None:
    """The last rank raises one of ours; the others wait for it."""
    if _is_last(context):
        raise RequestError(f"payload {payload}", expected="a better one", remedy="send that")
    dist.barrier()


def stumble(context: RankContext, payload: str, emit: Emit) -> None:
    """The last rank raises something else; the others wait for it."""
    if _is_last(context):
        raise KeyError(payload)
    dist.barrier()


def hang(context: RankContext, payload: None, emit: Emit) -> None:
    """Emits rank 0's process id; then the last rank sleeps and the others wait for it."""
    emit(os.getpid())
    if _is_last(context):
        time.sleep(300)
    dist.barrier()


def return_function(context: RankContext, payload: None, emit: Emit) -> object:
    """Returns what can't be pickled."""
    return lambda: None


@dataclass(frozen=True)
class Trap:
    """A payload that does not let set-up finish: when unpickled it raises, or it sleeps."""

    sleep_s: float

    def __reduce__(self) -> tuple[object, ...]:
        return _spring, (self.sleep_s,)


def _spring(sleep_s: float) -> None:
    time.sleep(sleep_s)
    raise OSError("trapped")


def _is_last(context: RankContext) -> bool:
    return context.rank == context.world_size - 1
