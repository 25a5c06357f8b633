"""Collectives as pushes: their ops, their results by a small simulation, and what is refused."""

from dataclasses import replace

import pytest

from distmega.errors import CheckError, UnsupportedError, VerifyError
from distmega.kernels.tasks.check.schedule import check_schedule
from distmega.kernels.tasks.expand import expand_collectives, team_size
from distmega.kernels.tasks.graph import build_task_graph
from distmega.kernels.tasks.schedule import schedule_graph
from distmega.kernels.tasks.tile import tile_segment, verify_groups
from distmega.program.builder import ProgramBuilder
from distmega.program.text import print_program
from distmega.program.types import Access, Axis, Index, Op, Program, Tensor
from distmega.sharding.layout.mesh import DeviceMesh
from tests.kernels.programs import decoder, graph_of, waits_of, with_collectives


def one_all_reduce(num_ranks: int = 2) -> Program:
    p = ProgramBuilder("one")
    h = p.linear(p.input("x", (1, 64)), p.weight("w", (64, 64)), name="h")
    return with_collectives(p.build(p.set(h, name="all_reduce").map("a0", name="y")), num_ranks)


def gather_program(shape: tuple[int, int], dim: int, num_ranks: int) -> Program:
    """y = all_gather of x along a dim, in the form sharding gives."""
    names = ("i0", "i1")
    axes = (
        Axis(name="r", extent=num_ranks),
        *(map(lambda n, e: Axis(name=n, extent=e), names, shape)),
    )
    full = tuple(e * num_ranks if i == dim else e for i, e in enumerate(shape))
    y = tuple(Index(axes=("r", n) if i == dim else (n,)) for i, n in enumerate(names))
    x = tuple(Index(axes=(n,)) for n in names)
    op = Op(
        name="y",
        kind="all_gather",
        axes=axes,
        reads=(Access(tensor="x", dims=x),),
        writes=(Access(tensor="y", dims=y),),
        attrs=(("dim", dim), ("mesh_axis", "tp"), ("num_ranks", num_ranks)),
    )
    tensors = (
        Tensor(name="x", shape=shape, dtype="f32", role="input"),
        Tensor(name="y", shape=full, dtype="f32"),
    )
    return Program(name="gather", tensors=tensors, ops=(op,), outputs=("y",))


def argmax_program(num_ranks: int) -> Program:
    p = ProgramBuilder("argmax")
    p.argmax(p.input("x", (2, 32)), name="a")
    q = Access(tensor="v", dims=(Index(axes=("m0",)),))
    local = p.build()
    op = Op(
        name="best",
        kind="all_reduce",
        axes=(Axis(name="m0", extent=2),),
        reads=(replace(q, tensor="a.value"), replace(q, tensor="a")),
        writes=(replace(q, tensor="best.value"), replace(q, tensor="best")),
        attrs=(("combine", "argmax"), ("mesh_axis", "tp"), ("num_ranks", num_ranks)),
    )
    best = (
        Tensor(name="best.value", shape=(2,), dtype="f32"),
        Tensor(name="best", shape=(2,), dtype="i64"),
    )
    tensors, ops = (*local.tensors, *best), (*local.ops, op)
    return replace(local, tensors=tensors, ops=ops, outputs=("best",))


def lines(program: Program, *starts: str) -> list[str]:
    found = [line.strip() for line in print_program(program).splitlines()]
    return [line for line in found if line.startswith(starts)]


def test_all_reduce_becomes_a_push_and_a_sum_in_rank_order():
    program = expand_collectives(one_all_reduce(), DeviceMesh(tp=2))
    assert lines(program, "state", "all_reduce") == [
        "state all_reduce.recv: f32[2, 1, 64]",
        "all_reduce.push = push[i0:1 i1:64 src:2:scatter:lookup] h(i0, i1)"
        " -> all_reduce.recv(src, i0, i1) | mesh_axis='tp' num_ranks=2",
        "all_reduce = sum_ranks[i0:1 i1:64 src:2:reduce:sum] all_reduce.recv(src, i0, i1)"
        " -> all_reduce(i0, i1) | combine='sum' mesh_axis='tp' num_ranks=2",
    ]


@pytest.mark.parametrize("dim", [0, 1])
def test_all_gather_becomes_a_push_and_a_copy(dim: int):
    program = expand_collectives(gather_program((4, 6), dim, 3), DeviceMesh(tp=3))
    assert [op.kind for op in program.ops] == ["push", "concat"]
    copy = program.ops[1]
    assert copy.reads[0].tensor == "y.recv"
    assert [index.axes for index in copy.reads[0].dims] == [("r",), ("i0",), ("i1",)]
    groups = tile_segment(program, 4, min_task_bytes=32)
    verify_groups(program, groups)
    check_schedule(schedule_graph(build_task_graph(program, groups, 3), 4))


def test_argmax_pushes_the_pair():
    program = expand_collectives(argmax_program(2), DeviceMesh(tp=2))
    assert [op.kind for op in program.ops] == ["argmax", "push", "push", "argmax_ranks"]
    assert lines(program, "state") == [
        "state best.value.recv: f32[2, 2]",
        "state best.recv: i64[2, 2]",
    ]
    check_schedule(schedule_graph(graph_of(program, 2, 2), 2))


def test_the_reader_of_a_slot_waits_for_the_push_of_its_tile():
    program = expand_collectives(one_all_reduce(3), DeviceMesh(tp=3))
    groups = tile_segment(program, 4, min_task_bytes=128)
    graph = build_task_graph(program, groups, 3)
    assert waits_of(graph, "h", "all_reduce.push") == [{0}, {1}, {2}, {3}]
    assert waits_of(graph, "all_reduce.push", "all_reduce") == [{0}, {1}, {2}, {3}]
    schedule = schedule_graph(graph, 4)
    sums = [
        task
        for queue in schedule.queues
        for task in queue
        if graph.groups[task.group].op.kind == "sum_ranks"
    ]
    assert [wait.count for task in sums for wait in task.waits] == [3] * len(sums)


def test_other_ops_and_local_shards_stay():
    program = decoder(1)
    assert expand_collectives(program, DeviceMesh(tp=1)) == program


def test_a_mesh_axis_of_one_rank_needs_only_a_copy():
    program = expand_collectives(one_all_reduce(1), DeviceMesh(tp=1))
    assert [op.kind for op in program.ops] == ["linear", "set", "pointwise"]
    assert team_size(program, DeviceMesh(tp=1)) == 1


def test_team_is_the_mesh_axis_of_the_collectives():
    mesh = DeviceMesh(dp=2, tp=4)
    program = one_all_reduce(4)
    assert team_size(program, mesh) == 4
    assert team_size(expand_collectives(program, mesh), mesh) == 4


def changed(program: Program, **attrs: str | int) -> Program:
    def change(op: Op) -> Op:
        merged = dict(op.attrs) | attrs if op.kind == "all_reduce" else dict(op.attrs)
        return replace(op, attrs=tuple(sorted(merged.items())))

    return replace(program, ops=tuple(map(change, program.ops)))


def test_other_exchanges_are_left_to_the_host():
    program = one_all_reduce()
    ops = tuple(
        replace(op, kind="reduce_scatter") if op.kind == "all_reduce" else op for op in program.ops
    )
    with pytest.raises(UnsupportedError, match="reduce_scatter is not in kernel"):
        expand_collectives(replace(program, ops=ops), DeviceMesh(tp=2))


def test_ranks_must_be_those_of_the_mesh():
    with pytest.raises(VerifyError, match="over 2 ranks of mesh axis 'tp'; expected 4 ranks"):
        expand_collectives(one_all_reduce(2), DeviceMesh(tp=4))


def over_two_axes() -> Program:
    """A sum over one mesh axis behind a sum over the other."""
    p = ProgramBuilder("two")
    x = p.set(p.input("x", (4,)), name="all_reduce.a")
    program = with_collectives(p.build(p.set(x, name="all_reduce.b")), 2)
    first = replace(
        program.ops[0], attrs=(("combine", "sum"), ("mesh_axis", "dp"), ("num_ranks", 2))
    )
    return replace(program, ops=(first, *program.ops[1:]))


def test_exchanges_over_two_mesh_axes_are_proven_apart():
    mesh = DeviceMesh(dp=2, tp=2)
    program = expand_collectives(over_two_axes(), mesh)
    assert team_size(program, mesh) == 4
    schedule = schedule_graph(build_task_graph(program, tile_segment(program, 4), 4), 4)
    check_schedule(schedule)
    waits = [wait.count for queue in schedule.queues for task in queue for wait in task.waits]
    assert waits.count(2) == 2  # of the ranks along one axis each
    with pytest.raises(CheckError, match=r"race on 'all_reduce\.[ab]\.recv' .* of launch 1"):
        check_schedule(schedule, peer_buffers=1)


def test_one_buffer_is_not_enough_for_one_exchange():
    program = expand_collectives(one_all_reduce(), DeviceMesh(tp=2))
    schedule = schedule_graph(graph_of(program, 4, 2), 4)
    check_schedule(schedule)
    with pytest.raises(CheckError, match=r"race on 'all_reduce.recv' .* of launch 1"):
        check_schedule(schedule, peer_buffers=1)


def test_one_buffer_is_enough_where_every_push_has_another_exchange_between():
    check_schedule(schedule_graph(graph_of(decoder(1, 2), 4, 2), 4), peer_buffers=1)


def test_two_buffers_hold_for_more_ranks():
    program = expand_collectives(one_all_reduce(5), DeviceMesh(tp=5))
    check_schedule(schedule_graph(graph_of(program, 3, 5), 3))
