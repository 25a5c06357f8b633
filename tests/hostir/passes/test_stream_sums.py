"""Iterations that add to one result: over an axis that an op sums, and around a ring of ranks."""

from collections.abc import Mapping

import pytest

from distmega.errors import PlanError
from distmega.hostir.passes.deallocations import peak_memory
from distmega.kernels.machines import CPU
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import Layout, replicate, shard, stream
from distmega.sharding.planner import plan_program
from tests.hostir.programs import require_every_wait
from tests.hostir.streams import ONE, TP, allocated_bytes, assert_exact, loops, lowered, words

Marks = Mapping[str, Layout]


def inner(*, rows: int = 4, depth: int = 12) -> Program:
    """A linear with a bias between two pointwise ops."""
    p = ProgramBuilder("inner")
    x, w, b = p.input("x", (rows, depth)), p.weight("w", (6, depth)), p.weight("b", (6,))
    y = p.linear(x.map("relu(a0)", name="a"), w, b, name="y")
    return p.build(y.map("a0 * 2", name="z"))


def test_chunks_of_a_summed_axis_add_up_and_the_bias_is_added_once():
    plan, local, host = lowered(inner(), ONE, {"w": stream(1, 4)}, max_streams=2)
    head, main = loops(host)
    assert (head.extent, main.extent) == (1, 3)
    assert words(head.body) == [
        "stream 1", "wait event 0", "slice x@i0.head of x dim 1 by i0.head step 3",
        "allocate a.head", "pointwise", "slice w@i0.head of w dim 1 by i0.head step 3",
        "linear", "record event 3", "free a.head",
    ]  # fmt: skip
    assert words(main.body) == [
        "stream 1 + (i0 + 1) % 2", "wait event 0", "slice x@i0 of x dim 1 by i0 + 1 step 3",
        "allocate a", "pointwise", "slice w@i0 of w dim 1 by i0 + 1 step 3", "allocate y.part",
        "linear", "wait event 3", "free a", "pointwise", "record event 3", "free y.part",
    ]  # fmt: skip
    sums = [node.op for node in (*head.body, *main.body) if getattr(node, "op", None)]
    assert [len(op.reads) for op in sums if op.kind == "linear"] == [3, 2]
    assert words(host.body)[-4:] == ["wait event 3", "allocate z", "pointwise", "free y"]
    assert plan.allocations["a"].stored_shape == (4, 3)
    assert allocated_bytes(host, "y", in_loop=False) == 96
    assert_exact(inner(), local, host)


@pytest.mark.parametrize("combine", ["sum", "max", "min"])
@pytest.mark.parametrize("num", [2, 3, 4, 5])
def test_reductions_by_chunk(combine: str, num: int):
    p = ProgramBuilder("reduced")
    x = p.input("x", (5, 7))
    program = p.build(p.reduce(x, 1, combine, name="y"))
    plan, local, host = lowered(program, ONE, {"x": stream(1, num)})
    assert plan.memory.total_bytes == peak_memory(host)
    assert_exact(program, local, host)


def test_what_needs_all_of_an_axis_at_once_is_not_cut():
    p = ProgramBuilder("whole")
    x, w = p.input("x", (4, 8)), p.weight("w", (8,))
    program = p.build(p.rms_norm(x, w, 1e-5, name="y"))
    with pytest.raises(PlanError, match="needs all of it at once"):
        plan_program(program, ONE, CPU, {"x": stream(1, 2)})


def test_a_summed_axis_on_ranks_and_in_chunks():
    program = inner(depth=16)
    marks = {"w": shard(1, "tp") | stream(1, 2), "x": shard(1, "tp")}
    plan, local, host = lowered(program, TP, marks)
    assert plan.allocations["a"].stored_shape == (4, 4)
    found = words(host.body)
    assert found.count("linear") == 2
    assert [word.partition(" ")[0] for word in found].count("all_reduce") == 1
    assert plan.memory.total_bytes == peak_memory(host)
    assert_exact(program, local, host)


def test_one_stream_needs_no_waits_between_sums():
    _, local, host = lowered(inner(), ONE, {"w": stream(1, 4)}, max_streams=1)
    assert [w for w in words(host.body) if w.startswith("wait")] == ["wait event 0", "wait event 1"]
    assert_exact(inner(), local, host)


def row_parallel(*, rows: int = 12) -> Program:
    p = ProgramBuilder("row_parallel")
    x, w, b = p.input("x", (rows, 8)), p.weight("w", (4, 8)), p.weight("b", (4,))
    y = p.linear(x.map("relu(a0)", name="a"), w, name="y")
    return p.build(p.pointwise("a0 + a1", y, b, name="z"))


def scattered(size: int) -> Marks:
    split = {"x": shard(1, "tp"), "w": shard(1, "tp"), "z": shard(0, "tp")}
    return {**split, "y": shard(0, "tp") | stream(0, size, ring="tp")}


@pytest.mark.parametrize("size", [2, 4])
def test_a_reduce_scatter_in_ring_order_passes_sums_on_beside_matmuls(size: int):
    program = row_parallel()
    plan, local, host = lowered(program, DeviceMesh(tp=size), scattered(size))
    head, main = loops(host)
    assert (head.extent, main.extent) == (1, size - 1)
    assert words(head.body) == [
        "slice x@i0.head of x dim 0 by i0.head + 1 ring tp", "allocate a.head", "pointwise",
        "linear", "free a.head",
    ]  # fmt: skip
    assert words(main.body) == [
        "allocate y.in", "coalesce", "send y to tp[-1]", "recv y.in from tp[+1]",
        "end coalesce as y.reduce_scatter", "slice x@i0 of x dim 0 by i0 + 2 ring tp",
        "allocate a", "pointwise", "allocate y.partial", "linear", "free a",
        "wait y.reduce_scatter", "pointwise", "free y.in", "free y.partial",
    ]  # fmt: skip
    assert words(host.body)[-3:] == ["allocate z", "pointwise", "free y"]
    assert not any("reduce_scatter tp" in word for word in words(host.body))
    assert plan.allocations["y.partial"].chunk == (0, 12 // size)
    assert plan.memory.total_bytes == peak_memory(host)
    assert_exact(program, local, host)


def test_a_bias_after_a_reduce_scatter_is_added_to_each_part_once():
    """Case of a pointwise op after parts of a sum: the parts are summed and scattered first."""
    marks = {**scattered(2), "y": shard(0, "tp")}
    _, local, host = lowered(row_parallel(), TP, marks)
    found = [w.partition(" ")[0] for w in words(host.body)]
    assert [w for w in found if w not in ("allocate", "free")] == [
        "pointwise", "linear", "reduce_scatter", "wait", "pointwise",
    ]  # fmt: skip
    assert_exact(row_parallel(), local, host)


def test_both_rings_around_an_mlp():
    """Rows are gathered part by part before the first linear, and summed part by part after the
    second.
    """
    p = ProgramBuilder("sequence")
    x, w1, w2 = p.input("x", (8, 4)), p.weight("w1", (12, 4)), p.weight("w2", (4, 12))
    h = p.linear(x, w1, name="h").map("relu(a0)", name="act")
    program = p.build(p.linear(h, w2, name="y"))
    rows = shard(0, "tp")
    marks = {
        "x": rows, "w1": shard(0, "tp"), "w2": shard(1, "tp"),
        "h": shard(1, "tp") | stream(0, 2, ring="tp"), "y": rows | stream(0, 2, ring="tp"),
    }  # fmt: skip
    plan, local, host = lowered(program, TP, marks)
    assert [str(loop.splits[0][1].shift) for loop in plan.host_loops] == ["0", "1"]
    kinds = [word.partition(" ")[0] for word in words(host.body)]
    assert kinds.count("send") == 2
    assert not {"all_gather", "reduce_scatter", "all_reduce"} & {*kinds}
    assert_exact(program, local, host)


def test_a_ring_of_more_chunks_than_ranks_keeps_the_collective():
    marks = {**scattered(2), "y": shard(0, "tp") | stream(0, 3, ring="tp")}
    _, local, host = lowered(row_parallel(), TP, marks)
    assert sum(word.startswith("reduce_scatter") for word in words(host.body)) == 1
    assert_exact(row_parallel(), local, host)


MESH = DeviceMesh(dp=2, tp=2)
CASES = {
    "sum": (inner(), ONE, {"w": stream(1, 4)}),
    "uneven sum": (inner(depth=11), ONE, {"w": stream(1, 4)}),
    "sum of two chunks": (inner(), ONE, {"w": stream(1, 2)}),
    "ring": (row_parallel(), TP, scattered(2)),
    "ring of 2-D": (row_parallel(), MESH, {**scattered(2), "b": replicate()}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_wait_is_needed(case: str):
    program, mesh, marks = CASES[case]
    _, local, host = lowered(program, mesh, marks)
    assert_exact(program, local, host)
    require_every_wait(host)


@pytest.mark.parametrize("case", CASES)
def test_sums_beside_megakernels(case: str):
    program, mesh, marks = CASES[case]
    _, local, host = lowered(program, mesh, marks, megakernel=True)
    assert host.segments
    assert_exact(program, local, host)
