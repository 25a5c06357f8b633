"""Teams of two to four ranks on one GPU, each with streams and a share of the SMs of its own: calls
of random kinds and extents one after another, exact on small integers. See test_gemm_teams.py.

The kernels wait for each other, so those of all ranks run at one time, and each stream needs a
queue of its own on the device: CUDA_DEVICE_MAX_CONNECTIONS must be 32 before CUDA starts.
"""

import itertools
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch
from torch import Tensor

from distmega.hostir.comm.collectives import combine_parts
from distmega.kernels.gemm import overlap, peer_collectives, workspace
from distmega.kernels.gemm.device import start
from distmega.kernels.gemm.pushed import PushedCollectives
from distmega.kernels.gemm.times.matmul_ways import STAGES, MatmulChoice
from distmega.kernels.gemm.times.tile_times import DepthSplit, Tiles
from distmega.kernels.hopper import all_gather, all_reduce, argmax
from distmega.kernels.runtime.streams.stream_ops import (
    copy_bytes,
    copy_columns,
    wait_word,
    write_word,
    write_words,
)
from tests.multigpu.test_gemm import product

SMS = 24
"""Of a rank: four leave some to copies."""
SYMMETRIC_BYTES = 2**25
NUM_CALLS = 40


@dataclass(frozen=True, kw_only=True)
class Memory:
    """As SymmetricMemory, of which one GPU holds all ranks' parts."""

    team_rank: int
    parts: list[Tensor]
    backend: str = "CUDA"

    @property
    def num_ranks(self) -> int:
        return len(self.parts)

    @property
    def local(self) -> Tensor:
        return self.parts[self.team_rank]

    @property
    def pointers(self) -> list[int]:
        return [part.data_ptr() for part in self.parts]

    def tensor(
        self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset_bytes: int = 0
    ) -> Tensor:
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        return self.parts[rank][offset_bytes:][:num_bytes].view(dtype).view(*shape)


def open_team(num_ranks: int) -> list[workspace.Workspace]:
    parts: list[Tensor] = []

    def open_memory(rank: int, num_bytes: int) -> Memory:
        if not parts:
            parts.extend(
                torch.zeros(num_bytes, dtype=torch.uint8, device="cuda") for _ in range(num_ranks)
            )
        return Memory(team_rank=rank, parts=parts)

    mesh = SimpleNamespace(size=lambda axis: num_ranks)
    teams = [
        SimpleNamespace(
            comm=SimpleNamespace(mesh=mesh, rank=rank, group=lambda axis: (None, ())),
            axis="tp", size=num_ranks, team_rank=rank, open=partial(open_memory, rank),
        )
        for rank in range(num_ranks)
    ]  # fmt: skip
    return [workspace.Workspace(team, SYMMETRIC_BYTES) for team in teams]  # type: ignore[arg-type]


def open_pushed(num_ranks: int) -> list[PushedCollectives]:
    """Each rank's memory of one opening is all ranks'. It is opened and kernels are loaded here,
    before others wait for what these push.
    """
    opened: list[list[Tensor]] = []
    mesh = SimpleNamespace(size=lambda axis: num_ranks)

    def member(rank: int) -> PushedCollectives:
        numbers = itertools.count()

        def open_memory(num_bytes: int) -> Memory:
            number = next(numbers)
            if number == len(opened):
                zeros = partial(torch.zeros, num_bytes, dtype=torch.uint8, device="cuda")
                opened.append([zeros() for _ in range(num_ranks)])
            return Memory(team_rank=rank, parts=opened[number])

        team = SimpleNamespace(
            size=num_ranks, team_rank=rank, axis="tp", open=open_memory,
            comm=SimpleNamespace(mesh=mesh, rank=rank),
        )  # fmt: skip
        return PushedCollectives(team)  # type: ignore[arg-type]

    team = [member(rank) for rank in range(num_ranks)]
    with (
        patch.object(all_gather, "gather_kernel", MagicMock()),
        patch.object(all_reduce, "reduce_one_shot", MagicMock()),
        patch.object(argmax, "argmax_kernel", MagicMock()),
    ):
        call_each(team)  # opens memory, which waits for all kernels that run
    call_each(team)
    return team


def call_each(team: list[PushedCollectives]) -> None:
    """Each kind of call once, by all ranks at one time."""
    streams = [torch.cuda.Stream() for _ in team]
    for kind in PUSHED:
        calls = [draw_pushed(random.Random(0), team, kind)[1] for _ in team]
        torch.cuda.synchronize()
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                calls[rank](rank)
        torch.cuda.synchronize()


def integers(*shape: int) -> Tensor:
    """-1 to 1: bf16 holds the sums of a rank's products exactly."""
    return torch.randint(-1, 2, shape, device="cuda").bfloat16()


Call = Callable[[int], Tensor]
Drawn = tuple[str, Call, list[Tensor]]
"""A call's name, what a rank does, and what each must find."""
PUSHED = "pushed gather", "pushed sum", "pushed argmax"


def draw_pushed(numbers: random.Random, team: list[PushedCollectives], kind: str) -> Drawn:
    """What a program's own collectives become. Sums have one size, for each opens memory."""
    size, rows, columns = len(team), numbers.randint(1, 40), 8 * numbers.randint(1, 40)
    name = f"{kind} of {rows} x {columns} by {size} ranks"
    if kind == "pushed gather":
        dim = numbers.randint(0, 1)
        x = integers(size, rows, columns)
        whole = torch.cat(tuple(x), dim)

        def gather(rank: int) -> Tensor:
            out = torch.empty_like(whole)
            assert team[rank].gather(x[rank], out, dim)
            return out

        return name, gather, [whole] * size
    if kind == "pushed sum":
        x = integers(size, 3, 1024)

        def add(rank: int) -> Tensor:
            assert team[rank].takes_sum(x[rank])
            out = torch.empty_like(x[rank])
            team[rank].sum(x[rank], out)
            return out

        return name, add, [x.sum(0)] * size
    values, indices = integers(size, rows), torch.argsort(torch.rand(size, rows, device="cuda"), 0)
    expected = torch.stack(
        [each.long() for each in combine_parts(list(zip(values, indices, strict=True)), "argmax")]
    )

    def find_largest(rank: int) -> Tensor:
        found = team[rank].argmax(values[rank], indices[rank])
        assert found is not None
        return torch.stack([each.long() for each in found])

    return name, find_largest, [expected] * size


def draw_call(
    numbers: random.Random,
    team: list[workspace.Workspace],
    pushed: list[PushedCollectives],
    tile_n: int,
) -> Drawn:
    size = len(team)
    kind = numbers.choice(
        ("gather", "final gather", "peer gather", "scatter", "push", "all", *PUSHED)
    )
    if kind in PUSHED:
        return draw_pushed(numbers, pushed, kind)
    rows, columns = 128 * numbers.randint(1, 6), 128 * numbers.randint(1, 6)
    depth = 64 * numbers.randint(16, 24)
    group = numbers.choice(
        [n for n in range(1, 9) if kind.endswith("gather") or rows // 128 % n == 0]
    )
    tiles = Tiles(tile_n=tile_n, stages=STAGES[tile_n], group=group)
    split = DepthSplit(given=numbers.choice((0, 5)))
    choice = MatmulChoice(
        means="tiles", us=0.0, tiles=tiles, split=split, parts=numbers.choice((1, 2, 4)),
        pushes=kind == "push",
    )  # fmt: skip
    b = [integers(columns, depth) for _ in team]
    name = f"{kind} of {rows} x {columns} x {depth} by {size} ranks, {choice}"
    if kind.endswith("gather"):
        own = [integers(rows, depth) for _ in team]
        whole = torch.cat(own)
        if kind == "peer gather":
            return name, lambda r: peer_collectives.all_gather(own[r], team[r]), [whole] * size
        final = kind == "final gather"

        def gather(rank: int) -> Tensor:
            # final rows are dropped, so that others get their memory; the rest are overwritten
            x = own[rank].clone()
            found = overlap.all_gather_matmul(x, b[rank], team[rank], choice, is_final=final)
            return found if final else (x.fill_(float("nan")), found)[1]

        return name, gather, [product(whole, w).bfloat16() for w in b]
    a = [integers(rows * size, depth) for _ in team]
    total = torch.stack([product(*pair) for pair in zip(a, b, strict=True)]).sum(0).bfloat16()
    if kind == "all":
        if size > 2:
            choice = replace(choice, split=DepthSplit(given=0))
        return (
            name,
            lambda r: overlap.matmul_all_reduce(a[r], b[r], team[r], choice),
            [total] * size,
        )
    return (
        name,
        lambda r: overlap.matmul_reduce_scatter(a[r], b[r], team[r], choice),
        list(total.chunk(size)),
    )


def warm_up(stream: torch.cuda.Stream) -> None:
    """Each kind of work once: what CUDA loads for it may wait for kernels that run, and so for
    those that wait for the work.
    """
    memory, place = torch.zeros(2**20, dtype=torch.uint8, device="cuda"), 2**16
    at = memory.data_ptr()
    with torch.cuda.stream(stream):
        for x in (integers(64, 64), torch.zeros(8, dtype=torch.int32, device="cuda")):
            x.clone().zero_()
        integers(64, 64).fill_(float("nan"))
        copy_bytes(at + place, at, 2**10, stream)
        copy_columns(at + place, at, 256, 1024, 64, stream)
        write_word(at, 1, stream)
        wait_word(at, 1, stream)
        write_words([at, at + 4], 0, stream)
    torch.cuda.synchronize()


def run_team(num_ranks: int, tile_n: int) -> None:
    numbers = random.Random(num_ranks)
    torch.manual_seed(num_ranks)
    team = open_team(num_ranks)
    streams = [torch.cuda.Stream() for _ in team]
    for stream in streams:
        warm_up(stream)
    pushed = open_pushed(num_ranks)
    drawn = [draw_call(numbers, team, pushed, tile_n) for _ in range(NUM_CALLS)]
    torch.cuda.synchronize()
    found: list[list[Tensor]] = []
    for name, call, _ in drawn:
        made = []
        for rank in numbers.sample(range(num_ranks), num_ranks):
            with torch.cuda.stream(streams[rank]):
                made.append((rank, call(rank).clone()))
        found.append([x for _, x in sorted(made, key=lambda each: each[0])])
        print("queued", name, flush=True)
    for stream, member in zip(streams, team, strict=True):
        with torch.cuda.stream(stream):
            member.settle()
    torch.cuda.synchronize()
    for (name, _, expected), made in zip(drawn, found, strict=True):
        for rank, (want, got) in enumerate(zip(expected, made, strict=True)):
            assert torch.equal(want, got), f"rank {rank}: {name}"
    print(
        f"{num_ranks} ranks, tiles of {tile_n} columns: {NUM_CALLS} calls as expected", flush=True
    )


if __name__ == "__main__":
    with (
        patch.object(start, "num_sms", lambda index: SMS),
        patch.object(overlap, "num_sms", lambda index: SMS),
    ):
        run_team(*map(int, sys.argv[1:]))
