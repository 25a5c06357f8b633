"""The all-reduce by pushed words: sums in rank order, the same bits everywhere, every launch."""

import pytest
import torch
from torch import Tensor

from distmega.errors import HangError, RequestError
from distmega.hostir.comm.nccl import NcclCommunicator
from distmega.kernels.hopper.all_reduce import PushedAllReduce
from distmega.kernels.runtime.symmetric import Team
from tests.hostir.ranks import values
from tests.multigpu.ranks import ON_GPUS

HERE = "tests.multigpu.test_all_reduce"


def total(parts: list[Tensor]) -> Tensor:
    """Summed in rank order in fp32, then rounded."""
    summed = parts[0].float()
    for part in parts[1:]:
        summed = summed + part.float()
    return summed.to(parts[0].dtype)


def reduce_often(comm: NcclCommunicator, num_shots: int) -> None:
    """Sizes that fill programs and that do not; 2000 launches, the last of them from a graph."""
    num_ranks, team = comm.mesh.num_ranks, Team(comm=comm, axis="tp")
    for num_elements in (8 * num_ranks, 4096, 33 * 8 * num_ranks, 1 << 18):
        reduce = PushedAllReduce(team, num_elements, num_shots, chunks=2)
        parts = [values(r, num_elements, dtype=torch.bfloat16) for r in range(num_ranks)]
        x, out = parts[comm.rank].clone(), torch.empty_like(parts[0])
        graph = torch.cuda.CUDAGraph()
        for number in range(2000 if num_elements == 4096 else 20):
            x.copy_(parts[comm.rank] + number)
            reduce(x, out)
            total = sum(
                ((part + number).float() for part in parts[1:]), (parts[0] + number).float()
            )
            assert torch.equal(out, total.to(torch.bfloat16))
        with torch.cuda.graph(graph):
            reduce(x, out)
        for number in range(20):
            x.copy_(parts[comm.rank] - number)
            out.zero_()
            graph.replay()
            total = sum(
                ((part - number).float() for part in parts[1:]), (parts[0] - number).float()
            )
            assert torch.equal(out, total.to(torch.bfloat16))
        torch.cuda.synchronize()
        comm.barrier()


@pytest.mark.parametrize("num_shots", [1, 2])
@pytest.mark.parametrize(("device", "num_ranks"), ON_GPUS)
def test_sums(num_shots: int, device: str, num_ranks: int, run_ranks):
    run_ranks(f"{HERE}:reduce_often", device, num_ranks, num_shots)


def name_a_missing_rank(comm: NcclCommunicator) -> None:
    """Rank 0 calls once more than the others; the call after that says who did not."""
    reduce = PushedAllReduce(Team(comm=comm, axis="tp"), 4096, timeout_s=1.0)
    x = torch.ones(4096, dtype=torch.bfloat16)
    out = torch.empty_like(x)
    reduce(x, out)
    torch.cuda.synchronize()
    comm.barrier()
    if comm.rank == 0:
        reduce(x, out)
        torch.cuda.synchronize()
        with pytest.raises(HangError, match="expected what rank 1 pushes in launch 2"):
            reduce(x, out)


@pytest.mark.parametrize(("device", "num_ranks"), ON_GPUS)
def test_a_missing_rank_is_named(device: str, num_ranks: int, run_ranks):
    run_ranks(f"{HERE}:name_a_missing_rank", device, num_ranks)


def refuse_odd_sizes(comm: NcclCommunicator) -> None:
    with pytest.raises(RequestError, match="an all-reduce of 100 elements over 2 ranks"):
        PushedAllReduce(Team(comm=comm, axis="tp"), 100)


@pytest.mark.multigpu(2)
def test_a_size_that_does_not_divide_is_refused(run_ranks):
    run_ranks(f"{HERE}:refuse_odd_sizes", "cuda", 2)
