"""Peer memory on CPUs: what ranks of one host write into each other, data and event counters.

In: the sizes a kernel needs, and a way to exchange small objects between ranks. Out: `Peers`, for
each rank of the team its peer arena and its counters as memory of this process. Every rank maps an
anonymous file of each other rank, which has no name in any file system: the kernel of the operating
system frees it with the last process that maps it, however that ends. `local_peers` gives the same
to ranks that live in one process.

Ordering. Counters have one lane for each source rank, so each word has a single writer and needs no
atomic add. A rank stores data, then adds to its lane of the receiver; the receiver reads the lane,
then the data. That order holds without fences on x86 alone, where stores become visible in program
order and loads are not reordered with loads: elsewhere `share_peers` refuses, and the host IR
communicates instead. Next on the walk: interpreter.py.
"""

import mmap
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distmega.errors import LaunchError
from distmega.hostir.comm.plain import Plain
from distmega.kernels.runtime.arena import ALIGNMENT_BYTES, round_up

Gather = Callable[[Plain], Sequence[object]]
"""Gathers one plain value (hostir/comm/plain.py) from each rank, in rank order, on all of them."""

COUNTER_BYTES = 4
NONCE_BYTES = ALIGNMENT_BYTES
"""Room at the start of a mapping for the nonce that tells it from any other file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSizes:
    """Memory that peers write on one rank: bytes of the arena, all copies, and counters, one a lane
    and event.
    """

    arena_bytes: int
    num_events: int
    num_lanes: int

    @property
    def counter_bytes(self) -> int:
        """Bytes of the counters, [events, lanes] int32, rounded up to a line."""
        return round_up(self.num_events * self.num_lanes * COUNTER_BYTES)

    @property
    def total_bytes(self) -> int:
        """Bytes of a mapping: nonce, counters, arena."""
        return NONCE_BYTES + self.counter_bytes + max(round_up(self.arena_bytes), ALIGNMENT_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Peers:
    """Peer arenas (uint8) and counters (int32, [events * lanes]) by rank; `lanes` is the lane of
    each source rank.
    """

    arenas: Mapping[int, Tensor]
    counters: Mapping[int, memoryview]
    lanes: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offer:
    """What a rank tells the others: where its file is, and the nonce at the start of it."""

    rank: int
    path: str
    nonce: bytes
    sizes: PeerSizes
    problem: str = ""

    def as_plain(self) -> Plain:
        """The offer as the exchange takes it: numbers, text, bytes, and a tuple of such."""
        sizes = self.sizes.arena_bytes, self.sizes.num_events, self.sizes.num_lanes
        return self.rank, self.path, self.nonce, sizes, self.problem


def _heard(given: object) -> _Offer:
    """The offer of which `given` made this. LaunchError for anything else."""
    match given:
        case (
            int(rank),
            str(path),
            bytes(nonce),
            (int(arena_bytes), int(num_events), int(num_lanes)),
            str(problem),
        ):
            sizes = PeerSizes(arena_bytes=arena_bytes, num_events=num_events, num_lanes=num_lanes)
            return _Offer(rank=rank, path=path, nonce=nonce, sizes=sizes, problem=problem)
        case _:
            raise LaunchError(
                f"an offer of shared memory of unknown form, {given!r}",
                expected="that of this version of distmega",
                remedy="run the same version on every rank",
            )


def peer_memory_problem() -> str:
    """Why ranks on this machine can't share memory in the way needed here; empty if they can."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return f"{platform.machine()} CPUs reorder stores"
    if not hasattr(os, "memfd_create"):
        return f"{platform.system()} has no anonymous shared files"
    return ""


def local_peers(ranks: Sequence[int], sizes: PeerSizes) -> Peers:
    """Peer memory of ranks that run in this process."""
    buffers = {rank: mmap.mmap(-1, sizes.total_bytes) for rank in ranks}
    return _peers(buffers, sizes)


def share_peers(rank: int, ranks: Sequence[int], sizes: PeerSizes, gather: Gather) -> Peers:
    """Peer memory of ranks that are processes of one host. Collective: all of `ranks` call it
    together.

    Raises LaunchError, on all ranks, if one of them can't create or reach the memory.
    """
    nonce = os.urandom(16)
    descriptor, problem = _create(sizes, nonce)
    try:
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        mine = _Offer(rank=rank, path=path, nonce=nonce, sizes=sizes, problem=problem)
        offered = [_heard(given) for given in gather(mine.as_plain())]
        assert [offer.rank for offer in offered] == list(ranks), f"exchange gave {offered}"
        _raise_first({offer.rank: offer.problem for offer in offered}, "create peer memory")
        buffers, problem = _map_all(offered, sizes)
        _raise_first(dict(zip(ranks, map(str, gather(problem)), strict=True)), "map peer memory")
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return _peers(buffers, sizes)


def _create(sizes: PeerSizes, nonce: bytes) -> tuple[int, str]:
    """A new anonymous file with the nonce in it, or -1 and what is wrong."""
    if problem := peer_memory_problem():
        return -1, problem
    descriptor = -1
    try:
        descriptor = os.memfd_create("distmega-peer")
        os.posix_fallocate(descriptor, 0, sizes.total_bytes)
        os.pwrite(descriptor, nonce, 0)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        return -1, f"{sizes.total_bytes} bytes of shared memory: {error.strerror}"
    return descriptor, ""


def _map_all(offers: Sequence[_Offer], sizes: PeerSizes) -> tuple[dict[int, mmap.mmap], str]:
    """Mappings by rank, and what is wrong if one is missing."""
    buffers: dict[int, mmap.mmap] = {}
    for offer in offers:
        if offer.sizes != sizes:
            return buffers, f"rank {offer.rank} wants {offer.sizes}, this rank {sizes}"
        try:
            with open(offer.path, "r+b") as file:
                buffer = mmap.mmap(file.fileno(), sizes.total_bytes)
        except (OSError, ValueError) as error:
            return buffers, f"memory of rank {offer.rank} is out of reach: {error}"
        if buffer[: len(offer.nonce)] != offer.nonce:
            return buffers, f"memory of rank {offer.rank} is out of reach: it is on another host"
        buffers[offer.rank] = buffer
    return buffers, ""


def _raise_first(problems: Mapping[int, str], what: str) -> None:
    for rank, problem in problems.items():
        if problem:
            raise LaunchError(
                f"rank {rank} can't {what}: {problem}",
                expected="processes of one user on one x86 Linux host, in one container",
                remedy="run these ranks on one host, or compile without peer memory",
            )


def _peers(buffers: Mapping[int, mmap.mmap], sizes: PeerSizes) -> Peers:
    assert len(buffers) == sizes.num_lanes, f"{len(buffers)} ranks, {sizes.num_lanes} lanes"
    start = NONCE_BYTES + sizes.counter_bytes
    return Peers(
        arenas={
            rank: torch.frombuffer(buffer, dtype=torch.uint8, offset=start)
            for rank, buffer in buffers.items()
        },
        counters={
            rank: memoryview(buffer)[NONCE_BYTES:start].cast("i")
            for rank, buffer in buffers.items()
        },
        lanes={rank: lane for lane, rank in enumerate(buffers)},
    )
