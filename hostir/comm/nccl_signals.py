"""Signals of host programs between GPUs over NCCL: a byte sent, a byte received, on the stream.

In: a communicator and an axis. Out: NcclSignals, with two groups of that communicator, one for each
direction, so that a signal waits neither for data nor for signals the other way. NCCL pairs them by
order alone: signals from one rank to another must be awaited in the order in which they are sent,
whatever their names. Where GPUs reach each other's memory, kernels/runtime/streams/signals.py knows
names and bounds waits. Next: nccl.py.
"""

from collections.abc import Callable
from itertools import combinations
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from distmega.hostir.comm.communicator import TeamCommunicator


class Signals(Protocol):
    """Signals between ranks of a team, in order with the current stream; `peer` is a coordinate.
    on_device: whether kernels send them, so that a CUDA graph may hold them.
    """

    on_device: bool

    def signal(self, axis: str, name: str, peer: int) -> None:
        """Signals the peer once the work so far on the current stream is done."""
        ...

    def wait(self, axis: str, name: str, peer: int) -> None:
        """What follows on the current stream starts after one more signal from the peer."""
        ...

    def check(self) -> None:
        """Raises HangError for a wait that was given up."""
        ...


class NcclSignals:
    """Signals along one axis; a wait that is in vain is ended by torch's watchdog."""

    on_device = False

    def __init__(self, comm: TeamCommunicator, axis: str, timeout_s: float) -> None:
        """Collective over all processes, whose devices are current. comm: closes their groups."""
        mesh, rank = comm.mesh, comm.rank
        self._team = mesh.team(axis, rank)
        self._team_rank = self._team.index(rank)
        self._sent, self._taken = torch.zeros(2, 1, dtype=torch.uint8, device="cuda").unbind()
        self._groups: dict[bool, dist.ProcessGroup] = {}
        for team in dict.fromkeys(mesh.team(axis, each) for each in mesh.ranks):
            for upwards in (False, True):
                group = comm.open_group(team, timeout_s)
                if rank in team:
                    self._groups[upwards] = group
        self._connect()

    def _connect(self) -> None:
        """Exchanges a first byte with each of the team, pair after pair: the hosts of two ranks
        meet when NCCL first sends from one to the other, later ones do not wait for each other.
        """
        for low, high in combinations(range(len(self._team)), 2):
            if self._team_rank == low:
                self.signal("", "", high)
                self.wait("", "", high)
            elif self._team_rank == high:
                self.wait("", "", low)
                self.signal("", "", low)
        torch.cuda.synchronize()

    def signal(self, axis: str, name: str, peer: int) -> None:
        """Sends a byte; nothing on this rank waits for its arrival."""
        self._start(dist.isend, self._sent, peer, upwards=peer > self._team_rank)

    def wait(self, axis: str, name: str, peer: int) -> None:
        """The current stream waits for the next byte from the peer."""
        self._start(dist.irecv, self._taken, peer, upwards=peer < self._team_rank).wait()

    def check(self) -> None:
        """Nothing to tell."""

    def _start(
        self, call: Callable[..., dist.Work | None], byte: Tensor, peer: int, *, upwards: bool
    ) -> dist.Work:
        work = call(byte, self._team[peer], group=self._groups[upwards])
        assert work is not None, "this rank is in the team"
        return work
