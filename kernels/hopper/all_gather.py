"""All-gather over GPUs that share memory: one kernel, for tensors that NCCL takes long to start.

In: a tensor on every rank, of one shape. Out: all of them side by side along a dim, on every rank.
A program has a block of the tensor: it pushes it into every peer's memory, tells them, waits for
theirs, and stores all of them where they belong, so that no other kernel need put them in order.
Each block counts its launches in device memory: a launch can be captured, and tensors of all sizes
up to a capacity share one memory. For a rank that does not come it waits without end.

Buffers have two copies, for launches of odd and even number, and programs wait in the order of
blocks: see all_reduce.py and sum_norm.py. Next on the walk: all_reduce.py.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import math

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from distmega.kernels.hopper.ptx.arrivals import await_ranks, tell_ranks
from distmega.kernels.hopper.pushed_memory import ArrivalMemory
from distmega.kernels.runtime.ahead import launch
from distmega.kernels.runtime.symmetric import Team

WORD_BYTES = 8
BLOCK = gl.constexpr(2048)
"""Words of a program."""
PAIRS = gl.constexpr(gl.BlockedLayout([2], [32], [8], [0]))
"""[2048]: 16 bytes an access."""


@gluon.jit(do_not_specialize=["team_rank"])
def gather_kernel(x, out, mine, peers, arrived, words, epochs, team_rank, num_words, length,
                  capacity, ranks: gl.constexpr):  # fmt: skip
    """x: int64 [num_words], read; out: int64 [num_words / length, ranks, length], written; both
    local. mine: int64 [2, ranks, capacity], written by peers; peers: `mine` of all ranks, team_rank
    being this one. arrived: int32 [2, ranks, capacity / BLOCK], written by peers, the number of the
    launch whose block is there; words: `arrived` of all ranks. All of these are zeroed before the
    first launch. epochs: int32, one a program, of launches, zeroed when allocated and written by
    that program alone.
    """
    pid = gl.program_id(0)
    flag = gl.load(epochs + pid) + 1
    first = (flag & 1) * ranks
    num_blocks = capacity // BLOCK
    at = pid * BLOCK + gl.arange(0, BLOCK, layout=PAIRS)
    wanted = at < num_words
    own = gl.load(x + at, mask=wanted, other=0)
    for rank in gl.static_range(ranks):
        to = peers[rank] + (first + team_rank) * capacity + at
        gl.store(to, own, mask=wanted & (team_rank != rank))
    tell_ranks(words, (first + team_rank) * num_blocks + pid, flag, team_rank, ranks)
    into = out + at // length * (ranks * length) + at % length
    gl.store(into + team_rank * length, own, mask=wanted)
    await_ranks(arrived, first * num_blocks + pid, num_blocks, flag, team_rank, ranks)
    for rank in gl.static_range(ranks):
        there = wanted & (team_rank != rank)
        # past the L1, which may hold what lay there two launches ago
        found = gl.load(mine + (first + rank) * capacity + at, mask=there, other=0,
                        cache_modifier=".cg")  # fmt: skip
        gl.store(into + rank * length, found, mask=there)
    gl.store(epochs + pid, flag)


class PushedAllGather:
    """All-gathers of up to so many bytes a rank over a team that shares memory."""

    def __init__(self, team: Team, num_bytes: int) -> None:
        """Collective."""
        self._ranks = team.size
        num_blocks = -(-num_bytes // (WORD_BYTES * BLOCK.value))
        self._capacity = num_blocks * BLOCK.value
        self._memory = ArrivalMemory(team, num_blocks, BLOCK.value)

    def takes(self, x: Tensor, dim: int) -> bool:
        """Whether there is room, and parts that lie together are whole words: alike on all
        ranks.
        """
        together = x.element_size() * math.prod(x.shape[dim:])
        return together % WORD_BYTES == 0 and 0 < x.nbytes <= WORD_BYTES * self._capacity

    def __call__(self, x: Tensor, out: Tensor, dim: int) -> None:
        """out = all ranks' x along a dim, in rank order; every rank must call, with an x of this
        shape. Both contiguous, at multiples of 16 bytes; see takes.
        """
        num_words = x.nbytes // WORD_BYTES
        length = x.element_size() * math.prod(x.shape[dim:]) // WORD_BYTES
        launch(
            gather_kernel,
            (-(-num_words // BLOCK.value),),
            x.view(-1).view(torch.int64),
            out.view(-1).view(torch.int64),
            *self._memory.arguments,
            num_words,
            length,
            self._capacity,
            ranks=self._ranks,
            num_warps=8,
        )
