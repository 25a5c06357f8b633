"""Ops that overwrite other elements than each reads: states that move up, or turn in place."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from distmega.kernels.megakernel import compile_megakernel
from distmega.kernels.tasks.overwrites import expand_overwrites
from distmega.program.builder import Handle, ProgramBuilder
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from tests.kernels.running import launch_all, make_ranks

N = 200
"""Rows and columns of a state: enough for several tasks."""
Move = Callable[[ProgramBuilder, Handle], Handle]


def moved_up(num: int) -> Move:
    """Rows from `num` on to the front, as a window of the last inputs moves."""

    def state(p: ProgramBuilder, x: Handle) -> Handle:
        kept = p.slice(x, 0, num, N, view=True)
        return p.set(kept, p.slice(x, 0, 0, N - num, view=True))

    return state


def turned(p: ProgramBuilder, x: Handle) -> Handle:
    return p.set(p.transpose(x, (1, 0), view=True), x)


def itself(p: ProgramBuilder, x: Handle) -> Handle:
    return p.set(x, x)


def program_of(move: Move) -> Program:
    p = ProgramBuilder("moves")
    x = p.state("x", (N, N))
    move(p, x)
    return p.build(p.reduce(x, 1))


def first_rows(x: Tensor, num: int) -> Tensor:
    return torch.cat([x[num:], x[N - num :]])


@pytest.mark.parametrize(
    ("move", "expected", "num_copies"),
    [
        (moved_up(1), lambda x: first_rows(x, 1), 1),
        (moved_up(26), lambda x: first_rows(x, 26), 1),
        (moved_up(N // 2), lambda x: first_rows(x, N // 2), 0),
        (turned, lambda x: x.T, 1),
        (itself, lambda x: x, 0),
    ],
    ids=["by a row", "by a task", "by half", "turned", "itself"],
)
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_what_an_op_overwrites_is_read_before(
    move: Move, expected: Callable[[Tensor], Tensor], num_copies: int, seed: int | None
):
    program = program_of(move)
    assert len(expand_overwrites(program).ops) == len(program.ops) + num_copies
    (rank,) = ranks = make_ranks(compile_megakernel(program, DeviceMesh(tp=1), num_sms=8))
    whole = torch.randn(N, N)
    rank.fill({"x": whole})
    launch_all(ranks, seed=seed)
    torch.testing.assert_close(rank.tensors["x"], expected(whole))
