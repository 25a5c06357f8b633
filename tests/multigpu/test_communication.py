"""Collectives, sends and signals between ranks give the same on GPUs over NCCL as over gloo."""

import os

import pytest
import torch

from distmega.hostir.comm.communicator import Communicator
from distmega.hostir.comm.nccl import NcclCommunicator
from distmega.kernels.runtime.streams.signals import open_signals
from tests.hostir.ranks import check_movements, check_point_to_point, check_reductions, values
from tests.multigpu.ranks import ON_EITHER, TIMEOUT_S

HERE = "tests.multigpu.test_communication"


def exchange_all(comm: Communicator) -> None:
    check_reductions(comm)
    check_movements(comm)
    if isinstance(comm, NcclCommunicator):
        open_signals(comm, "tp", ("ready", "done"), TIMEOUT_S, peer_memory=False)
    check_point_to_point(comm)


def exchange_both_ways(comm: Communicator) -> None:
    """Messages larger than what the network keeps, to the right and to the left at once."""
    size, rank = comm.mesh.num_ranks, comm.rank
    x, from_left, from_right = values(rank, 1 << 22), torch.empty(1 << 22), torch.empty(1 << 22)
    comm.begin_group()
    members = [
        comm.send("tp", x, (rank + 1) % size),
        comm.send("tp", x + 1, (rank - 1) % size),
        comm.recv("tp", from_left, (rank - 1) % size),
        comm.recv("tp", from_right, (rank + 1) % size),
    ]
    comm.end_group(members).wait()
    assert torch.equal(from_left, values((rank - 1) % size, 1 << 22))
    assert torch.equal(from_right, values((rank + 1) % size, 1 << 22) + 1)


def close_in_turn(comm: Communicator) -> None:
    """Communicators that are closed leave no sockets and threads; one beside them goes on."""
    used = []
    for _ in range(6):
        mine = type(comm)(comm.mesh, comm.rank, TIMEOUT_S)
        check_movements(mine)
        if isinstance(mine, NcclCommunicator):
            open_signals(mine, "tp", ("ready", "done"), TIMEOUT_S, peer_memory=False)
        check_point_to_point(mine)
        mine.close()
        used.append(len(os.listdir("/proc/self/task")) + len(os.listdir("/proc/self/fd")))
    assert used[-1] <= used[1] + 3, used
    check_movements(comm)


@pytest.mark.parametrize("body", ["exchange_all", "exchange_both_ways", "close_in_turn"])
@pytest.mark.parametrize(("device", "num_ranks"), ON_EITHER)
def test_exchanges(body: str, device: str, num_ranks: int, run_ranks):
    run_ranks(f"{HERE}:{body}", device, num_ranks)
