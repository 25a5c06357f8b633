"""Lowering: the exact text of small programs, and how runs of ops become segments."""

import sys

import pytest

from distmega.errors import PlanError
from distmega.hostir.ir.nodes import (
    Collective,
    HostProgram,
    LaunchMegakernel,
    LibraryOp,
    walk_nodes,
)
from distmega.hostir.ir.text import print_host
from distmega.hostir.lower.lower import lower_program
from distmega.hostir.passes.passes import run_passes
from distmega.kernels.machines import CPU
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Op, verify_program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import Layout, shard, stream
from distmega.sharding.localize import localize
from distmega.sharding.planner import plan_program
from tests.hostir.programs import chain, local, mlp, sharded_mlp, with_views

AS_LIBRARY_OPS = """\
host mlp on mesh(tp=1)
  streams 1, events 0
  input x: f32[4, 8]
  weight w1: f32[16, 8]
  temp h: f32[4, 16]
  temp act: f32[4, 16]
  weight w2: f32[8, 16]
  temp y: f32[4, 8]
  body
    allocate h
    h = linear[m0:4 n:16 k:8:reduce:sum] x(m0, k) w1(n, k) -> h(m0, n)
    allocate act
    act = pointwise[i0:4 i1:16] h(i0, i1) -> act(i0, i1) | expr='silu(a0)'
    free h
    allocate y
    y = linear[m0:4 n:8 k:16:reduce:sum] act(m0, k) w2(n, k) -> y(m0, n)
    free act
  return y
"""

AS_KERNEL = """\
host mlp on mesh(tp=1)
  streams 1, events 0
  input x: f32[4, 8]
  weight w1: f32[16, 8]
  weight w2: f32[8, 16]
  temp y: f32[4, 8]
  program mlp.0
    input x: f32[4, 8]
    weight w1: f32[16, 8]
    temp h: f32[4, 16]
    temp act: f32[4, 16]
    weight w2: f32[8, 16]
    temp y: f32[4, 8]
    h = linear[m0:4 n:16 k:8:reduce:sum] x(m0, k) w1(n, k) -> h(m0, n)
    act = pointwise[i0:4 i1:16] h(i0, i1) -> act(i0, i1) | expr='silu(a0)'
    y = linear[m0:4 n:8 k:16:reduce:sum] act(m0, k) w2(n, k) -> y(m0, n)
    return y
  body
    allocate y
    launch mlp.0(x, w1, w2, y)
  return y
"""


@pytest.mark.parametrize(("megakernel", "expected"), [(False, AS_LIBRARY_OPS), (True, AS_KERNEL)])
def test_text(megakernel: bool, expected: str):
    host = lower_program(local(mlp()), megakernel=megakernel, peer_memory=True)
    assert print_host(run_passes(host)) == expected


def kinds(host: HostProgram) -> list[str]:
    """What the body does, without allocations and waits."""
    return [
        node.kernel if isinstance(node, LaunchMegakernel)
        else node.op.kind if isinstance(node, LibraryOp)
        else node.kind
        for node in host.body
        if isinstance(node, LaunchMegakernel | LibraryOp | Collective)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("megakernel", "peer_memory", "expected"),
    [
        (False, False, ["linear", "pointwise", "linear", "all_reduce"]),
        (True, False, ["mlp.0", "all_reduce"]),
        (True, True, ["mlp.0"]),
    ],
)
def test_collectives_stay_inside_with_peer_memory(
    megakernel: bool, peer_memory: bool, expected: list[str]
):
    host = lower_program(sharded_mlp(), megakernel=megakernel, peer_memory=peer_memory)
    assert kinds(host) == expected
    run_passes(host)


def test_kinds_a_kernel_cannot_do_split_the_segment():
    host = lower_program(
        local(mlp()),
        megakernel=True,
        peer_memory=True,
        is_encodable=lambda op, *_: op.kind != "pointwise",
    )
    assert kinds(host) == ["mlp.0", "pointwise", "mlp.1"]
    assert [segment.outputs for segment in host.segments] == [("h",), ("y",)]
    assert host.segments[1].tensor_map()["act"].role == "input"


def test_ops_that_cannot_be_encoded_split_the_segment():
    host = lower_program(
        local(mlp()),
        megakernel=True,
        peer_memory=True,
        is_encodable=lambda op, tensors, _: tensors[op.writes[0].tensor].shape != (4, 16),
    )
    assert kinds(host) == ["linear", "pointwise", "mlp.0"]


def test_ops_that_shall_stay_apart():
    """Collectives too, whether a kernel could do them or not."""
    local, options = sharded_mlp(), {"megakernel": True, "peer_memory": True}
    *_, last, reduced = (op.name for op in local.program.ops)
    host = lower_program(local, **options, apart={last, reduced})
    assert kinds(host) == ["mlp.0", "linear", "all_reduce"]
    assert kinds(lower_program(local, **options, apart={reduced})) == ["mlp.0", "all_reduce"]


def test_views_never_cross_the_edge_of_a_segment():
    host = lower_program(
        local(with_views()),
        megakernel=True,
        peer_memory=True,
        is_encodable=lambda op, *_: op.kind != "reduce",
    )
    assert kinds(host) == ["viewed.0", "reduce", "viewed.1", "view"]
    first, second = host.segments
    assert [op.name for op in first.ops] == ["a", "flat", "half", "b"]
    assert [op.name for op in second.ops] == ["flat", "half", "c"]
    assert first.outputs == ("a", "b")
    for segment in host.segments:
        verify_program(segment)
        assert not {"flat", "half"} & set(segment.outputs)
    run_passes(host)


def test_a_temp_of_an_earlier_segment_is_not_overwritten_in_a_kernel():
    p = ProgramBuilder("overwritten")
    x = p.input("x", (4,))
    a = x.map("a0 + 1", name="a")
    top = p.reduce(a, 0, "max", name="top")
    p.set(x, into=a, name="again")
    program = p.build(a, top, a.map("a0 * 2", name="y"))
    host = lower_program(
        local(program),
        megakernel=True,
        peer_memory=True,
        is_encodable=lambda op, *_: op.kind != "reduce",
    )
    kinds = [node.op.name for node in host.body if isinstance(node, LibraryOp)]
    assert kinds == ["top", "again"]
    assert [segment.outputs for segment in host.segments] == [("a",), ("y",)]
    assert not any(segment.with_role("state") for segment in host.segments)
    run_passes(host)


def test_one_mesh_axis_a_segment():
    mesh = DeviceMesh(dp=2, tp=2)
    p = ProgramBuilder("two_axes")
    x, w1, w2 = p.input("x", (4, 8)), p.weight("w1", (8, 8)), p.weight("w2", (8, 8))
    h = p.linear(x, w1, name="h")
    program = p.build(p.linear(h, w2, name="y"))
    marks = {"w1": shard(1, "tp"), "w2": shard(1, "dp")}
    found = localize(plan_program(program, mesh, CPU, annotations=marks))
    axes = [op.attr("mesh_axis") for op in found.program.ops if op.kind == "all_reduce"]
    host = lower_program(found, megakernel=True, peer_memory=True)
    assert set(axes) == {"dp", "tp"}
    assert len(host.segments) == 2
    for segment in host.segments:
        assert len({op.attr("mesh_axis") for op in segment.ops if op.kind == "all_reduce"}) == 1


def test_inputs_that_leave_need_no_storage():
    p = ProgramBuilder("through")
    x = p.input("x", (4,))
    host = lower_program(local(p.build(x)), megakernel=False, peer_memory=False)
    assert host.body == ()


@pytest.mark.parametrize("megakernel", [False, True])
@pytest.mark.parametrize("marks", [{}, {"y": stream(0, 2)}], ids=["whole", "chunks"])
def test_views_of_views_are_not_limited_by_recursion(marks: dict[str, Layout], megakernel: bool):
    p = ProgramBuilder("views")
    seen = p.input("x", (4, 4)).map("a0 + 1", name="h")
    for _ in range(sys.getrecursionlimit()):
        seen = p.transpose(seen, (0, 1), view=True)
    program = p.build(seen.map("a0 * 2", name="y"))
    found = localize(plan_program(program, DeviceMesh(tp=1), CPU, annotations=marks))
    host = lower_program(found, megakernel=megakernel, peer_memory=False)
    views = sum(op.is_view for op in _all_ops(host))
    assert views == sys.getrecursionlimit()


def _all_ops(host: HostProgram) -> list[Op]:
    named = [node.op for node in walk_nodes(host.body) if isinstance(node, LibraryOp)]
    return [*named, *(op for segment in host.segments for op in segment.ops)]


def test_segments_are_programs_of_their_own():
    host = lower_program(local(chain()), megakernel=True, peer_memory=True)
    assert [verify_program(segment).name for segment in host.segments] == ["chain.0"]


@pytest.mark.parametrize("num", [0, -1, 1.5])
def test_a_host_loop_needs_a_stream(num: int):
    with pytest.raises(PlanError, match=f"max_streams {num}; expected a whole number of at least"):
        lower_program(local(mlp()), megakernel=False, peer_memory=False, max_streams=num)
