"""Matmuls with a collective, and blocks of a transformer, beside torch's ways, alternating in one
run: `python -m bench.overlap --ranks 2`, on as many Hopper GPUs of one host.

Writes bench/results/overlap-<device>-tp<N>.json, a record a case (records.py). Times are the
slowest rank's; floor_us is the longer of cuBLAS's matmul and NCCL's collective alone, for a block
torch's time without collectives. M, K and N of a case are those of all ranks together. How it runs
is the library's own choice.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from bench.blocks import (
    OURS,
    TORCH,
    Shape,
    alone,
    fused,
    mlp_block,
    transformer_block,
)
from bench.options import at_least, read_options, seconds
from bench.ranks import median_us, run_on_ranks
from bench.records import Record, add_book_options, open_book
from distmega.hostir.comm.nccl import NcclCommunicator
from distmega.hostir.comm.torch_names import all_gather_single, reduce_scatter_single
from distmega.kernels import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from distmega.kernels.gemm.machine import measured
from distmega.kernels.gemm.workspace import workspace_of
from distmega.kernels.runtime.streams.copy_engines import CopyCommunicator
from distmega.sharding.overlap.pairs import CHEAPEST

WIDE, LONG, NARROW = (8192, 28672), (4096, 14336), (8192, 10240)
"""K and N of a gathering matmul, N and K of a sending one."""
SHAPES = [(4096, *NARROW), (16384, *LONG), (8192, *WIDE), (1024, *WIDE), (128, *WIDE),
          (256, *WIDE), (512, *WIDE), (1024, *NARROW), (2048, *WIDE), (4096, *WIDE), (128, *LONG),
          (512, *LONG), (1024, *LONG), (16384, *WIDE)]  # fmt: skip
"""Those that say most come first."""
BLOCK_ROWS = (4096, 1024, 8192)
Call = Callable[[], object]
SEQUENTIAL, FUSED = "cuBLAS then NCCL", "torch fused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The variants of one operation by name, "ours" among them; what its floor is made of."""

    name: str
    calls: dict[str, Call]
    matmul: Call
    collective: Call


class Operands:
    """Random bf16 tensors of one rank, and the cases over them."""

    def __init__(self, comm: NcclCommunicator, rows: int, hidden: int, inner: int) -> None:
        self.comm, self.group, self.fused = comm, comm.group("tp")[0], fused(comm)
        self.rows, self.hidden, self.inner = rows, hidden, inner
        ranks = comm.mesh.num_ranks
        self.own = symm_mem.empty(rows // ranks, hidden, dtype=torch.bfloat16, device="cuda")
        symm_mem.rendezvous(self.own, self.group.group_name)
        self.own.normal_()
        self.full = random(rows, hidden)
        self.up, self.down = random(inner // ranks, hidden), random(hidden, inner // ranks)
        self.wide = random(rows, inner // ranks)

    def gather(self) -> Tensor:
        all_gather_single(self.full, self.own, group=self.group)
        return self.full

    def scatter(self, x: Tensor) -> Tensor:
        out = torch.empty_like(self.own)
        reduce_scatter_single(out, x, group=self.group)
        return out

    def cases(self) -> list[Case]:
        """A gathering matmul, two sending ones."""
        forward = f"M={self.rows} K={self.hidden} N={self.inner}"
        back = f"M={self.rows} K={self.inner} N={self.hidden}"
        partial = torch.empty_like(self.full)
        gathering = {
            "ours": lambda: all_gather_matmul(self.own, self.up, self.comm),
            SEQUENTIAL: lambda: self.gather() @ self.up.T,
            FUSED: lambda: self.fused.gathered(self.own, self.up),
        }
        scattering = {
            "ours": lambda: matmul_reduce_scatter(self.wide, self.down, self.comm),
            SEQUENTIAL: lambda: self.scatter(self.wide @ self.down.T),
            FUSED: lambda: self.fused.scattered(self.wide, self.down),
        }
        reducing = {
            "ours": lambda: matmul_all_reduce(self.wide, self.down, self.comm, borrow=True),
            SEQUENTIAL: lambda: dist.all_reduce(self.wide @ self.down.T, group=self.group),
        }

        def last() -> Tensor:
            return self.wide @ self.down.T

        return [
            Case(name=f"ag_gemm {forward}", calls=gathering, collective=self.gather,
                 matmul=lambda: self.full @ self.up.T),
            Case(name=f"gemm_rs {back}", calls=scattering, matmul=last,
                 collective=lambda: self.scatter(partial)),
            Case(name=f"gemm_ar {back}", calls=reducing, matmul=last,
                 collective=lambda: dist.all_reduce(partial, group=self.group)),
        ]  # fmt: skip


def block_cases(comm: NcclCommunicator, rows: int) -> list[Case]:
    """The MLP and a transformer block as the host program runs them, and in plain torch; the floor
    is torch without collectives.
    """
    cases = []
    for make in (mlp_block, transformer_block):
        shape = Shape(rows=rows, hidden=WIDE[0], inner=WIDE[1])
        block = make(comm, shape, measured(comm), ways={OURS: CHEAPEST})
        calls = {"ours": block.calls[OURS], SEQUENTIAL: block.calls[TORCH]}
        calls[FUSED] = partial(block.in_torch, fused(comm))
        least = partial(block.in_torch, alone(comm))
        cases.append(Case(name=block.name, calls=calls, matmul=least, collective=least))
    return cases


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def measure(case: Case, num_ranks: int) -> Record:
    """One case; the floor in alternation with the rest."""
    times = median_us(case.calls | {"matmul": case.matmul, "collective": case.collective})
    matmul, collective = times.pop("matmul"), times.pop("collective")
    ours = times.pop("ours")
    return Record(
        case=case.name,
        device=torch.cuda.get_device_name(),
        num_gpus=num_ranks,
        ours_us=round(ours, 1),
        peers={name: round(us, 1) for name, us in times.items()},
        floor_us=round(max(matmul, collective), 1),
    )


def run_rank(given: NcclCommunicator, options: argparse.Namespace) -> None:
    """What each process does; rank 0 prints and writes."""
    end = time.monotonic() + options.seconds
    torch.set_default_device("cuda")
    comm = CopyCommunicator(given.mesh, given.rank)
    shapes = [shape for shape in SHAPES if shape[0] in options.rows or not options.rows]
    blocks = [rows for rows in BLOCK_ROWS if rows in options.rows or not options.rows]
    workspace_of(comm, "tp", max((4 * rows * hidden for rows, hidden, _ in shapes), default=1))
    for shape in shapes:
        _record(comm, partial(_shape_cases, comm, shape), options, end)
    for rows in blocks:
        _record(comm, partial(block_cases, comm, rows), options, end)


def _shape_cases(comm: NcclCommunicator, shape: tuple[int, int, int]) -> list[Case]:
    return Operands(comm, *shape).cases()


def _record(
    comm: NcclCommunicator, make: Callable[[], list[Case]], options: argparse.Namespace, end: float
) -> None:
    """Measures and writes some cases, unless the time is over on any rank; frees their memory."""
    if max(comm.all_gather_object(time.monotonic() > end)):
        return
    for case in make():
        record = measure(case, options.ranks)
        if comm.rank == 0:
            options.book.write("overlap", record, by_ranks=True)
            print(summary(record), flush=True)
    del case
    torch.cuda.empty_cache()


def summary(record: Record) -> str:
    """A line: times, and ratios to the floor and to the best peer."""
    assert record.floor_us is not None, "measure() gives one"
    best = min(record.peers.values())
    peers = ", ".join(f"{name} {us:.0f}" for name, us in record.peers.items())
    ratios = f"{record.ours_us / record.floor_us:.3f} of floor, {best / record.ours_us:.3f}x"
    return f"{record.case}: {record.ours_us:.0f} us ({peers}, floor {record.floor_us:.0f}) {ratios}"


def main() -> None:
    """Starts the ranks and measures all cases."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--ranks", type=at_least(2), default=2)
    parser.add_argument("--rows", type=at_least(1), nargs="+", default=[], help="only these M")
    parser.add_argument("--seconds", type=seconds, default=120.0, help="after which no case starts")
    add_book_options(parser)
    options = read_options(parser, lambda given: given.ranks)
    options.book = open_book(options.results, options.commit)
    run_on_ranks(run_rank, options.ranks, options)


if __name__ == "__main__":
    main()
