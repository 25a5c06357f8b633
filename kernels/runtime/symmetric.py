"""Peer memory on GPUs: memory of each rank that kernels of its whole team read and write directly.

In: the NCCL team of a mesh axis, a size. Out: a SymmetricMemory: this rank's part as a tensor, and
every member's part as an address for kernels and as a tensor for copies. Torch's symmetric memory
allocates it, through CUDA handles or NCCL windows, whichever works on the machine: each opening
proves that every rank reads what every other wrote. Opening is collective, and nothing collective
may run beside a persistent kernel, so a rank takes all that it needs as one arena at the start.
NVLink multicast stays off unless the environment turns it on. Next: hopper/one_row/runner.py.
"""

import importlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from distmega.env import read_settings
from distmega.errors import LaunchError, argument
from distmega.hostir.comm.nccl import NcclCommunicator
from distmega.kernels.runtime.arena import round_up

Backend = Literal["CUDA", "NCCL"]

BACKENDS: tuple[Backend, ...] = ("CUDA", "NCCL")
"""In the order in which they are tried. A process can use only one of them."""

DISABLE_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SymmetricMemory:
    """The same number of bytes on every rank of a team, zeroed; `team_rank` is this rank's in the
    team.

    local: this rank's bytes, uint8. pointers: the address of each member's bytes as this rank's GPU
    sees it, in team order. Whoever writes a peer's memory sees to it that its owner knows.
    """

    team_rank: int
    backend: Backend
    local: Tensor
    pointers: tuple[int, ...]
    _handle: Any = field(repr=False)
    _team_ranks: tuple[int, ...] = field(repr=False)

    @property
    def num_ranks(self) -> int:
        """Members of the team."""
        return len(self.pointers)

    def tensor(
        self, team_rank: int, shape: Sequence[int], dtype: torch.dtype, offset_bytes: int = 0
    ) -> Tensor:
        """A member's bytes from `offset_bytes` on, as a tensor that this rank's kernels use; it
        does not keep the memory.
        """
        first = (self._handle.offset + offset_bytes) // dtype.itemsize
        found: Tensor = self._handle.get_buffer(
            self._team_ranks[team_rank], tuple(shape), dtype, first
        )
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """The ranks along a mesh axis, as a kernel that they run together needs them."""

    comm: NcclCommunicator
    axis: str

    @property
    def team_rank(self) -> int:
        """This rank's number in the team."""
        return self.comm.mesh.team(self.axis, self.comm.rank).index(self.comm.rank)

    @property
    def size(self) -> int:
        """Members of the team."""
        return self.comm.mesh.size(self.axis)

    def open(self, num_bytes: int) -> SymmetricMemory:
        """Memory that the members share; see open_symmetric."""
        return open_symmetric(self.comm, self.axis, num_bytes)

    def gather(self, x: Tensor, out: Tensor) -> None:
        """The members' [1, n] parts side by side, cut to fit. Collective."""
        self.comm.all_gather(self.axis, x, out, 1).wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class StandInTeam(Team):
    """The same ranks for kernels that are compiled and not run: what they share is new memory of
    this rank, and no other is asked for anything.
    """

    def open(self, num_bytes: int) -> SymmetricMemory:
        """Not zeroed."""
        size = self.size
        local = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        return SymmetricMemory(
            team_rank=self.team_rank,
            backend="CUDA",
            local=local,
            pointers=(local.data_ptr(),) * size,
            _handle=_OwnBuffer(local),
            _team_ranks=tuple(range(size)),
        )


class _OwnBuffer:
    """What torch's handle of symmetric memory does, of one tensor for all ranks."""

    offset = 0

    def __init__(self, local: Tensor) -> None:
        self._local = local

    def get_buffer(
        self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, first: int
    ) -> Tensor:
        num_elements = math.prod(shape)
        return self._local.view(dtype)[first : first + num_elements].view(shape)


def open_symmetric(
    comm: NcclCommunicator, axis: str, num_bytes: int, backends: Sequence[Backend] = BACKENDS
) -> SymmetricMemory:
    """Memory of this rank's team along `axis`, which must have two ranks or more. Collective.

    Raises LaunchError, on all ranks, that says for each backend why it did not work.
    """
    os.environ.setdefault(DISABLE_MULTICAST, "1")
    size = round_up(max(num_bytes, 1))
    problems = [_agree(comm, reach_problem(torch.cuda.current_device()))]
    if not problems[0]:
        problems.clear()
        for backend in backends:
            memory = _allocate(comm, axis, size, backend)
            if isinstance(memory, SymmetricMemory):
                return memory
            problems.append(f"{backend}: {memory}")
    raise LaunchError(
        f"GPUs of mesh axis {axis!r} can't reach each other's memory: {'; '.join(problems)}",
        expected="GPUs of one host with peer access, all visible to every rank",
        remedy=f"use {argument('collectives')} host, which goes over NCCL",
    )


def _agree(comm: NcclCommunicator, problem: str) -> str:
    """The first problem that any rank has, on all ranks alike; empty if none has one."""
    found = zip(comm.mesh.ranks, comm.all_gather_object(problem), strict=True)
    return next((f"rank {rank}: {theirs}" for rank, theirs in found if theirs), "")


def reach_problem(here: int) -> str:
    """Why GPU `here` can't reach the others that this process sees; empty if it can."""
    others = [i for i in range(torch.cuda.device_count()) if i != here]
    if not others:
        return "" if read_settings().share_gpus else "it sees no GPU but its own"
    far = [i for i in others if not torch.cuda.can_device_access_peer(here, i)]
    return f"no peer access from GPU {here} to {far}" if far else ""


@cache
def _torch_memory() -> ModuleType:
    """Torch's module, of which a process without peers need not wait for the import."""
    return importlib.import_module("torch.distributed._symmetric_memory")


def _allocate(
    comm: NcclCommunicator, axis: str, size: int, backend: Backend
) -> SymmetricMemory | str:
    """Memory of one backend, or what is wrong with it; the same on all ranks."""
    group, team_ranks = comm.group(axis)
    problem = ""
    handle: Any = None
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        if _torch_memory().get_backend(device) != backend:
            _torch_memory().set_backend(backend)
        local = _torch_memory().empty(size, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        problem = str(error).partition("\n")[0]
    if problem := _agree(comm, problem):
        return problem
    try:
        handle = _torch_memory().rendezvous(local, group.group_name)
        if handle.multicast_ptr and os.environ[DISABLE_MULTICAST] != "0":
            problem = f"torch made a multicast address in spite of {DISABLE_MULTICAST}"
    except RuntimeError as error:
        problem = str(error).partition("\n")[0]
    if problem := _agree(comm, problem):
        return problem
    memory = SymmetricMemory(
        team_rank=comm.mesh.team(axis, comm.rank).index(comm.rank),
        backend=backend,
        local=local,
        pointers=tuple(handle.buffer_ptrs[one] + handle.offset for one in team_ranks),
        _handle=handle,
        _team_ranks=tuple(team_ranks),
    )
    return _prove(comm, memory) or memory


def _prove(comm: NcclCommunicator, memory: SymmetricMemory) -> str:
    """Whether each rank reads what the others wrote, in both directions; zeroes the memory."""
    team_rank, num_ranks = memory.team_rank, memory.num_ranks
    memory.local.zero_()
    torch.cuda.synchronize()
    comm.barrier()
    for other in range(num_ranks):
        memory.tensor(other, (1,), torch.uint8, team_rank).fill_(1 + team_rank)
    torch.cuda.synchronize()
    comm.barrier()
    wanted = list(range(1, 1 + num_ranks))
    wrong = [
        other
        for other in range(num_ranks)
        if memory.tensor(other, (num_ranks,), torch.uint8).tolist() != wanted
    ]
    problem = _agree(comm, f"wrong data in the memory of members {wrong}" if wrong else "")
    memory.local.zero_()
    torch.cuda.synchronize()
    comm.barrier()
    return problem
