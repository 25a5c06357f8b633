"""Kernels that fill a GPU never run beside each other, nor those of several ranks beside an
exchange.
"""

from dataclasses import replace

import pytest

from distmega.errors import CheckError, VerifyError
from distmega.hostir.check.check import check_host, prove_once
from distmega.hostir.ir.nodes import HostProgram, Peer, Signal, Wait, walk_nodes
from distmega.hostir.ir.text import parse_host, print_node
from distmega.hostir.ir.verify import verify_host
from distmega.hostir.lower.lower import lower_program
from distmega.hostir.passes.kernel_order import order_kernels
from distmega.hostir.passes.passes import run_passes
from distmega.kernels.machines import CPU
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import shard, stream
from distmega.sharding.localize import LocalProgram, localize
from distmega.sharding.planner import plan_program
from tests.hostir.programs import wait_numbers, without
from tests.hostir.streams import assert_exact

TP = DeviceMesh(tp=2)
SUMMED = {"x": shard(1, "tp"), "w": shard(1, "tp"), "y": shard(0, "tp")}


def planned(program: Program, marks: dict, way: str = "sequential") -> LocalProgram:
    return localize(plan_program(program, TP, CPU, marks, overlap=way))


def lowered(local: LocalProgram) -> HostProgram:
    return lower_program(local, megakernel=True, peer_memory=True)


def beside() -> Program:
    """A chain by chunk, and a linear that shares nothing with it."""
    p = ProgramBuilder("beside")
    c = p.input("c", (4, 6)).map("a0 + 1", name="c2").map("a0 * 2", name="c3")
    return p.build(c, p.linear(p.input("x", (4, 8)), p.weight("w", (8, 8)), name="y"))


def test_kernels_of_several_streams_take_turns():
    local = planned(beside(), SUMMED | {"y": shard(0, "tp"), "c2": stream(0, 2)}, "kernel")
    raw, host = lowered(local), run_passes(lowered(local))
    texts = [print_node(node) for node in walk_nodes(host.body)]
    order = [t for t in texts if "event 3" in t or "launch" in t or "matmul" in t or "for" in t]
    assert order == [
        "record event 3",
        "for i0 in 2:",
        "wait event 3", "launch beside.0(c@i0, c3@i0)", "record event 3",
        "wait event 3", "matmul_reduce_scatter tp (x, w) -> y rows 1 forced", "record event 3",
    ]  # fmt: skip
    check_host(host)
    assert_exact(beside(), local, host)
    with pytest.raises(CheckError, match=r"launch beside.0.* may run beside .*launch beside.0"):
        check_host(raw)
    loop, fused = (n for n, text in enumerate(texts) if text == "wait event 3")
    with pytest.raises(CheckError, match=r"i0=0 \(launch .* may run beside .*i0=1 \(launch"):
        check_host(without(host, loop))
    with pytest.raises(CheckError, match=r"launch .* may run beside .*matmul_reduce_scatter"):
        check_host(without(host, fused))


def test_kernels_of_one_stream_need_no_event():
    local = planned(beside(), SUMMED, "kernel")
    host = lowered(local)
    assert len(host.segments) == 1
    assert order_kernels(host) is host
    check_host(host)


def test_no_exchange_of_a_loop_runs_beside_a_kernel_of_all_ranks():
    p = ProgramBuilder("sums")
    x, v = p.input("x", (4, 8)), p.weight("v", (8, 8))
    y = p.linear(x, v, name="y")
    program = p.build(y, p.linear(p.input("z", (4, 8)), p.weight("w", (8, 8)), name="s"))
    marks = dict.fromkeys(("x", "v", "z", "w"), shard(1, "tp"))
    local = planned(program, marks | {"y": stream(0, 2)})
    host = run_passes(lowered(local))
    check_host(host)
    kinds = [[op.kind for op in segment.ops] for segment in host.segments]
    assert kinds == [["linear"], ["linear", "all_reduce"]]
    texts = [print_node(node) for node in host.body]
    launch = texts.index("launch sums.1(z, w, s)")
    assert texts[launch - 1] == "wait event 3"
    found = [print_node(node) for node in walk_nodes(host.body)]
    waits = [number for number, text in enumerate(found) if text == "wait event 3"]
    beside = r"\(launch sums.0.* i0=1 \(launch sums.0", r"\(launch sums.0.* \(launch sums.1"
    for number, pair in zip(waits, beside, strict=True):
        with pytest.raises(CheckError, match=pair.replace(".*", ".* may run beside .*")):
            check_host(without(host, number))


def test_an_exchange_is_waited_for_before_a_kernel_of_all_ranks():
    p = ProgramBuilder("scattered")
    x, z = p.input("x", (4, 8)), p.input("z", (4, 8))
    y = p.linear(x, p.weight("w", (8, 8)), name="y")
    s = p.linear(z, p.weight("v", (8, 8)), name="s")
    program = p.build(y, s)
    local = planned(program, SUMMED | {"z": shard(1, "tp"), "v": shard(1, "tp")})
    raw = lowered(local)
    host = run_passes(raw)
    check_host(host)
    words = [print_node(node).partition(" tp")[0].partition("(")[0] for node in host.body]
    assert [word for word in words if "allocate" not in word and "free" not in word] == [
        "launch scattered.0", "reduce_scatter", "wait y.reduce_scatter", "launch scattered.1",
    ]  # fmt: skip
    (wait,) = (node for node in raw.body if isinstance(node, Wait))
    late = replace(raw, body=(*(node for node in raw.body if node is not wait), wait))
    with pytest.raises(VerifyError, match=r"\['y.reduce_scatter'\] under way beside it"):
        verify_host(late, freed=False)
    with pytest.raises(CheckError, match="may run beside"):
        check_host(late)


TWO_AXES = """
host p on mesh(dp=2, tp=2)
  streams {streams}, events {events}
  input x: f32[4]
  input z: f32[4]
  temp a: f32[4]
  temp b: f32[4]
  body
    allocate a
    allocate b
{body}
  return a, b
"""


def on_two_axes(*body: str, streams: int = 1, events: int = 0) -> HostProgram:
    nodes = "\n".join(f"    {line}" for line in body)
    return parse_host(TWO_AXES.format(streams=streams, events=events, body=nodes))


BESIDE = on_two_axes(
    "all_reduce dp (x) -> (a) as one | combine='sum'",
    "all_reduce tp (z) -> (b) as two | combine='sum'",
    "wait one",
    "wait two",
)
ON_STREAMS = on_two_axes(
    "record event 0",
    "stream 1",
    "wait event 0",
    "all_reduce dp (x) -> (a) as one | combine='sum'",
    "wait one",
    "record event 1",
    "stream 0",
    "all_reduce tp (z) -> (b) as two | combine='sum'",
    "wait two",
    "wait event 1",
    streams=2,
    events=2,
)


def body_of(host: HostProgram) -> list[str]:
    return [print_node(node) for node in host.body]


def test_exchanges_of_two_axes_take_turns_on_one_stream():
    with pytest.raises(CheckError, match=r"all_reduce dp.* may run beside .*all_reduce tp"):
        check_host(BESIDE)
    host = order_kernels(BESIDE)
    assert [text for text in body_of(host) if "allocate" not in text] == [
        "all_reduce dp (x) -> (a) as one | combine='sum'",
        "wait one",
        "all_reduce tp (z) -> (b) as two | combine='sum'",
        "wait two",
    ]
    check_host(host)


def test_exchanges_of_two_axes_take_turns_on_two_streams():
    with pytest.raises(CheckError, match=r"all_reduce dp.* may run beside .*all_reduce tp"):
        check_host(ON_STREAMS)
    host = run_passes(ON_STREAMS)
    check_host(host)
    texts = body_of(host)
    chained = texts.index("all_reduce tp (z) -> (b) as two | combine='sum'") - 1
    assert texts[chained] == "wait event 2"
    with pytest.raises(CheckError, match=r"all_reduce dp.* may run beside .*all_reduce tp"):
        check_host(without(host, chained))
    for number in wait_numbers(host):
        with pytest.raises(CheckError):
            check_host(without(host, number))


def test_exchanges_of_one_axis_stay_as_they_are():
    body = (
        "all_reduce tp (x) -> (a) as one | combine='sum'",
        "all_reduce tp (z) -> (b) as two | combine='sum'",
        "wait one",
        "wait two",
    )
    host = on_two_axes(*body)
    assert order_kernels(host) is host
    check_host(host)


def test_ranks_that_run_the_chain_in_different_orders_are_caught():
    """Each rank has a chain, and they wait for each other."""
    first = ("all_reduce dp (x) -> (a) as one | combine='sum'", "wait one")
    second = ("all_reduce tp (z) -> (b) as two | combine='sum'", "wait two")
    one, other = on_two_axes(*first, *second), on_two_axes(*second, *first)
    check_host([one] * 4)
    with pytest.raises(CheckError, match="wait for each other"):
        check_host([one, other, other, one])


def test_an_exchange_under_way_ends_before_a_kernel_of_one_rank():
    """NCCL and a kernel that fills the GPU would block each other on two GPUs."""
    p = ProgramBuilder("filled")
    x = p.input("x", (4, 8))
    y = p.linear(x, p.weight("w", (8, 8)), name="y")
    program = p.build(y, p.input("z", (4, 6)).map("a0 + 1", name="m"))
    raw = lower_program(planned(program, SUMMED), megakernel=True, peer_memory=False)
    check_host(run_passes(raw))
    wait = next(node for node in raw.body if isinstance(node, Wait))
    late = replace(raw, body=(*(node for node in raw.body if node is not wait), wait))
    launches = [text for text in body_of(raw) if text.startswith("launch")]
    assert len(launches) == 2
    with pytest.raises(CheckError, match=r"may run beside .*launch"):
        check_host(late)
    check_host(order_kernels(late))


def test_a_wait_that_nobody_needs_is_dropped_in_loops_too():
    text = """
host p on mesh(tp=1)
  streams 2, events 2
  input x: f32[4]
  temp y: f32[4]
  body
    allocate y
    record event 0
    for i in 2:
      stream 1
      wait event 0
      wait event 0
      y = pointwise[m:4] x(m) -> y(m) | expr='a0 + 1.0'
      record event 1
    stream 0
    wait event 1
    wait event 1
  return y
"""
    host = run_passes(parse_host(text))
    waits = [text for text in map(print_node, walk_nodes(host.body)) if text.startswith("wait")]
    assert waits == ["wait event 0", "wait event 1"]
    check_host(host)


def test_two_ranks_an_axis_stand_for_all_that_do_the_same(monkeypatch: pytest.MonkeyPatch):
    seen = []
    monkeypatch.setattr(
        "distmega.hostir.check.check._prove", lambda programs: seen.append(len(programs))
    )
    prove_once.cache_clear()
    local = localize(plan_program(beside(), DeviceMesh(tp=4), CPU, SUMMED))
    host = run_passes(lower_program(local, megakernel=False, peer_memory=False))
    for _ in range(2):
        prove_once(host)
    ring = replace(host, body=(*host.body, Signal(name="s", peer=Peer(mesh_axis="tp", offset=1))))
    prove_once(ring)
    prove_once.cache_clear()
    assert seen == [2, 4]
