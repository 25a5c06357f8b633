"""Small collectives of one stream, by kernels that push: what the communicator gives, in changing
order and sizes, from graphs too.
"""

import pytest
import torch
from torch import Tensor

from distmega.hostir.comm.collectives import combine_parts
from distmega.hostir.comm.nccl import NcclCommunicator
from distmega.hostir.ir.matmul_nodes import SymmetricBuffer
from distmega.hostir.ir.nodes import Collective
from distmega.kernels.gemm.host import DONE, PeerMatmuls
from tests.hostir.programs import collective_of
from tests.hostir.ranks import values
from tests.multigpu.ranks import ON_GPUS

HERE = "tests.multigpu.test_pushed"


def shapes_of(size: int) -> list[tuple[tuple[int, ...], int]]:
    """Of each rank's part, and the dim to gather: up to 16 MB together."""
    few = ((1, 4096), 0), ((3, 5, 40), 1), ((100, 260), 0)
    return [*few, ((2048, 4096 // size), 1), ((2048 // size, 4096), 0)]


def push_often(comm: NcclCommunicator) -> None:
    """Three rounds of gathers, sums and argmaxes; every second one is captured and replayed."""
    matmuls = PeerMatmuls(comm)
    matmuls.open_symmetric_buffers([SymmetricBuffer(mesh_axis="tp", num_bytes=2**20)])
    size, rank = comm.mesh.num_ranks, comm.rank

    def refuse(*args: object) -> None:
        raise AssertionError("by the communicator")

    def often(node: Collective, xs: list[Tensor], expected: list[Tensor], captures: bool) -> None:
        start = matmuls.compile_collective(node, refuse)  # type: ignore[arg-type]
        outs = [torch.full_like(each, 7) for each in expected]
        assert start(xs, outs) is DONE
        if captures:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                start(xs, outs)
            for out in outs:
                out.fill_(9)
            for _ in range(5):
                graph.replay()
        for want, got in zip(expected, outs, strict=True):
            assert torch.equal(want, got)

    for number in range(3):
        for shape, dim in shapes_of(size):
            parts = [values(r + 10 * number, *shape, dtype=torch.bfloat16) for r in range(size)]
            whole = torch.cat(parts, dim)
            often(collective_of("all_gather", dim=dim), [parts[rank]], [whole], dim == number % 2)
            if parts[0].numel() % (8 * size) == 0 and parts[0].nbytes * (size - 1) <= 2**20:
                total = sum((x.float() for x in parts[1:]), parts[0].float()).bfloat16()
                often(collective_of("all_reduce", combine="sum"), [parts[rank]], [total], dim == 0)
        for rows in (1, 16, 77):
            found = torch.stack([values(r + number, rows).round() for r in range(size)]).bfloat16()
            indices = torch.arange(size)[:, None] * 1000 + torch.arange(rows)
            expected = list(combine_parts(list(zip(found, indices, strict=True)), "argmax"))
            node = collective_of("all_reduce", combine="argmax")
            often(node, [found[rank], indices[rank]], expected, rows == 16)
    torch.cuda.synchronize()
    comm.barrier()


@pytest.mark.parametrize(("device", "num_ranks"), ON_GPUS)
def test_what_is_pushed_is_what_all_ranks_gave(device: str, num_ranks: int, run_ranks):
    run_ranks(f"{HERE}:push_often", device, num_ranks)
