"""Sums over ranks with the norm of their rows: torch's numbers, the same bits everywhere, every
launch, whatever rows come after each other.
"""

from typing import Literal

import pytest
import torch

from distmega.hostir.comm.nccl import NcclCommunicator
from distmega.hostir.library.norms import normalise
from distmega.kernels.gemm.api import matmul_sum_norm
from distmega.kernels.gemm.workspace import workspace_of
from distmega.kernels.hopper.sum_norm import PushedSumNorm
from distmega.kernels.runtime.symmetric import Team
from tests.hostir.ranks import values
from tests.multigpu.ranks import ON_GPUS

HERE = "tests.multigpu.test_sum_norm"


def sum_often(comm: NcclCommunicator) -> None:
    """Rows that fill chunks and that do not; 400 launches of changing rows, some from a graph."""
    num_ranks, team = comm.mesh.num_ranks, Team(comm=comm, axis="tp")
    kinds: tuple[Literal["rms_norm", "layer_norm"], ...] = ("rms_norm", "layer_norm")
    for columns in (64, 2048, 2304, 8192):
        run = PushedSumNorm(team, columns, 256)
        for number, rows in enumerate((1, 256, 3, 100) * 25):
            kind = kinds[number % 2]
            parts = [
                values(r + 10 * number, rows, columns, dtype=torch.bfloat16)
                for r in range(num_ranks)
            ]
            residual = values(5 + 10 * number, rows, columns, dtype=torch.bfloat16)
            weight, bias = values(6, 2, columns, dtype=torch.bfloat16)
            given = (residual, weight, bias if number % 4 == 1 else None)
            x = parts[comm.rank]
            if number % 5:
                y, total = run(x, *given, kind, 1e-5)
            else:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    y, total = run(x, *given, kind, 1e-5)
                for _ in range(3):
                    graph.replay()
            summed = sum((part.float() for part in parts[1:]), parts[0].float()).bfloat16()
            expected = normalise(kind, summed, *given, 1e-5)
            assert torch.equal(total, expected[1])
            torch.testing.assert_close(y, expected[0], rtol=2**-7, atol=2**-7)
            if number % 25 == 0:
                bits = y.view(torch.int16).flatten()[:4096].tolist()
                assert len({*map(tuple, comm.all_gather_object(bits))}) == 1
        torch.cuda.synchronize()
        comm.barrier()


@pytest.mark.parametrize(("device", "num_ranks"), ON_GPUS)
def test_sums(device: str, num_ranks: int, run_ranks):
    run_ranks(f"{HERE}:sum_often", device, num_ranks)


def multiply(comm: NcclCommunicator) -> None:
    """Products with it, of few rows, of more and of many, against the same in parts."""
    num_ranks, rank = comm.mesh.num_ranks, comm.rank
    shared = workspace_of(comm, "tp", 2**26)
    for rows, columns, depth in (
        (16, 512, 128),
        (64, 2048, 256),
        (512, 2048, 256),
        (4096, 1024, 64),
    ):
        residual = values(9, rows, columns, dtype=torch.bfloat16)
        weight = values(8, columns, dtype=torch.bfloat16)
        a = values(rank, rows, depth, dtype=torch.bfloat16)
        b = values(20 + rank, columns, depth, dtype=torch.bfloat16)
        for _ in range(3):
            y, total = matmul_sum_norm(
                a, b, residual, weight, None, comm, kind="rms_norm", eps=1e-6, workspace=shared
            )
            parts = [
                torch.mm(
                    values(r, rows, depth, dtype=torch.bfloat16),
                    values(20 + r, columns, depth, dtype=torch.bfloat16).T,
                )
                for r in range(num_ranks)
            ]
            summed = sum((part.float() for part in parts[1:]), parts[0].float()).bfloat16()
            expected = normalise("rms_norm", summed, residual, weight, None, 1e-6)
            # NCCL rounds a sum at each rank: each time by 2**-9 of what is summed by then, at most
            rounded = sum(part.abs().float() for part in parts) * (num_ranks * 2**-9)
            off = (total.float() - expected[1].float()).abs()
            assert (off <= rounded + expected[1].float().abs() * 2**-6 + 2**-5).all(), off.max()
            scale = weight.float().abs() / expected[1].float().square().mean(1, True).sqrt()
            off = (y.float() - expected[0].float()).abs()
            assert (off <= rounded * scale + expected[0].float().abs() * 2**-6 + 2**-5).all()


@pytest.mark.parametrize(("device", "num_ranks"), ON_GPUS)
def test_products(device: str, num_ranks: int, run_ranks):
    run_ranks(f"{HERE}:multiply", device, num_ranks)
