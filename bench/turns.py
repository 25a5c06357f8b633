"""Benchmarks that set up several cases at the same time and measure one after the other: torch
compiles for a minute a case, and nothing else may run while something is timed.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from distmega.hostir.comm.communicator import Communicator

LONGEST_WAIT = timedelta(minutes=10)
"""Of a process for the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Processes on the same GPUs: once all have set up a step, one after the other is alone.

    store: a file for all of them. number: this process's, of `num`.
    """

    store: str
    number: int
    num: int

    @contextmanager
    def take(self, step: int, comm: Communicator) -> Iterator[None]:
        """This process's turn at a step, of all its ranks; each step begins with another one."""
        if comm.rank == 0:
            store = dist.FileStore(self.store, -1)
            store.set(f"{step}: {self.number} is ready", "")
            store.wait([f"{step}: {each} is ready" for each in range(self.num)], LONGEST_WAIT)
            if (self.number - step) % self.num:
                store.wait([f"{step}: {(self.number - 1) % self.num} is done"], LONGEST_WAIT)
        comm.barrier()
        yield
        torch.cuda.synchronize()
        comm.barrier()
        if comm.rank == 0:
            store.set(f"{step}: {self.number} is done", "")


def tune_alone(path: Path) -> None:
    """Torch times the kernels that it chooses from while no other process does."""
    # brings dynamo, which takes seconds
    from torch._inductor.runtime.benchmarking import benchmarker  # noqa: PLC0415

    inner = benchmarker.benchmark_gpu

    def benchmark_gpu(*args: object, **options: object) -> float:
        with path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            found: float = inner(*args, **options)
        return found

    benchmarker.benchmark_gpu = benchmark_gpu
