"""How much the search for one mesh axis does."""

import pytest

from distmega.kernels.machines import CPU
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.planner import plan_program
from tests.work import lines_run

PAIR = DeviceMesh(tp=2)


def many(num: int, *, are_outputs: bool) -> Program:
    """So many products of one x: results, or added up once all are there."""
    p = ProgramBuilder("many")
    x = p.input("x", (4, 8))
    made = [p.linear(x, p.weight(f"w{n}", (8, 8)), name=f"y{n}") for n in range(num)]
    if are_outputs:
        return p.build(*made)
    total = made[0]
    for each in made[1:]:
        total = total.map("a0 + a1", each)
    return p.build(total)


@pytest.mark.parametrize("are_outputs", [False, True])
def test_an_op_costs_no_more_where_many_tensors_wait_for_later_ones(are_outputs: bool):
    few, many_more = (
        lines_run(lambda num=num: plan_program(many(num, are_outputs=are_outputs), PAIR, CPU))
        for num in (30, 120)
    )
    assert many_more < 4.5 * few
    assert few < 1_000_000
