"""A sum over GPUs that share memory, added to a residual and normalised, row by row: one kernel.

In: a part of each row on every rank, a residual, a norm's weight. Out: the normalised rows and what
was normalised, the same bits on all ranks: parts are added in rank order, and rounded, as a plain
all-reduce would (all_reduce.py). A program has a row: it pushes its part into every peer's memory,
waits for theirs, and has the whole row in registers. Parts go as they are, behind them the number
of the launch, released at scope sys. Each row counts its launches in device memory, so a launch can
be captured, and any number of rows up to a capacity share one memory. For a rank that does not come
it waits without end.

Buffers have two copies, for launches of odd and even number: see all_reduce.py. A program's waits
are for the same row of the peers, whose programs push before they wait, in the order of rows: that
of the least row that has not ended runs on all ranks, however few run at a time. Next on the walk:
all_reduce.py.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, misc"

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from distmega.kernels.hopper.ptx.arrivals import await_ranks, tell_ranks
from distmega.kernels.hopper.ptx.device import bf16_pair, high_half, low_half
from distmega.kernels.hopper.ptx.shapes import PER_THREAD, THREADS
from distmega.kernels.hopper.pushed_memory import ArrivalMemory
from distmega.kernels.runtime.ahead import launch
from distmega.kernels.runtime.symmetric import Team

FOUR = 4
"""Elements that a thread has of a chunk, as one int64."""
LEAST_CAPACITY = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SumNormSpec:
    """What the kernel is specialised for.

    kind: of the norm. fours: of a row, four elements each.
    """

    kind: Literal["rms_norm", "layer_norm"]
    fours: int
    ranks: int
    has_bias: bool = False

    @property
    def chunks(self) -> int:
        return -(-self.fours // int(THREADS.value))


@gluon.jit
def four_floats(bits):
    """Four bf16 in an int64, as float32."""
    first = bits.to(gl.int32)
    second = (bits >> 32).to(gl.int32)
    return low_half(first), high_half(first), low_half(second), high_half(second)


@gluon.jit
def four_bf16(a, b, c, d):
    """Four float32 as bf16 in an int64."""
    first = bf16_pair(a, b).to(gl.int64) & 0xFFFFFFFF
    return (bf16_pair(c, d).to(gl.int64) << 32) | first


@gluon.jit
def load_row(x, spec: gl.constexpr):
    """A row from x on, of four bf16 each, as a tuple of its chunks."""
    lane = gl.arange(0, THREADS, layout=PER_THREAD)
    chunks: gl.constexpr = spec.chunks
    found = ()
    for chunk in gl.static_range(chunks):
        at = chunk * THREADS + lane
        found += (gl.load(x + at, mask=at < spec.fours, other=0),)
    return found


@gluon.jit
def push_row(own, peers, arrivals, team_rank, flag, slot, rank_slots, spec: gl.constexpr):
    """This rank's part of a row to all ranks that wait for it. slot: of the first rank's part;
    rank_slots: from one rank's to the next.
    """
    lane = gl.arange(0, THREADS, layout=PER_THREAD)
    ranks: gl.constexpr = spec.ranks
    chunks: gl.constexpr = spec.chunks
    mine = slot + team_rank * rank_slots
    for chunk in gl.static_range(chunks):
        at = chunk * THREADS + lane
        for rank in gl.static_range(ranks):
            wanted = (at < spec.fours) & (team_rank != rank)
            gl.store(peers[rank] + mine * spec.fours + at, own[chunk], mask=wanted)
    tell_ranks(arrivals, mine, flag, team_rank, ranks)


@gluon.jit
def load_parts(mine, team_rank, slot, rank_slots, spec: gl.constexpr):
    """What peers have pushed of a row: a tuple of its chunks, each one of parts in rank order."""
    others: gl.constexpr = spec.ranks - 1
    chunks: gl.constexpr = spec.chunks
    lane = gl.arange(0, THREADS, layout=PER_THREAD)
    found = ()
    for chunk in gl.static_range(chunks):
        at = chunk * THREADS + lane
        parts = ()
        for other in gl.static_range(others):
            rank = other + (team_rank <= other).to(gl.int32)
            first = mine + (slot + rank * rank_slots) * spec.fours
            # past the L1, which may hold what lay there two launches ago
            parts += (gl.load(first + at, mask=at < spec.fours, other=0, cache_modifier=".cg"),)
        found += (parts,)
    return found


@gluon.jit
def sum_chunk(own, parts, team_rank, spec: gl.constexpr):
    """Four elements a thread of all ranks' parts, summed in rank order and rounded, as float32.
    parts: as of load_parts, without the own one.
    """
    ranks: gl.constexpr = spec.ranks
    a = gl.zeros([THREADS], gl.float32, layout=PER_THREAD)
    b = a
    c = a
    d = a
    for rank in gl.static_range(ranks):
        bits = own
        if rank < ranks - 1:
            bits = gl.where(team_rank > rank, parts[rank], bits)
        if rank > 0:
            bits = gl.where(team_rank < rank, parts[rank - 1], bits)
        e, f, g, h = four_floats(bits)
        a = a + e
        b = b + f
        c = c + g
        d = d + h
    return four_floats(four_bf16(a, b, c, d))


@gluon.jit(do_not_specialize=["team_rank", "capacity"])
def sum_norm_kernel(x, residual, weight, bias, y, total, mine, peers, arrived, words, epochs,
                    team_rank, capacity, eps, spec: gl.constexpr):  # fmt: skip
    """x, residual: int64 [rows, fours], four bf16 each, read; weight, bias: int64 [fours], read; y,
    total: as x, written: the norm and what it is of. All local; without a bias its pointer is not
    used. mine: int64 [2, ranks, capacity, fours], written by peers; peers: `mine` of all ranks,
    team_rank being this one. arrived: int32 [2, ranks, capacity], written by peers, the number of
    the launch whose part is there; words: `arrived` of all ranks. All of these are zeroed before
    the first launch. epochs: int32 [capacity], of launches, zeroed when allocated and written by
    the row's program alone. eps: of the norm, fp32. spec: see SumNormSpec.
    """
    chunks: gl.constexpr = spec.chunks
    row = gl.program_id(0)
    flag = gl.load(epochs + row) + 1
    rank_slots = capacity.to(gl.int64)
    slot = (flag & 1) * spec.ranks * rank_slots + row
    lane = gl.arange(0, THREADS, layout=PER_THREAD)
    line = row.to(gl.int64) * spec.fours
    own = load_row(x + line, spec)
    push_row(own, peers, words, team_rank, flag, slot, rank_slots, spec)
    # all else is asked for while parts are on their way
    residuals = load_row(residual + line, spec)
    weights = load_row(weight, spec)
    if spec.has_bias:
        biases = load_row(bias, spec)
    await_ranks(arrived, slot, rank_slots, flag, team_rank, spec.ranks)
    parts = load_parts(mine, team_rank, slot, rank_slots, spec)
    values = ()
    added = gl.zeros([THREADS], gl.float32, layout=PER_THREAD)
    for chunk in gl.static_range(chunks):
        at = chunk * THREADS + lane
        a, b, c, d = sum_chunk(own[chunk], parts[chunk], team_rank, spec)
        e, f, g, h = four_floats(residuals[chunk])
        bits = four_bf16(a + e, b + f, c + g, d + h)
        gl.store(total + line + at, bits, mask=at < spec.fours)
        a, b, c, d = four_floats(bits)
        values += ((a, b, c, d),)
        if spec.kind == "layer_norm":
            added += (a + b) + (c + d)
        else:
            added += (a * a + b * b) + (c * c + d * d)
    columns: gl.constexpr = spec.fours * 4
    mean = gl.sum(added, 0) / columns
    square = mean
    if spec.kind == "layer_norm":
        added = gl.zeros([THREADS], gl.float32, layout=PER_THREAD)
        for chunk in gl.static_range(chunks):
            a, b, c, d = values[chunk]
            each = (a - mean) * (a - mean) + (b - mean) * (b - mean)
            each += (c - mean) * (c - mean) + (d - mean) * (d - mean)
            added += gl.where(chunk * THREADS + lane < spec.fours, each, 0.0)
        square = gl.sum(added, 0) / columns
    else:
        mean = 0.0
    scale = gl.rsqrt(square + eps)
    for chunk in gl.static_range(chunks):
        at = chunk * THREADS + lane
        a, b, c, d = values[chunk]
        e, f, g, h = four_floats(weights[chunk])
        a = (a - mean) * scale * e
        b = (b - mean) * scale * f
        c = (c - mean) * scale * g
        d = (d - mean) * scale * h
        if spec.has_bias:
            e, f, g, h = four_floats(biases[chunk])
            a += e
            b += f
            c += g
            d += h
        gl.store(y + line + at, four_bf16(a, b, c, d), mask=at < spec.fours)
    gl.store(epochs + row, flag)


class PushedSumNorm:
    """Sums over ranks of rows of one length, with what is added and the norm of it."""

    def __init__(self, team: Team, columns: int, capacity: int) -> None:
        """Collective. columns: of a row, a multiple of FOUR. capacity: most rows of a call."""
        assert columns % FOUR == 0, "a thread has four elements"
        self._ranks, self._fours, self._capacity = team.size, columns // FOUR, capacity
        self._memory = ArrivalMemory(team, capacity, self._fours)

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        kind: Literal["rms_norm", "layer_norm"],
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """The norm of residual + the sum of all ranks' x, and that total, bf16 [rows, columns];
        every rank must call. x and residual alike, weight and bias [columns]; all contiguous.
        """
        assert x.shape[0] <= self._capacity, "rows have a slot each"
        spec = SumNormSpec(
            kind=kind, fours=self._fours, ranks=self._ranks, has_bias=bias is not None
        )
        y, total = torch.empty_like(x), torch.empty_like(x)
        given = x, residual, weight, weight if bias is None else bias, y, total
        launch(
            sum_norm_kernel,
            (x.shape[0],),
            *(each.view(torch.int64) for each in given),
            *self._memory.arguments,
            self._capacity,
            eps,
            spec=spec,
            num_warps=8,
        )
        return y, total
