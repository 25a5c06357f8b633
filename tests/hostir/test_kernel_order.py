"""Kernels that fill a GPU never run beside each other, nor those of several ranks beside an
exchange.
"""

from dataclasses import replace

import pytest

from distmega.errors import CheckError, VerifyError
from distmega.hostir.check.check import check_host
from distmega.hostir.ir.nodes import HostProgram, Wait, walk_nodes
from distmega.hostir.ir.text import print_node
from distmega.hostir.ir.verify import verify_host
from distmega.hostir.lower.lower import lower_program
from distmega.hostir.passes.kernel_order import order_kernels
from distmega.hostir.passes.passes import run_passes
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import shard, stream
from distmega.sharding.localize import LocalProgram, localize
from distmega.sharding.planner import plan_program
from distmega.sharding.search.cost import CPU
from tests.hostir.programs import without
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
