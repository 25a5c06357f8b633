"""Stream parallelism: the cases by name, as node sequences, bytes and results."""

from dataclasses import replace

import pytest

from distmega.errors import PlanError, VerifyError
from distmega.hostir.ir.nodes import Allocate
from distmega.hostir.ir.text import parse_host, print_host
from distmega.hostir.lower.lower import lower_program
from distmega.hostir.passes.deallocations import peak_memory
from distmega.hostir.passes.passes import run_passes
from distmega.kernels.machines import CPU
from distmega.program.builder import ProgramBuilder
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import Layout, replicate, shard, stream
from distmega.sharding.planner import plan_program
from tests.hostir.programs import renamed, require_every_wait
from tests.hostir.streams import (
    CASES,
    ONE,
    SPLIT_SUM,
    TP,
    allocated_bytes,
    assert_exact,
    gathered,
    loops,
    lowered,
    row_parallel,
    small_integers,
    sums,
    two_linears,
    words,
)
from tests.hostir.threads import HeldBytes, run_mesh


def test_case_n1_one_loop_with_the_intermediate_by_chunk():
    plan, local, host = lowered(sums(), ONE, {"x": stream(0, 2)})
    (loop,) = loops(host)
    assert words(loop.body) == [
        "stream 1 + i0 % 2", "wait event 0", "slice x@i0 of x dim 0 by i0", "allocate a",
        "pointwise", "slice b@i0 of b dim 0 by i0", "reduce", "slice c@i0 of c dim 0 by i0",
        "pointwise", "record event 1 + i0 % 2", "free a",
    ]  # fmt: skip
    around = [word for word in words(host.body) if word not in words(loop.body)]
    assert around == [
        "allocate b", "allocate c", "record event 0", "for i0 in 2:", "stream 0",
        "wait event 1", "wait event 2",
    ]  # fmt: skip
    assert allocated_bytes(host, "a", in_loop=True) == 384
    assert plan.allocations["a"].stored_shape == (2, 6, 8)
    assert all(not plan.allocations[name].chunk for name in "xbc")
    assert str(plan.loops["a"]) == "[i0.o:2 Stream, i0.i:2, i1:6, i2:8]"
    assert_exact(sums(), local, host)


def test_case_n2_other_dims_are_other_loops():
    _, local, host = lowered(sums(), ONE, {"x": stream(0, 2), "b": stream(1, 2)})
    first, second = loops(host)
    assert [w for w in words(first.body) if "slice" not in w and "event" not in w] == [
        "stream 1 + i0 % 2", "pointwise", "pointwise",
    ]  # fmt: skip
    assert words(second.body)[2:5] == [
        "slice a@i1 of a dim 1 by i1", "slice b@i1 of b dim 1 by i1", "reduce",
    ]  # fmt: skip
    assert allocated_bytes(host, "a", in_loop=False) == 768
    assert_exact(sums(), local, host)


def test_case_n3_columns_then_rows_are_two_loops():
    program = two_linears(15)
    _, local, host = lowered(program, ONE, {"h": stream(1, 3), "y": stream(0, 3)})
    assert [loop.extent for loop in loops(host)] == [3, 3]
    assert allocated_bytes(host, "h", in_loop=False) == 360
    assert_exact(program, local, host)


def test_case_n4_rows_are_one_loop():
    program = two_linears(5)
    _, local, host = lowered(program, ONE, {"x": stream(0, 3)})
    (loop,) = loops(host)
    assert words(loop.body).count("linear") * loop.extent == 6
    assert allocated_bytes(host, "h", in_loop=True) == 40
    assert allocated_bytes(host, "y", in_loop=False) == 72
    assert host.body.index(Allocate(buffer="y")) < host.body.index(loop)
    assert_exact(program, local, host)


def test_case_n6_a_linear_and_its_all_reduce_by_chunk():
    _, local, host = lowered(row_parallel(), TP, {**SPLIT_SUM, "y": stream(0, 3)})
    (loop,) = loops(host)
    assert words(loop.body) == [
        "stream 1 + i0 % 3", "wait event 0", "slice x@i0 of x dim 0 by i0",
        "allocate y.partial", "linear", "slice y@i0 of y dim 0 by i0",
        "all_reduce tp (y.partial) -> (y@i0) as y.all_reduce | combine='sum' num_ranks=2",
        "wait y.all_reduce", "record event 1 + i0 % 3", "free y.partial",
    ]  # fmt: skip
    assert allocated_bytes(host, "y.partial", in_loop=True) == 8
    assert words(host.body)[-4:] == ["stream 0", "wait event 1", "wait event 2", "wait event 3"]
    assert_exact(row_parallel(), local, host)


def test_case_n26_an_unrelated_op_between_does_not_break_a_loop():
    p = ProgramBuilder("between")
    x, z = p.input("x", (4, 6)), p.input("z", (5,))
    a = x.map("a0 * 2", name="a")
    u = z.map("a0 + 1", name="u")
    program = p.build(a.map("a0 - 1", name="c"), u)
    _, local, host = lowered(program, ONE, {"a": stream(0, 2), "c": stream(0, 2)})
    (loop,) = loops(host)
    assert words(loop.body).count("pointwise") == 2
    assert allocated_bytes(host, "a", in_loop=True) == 48
    assert_exact(program, local, host)


def test_case_n26_an_op_between_that_is_needed_breaks_it_and_nothing_is_by_chunk():
    p = ProgramBuilder("needed")
    x = p.input("x", (4, 6))
    a = x.map("a0 * 2", name="a")
    top = p.reduce(a, 0, "max", name="top")
    program = p.build(p.pointwise("a0 - a1", a, top, name="c"))
    _, local, host = lowered(program, ONE, {"a": stream(0, 2), "c": stream(0, 2)})
    assert len(loops(host)) == 2
    assert allocated_bytes(host, "a", in_loop=False) == 96
    assert_exact(program, local, host)


def test_an_uneven_split_ends_in_a_shorter_chunk():
    program = two_linears(5, rows=7)
    plan, local, host = lowered(program, ONE, {"x": stream(0, 3)})
    main, tail = loops(host)
    assert (main.extent, tail.extent) == (2, 1)
    assert host.buffer_map()["h"].shape == (3, 5)
    assert host.buffer_map()["h.tail"].shape == (1, 5)
    assert len(plan.host_loops) == 1
    assert words(tail.body)[0] == "stream 3"
    assert_exact(program, local, host)


def test_streams_are_a_bounded_ring():
    program = two_linears(5, rows=12)
    _, local, host = lowered(program, ONE, {"x": stream(0, 12)}, max_streams=2)
    assert (host.num_streams, host.num_events) == (3, 3)
    assert_exact(program, local, host)
    assert lowered(program, ONE, {"x": stream(0, 12)})[2].num_streams == 5


def test_a_stream_inside_a_shard():
    program = two_linears(5, rows=8)
    marks = {"x": shard(0, "tp") | stream(0, 2), "y": shard(0, "tp")}
    plan, local, host = lowered(program, TP, marks)
    assert host.buffer_map()["h"].shape == (2, 5)
    assert str(plan.loops["h"]).startswith("[m.i.o:2 Stream, m.o:2 Device(tp), m.i.i:2")
    assert_exact(program, local, host)


@pytest.mark.parametrize("size", [2, 4])
def test_a_gather_in_ring_order_is_sends_and_receives_beside_matmuls(size: int):
    program, marks = gathered(size)
    plan, local, host = lowered(program, DeviceMesh(tp=size), marks)
    main, tail = loops(host)
    assert (main.extent, tail.extent) == (size - 1, 1)
    assert words(main.body) == [
        "slice x.whole@i0 of x.whole dim 0 by i0 ring tp",
        "slice x.whole@i0.next of x.whole dim 0 by i0 + 1 ring tp",
        "coalesce", "send x.whole@i0 to tp[-1]", "recv x.whole@i0.next from tp[+1]",
        "end coalesce as x.whole.all_gather", "allocate h", "linear",
        "slice y@i0 of y dim 0 by i0 ring tp", "pointwise", "free h",
        "wait x.whole.all_gather",
    ]  # fmt: skip
    assert not any("all_gather tp" in word for word in words(host.body))
    assert plan.allocations["h"].chunk == (0, 12 // size)
    assert plan.allocations["x.whole"].chunk is None
    assert f"m0.o.r:{size} Stream" in str(plan.loops["h"])
    assert_exact(program, local, host)


def test_a_ring_without_a_gather_only_turns_the_order():
    program = two_linears(5)
    _, local, host = lowered(program, TP, {"y": replicate() | stream(0, 3, ring="tp")})
    (loop,) = loops(host)
    assert "slice x@i0 of x dim 0 by i0 ring tp" in words(loop.body)
    assert not any("all_reduce" in word for word in words(loop.body))
    assert_exact(program, local, host)


def test_views_of_a_chunk_are_chunks():
    p = ProgramBuilder("viewed")
    x = p.input("x", (6, 4))
    a = x.map("a0 + 1", name="a")
    flat = p.reshape(a, (24,), view=True, name="flat")
    program = p.build(flat.map("a0 * 2", name="y"))
    _, local, host = lowered(program, ONE, {"x": stream(0, 3)})
    assert host.buffer_map()["flat"].shape == (8,)
    assert allocated_bytes(host, "a", in_loop=True) == 32
    assert_exact(program, local, host)


def test_a_view_that_leaves_keeps_its_storage_whole():
    p = ProgramBuilder("leaves")
    a = p.input("x", (6, 4)).map("a0 + 1", name="a")
    flat = p.reshape(a, (24,), view=True, name="flat")
    program = p.build(a.map("a0 * 2", name="y"), flat)
    _, local, host = lowered(program, ONE, {"x": stream(0, 3)})
    assert allocated_bytes(host, "a", in_loop=False) == 96
    assert_exact(program, local, host)


def test_states_are_updated_by_chunk():
    p = ProgramBuilder("counted")
    total, x = p.state("total", (6, 4)), p.input("x", (6, 4))
    p.set(p.pointwise("a0 + a1", total, x, name="next"), into=total, name="again")
    program = p.build(total)
    _, local, host = lowered(program, ONE, {"next": stream(0, 2)})
    (loop,) = loops(host)
    assert "slice total@i0 of total dim 0 by i0" in words(loop.body)
    assert host.buffer_map()["next"].shape == (3, 4)
    assert_exact(program, local, host)


def test_megakernels_run_in_stream_loops():
    program = two_linears(5, rows=7)
    _, local, host = lowered(program, ONE, {"x": stream(0, 3)}, megakernel=True)
    assert len(host.segments) == 2
    assert host.segments[0].tensor_map()["y@i0"].shape == (3, 3)
    assert_exact(program, local, host)
    _, local, host = lowered(row_parallel(), TP, {**SPLIT_SUM, "y": stream(0, 3)}, megakernel=True)
    assert_exact(row_parallel(), local, host)


@pytest.mark.parametrize(
    ("marks", "message"),
    [
        ({"a": stream(3, 2)}, "a dim below 3"),
        ({"a": stream(0, 0)}, "at least one chunk"),
        ({"a": stream(0, 2, ring="pp")}, "axes of mesh"),
        ({"nothing": stream(0, 2)}, "tensor 'nothing'"),
        ({"x": stream(2, 3, ring="tp")}, "a ring needs equal chunks, and 8 is cut by 3"),
        ({"c": "tp"}, "annotation 'tp' of tensor 'c'"),
        (
            dict.fromkeys("xabc", shard(0, "tp")) | {"a": shard(0, "tp") | stream(0, 2, ring="tp")},
            "only parts of it are used, one chunk each of tp",
        ),
        ({"x": stream(0, 4), "a": stream(1, 2)}, "runs in 2 chunks of i1, as annotated for a"),
    ],
)
def test_annotations_that_cannot_be_followed_are_refused(marks: dict[str, Layout], message: str):
    with pytest.raises(PlanError, match=message):
        plan_program(sums(), TP, CPU, marks)


@pytest.mark.parametrize("of_state", [True, False])
@pytest.mark.parametrize("dim", [0, 1])
def test_what_is_set_to_its_own_transpose_runs_at_once(of_state: bool, dim: int):
    """Its chunks would write what others read; ops around it run in chunks."""
    p = ProgramBuilder("turn")
    s = p.state("s", (4, 4)) if of_state else p.input("s", (4, 4)).map("a0 + 1", name="t")
    p.set(p.transpose(s, (1, 0), view=True, name="v"), into=s, name="turned")
    program = p.build(s.map("a0 * 2", name="y"))
    for name in (s.name, "y"):
        _, local, host = lowered(program, ONE, {name: stream(dim, 2)})
        assert all("set" not in words(loop.body) for loop in loops(host))
        assert_exact(program, local, host)


@pytest.mark.parametrize("name", ["s", "v"])
def test_chunks_of_a_set_to_its_own_transpose_are_refused(name: str):
    p = ProgramBuilder("turn")
    s = p.state("s", (4, 4))
    p.set(p.transpose(s, (1, 0), view=True, name="v"), into=s, name="turned")
    program = p.build(p.input("x", (2,)).map("a0 * 2"))
    message = (
        rf"asked for '{name}' .*turned: set over i\d: it reads other chunks of s than it writes"
    )
    with pytest.raises(PlanError, match=message):
        plan_program(program, ONE, CPU, {name: stream(0, 2)})


def test_one_chunk_keeps_an_op_out_of_loops():
    _, local, host = lowered(sums(), ONE, {"x": stream(0, 2), "b": stream(0, 1)})
    (loop,) = loops(host)
    assert "reduce" not in words(loop.body)
    assert allocated_bytes(host, "a", in_loop=False) == 768
    assert_exact(sums(), local, host)


@pytest.mark.parametrize("case", CASES)
def test_chunks_have_names_that_no_tensor_of_the_program_has(case: str):
    program, mesh, marks = CASES[case]
    _, local, host = lowered(program, mesh, marks)
    made = {buffer.name for buffer in host.buffers} - {t.name for t in local.program.tensors}
    assert made
    for name in sorted(made):
        other = next(t.name for t in program.tensors if not name.startswith(t.name))
        clashing = renamed(program, {other: name})
        named = {name if key == other else key: layout for key, layout in marks.items()}
        _, local, host = lowered(clashing, mesh, named)
        assert_exact(clashing, local, host)


@pytest.mark.parametrize("case", CASES)
def test_every_wait_is_needed(case: str):
    host = lowered(*CASES[case])[2]
    require_every_wait(host)


@pytest.mark.parametrize("case", CASES)
def test_the_reported_peak_is_what_is_held(case: str, monkeypatch: pytest.MonkeyPatch):
    program, mesh, marks = CASES[case]
    if mesh.num_ranks > 1:
        mesh, marks = ONE, {k: v for k, v in marks.items() if v.chunks and not v.chunks.ring}
    plan, local, host = lowered(program, mesh, marks)
    held = HeldBytes(monkeypatch)
    run_mesh(host, local, small_integers(program))
    assert held.peak == peak_memory(host) == plan.memory.total_bytes


def test_a_full_allocation_turned_into_a_chunk_is_caught():
    program, mesh, marks = CASES["n2"]
    _, local, host = lowered(program, mesh, marks)
    broken = {**local.allocations, "a": local.allocations["a"].chunked(0, 2)}
    with pytest.raises(VerifyError):
        run_passes(lower_program(replace(local, allocations=broken), megakernel=False,
                                 peer_memory=False))  # fmt: skip
    text = print_host(host).replace("  temp a: f32[4, 6, 8]", "  temp a: f32[2, 6, 8]")
    with pytest.raises(VerifyError):
        run_passes(parse_host(text))


def test_a_plan_explains_its_host_loops_and_ranks_agree_on_them():
    program, mesh, marks = CASES["n1"]
    plan = plan_program(program, mesh, CPU, marks)
    assert "host loops\n  i0 in 2: a(i0 4 by 2), b(i0 4 by 2), c(i0 4 by 2)\n" in plan.explain()
    assert "  a by chunk: [2, 6, 8]\n" in plan.explain()
    plan = plan_program(program, mesh, CPU, {"b": stream(1, 2)})
    assert "  x in parts with gaps: [4, 3, 8]\n" in plan.explain()
    assert plan.fingerprint() != plan_program(program, mesh, CPU).fingerprint()
