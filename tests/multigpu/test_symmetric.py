"""Memory that GPUs share: both backends, data behind events over a million rounds."""

import pytest
import torch

from distmega.env import read_settings
from distmega.hostir.comm.nccl import NcclCommunicator
from distmega.kernels.runtime.symmetric import Backend, open_symmetric
from tests.multigpu.ranks import ON_GPUS, is_under_torchrun
from tests.multigpu.rounds import exchange_rounds

HERE = "tests.multigpu.test_symmetric"

BLOCK = 1024
ROUNDS = 1_000_000


def reach_every_member(comm: NcclCommunicator, backend: Backend) -> None:
    memory = open_symmetric(comm, "tp", 1000, [backend])
    assert memory.backend == backend
    assert memory.local.numel() == 1024
    comm.barrier()
    for other in range(memory.num_ranks):
        memory.tensor(other, (4,), torch.int32, 16 * comm.rank).fill_(100 * other + comm.rank)
    torch.cuda.synchronize()
    comm.barrier()
    expected = [100 * comm.rank + r for r in range(memory.num_ranks)]
    assert memory.tensor(comm.rank, (memory.num_ranks, 4), torch.int32)[:, 0].tolist() == expected
    assert memory.local.view(torch.int32)[: 4 * memory.num_ranks : 4].tolist() == expected


def hand_over(comm: NcclCommunicator, backend: Backend) -> None:
    """Buffers of both parities, then a line with the counter, in one arena."""
    counter = 8 * BLOCK
    memory = open_symmetric(comm, "tp", counter + 128, [backend])
    other = 1 - comm.rank
    mine, theirs = (memory.tensor(r, (2, BLOCK), torch.int32) for r in (comm.rank, other))
    counts = [memory.tensor(r, (1,), torch.int32, counter) for r in (comm.rank, other)]
    faults = torch.zeros(2, dtype=torch.int32)
    for first, rounds in ((0, 8), (8, ROUNDS)):  # the first launch loads the kernel on both ranks
        comm.barrier()
        exchange_rounds[(1,)](
            mine, theirs, *counts, faults, comm.rank, first, rounds, 10_000_000, BLOCK=BLOCK,
            num_warps=4,
        )  # fmt: skip
        torch.cuda.synchronize()
        assert faults.tolist() == [0, 0]
    assert counts[0].item() == ROUNDS + 8


def own(backend: str) -> str:
    """The group that uses a backend: a process can't use two."""
    if is_under_torchrun() and backend != "CUDA":
        pytest.skip("torchrun's processes use the CUDA backend already")
    if read_settings().share_gpus and backend != "CUDA":
        pytest.skip("NCCL has no windows between ranks that share a GPU")
    return "" if backend == "CUDA" else backend


@pytest.mark.parametrize("backend", ["CUDA", "NCCL"])
@pytest.mark.parametrize(("device", "num_ranks"), ON_GPUS)
def test_every_member_reaches_the_others(backend, device, num_ranks, run_ranks):
    run_ranks(f"{HERE}:reach_every_member", device, num_ranks, backend, separate=own(backend))


@pytest.mark.multigpu(2)
@pytest.mark.parametrize("backend", ["CUDA", "NCCL"])
def test_a_million_events_with_data_behind_them(backend: str, run_ranks):
    run_ranks(f"{HERE}:hand_over", "cuda", 2, backend, separate=own(backend))
