"""All-reduce of a small bf16 tensor over GPUs that share memory: one kernel, words that carry
flags.

In: x on every rank. Out: the sum on every rank, taken in fp32 in rank order and so bitwise equal.
As in the persistent kernels a rank pushes its words, two bf16 and a flag each, and polls its own
memory, so that no fence and no barrier is needed. One shot pushes all of x to every rank; two shots
push each rank its part, and then the sum of the part to every rank. The flag is the number of the
launch, which each program counts in device memory: a launch can be captured in a CUDA graph.

Buffers have two copies, for launches of odd and even number. Whoever pushes in launch n has ended
launch n - 1, for which every peer's same program had pushed, and that it did after its launch
n - 2, in which it read what the copy held. Next on the walk: one_row/kernel.py.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from distmega.errors import RequestError
from distmega.kernels.hopper.ptx.device import bf16_pair, flagged, high_half, low_half
from distmega.kernels.hopper.ptx.shapes import PER_THREAD, THREADS, TWOS
from distmega.kernels.hopper.ptx.spins import spin_ranks
from distmega.kernels.hopper.pushed_memory import FlaggedMemory
from distmega.kernels.runtime.ahead import launch
from distmega.kernels.runtime.symmetric import Team

CHUNK_WORDS = gl.constexpr(512)
"""Words that a program pushes or sums at a time: two a thread."""


@gluon.jit
def push_words(peers, rank: gl.constexpr, at, pair, flag, wanted):
    """Flagged words into the memory of a rank, [512] in TWOS."""
    gl.store(peers[rank] + at, flagged(pair, flag), mask=wanted)


@gluon.jit
def sum_words(report, mine, at, stride, flag, wanted, RANKS: gl.constexpr):
    """Words `at` and at + 1 of all ranks' parts, `stride` words apart, summed: two a thread."""
    parts = spin_ranks(report, mine + at, stride.to(gl.int64) * 8, flag, wanted, RANKS)
    low0 = low_half(parts[0])
    high0 = high_half(parts[0])
    low1 = low_half(parts[1])
    high1 = high_half(parts[1])
    for rank in gl.static_range(1, RANKS):
        low0 += low_half(parts[2 * rank])
        high0 += high_half(parts[2 * rank])
        low1 += low_half(parts[2 * rank + 1])
        high1 += high_half(parts[2 * rank + 1])
    return bf16_pair(low0, high0), bf16_pair(low1, high1)


@gluon.jit
def in_twos(first, second):
    """[512] in TWOS from what each thread has for its two words."""
    return gl.convert_layout(gl.reshape(gl.join(first, second), [CHUNK_WORDS]), TWOS)


@gluon.jit(do_not_specialize=["team_rank"])
def reduce_one_shot(
    x,
    out,
    report,
    mine,
    peers,
    epochs,
    team_rank,
    num_words,
    RANKS: gl.constexpr,
    CHUNKS: gl.constexpr,
):
    """x, out: int32 [num_words], pairs of bf16, read and written, local. report: see ptx/spins.py,
    right before mine. mine: int64 [2, RANKS, num_words], zeroed before the first launch, written by
    all ranks; peers: `mine` of all ranks, team_rank being this one. epochs: int32, one a program,
    of launches, zeroed when allocated and written by that program alone. CHUNKS: of CHUNK_WORDS
    words, that a program adds up.
    """
    pid = gl.program_id(0)
    flag = gl.load(epochs + pid) + 1
    copy = (flag & 1) * RANKS * num_words
    words = gl.arange(0, CHUNK_WORDS, layout=TWOS)
    twos = 2 * gl.arange(0, THREADS, layout=PER_THREAD)
    for chunk in gl.static_range(CHUNKS):
        first = (pid * CHUNKS + chunk) * CHUNK_WORDS
        wanted = first + words < num_words
        pair = gl.load(x + first + words, mask=wanted, other=0)
        for rank in gl.static_range(RANKS):
            to = copy + team_rank * num_words + first
            push_words(peers, rank, to + words, pair, flag, wanted)
    for chunk in gl.static_range(CHUNKS):
        first = (pid * CHUNKS + chunk) * CHUNK_WORDS
        wanted = first + twos < num_words
        even, odd = sum_words(report, mine, copy + first + twos, num_words, flag, wanted, RANKS)
        gl.store(out + first + words, in_twos(even, odd), mask=first + words < num_words)
    gl.store(epochs + pid, flag)


@gluon.jit(do_not_specialize=["team_rank"])
def reduce_two_shot(
    x, out, report, mine, peers, epochs, team_rank, size, RANKS: gl.constexpr, CHUNKS: gl.constexpr
):
    """As reduce_one_shot, of RANKS parts of `size` words; mine: int64 [2, 2, RANKS, size], what is
    to be added up and sums.
    """
    pid = gl.program_id(0)
    flag = gl.load(epochs + pid) + 1
    parts = (flag & 1) * 2 * RANKS * size
    sums = parts + RANKS * size
    words = gl.arange(0, CHUNK_WORDS, layout=TWOS)
    twos = 2 * gl.arange(0, THREADS, layout=PER_THREAD)
    for chunk in gl.static_range(CHUNKS):
        first = (pid * CHUNKS + chunk) * CHUNK_WORDS
        wanted = first + words < size
        for rank in gl.static_range(RANKS):
            pair = gl.load(x + rank * size + first + words, mask=wanted, other=0)
            to = parts + team_rank * size + first
            push_words(peers, rank, to + words, pair, flag, wanted)
    for chunk in gl.static_range(CHUNKS):
        first = (pid * CHUNKS + chunk) * CHUNK_WORDS
        wanted = first + twos < size
        even, odd = sum_words(report, mine, parts + first + twos, size, flag, wanted, RANKS)
        pair = in_twos(even, odd)
        for rank in gl.static_range(RANKS):
            to = sums + team_rank * size + first
            push_words(peers, rank, to + words, pair, flag, first + words < size)
    for chunk in gl.static_range(CHUNKS):
        first = (pid * CHUNKS + chunk) * CHUNK_WORDS
        wanted = first + twos < size
        at = mine + sums + first + twos
        found = spin_ranks(report, at, size.to(gl.int64) * 8, flag, wanted, RANKS)
        for rank in gl.static_range(RANKS):
            pair = in_twos(found[2 * rank], found[2 * rank + 1])
            gl.store(out + rank * size + first + words, pair, mask=first + words < size)
    gl.store(epochs + pid, flag)


class PushedAllReduce:
    """An all-reduce of bf16 tensors of one size, in rank order, over a team that shares memory."""

    def __init__(
        self,
        team: Team,
        num_elements: int,
        num_shots: int = 1,
        chunks: int = 1,
        timeout_s: float = 60.0,
    ) -> None:
        """Collective. chunks: pieces of 512 words that one program does. timeout_s: bound on a wait
        for a peer.

        RequestError for a size that does not divide into words of every rank.
        """
        num_ranks = team.size
        if num_elements % (8 * num_ranks):
            raise RequestError(
                f"an all-reduce of {num_elements} elements over {num_ranks} ranks",
                expected=f"a multiple of {8 * num_ranks}",
                remedy="pad the tensor, or reduce over NCCL",
            )
        num_words, self._num_ranks = num_elements // 2, num_ranks
        self._num_shots, self._chunks = num_shots, chunks
        self._share = num_words // (num_ranks if num_shots == 2 else 1)
        self._num_programs = -(-self._share // (CHUNK_WORDS.value * chunks))
        held = num_words * (num_ranks if num_shots == 1 else 2)
        self._memory = FlaggedMemory(team, held, self._num_programs, "all-reduce", timeout_s)

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """out = the sum of all ranks' x, bf16 [num_elements]; every rank must call. HangError if a
        peer did not push in an earlier call, whose sum is void.
        """
        self._memory.check(self._share)
        kernel = reduce_one_shot if self._num_shots == 1 else reduce_two_shot
        launch(
            kernel,
            (self._num_programs,),
            x.view(torch.int32),
            out.view(torch.int32),
            *self._memory.arguments,
            self._share,
            RANKS=self._num_ranks,
            CHUNKS=self._chunks,
            num_warps=8,
        )
