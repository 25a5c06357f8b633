"""Matmuls with a collective beside them give what the two give one after the other, exactly on
small integers: chosen, forced, call after call, and what is refused.
"""

from dataclasses import replace
from itertools import product as cross
from typing import Any

import pytest
import torch
from torch import Tensor

from distmega.errors import HangError, ProgramError
from distmega.hostir.comm.communicator import Communicator
from distmega.hostir.comm.nccl import NcclCommunicator
from distmega.kernels import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from distmega.kernels.gemm import late
from distmega.kernels.gemm.times.matmul_ways import STAGES, MatmulChoice
from distmega.kernels.gemm.times.tile_times import MOST_PEERS, DepthSplit, Tiles, plan_sending
from distmega.kernels.gemm.workspace import Workspace, workspace_of
from distmega.kernels.runtime.gpus import num_sms
from distmega.kernels.runtime.symmetric import Team
from distmega.sharding.overlap.products import Extents
from tests.multigpu.ranks import ON_EITHER, ON_GPUS

HERE = "tests.multigpu.test_gemm"


def integers(*shape: int, seed: int) -> Tensor:
    """Small ones, the same on every rank and device for a seed."""
    generator = torch.Generator("cpu").manual_seed(seed)
    drawn = torch.randint(-2, 3, shape, generator=generator, device="cpu")
    return drawn.to(torch.get_default_device()).bfloat16()


def operands(rank: int, rows: int, columns: int, depth: int, seed: int) -> tuple[Tensor, Tensor]:
    return (
        integers(rows, depth, seed=seed * 100 + rank),
        integers(columns, depth, seed=seed * 100 + 50 + rank),
    )


def product(a: Tensor, b: Tensor) -> Tensor:
    return a.float() @ b.float().T


def compute_all(comm: Communicator, rows: int, columns: int, overlap: bool | None) -> None:
    """rows: of one rank."""
    size, rank = comm.mesh.num_ranks, comm.rank
    for seed in range(3):
        parts = [operands(r, rows, columns, 320, seed) for r in range(size)]
        gathered = torch.cat([own for own, _ in parts])
        own, b = parts[rank]
        found = all_gather_matmul(own, b, comm, overlap=overlap)
        assert torch.equal(found, product(gathered, b).bfloat16())
        found = all_gather_matmul(own, b, comm, overlap=overlap, mixes="a0 - 2 * a1")
        left, right = product(gathered, b).chunk(2, 1)
        assert torch.equal(found, (left - 2 * right).bfloat16())
        parts = [operands(r, rows * size, columns, 192, seed) for r in range(size)]
        total = torch.stack([product(*part) for part in parts]).sum(0).bfloat16()
        a, b = parts[rank]
        found = matmul_reduce_scatter(a, b, comm, overlap=overlap)
        assert torch.equal(found, total.chunk(size)[rank])
        for borrow in (False, True):
            found = matmul_all_reduce(a, b, comm, overlap=overlap, borrow=borrow)
            assert torch.equal(found, total)


def keep_bits_on_all_ranks(comm: Communicator) -> None:
    """Sums that round differently in another order; a gather into a matmul that all ranks compute
    alike, of extents at which one that differs between them shares its last wave.
    """
    torch.manual_seed(comm.rank)
    a, b = torch.randn(1024, 256).bfloat16(), torch.randn(512, 256).bfloat16()
    found = matmul_all_reduce(a, b, comm, overlap=True).view(torch.int16)
    assert len(set(comm.all_gather_object(tuple(found.flatten()[:4096].tolist())))) == 1
    assert len(set(comm.all_gather_object(int(found.long().sum())))) == 1
    own = torch.randn(4096 // comm.mesh.num_ranks, 8192).bfloat16()
    torch.manual_seed(0)
    b = torch.randn(5120, 8192).bfloat16()
    found = all_gather_matmul(own, b, comm, overlap=True, replicated=True).view(torch.int16).long()
    weighed = found.flatten() * (1 + torch.arange(found.numel()) % 1009)
    assert len(set(comm.all_gather_object(int(weighed.sum())))) == 1


def use_every_tile(comm: NcclCommunicator) -> None:
    """Both widths in debug builds, whose waits are bounded; a small shape after a large one."""
    size, rank = comm.mesh.num_ranks, comm.rank
    shared = workspace_of(comm, "tp", 2**28)
    for tile_n, stages in STAGES.items():
        tiles = Tiles(tile_n=tile_n, stages=stages)
        choice = MatmulChoice(means="tiles", us=0.0, tiles=tiles)
        for rows in (1024, 128, 384):
            own, b = operands(rank, rows, 1152, 448, rows)
            parts = [operands(r, rows, 1152, 448, rows)[0] for r in range(size)]
            found = late.overlap.all_gather_matmul(own, b, shared, choice, debug=True)
            assert torch.equal(found, product(torch.cat(parts), b).bfloat16())
            parts = [operands(r, rows * size, 1152, 64, rows) for r in range(size)]
            total = torch.stack([product(*part) for part in parts]).sum(0).bfloat16()
            for pushes in {False, size <= 1 + MOST_PEERS}:
                sent = replace(choice, pushes=pushes)
                found = late.overlap.matmul_reduce_scatter(*parts[rank], shared, sent, debug=True)
                assert torch.equal(found, total.chunk(size)[rank])
            for num_parts in (1, 2, 4):
                cut = replace(choice, parts=num_parts)
                found = late.overlap.matmul_all_reduce(*parts[rank], shared, cut, debug=True)
                assert torch.equal(found, total)


def share_the_last_wave(comm: NcclCommunicator) -> None:
    """Programs that the last wave leaves idle help with its tiles, one or several each, call after
    call in the same event words.
    """
    size, rank = comm.mesh.num_ranks, comm.rank
    sms = num_sms(torch.cuda.current_device())
    shared = workspace_of(comm, "tp", 2**28)
    rows, helped = 1024 * size, []
    for wave, (tile_n, stages) in cross((1, sms * 6 // 11, sms * 9 // 11), STAGES.items()):
        columns = -(-(sms + wave) * 128 // rows) * tile_n
        last = rows // 128 * (columns // tile_n) % sms
        turns = -(-last // (sms - last))
        split = DepthSplit(given=13, fewer=min(3, 12 // turns))
        tiles = Tiles(tile_n=tile_n, stages=stages)
        choice = MatmulChoice(means="tiles", us=0.0, tiles=tiles, split=split)
        extents = Extents(rows=rows, columns=columns, depth=1024, num_ranks=size)
        plan = plan_sending(extents, tiles, sms, split=split, shares=True)
        helped.append(turns if plan.num_helpers else 0)
        drawn = [operands(r, rows, columns, 1024, wave) for r in range(size)]
        signs = [(a.sign(), b.sign()) for a, b in drawn]
        total = torch.stack([product(*part) for part in signs]).sum(0).bfloat16()
        wide, b = [5 * a[:1024] + 1 for a, _ in drawn], signs[rank][1]
        gathered = product(torch.cat(wide), b).bfloat16()
        for number in range(3):
            sent = replace(choice, pushes=number != 1 and size <= 1 + MOST_PEERS)
            found = late.overlap.matmul_reduce_scatter(*signs[rank], shared, sent, debug=True)
            assert torch.equal(found, total.chunk(size)[rank])
            found = late.overlap.matmul_all_reduce(*signs[rank], shared, choice, debug=True)
            assert torch.equal(found, total)
            found = late.overlap.all_gather_matmul(wide[rank], b, shared, choice, debug=True)
            assert torch.equal(found, gathered), "parts of more than 8 bits are added too"
    assert 1 in helped
    assert size > 2 or max(helped) > 2


def replay_captured(comm: NcclCommunicator) -> None:
    """A graph of three calls, which begins and ends at an even turn, between calls outside."""
    size, rank = comm.mesh.num_ranks, comm.rank
    shared = workspace_of(comm, "tp", 2**24)
    a, b = operands(rank, 128 * size, 256, 128, 0)
    own = a[:128].clone()

    def run() -> list[Tensor]:
        ways: dict[str, Any] = {"overlap": True, "workspace": shared}
        made = [all_gather_matmul(own, b, comm, **ways), matmul_all_reduce(a, b, comm, **ways)]
        return [*made, matmul_reduce_scatter(a, b, comm, **ways)]

    def expected(seed: int) -> list[Tensor]:
        parts = [operands(r, 128 * size, 256, 128, seed)[0] for r in range(size)]
        others = [operands(r, 128 * size, 256, 128, 0)[1] for r in range(size)]
        total = torch.stack([product(*pair) for pair in zip(parts, others, strict=True)]).sum(0)
        gathered = product(torch.cat([part[:128] for part in parts]), b)
        return [x.bfloat16() for x in (gathered, total, total.chunk(size)[rank])]

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        run()
        shared.settle()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            found = run()
            shared.settle()
    for seed in (1, 2, 3, 4):
        a.copy_(operands(rank, 128 * size, 256, 128, seed)[0])
        own.copy_(a[:128])
        if seed % 2:
            run()
        shared.settle()
        graph.replay()
        assert all(map(torch.equal, found, expected(seed)))


def exchange_by_peer_memory(comm: NcclCommunicator) -> None:
    """Collectives of choices "peer", call after call of different sizes."""
    size, rank = comm.mesh.num_ranks, comm.rank
    shared = workspace_of(comm, "tp", 2**24)
    for rows in (3, 64, 3, 128, 1500):
        parts = [operands(r, rows * size, 384, 64, rows) for r in range(size)]
        a, b = parts[rank]
        found = late.peer_collectives.all_gather(a, shared)
        assert torch.equal(found, torch.cat([part for part, _ in parts]))
        total = torch.stack([product(*part) for part in parts]).sum(0).bfloat16()
        found = late.peer_collectives.matmul_reduce_scatter(a, b, shared)
        assert torch.equal(found, total.chunk(size)[rank])
        assert torch.equal(late.peer_collectives.matmul_all_reduce(a, b, shared), total)
        fewer = late.peer_collectives.matmul_all_reduce(a[1:], b, shared)
        assert torch.equal(fewer, total[1:])


def name_a_missing_rank(comm: NcclCommunicator) -> None:
    """Rank 0 calls, the others do not: its debug build gives up and says what it waited for."""
    team = Team(comm=comm, axis="tp")
    shared = Workspace(team, 2**24)  # no later test's, whose words would be set
    if comm.rank == 0:
        own, b = operands(0, 128, 128, 64, 0)
        choice = MatmulChoice(means="tiles", us=0.0, tiles=Tiles(tile_n=128, stages=STAGES[128]))
        missing = "|".join(
            f"event {4096 * other}; expected rank {other} to" for other in shared.peers
        )
        with pytest.raises(HangError, match=f"rank 0 waited for ({missing})"):
            late.overlap.all_gather_matmul(own, b, shared, choice, debug=True)


def refuse_what_does_not_fit(comm: Communicator) -> None:
    a, b = operands(comm.rank, 1 + comm.mesh.num_ranks, 8, 8, 0)
    with pytest.raises(ProgramError, match="expected a multiple of the ranks"):
        matmul_reduce_scatter(a, b, comm)
    with pytest.raises(ProgramError, match="overlap forced"):
        all_gather_matmul(a, b, comm, overlap=True)


@pytest.mark.parametrize(("device", "num_ranks"), ON_EITHER)
@pytest.mark.parametrize(("rows", "columns"), [(64, 128), (256, 384), (3, 10)])
def test_chosen(rows, columns, device, num_ranks, run_ranks):
    run_ranks(f"{HERE}:compute_all", device, num_ranks, rows, columns, None)


@pytest.mark.parametrize(("device", "num_ranks"), ON_GPUS)
@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (256, 384), (256, 512), (1024, 4096)])
def test_overlapped(rows, columns, device, num_ranks, run_ranks):
    run_ranks(f"{HERE}:compute_all", device, num_ranks, rows, columns, True)


@pytest.mark.parametrize(
    "body",
    [
        "use_every_tile",
        "share_the_last_wave",
        "replay_captured",
        "exchange_by_peer_memory",
        "keep_bits_on_all_ranks",
        "name_a_missing_rank",
    ],
)
@pytest.mark.parametrize(("device", "num_ranks"), ON_GPUS)
def test_kernel(body, device, num_ranks, run_ranks):
    run_ranks(f"{HERE}:{body}", device, num_ranks)


@pytest.mark.parametrize(("device", "num_ranks"), ON_EITHER)
def test_refused(device, num_ranks, run_ranks):
    run_ranks(f"{HERE}:refuse_what_does_not_fit", device, num_ranks)
