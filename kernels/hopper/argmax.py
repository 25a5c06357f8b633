"""The largest of each row over GPUs that share memory, and where it is: one kernel for what is a
gather and ten kernels otherwise.

In: each rank's largest value of a row and its index. Out: the largest of all ranks and its index,
the same on all; NaN is the largest, and of equal ones that of the lowest index counts. Words go as
in all_reduce.py, two a row and rank, 32 bits of each being the number of the launch. Used by
../gemm/pushed.py.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from distmega.kernels.hopper.ptx.device import as_float, bits_of, flagged, key_of
from distmega.kernels.hopper.ptx.spins import spin_ranks
from distmega.kernels.hopper.pushed_memory import FlaggedMemory
from distmega.kernels.runtime.ahead import launch
from distmega.kernels.runtime.symmetric import Team

ROWS = gl.constexpr(32)
"""Of a program: one a thread."""
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
WORDS = gl.constexpr(4)
"""Of a row: its value, the halves of its index, and one that makes two pairs of three."""


@gluon.jit
def order_of(bits):
    """int32 in the order of the float32 whose bits these are; zeros are equal, NaN is the most."""
    size = bits & 0x7FFFFFFF
    order = gl.where(size == 0, 0, key_of(bits))
    return gl.where(size > 0x7F800000, 0x7FFFFFFF, order)


@gluon.jit
def index_of(low, high):
    """i64 from its halves, int32."""
    return (high.to(gl.int64) << 32) | (low.to(gl.int64) & 0xFFFFFFFF)


@gluon.jit(do_not_specialize=["team_rank", "num_rows"])
def argmax_kernel(values, indices, largest, where, report, mine, peers, epochs, team_rank, num_rows,
                  capacity, ranks: gl.constexpr):  # fmt: skip
    """values: of a float type, indices: i64, both [num_rows], read; largest, where: as these,
    written; all local. report: see ptx/spins.py, right before mine. mine: int64 [2, ranks,
    capacity, WORDS], zeroed before the first launch, written by all ranks; peers: `mine` of all
    ranks, team_rank being this one. epochs: int32, one a program, of launches, zeroed when
    allocated and written by that program alone.
    """
    pid = gl.program_id(0)
    flag = gl.load(epochs + pid) + 1
    row = pid * ROWS + gl.arange(0, ROWS, layout=LANES)
    wanted = row < num_rows
    part = WORDS * capacity
    at = (flag & 1) * ranks * part + WORDS * row
    value = bits_of(gl.load(values + row, mask=wanted, other=0).to(gl.float32))
    index = gl.load(indices + row, mask=wanted, other=0)
    for rank in gl.static_range(ranks):
        to = peers[rank] + at + team_rank * part
        gl.store(to, flagged(value, flag), mask=wanted)
        gl.store(to + 1, flagged(index, flag), mask=wanted)
        gl.store(to + 2, flagged(index >> 32, flag), mask=wanted)
        gl.store(to + 3, flagged(value, flag), mask=wanted)
    stride = part.to(gl.int64) * 8
    first = spin_ranks(report, mine + at, stride, flag, wanted, ranks)
    second = spin_ranks(report, mine + at + 2, stride, flag, wanted, ranks)
    value = first[0]
    index = index_of(first[1], second[0])
    most = order_of(value)
    for rank in gl.static_range(1, ranks):
        order = order_of(first[2 * rank])
        there = index_of(first[2 * rank + 1], second[2 * rank])
        better = (order > most) | ((order == most) & (there < index))
        value = gl.where(better, first[2 * rank], value)
        index = gl.where(better, there, index)
        most = gl.where(better, order, most)
    gl.store(largest + row, as_float(value), mask=wanted)
    gl.store(where + row, index, mask=wanted)
    gl.store(epochs + pid, flag)


class PushedArgmax:
    """The largest of up to so many rows over a team that shares memory."""

    def __init__(self, team: Team, num_rows: int, timeout_s: float) -> None:
        """Collective. timeout_s: bound on a wait for a peer."""
        self._ranks = team.size
        num_programs = -(-num_rows // ROWS.value)
        self._capacity = num_programs * ROWS.value
        self._share = self._capacity * WORDS.value
        held = self._ranks * self._share
        self._memory = FlaggedMemory(team, held, num_programs, "argmax", timeout_s)

    def __call__(self, values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """The largest of all ranks' values, a float type of at most 32 bits [rows], and its index,
        i64 [rows]; every rank must call. HangError if a peer did not push in an earlier
        call, whose result is void.
        """
        self._memory.check(self._share)
        largest, where = torch.empty_like(values), torch.empty_like(indices)
        num_rows = len(values)
        launch(
            argmax_kernel,
            (-(-num_rows // ROWS.value),),
            values,
            indices,
            largest,
            where,
            *self._memory.arguments,
            num_rows,
            self._capacity,
            ranks=self._ranks,
            num_warps=1,
        )
        return largest, where
