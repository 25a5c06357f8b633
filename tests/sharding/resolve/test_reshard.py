"""The table of collectives, layout copies, paths over several mesh axes, annotations."""

from functools import reduce
from itertools import product
from operator import or_

import pytest

from distmega.errors import PlanError
from distmega.kernels.machines import CPU, H200
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Program, Tensor
from distmega.sharding.layout.aliases import bound_views
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import (
    REPLICATE,
    REPLICATED,
    Layout,
    Partial,
    Shard,
    resolve_layout,
    shard,
)
from distmega.sharding.planner import plan_program
from distmega.sharding.resolve.reshard import find_movements, table
from distmega.sharding.search.cost import collective_bytes, collective_time_us
from tests.sharding.simulate import check_plan, random_arrays

TP = DeviceMesh(tp=2)
SUM = Partial("sum")


@pytest.mark.parametrize(
    ("source", "target", "kinds"),
    [
        (REPLICATE, REPLICATE, []),
        (SUM, REPLICATE, ["all_reduce"]),
        (Shard(0, 2), REPLICATE, ["all_gather"]),
        (SUM, Shard(0, 2), ["reduce_scatter"]),
        (Partial("max"), Shard(0, 2), ["all_reduce", "take_shard"]),
        (REPLICATE, Shard(0, 2), ["take_shard"]),
        (Shard(0, 2), Shard(1, 2), ["all_to_all"]),
        (Shard(0, 2), Shard(0, 3), ["all_gather", "take_shard"]),
    ],
)
def test_each_mismatch_is_one_row_of_the_table(source, target, kinds):
    assert [kind for kind, _ in table(source, target)] == kinds


def test_nothing_becomes_a_part_by_moving():
    assert table(REPLICATE, SUM) is None
    with pytest.raises(PlanError, match="no collective leads from"):
        find_movements((4,), 4, REPLICATED, Layout.of({"tp": SUM}), TP, CPU)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (shard(0, "dp") | shard(1, "tp"), shard(1, "dp") | shard(0, "tp")),
        (shard(0, "dp") | shard(0, "tp"), shard(1, "dp") | shard(1, "tp")),
        (shard(0, "dp") | shard(0, "tp"), shard(1, "dp") | shard(0, "tp")),
    ],
)
def test_one_mesh_axis_is_gathered_so_that_the_other_can_go_elsewhere(source, target):
    """Not both: one steps aside, and takes its part again for nothing."""
    mesh, tensor = DeviceMesh(dp=2, tp=2), Tensor(name="x", shape=(4, 4), dtype="f32")
    ends = [resolve_layout(tensor, layout, mesh) for layout in (source, target)]
    movements = find_movements(tensor.shape, 4, *ends, mesh, CPU)
    assert [move.kind for move in movements] == ["all_gather", "all_to_all", "take_shard"]
    assert movements[0].axis == movements[2].axis != movements[1].axis


def test_sums_are_scattered_before_another_mesh_axis_is_gathered():
    """The gather then moves half; and five mesh axes are searched at once, not in each order."""
    mesh, tensor = DeviceMesh(a=2, b=2, c=2), Tensor(name="x", shape=(2, 4), dtype="f32")
    source = Layout.of({"a": SUM, "c": Shard(1, 2)})
    target = resolve_layout(tensor, shard(0, "a") | shard(1, "b") | shard(1, "c"), mesh)
    movements = find_movements(tensor.shape, 4, source, target, mesh, H200)
    assert [(move.kind, move.axis) for move in movements] == [
        ("reduce_scatter", "a"), ("all_gather", "c"), ("take_shard", "b"), ("take_shard", "c"),
    ]  # fmt: skip
    wide = DeviceMesh(a=2, b=2, c=2, d=2, e=2)
    tensor = Tensor(name="y", shape=(64, 64), dtype="f32")
    ends = [
        resolve_layout(tensor, reduce(or_, (shard(dim, a) for a in wide.names)), wide)
        for dim in (0, 1)
    ]
    assert find_movements(tensor.shape, 4, *ends, wide, CPU)[-1].target == ends[1]


def test_bytes_follow_the_collective():
    assert collective_bytes("all_reduce", 800, 4) == 1200
    assert collective_bytes("all_gather", 800, 4) == 600
    assert collective_bytes("reduce_scatter", 800, 4) == 600
    assert collective_bytes("all_to_all", 800, 4) == 150
    assert collective_bytes("take_shard", 800, 4) == 0
    assert collective_time_us("all_reduce", 2**20, 2, H200) == pytest.approx(9.7, abs=0.1)
    assert collective_time_us("all_reduce", 8192, 2, H200) == pytest.approx(6.4, abs=0.1)


@pytest.mark.parametrize(("shape", "copies"), [((3, 2, 8), True), ((2, 8), False)])
def test_case_n18_a_layout_copy_where_the_scattered_dim_is_not_outermost(shape, copies):
    """[d, 3, 4d] and [d, 4d], d = 2: summed over dim 0, scattered over the last dim."""
    p = ProgramBuilder("p")
    x = p.input("x", (2, *shape[1:]) if len(shape) == 2 else (2, 3, 8))
    program = p.build(p.reduce(x, 0, name="y"))
    last = len(program.tensor_map()["y"].shape) - 1
    annotations = {"x": shard(0, "tp"), "y": shard(last, "tp")}
    plan = plan_program(program, TP, CPU, annotations)
    (step,) = plan.reshards
    assert (step.move.kind, step.move.layout_copy) == ("reduce_scatter", copies)
    check_plan(plan, random_arrays(program, 0))


LAYOUTS = [REPLICATED, shard(0, "dp"), shard(1, "tp"), shard(0, "dp") | shard(1, "tp")]
LAYOUTS += [shard(1, "dp") | shard(0, "tp"), shard(0, "tp")]
LAYOUTS += [shard(dim, "dp") | shard(dim, "tp") for dim in (0, 1)]


@pytest.mark.parametrize(("source", "target"), list(product(LAYOUTS, LAYOUTS)), ids=str)
def test_any_layout_leads_to_any_other_over_two_mesh_axes(source, target):
    """Through a program that reads x as `source` and gives y as `target`, run on all ranks."""
    mesh = DeviceMesh(dp=2, tp=3)
    p = ProgramBuilder("p")
    program = p.build(p.set(p.input("x", (5, 7)), name="y"))
    plan = plan_program(program, mesh, CPU, {"x": source, "y": target})
    tensor = Tensor(name="x", shape=(5, 7), dtype="f32")
    ends = [resolve_layout(tensor, layout, mesh) for layout in (source, target)]
    assert [plan.layouts[name] for name in "xy"] == ends
    assert bool(plan.reshards) == (ends[0] != ends[1])
    check_plan(plan, random_arrays(program, 0))


def test_case_n13_propagation_never_overwrites():
    """t3 = t0 + set(t1): the set stays divided as t1 is, the sum takes its first operand's side."""
    mesh = DeviceMesh(dp=2, tp=3)
    p = ProgramBuilder("p")
    t0, t1 = p.input("t0", (6,)), p.input("t1", (6,))
    program = p.build(p.pointwise("a0 + a1", t0, p.set(t1, name="t2"), name="t3"))
    annotations = {"t0": shard(0, "tp"), "t1": shard(0, "dp")}
    plan = plan_program(program, mesh, CPU, annotations)
    divided = {s.op.name: [(axis, o.axis) for axis, o in s.splits] for s in plan.decisions}
    assert divided == {"t2": [("dp", "i0")], "t3": [("tp", "i0")]}
    assert plan.layouts["t2"] == Layout.of({"dp": Shard(0, 3)})
    kept = plan_program(program, mesh, CPU, {**annotations, "t3": shard(0, "tp")})
    assert kept.layouts["t3"] == Layout.of({"tp": Shard(0, 2)})
    check_plan(plan, random_arrays(program, 0))


def test_annotations_reach_backwards_and_stop_at_others():
    p = ProgramBuilder("p")
    a = p.set(p.input("x", (8, 6)), name="a")
    b = p.set(a, name="b")
    program = p.build(p.set(b, name="c"))
    plan = plan_program(program, TP, CPU, {"c": shard(1, "tp")})
    assert plan.layouts["a"] == plan.layouts["b"] == Layout.of({"tp": Shard(1, 3)})
    plan = plan_program(program, TP, CPU, {"c": shard(1, "tp"), "a": shard(0, "tp")})
    assert plan.layouts["a"] == Layout.of({"tp": Shard(0, 4)})
    assert plan.layouts["c"] == Layout.of({"tp": Shard(1, 3)})
    divided = {s.op.name: [option.axis for _, option in s.splits] for s in plan.decisions}
    assert divided == {"a": ["i0"], "b": ["i0"], "c": ["i1"]}
    check_plan(plan, random_arrays(program, 0))


@pytest.mark.parametrize(
    ("annotations", "found"),
    [
        ({"nothing": shard(0, "tp")}, "annotation of tensor 'nothing'"),
        ({"x": shard(0, "pp")}, "layout [pp=S0] for 'x'"),
        ({"x": shard(5, "tp")}, "layout [tp=S5] for 'x'"),
    ],
)
def test_annotations_that_mean_nothing_are_refused(annotations, found):
    p = ProgramBuilder("p")
    program = p.build(p.set(p.input("x", (8, 6))))
    with pytest.raises(PlanError) as caught:
        plan_program(program, TP, CPU, annotations)
    assert caught.value.found.startswith(found)


def test_a_copy_is_not_kept_over_an_overwrite():
    """The second reader of x needs it whole again, after x was written anew."""
    p = ProgramBuilder("p")
    x = p.set(p.input("x0", (4, 6)), name="x")
    first = p.reduce(x, 0, "max", name="first")
    p.set(p.input("x1", (4, 6)), into=x, name="overwrite")
    second = p.reduce(x, 0, "max", name="second")
    program = p.build(first, second)
    annotations = {"x": shard(0, "tp"), "first": REPLICATED, "second": REPLICATED}
    plan = plan_program(program, DeviceMesh(tp=3), CPU, annotations)
    assert [step.move.kind for step in plan.reshards].count("all_gather") == 2
    check_plan(plan, random_arrays(program, 0))


def test_a_view_of_a_state_is_not_moved_before_it_is_written():
    p = ProgramBuilder("p")
    state, x = p.state("s", (6, 4)), p.input("x", (3, 4))
    part = p.slice(state, 0, 1, 4, view=True, name="part")
    p.set(x, into=part, name="write")
    program = p.build(p.set(state, name="out"))
    for layout in (shard(1, "tp"), REPLICATED):
        plan = plan_program(program, TP, CPU, {"s": layout})
        check_plan(plan, random_arrays(program, 0))


def sliced(role: str, *, after: str = "") -> Program:
    """Reads a view of the first rows of `s`; `after`: what is done between."""
    p = ProgramBuilder("p")
    make = {"weight": p.weight, "state": p.state, "input": p.input}[role]
    s, x = make("s", (8, 4)), p.input("x", (8, 4))
    if after == "written before":
        p.set(x, into=s, name="write")
    part = p.slice(s, 0, 0, 3, view=True, name="part")
    if after == "written while used":
        p.set(x, into=s, name="write")
    y = part.map("a0 + 1", name="y")
    if after == "written later":
        p.set(x, into=s, name="write")
    return p.build(y, p.set(s, name="out")) if role == "state" else p.build(y)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("role", ["weight", "state", "input"])
def test_a_view_that_is_only_read_may_cut_a_divided_dim(role: str, ranks: int):
    program = sliced(role)
    plan = plan_program(program, DeviceMesh(tp=ranks), CPU, {"s": shard(0, "tp")})
    assert plan.layouts["s"].at("tp") == Shard(0, -(-8 // ranks))
    check_plan(plan, random_arrays(program, 0))


@pytest.mark.parametrize("when", ["written before", "written later"])
def test_a_view_of_a_state_may_be_of_a_copy_while_nobody_writes(when: str):
    program = sliced("state", after=when)
    assert bound_views(program) == frozenset()
    plan = plan_program(program, DeviceMesh(tp=2), CPU, {"s": shard(0, "tp")})
    assert "all_gather" in [step.move.kind for step in plan.reshards]
    check_plan(plan, random_arrays(program, 0))


def test_a_view_that_sees_a_write_is_of_the_storage_itself():
    program = sliced("state", after="written while used")
    assert bound_views(program) == {"part"}
    with pytest.raises(PlanError, match="op 'part' fits mesh axis 'tp' of 2 in no way"):
        plan_program(program, DeviceMesh(tp=2), CPU, {"s": shard(0, "tp")})
    plan = plan_program(program, DeviceMesh(tp=2), CPU, {"s": shard(1, "tp")})
    check_plan(plan, random_arrays(program, 0))


def test_a_view_of_a_view_binds_both():
    p = ProgramBuilder("p")
    state, x = p.state("s", (8, 4)), p.input("x", (2, 4))
    outer = p.slice(state, 0, 0, 4, view=True, name="outer")
    inner = p.slice(outer, 0, 1, 3, view=True, name="inner")
    other = p.slice(state, 0, 4, 8, view=True, name="other").map("a0 * 2", name="z")
    p.set(x, into=inner, name="write")
    program = p.build(outer.map("a0 + 1", name="y"), other)
    assert bound_views(program) == {"outer", "inner"}
    plan = plan_program(program, DeviceMesh(tp=2), CPU, {"s": shard(1, "tp")})
    check_plan(plan, random_arrays(program, 0))
