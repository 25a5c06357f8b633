"""Runs bodies of tests on ranks that stay: one group of processes for all tests of a session.

A body is a function of this folder that takes a communicator. It runs with the rank's device as
torch's default, so the same body serves GPUs over NCCL and CPUs over gloo. A group is started when
a test first needs so many ranks; one in which a body failed, a rank died or did not answer is
ended, and the next test gets a new one; on a machine with GPUs its processes have been started
before, since that takes longer than most bodies. Under torchrun its processes are the only group.
"""

import gc
import importlib
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distmega.hostir.comm.communicator import Communicator, GlooCommunicator
from distmega.hostir.comm.nccl import NcclCommunicator
from distmega.hostir.run.cuda_graph import release_graphs
from distmega.launch.contract import MULTICAST_OFF
from distmega.launch.host.devices import allow_sharing, gpu_of
from distmega.sharding.layout.mesh import DeviceMesh

TIMEOUT_S = 60.0
"""Of a collective."""
BODY_S = 120.0
"""Of a body, on all ranks."""
GRACE_S = 30.0
"""For the others to say what is wrong with them, once one rank has failed."""
ON_EITHER = [
    pytest.param("cpu", 2, id="cpu-2"),
    pytest.param("cuda", 2, id="cuda-2", marks=pytest.mark.multigpu(2)),
    pytest.param("cuda", 4, id="cuda-4", marks=pytest.mark.multigpu(4)),
]
"""Device and number of ranks of bodies that need no GPU."""
ON_GPUS = ON_EITHER[1:]


class RanksFailed(Exception):
    """What went wrong on each rank of a group."""


def is_under_torchrun() -> bool:
    """Whether all tests share the processes that torchrun started."""
    return "TORCHELASTIC_RUN_ID" in os.environ


@dataclass(slots=True)
class Groups:
    """The groups of this session. `separate` names groups whose processes others do not share.
    spare: processes that belong to no group yet.
    """

    open: dict[tuple[str, int, str], "Group"] = field(default_factory=dict)
    joined: dict[str, Communicator] = field(default_factory=dict)
    spare: list["Rank"] = field(default_factory=list)

    def run(
        self, body: str, device: str, num_ranks: int, *args: object, separate: str = ""
    ) -> None:
        """Calls `body`, "module:function", with (communicator, *args) on every rank. Raises
        RanksFailed with what each rank raised.
        """
        if is_under_torchrun():
            self._run_here(body, device, num_ranks, args)
            return
        key = device, num_ranks, separate
        if key not in self.open:
            self.open[key] = Group(device, self._take(num_ranks))
        try:
            self.open[key].run(body, args)
        except BaseException:
            self.open.pop(key).end()
            raise

    def _take(self, num_ranks: int) -> list["Rank"]:
        """Processes for a group; where there are GPUs, as many are started for the next one."""
        while len(self.spare) < num_ranks:
            self.spare.append(Rank())
        taken = [self.spare.pop(0) for _ in range(num_ranks)]
        while torch.cuda.is_available() and len(self.spare) < num_ranks:
            self.spare.append(Rank())
        return taken

    def _run_here(self, body: str, device: str, num_ranks: int, args: tuple[object, ...]) -> None:
        """On this process, which is one of torchrun's."""
        if int(os.environ["WORLD_SIZE"]) != num_ranks:
            pytest.skip(f"torchrun started {os.environ['WORLD_SIZE']} ranks, not {num_ranks}")
        if device not in self.joined:
            self.joined[device] = _join(device, num_ranks, int(os.environ["RANK"]), None)
        _call(self.joined[device], device, body, args)

    def end(self) -> None:
        """Ends the processes of all groups."""
        for group in self.open.values():
            group.end()
        for rank in self.spare:
            rank.end()
        if is_under_torchrun() and dist.is_initialized():
            release_graphs()
            dist.destroy_process_group()


class Rank:
    """A process that serves one body after another, once it is in a group."""

    def __init__(self) -> None:
        context = get_context("spawn")
        self.connection, there = context.Pipe()
        self.process = context.Process(target=_serve, args=(there,), daemon=True)
        self.process.start()
        there.close()

    def answer(self) -> str:
        """What was wrong with a body; empty if nothing was."""
        try:
            problem: str = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(GRACE_S)
            return f"died, exit code {self.process.exitcode}"
        return problem

    def end(self) -> None:
        """Kills the process: it has nothing to keep."""
        self.process.kill()
        self.process.join()
        self.connection.close()


class Group:
    """Ranks that run bodies together."""

    def __init__(self, device: str, ranks: list[Rank]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._ranks = ranks
        store = str(Path(self._folder.name) / "store")
        for number, rank in enumerate(ranks):
            rank.connection.send((device, len(ranks), number, store))

    def run(self, body: str, args: tuple[object, ...]) -> None:
        """One body on all ranks. Raises RanksFailed; the group is of no use then."""
        waiting: dict[Connection, int] = {}
        failures: dict[int, str] = {}
        for number, rank in enumerate(self._ranks):
            rank.connection.send((body, args))
            waiting[rank.connection] = number
        deadline = time.monotonic() + BODY_S
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            for one in [each for each in wait(list(waiting), left_s) if each in waiting]:
                assert isinstance(one, Connection)
                number = waiting.pop(one)
                if problem := self._ranks[number].answer():
                    failures[number] = problem
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        failures |= dict.fromkeys(waiting.values(), f"no answer from {body}")
        if failures:
            lines = [f"rank {number}: {failures[number]}" for number in sorted(failures)]
            raise RanksFailed("\n".join(lines))

    def end(self) -> None:
        """Ends all of its ranks."""
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.end()
        self._folder.cleanup()


def _serve(orders: Connection) -> None:
    """A rank, until the tests' process ends: first its place in a group, then bodies."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    device, num_ranks, rank, store = orders.recv()
    comm: Communicator | None = None
    while True:
        body, args = orders.recv()
        try:
            comm = comm or _join(device, num_ranks, rank, store)
            _call(comm, device, body, args)
        except BaseException:  # pytest's own failures are no Exceptions
            orders.send(traceback.format_exc())
        else:
            orders.send("")


def _end_with_parent() -> None:
    """Even if a kernel hangs, whose owner would wait for ever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _join(device: str, num_ranks: int, rank: int, store: str | None) -> Communicator:
    """This rank's communicator over a mesh with the axis "tp"; without a store, torchrun's."""
    _set_defaults(os.environ, MULTICAST_OFF)
    if device == "cuda":
        torch.cuda.set_device(gpu_of(rank))
        allow_sharing(rank)
    if not dist.is_initialized():
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            store=dist.FileStore(store, num_ranks) if store else None,
            rank=rank if store else -1,
            world_size=num_ranks if store else -1,
            timeout=timedelta(seconds=TIMEOUT_S),
            device_id=torch.device("cuda", gpu_of(rank)) if device == "cuda" else None,
        )
    kind = NcclCommunicator if device == "cuda" else GlooCommunicator
    comm: Communicator = kind(DeviceMesh(tp=num_ranks), rank, TIMEOUT_S)
    return comm


def _set_defaults(environment: "os._Environ[str]", defaults: Mapping[str, str]) -> None:
    for name, value in defaults.items():
        environment.setdefault(name, value)


def _call(comm: Communicator, device: str, body: str, args: tuple[object, ...]) -> None:
    """A body, and then nothing of it is left on any rank."""
    module, _, function = body.partition(":")
    place = torch.device("cuda", gpu_of(comm.rank)) if device == "cuda" else torch.device("cpu")
    with torch.device(place):
        getattr(importlib.import_module(module), function)(comm, *args)
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    comm.barrier()
