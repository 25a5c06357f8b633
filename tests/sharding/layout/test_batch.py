"""Sequences of a batch divided over data-parallel ranks, with heads over tensor-parallel ones."""

import pytest

from distmega.errors import PlanError
from distmega.kernels.machines import CPU
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import (
    REPLICATE,
    Layout,
    Shard,
    layout_of_part,
    replicate,
    shard,
)
from distmega.sharding.planner import plan_program
from tests.sharding.programs import decoder
from tests.sharding.simulate import check_plan, random_arrays

ROWS = ("tokens", "positions", "next")


@pytest.mark.parametrize("mesh", [DeviceMesh(dp=2), DeviceMesh(dp=2, tp=2)], ids=str)
def test_each_rank_decodes_its_own_sequences(mesh):
    """Annotating the inputs and the result is enough: caches follow, and dp needs no collective."""
    program = decoder(layers=2, rows=6, sequences=True, logits=False)
    plan = plan_program(program, mesh, CPU, {name: shard(0, "dp") for name in ROWS})
    for cache in program.with_role("state"):
        assert plan.layouts[cache.name].at("dp") == Shard(0, 3)
        heads = Shard(1, 2) if "tp" in mesh.names else REPLICATE
        assert plan.layouts[cache.name].at("tp") == heads
    assert {step.move.axis for step in plan.reshards} <= {"tp"}
    check_plan(plan, random_arrays(program, 3), exact=False)


def test_sequences_that_do_not_divide_evenly():
    program = decoder(rows=5, sequences=True, logits=False)
    plan = plan_program(program, DeviceMesh(dp=2), CPU, {name: shard(0, "dp") for name in ROWS})
    check_plan(plan, random_arrays(program, 4), exact=False)


def test_the_layout_of_one_sequence():
    assert layout_of_part(Layout.parse("tp=S1:4"), 0) == Layout.parse("tp=S0:4")
    assert layout_of_part(replicate(), 0) == replicate()
    with pytest.raises(PlanError, match=r"dp=S0:3 .* one index of dim 0"):
        layout_of_part(Layout.parse("dp=S0:3"), 0)
