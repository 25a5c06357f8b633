"""Time of an all-reduce of bf16 between GPUs: pushed words, NCCL and torch's symmetric memory.

    python -m bench.collectives [--ranks 2] [--rounds 20] [--kb 8 64 1024]

Each variant is captured in a CUDA graph of several calls, since that is how a decode step would run
it; graphs are replayed in turns. The floor is what a rank must send at the rate of a copy between
two GPUs. Writes bench/results/collectives-<device>-tp<N>.json.
"""

import argparse
import statistics

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from bench.options import at_least, read_options
from bench.ranks import run_on_ranks
from bench.records import Book, Record, add_book_options, open_book
from bench.timing import Call, elapsed_us
from distmega.hostir.comm.nccl import NcclCommunicator
from distmega.kernels.hopper.all_reduce import PushedAllReduce
from distmega.kernels.runtime.symmetric import Team

SIZES_KB = (8, 16, 32, 64, 128, 256, 512, 1024)
CALLS = 20
"""All-reduces in a graph."""
VARIANTS = {"one shot": (1, 1), "one shot, 2 chunks": (1, 2), "two shots": (2, 1)}
"""Ours: shots, and chunks of 512 words a program; the fastest is reported, all are printed."""


class Captured:
    """CALLS calls as one CUDA graph; keeps the memory that they use."""

    def __init__(self, call: Call) -> None:
        call()
        torch.cuda.synchronize()
        self._call, self._graph = call, torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for _ in range(CALLS):
                call()

    def __call__(self) -> None:
        self._graph.replay()


def our_calls(comm: NcclCommunicator, num_elements: int) -> dict[str, Call]:
    """Each variant, checked against NCCL first."""
    team = Team(comm=comm, axis="tp")
    x = torch.randn(num_elements, device="cuda").to(torch.bfloat16)
    expected = x.float()
    dist.all_reduce(expected)
    found = {}
    for name, (num_shots, chunks) in VARIANTS.items():
        reduce, out = PushedAllReduce(team, num_elements, num_shots, chunks), torch.empty_like(x)
        reduce(x, out)
        torch.testing.assert_close(out.float(), expected, rtol=1.6e-2, atol=1e-2)
        found[name] = Captured(lambda reduce=reduce, out=out: reduce(x, out))
    return found


def peer_calls(num_elements: int) -> dict[str, Call]:
    """NCCL, and torch's kernels on symmetric memory; these work in place."""
    x = torch.zeros(num_elements, device="cuda", dtype=torch.bfloat16)
    group = dist.group.WORLD
    assert group is not None, "bench/ranks.py opens a group"
    shared = symm_mem.empty(num_elements, dtype=torch.bfloat16, device=x.device)
    symm_mem.rendezvous(shared, group.group_name)
    shared.zero_()
    ops = torch.ops.symm_mem
    return {
        "NCCL": Captured(lambda: dist.all_reduce(x)),
        "torch one-shot": Captured(
            lambda: ops.one_shot_all_reduce(shared, "sum", group.group_name)
        ),
        "torch two-shot": Captured(
            lambda: ops.two_shot_all_reduce_(shared, "sum", group.group_name)
        ),
    }


def link_bytes_per_us(comm: NcclCommunicator) -> float:
    """Rate of a copy of 64 MiB into the next rank's memory, all ranks at once."""
    memory = Team(comm=comm, axis="tp").open(1 << 26)
    to = memory.tensor((memory.team_rank + 1) % memory.num_ranks, (1 << 26,), torch.uint8)
    x = torch.zeros_like(memory.local)
    times = []
    for _ in range(10):
        comm.barrier()
        times.append(elapsed_us(lambda: to.copy_(x), 1))
    comm.barrier()
    return (1 << 26) / statistics.median(times)


def measure(comm: NcclCommunicator, rounds: int, sizes_kb: tuple[int, ...], book: Book) -> None:
    """All sizes; the first rank writes the records."""
    rate, size = link_bytes_per_us(comm), comm.mesh.num_ranks
    for kb in sizes_kb:
        ours, peers = our_calls(comm, kb * 512), peer_calls(kb * 512)
        runs = {**ours, **peers}
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(rounds):
            for name, run in runs.items():
                comm.barrier()
                times[name].append(elapsed_us(run, CALLS))
        medians = {name: round(statistics.median(found), 2) for name, found in times.items()}
        record = Record(
            case=f"all-reduce {kb} KB",
            device=torch.cuda.get_device_name(),
            num_gpus=size,
            ours_us=min(medians[name] for name in ours),
            peers={name: medians[name] for name in peers},
            floor_us=round(2 * (size - 1) / size * kb * 1024 / rate, 2),
        )
        if comm.rank == 0:
            book.write("collectives", record, by_ranks=True)
            print(record, medians, flush=True)


def main() -> None:
    """Measures on `--ranks` GPUs of this machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=at_least(2), default=2)
    parser.add_argument("--rounds", type=at_least(1), default=20)
    parser.add_argument("--kb", type=at_least(1), nargs="+", default=SIZES_KB)
    add_book_options(parser)
    given = read_options(parser, lambda given: given.ranks)
    book = open_book(given.results, given.commit)
    run_on_ranks(measure, given.ranks, given.rounds, tuple(given.kb), book)


if __name__ == "__main__":
    main()
