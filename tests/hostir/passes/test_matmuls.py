"""Matmuls and collectives as one instruction: chosen, verified, checked, exact on ranks."""

import itertools
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distmega.errors import CheckError, PlanError, VerifyError
from distmega.hostir.check.check import check_host
from distmega.hostir.ir.matmul_nodes import FusedMatmul, SymmetricBuffer
from distmega.hostir.ir.nodes import HostProgram, walk_nodes
from distmega.hostir.ir.text import parse_host, print_host
from distmega.hostir.ir.verify import verify_host
from distmega.hostir.lower.lower import lower_program
from distmega.hostir.passes.deallocations import peak_memory
from distmega.hostir.passes.passes import run_passes
from distmega.kernels.machines import CPU
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import Layout, replicate, shard
from distmega.sharding.localize import LocalProgram, localize
from distmega.sharding.overlap.products import Way
from distmega.sharding.planner import Plan, plan_program
from tests.hostir.programs import run_program, without
from tests.hostir.streams import assert_exact, plan_following, without_dead_ops
from tests.hostir.threads import join, run_mesh
from tests.sharding.random_programs import STEPS, Draft, joined, unary

TP = DeviceMesh(tp=2)
ROWS = {"x": shard(0, "tp"), "w1": shard(0, "tp"), "h": shard(1, "tp"), "w2": shard(1, "tp"),
        "y": shard(0, "tp"), "z": shard(0, "tp")}  # fmt: skip
COLUMNS = {"w1": shard(0, "tp"), "w2": shard(1, "tp")}


def mlp() -> Program:
    """Two linears with a gate between and a sum behind."""
    p = ProgramBuilder("mlp")
    x = p.input("x", (4, 8))
    h = p.linear(x, p.weight("w1", (12, 8)), name="h").map("relu(a0)", name="act")
    y = p.linear(h, p.weight("w2", (8, 12)), name="y")
    return p.build(y.map("a0 + a1", x, name="z"))


def lowered(
    marks: dict, program: Program | None = None, way: str = "kernel"
) -> tuple[Plan, LocalProgram, HostProgram]:
    plan = plan_program(program or mlp(), TP, CPU, marks, overlap=way)
    local = localize(plan)
    host = run_passes(lower_program(local, megakernel=False, peer_memory=True))
    check_host(host)
    assert parse_host(print_host(host)) == host
    return plan, local, host


def fused(host: HostProgram) -> list[FusedMatmul]:
    return [node for node in walk_nodes(host.body) if isinstance(node, FusedMatmul)]


def small(program: Program) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    given = [t for t in program.tensors if t.role != "temp"]
    return {t.name: torch.randint(-3, 4, t.shape, generator=generator).float() for t in given}


@pytest.mark.parametrize(
    ("marks", "kinds"),
    [
        (ROWS, ["all_gather_matmul", "matmul_reduce_scatter"]),
        (COLUMNS, ["matmul_all_reduce"]),
    ],
)
def test_pairs_become_one_instruction(marks: dict, kinds: list[str]):
    plan, local, host = lowered(marks)
    assert [node.kind for node in fused(host)] == kinds
    found = join(run_mesh(host, local, small(mlp())), local, ["z"])
    assert torch.equal(found["z"], run_program(mlp(), small(mlp()))["z"])
    assert peak_memory(host) == plan.memory.total_bytes
    assert "kernel, as asked" in plan.explain()


def test_what_is_gathered_or_partial_is_not_allocated():
    _, _, host = lowered(ROWS)
    assert print_host(host).splitlines()[2:] == [
        "  symmetric buffer tp: 256 bytes",
        "  input x: f32[2, 8]",
        "  weight w1: f32[6, 8]",
        "  temp h: f32[4, 6]",
        "  temp act: f32[4, 6]",
        "  weight w2: f32[8, 6]",
        "  temp y: f32[2, 8]",
        "  temp z: f32[2, 8]",
        "  body",
        "    allocate h",
        "    all_gather_matmul tp (x, w1) -> h rows 1 forced",
        "    allocate act",
        "    act = pointwise[i0:4 i1:6] h(i0, i1) -> act(i0, i1) | expr='relu(a0)'",
        "    free h",
        "    allocate y",
        "    matmul_reduce_scatter tp (act, w2) -> y rows 1 forced",
        "    free act",
        "    allocate z",
        "    z = pointwise[i0:2 i1:8] y(i0, i1) x(i0, i1) -> z(i0, i1) | expr='(a0 + a1)'",
        "    free y",
        "  return z",
    ]


@pytest.mark.parametrize("replicated", [False, True])
def test_an_instruction_says_where_all_ranks_compute_the_same(replicated: bool):
    p = ProgramBuilder("wide")
    program = p.build(p.linear(p.input("x", (4, 2)), p.weight("w", (64, 2)), name="y"))
    same = {"w": replicate(), "y": replicate()}
    marks = {"x": shard(0, "tp")} | (
        same if replicated else {"w": shard(0, "tp"), "y": shard(1, "tp")}
    )
    _, local, host = lowered(marks, program)
    assert [(node.kind, node.replicated) for node in fused(host)] == [
        ("all_gather_matmul", replicated)
    ]
    found = join(run_mesh(host, local, small(program)), local, ["y"])
    assert torch.equal(found["y"], run_program(program, small(program))["y"])


def test_a_gathers_product_mixes_its_columns():
    """Two halves of the product and a formula of them are one instruction with it."""
    p = ProgramBuilder("gated")
    product = p.linear(p.input("x", (4, 2)), p.weight("w", (64, 2)), name="product")
    gate, up = (p.slice(product, 1, n, n + 32, view=True, name=f"half{n}") for n in (0, 32))
    program = p.build(p.pointwise("relu(a0) * a1", gate, up, name="y"))
    same = dict.fromkeys(("w", "product", "y"), replicate())
    plan = plan_program(program, TP, CPU, {"x": shard(0, "tp")} | same, overlap="kernel")
    local = localize(plan)
    host = run_passes(lower_program(local, megakernel=False, peer_memory=True, fuse=True))
    check_host(host)
    assert parse_host(print_host(host)) == host
    assert [(n.kind, n.out, n.mixes) for n in fused(host)] == [
        ("all_gather_matmul", "y", "(relu(a0) * a1)")
    ]
    assert "product" not in host.buffer_map()
    found = join(run_mesh(host, local, small(program)), local, ["y"])
    assert torch.equal(found["y"], run_program(program, small(program))["y"])


def test_a_sum_is_borrowed_where_it_is_used_before_the_next():
    _, _, host = lowered(COLUMNS)
    assert [node.borrows for node in fused(host)] == [True]
    p = ProgramBuilder("kept")
    x = p.input("x", (4, 8))
    program = p.build(p.linear(x, p.weight("w", (8, 8)), name="y"))
    _, _, host = lowered({"w": shard(1, "tp"), "x": shard(1, "tp")}, program)
    assert [(node.kind, node.borrows) for node in fused(host)] == [("matmul_all_reduce", False)]
    borrowed = replace(host, body=tuple(borrow(node) for node in host.body))
    with pytest.raises(VerifyError, match="in peer memory that is used again"):
        verify_host(borrowed)


def borrow(node):
    return replace(node, borrows=True) if isinstance(node, FusedMatmul) else node


def test_what_is_borrowed_expires_with_the_next():
    p = ProgramBuilder("twice")
    x = p.input("x", (4, 8))
    a = p.linear(x, p.weight("w1", (8, 8)), name="a")
    b = p.linear(x, p.weight("w2", (8, 8)), name="b")
    program = p.build(a.map("a0 * a1", b, name="z"))
    marks = {"x": shard(1, "tp"), "w1": shard(1, "tp"), "w2": shard(1, "tp")}
    _, _, host = lowered(marks, program)
    assert [node.borrows for node in fused(host)] == [False, True]
    with pytest.raises(VerifyError, match=r"\['a'\] in peer memory"):
        verify_host(replace(host, body=tuple(borrow(node) for node in host.body)))


def test_rooms_are_large_enough_and_final():
    _, _, host = lowered(COLUMNS)
    with pytest.raises(VerifyError, match="a symmetric buffer of 8 bytes"):
        verify_host(
            replace(host, symmetric_buffers=(SymmetricBuffer(mesh_axis="tp", num_bytes=8),))
        )
    larger = (SymmetricBuffer(mesh_axis="tp", num_bytes=10**6),)
    with pytest.raises(VerifyError, match="symmetric buffers became"):
        run_passes(host, passes=[lambda h: replace(h, symmetric_buffers=larger)])


BESIDE = """
host beside on mesh(tp=2)
  streams 2, events 2
  symmetric buffer tp: 64 bytes
  input x: f32[4, 2]
  weight w: f32[2, 2]
  temp s: f32[4, 2]
  temp y: f32[4, 2]
  body
    allocate s
    allocate y
    record event 0
    stream 1
    wait event 0
    all_reduce tp (x) -> (s) as sum | combine='sum'
    wait sum
    record event 1
    stream 0
    wait event 1
    matmul_all_reduce tp (x, w) -> y rows 1
    wait event 1
    free s
  return y
"""


def test_no_exchange_runs_beside_one():
    host = verify_host(parse_host(BESIDE))
    check_host(host)
    late = next(n for n, node in enumerate(host.body) if isinstance(node, FusedMatmul)) - 1
    with pytest.raises(CheckError, match="may run beside"):
        check_host(without(host, late))
    with pytest.raises(VerifyError, match=r"\['sum'\] under way beside it"):
        verify_host(parse_host(BESIDE.replace("    wait sum\n", "")))


def test_what_is_impossible_is_said():
    with pytest.raises(PlanError, match="an all-gather or a reduce-scatter"):
        plan_program(mlp(), TP, CPU, COLUMNS, overlap="ring")
    with pytest.raises(PlanError, match=r"there are \[\]"):
        plan_program(mlp(), DeviceMesh(tp=1), CPU, overlap="kernel")
    plan = plan_program(mlp(), TP, CPU, COLUMNS, overlap="kernel")
    with pytest.raises(PlanError, match="without peer memory"):
        lower_program(localize(plan), megakernel=False, peer_memory=False)


EVEN = (2, 4, 6, 8)


def random_blocks(seed: int) -> tuple[Program, dict[str, Layout]]:
    """Linears of rows one behind the other, other ops before, between and beside them, and layouts
    by which a collective along tp stands before or behind each.
    """
    d, marks = Draft(seed), dict[str, Layout]()
    rows, width = d.rng.choice(EVEN), d.rng.choice(EVEN)
    x = d.p.input("rows", (rows, width))
    d.known.append(x)
    for _ in range(d.rng.choice((1, 2, 2, 3))):
        for _ in range(d.rng.choice((0, 0, 1, 2))):
            d.grow(STEPS)
        x = unary(d, x) if d.chance(0.5) else x
        x, wide = d.clamped(x, 7), d.rng.choice(EVEN)
        w = d.weight((wide, x.shape[1]))
        y = d.contracted(x, w)
        if d.chance(0.5):  # each rank has some rows, and some columns or all of the result
            alone = d.chance(0.3)
            marks[x.name] = shard(0, "tp")
            marks[w.name] = replicate() if alone else shard(0, "tp")
            marks[y.name] = replicate() if alone else shard(1, "tp")
        else:  # each rank has some terms of sums, and some rows of the result or all
            marks[w.name] = shard(1, "tp")
            marks.setdefault(x.name, shard(1, "tp"))
            marks[y.name] = shard(0, "tp") if d.chance(0.7) else replicate()
        x = joined(d, y, y) if d.chance(0.3) else unary(d, y)
        d.known += [y, x]
    program = without_dead_ops(d.finished())
    return program, {name: marks[name] for name in marks if name in program.tensor_map()}


def test_random_programs_are_exact_in_every_way():
    """And most of them have matmuls beside collectives, in each way."""
    ways = ("kernel", "ring", "chunks")
    num, found = 0, Counter[str]()

    @settings(max_examples=40, deadline=None)
    @given(st.integers(0, 10**6), st.sampled_from([TP, DeviceMesh(dp=2, tp=2)]))
    def check(seed: int, mesh: DeviceMesh) -> None:
        nonlocal num
        num += 1
        program, marks = random_blocks(seed)
        plan, marks = plan_following(program, mesh, marks)
        pairs = plan.overlaps
        turns = itertools.cycle(ways[seed % 3 :] + ways[: seed % 3])
        asked: dict[str, Way] = {}
        for choice, way in zip(pairs, turns, strict=False):
            possible = {name.partition(" ")[0] for name, _ in choice.times_us}
            more = {**asked, choice.pair.result: way if way in possible else "kernel"}
            with suppress(PlanError):  # of ways that do not go together
                plan = plan_program(program, mesh, CPU, marks, overlap=more)
                asked = more
        local = localize(plan)
        host = run_passes(lower_program(local, megakernel=False, peer_memory=True))
        check_host(host)
        assert parse_host(print_host(host)) == host
        assert_exact(program, local, host, seed=seed)
        found.update({"pairs"} if plan.overlaps else ())
        found.update({choice.way for choice in plan.overlaps})
        found.update({node.kind for node in fused(host)})

    check()
    assert found["pairs"] >= 0.7 * num, found
    assert all(found[way] >= 0.1 * num for way in ways), found
    assert found["all_gather_matmul"] >= 0.1 * num, found
    assert found["matmul_all_reduce"] + found["matmul_reduce_scatter"] >= 0.1 * num, found
