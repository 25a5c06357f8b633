"""Programs in stream parallelism, named and random, and how their host programs are looked at."""

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from distmega.errors import PlanError
from distmega.hostir.check.check import check_host
from distmega.hostir.ir.nodes import Allocate, ForLoop, HostProgram, Node, walk_nodes
from distmega.hostir.ir.text import parse_host, print_host, print_node
from distmega.hostir.library.torch_types import torch_dtype
from distmega.hostir.lower.lower import lower_program
from distmega.hostir.passes.kernel_order import order_kernels
from distmega.hostir.passes.passes import run_passes
from distmega.kernels.machines import CPU
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Program, accesses
from distmega.sharding.layout.aliases import alias_roots
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import Layout, fits, replicate, shard, stream
from distmega.sharding.localize import LocalProgram, localize
from distmega.sharding.overlap.pairs import CHEAPEST, OverlapRequest
from distmega.sharding.planner import Plan, plan_program
from tests.hostir.programs import run_program
from tests.hostir.threads import Bind, join, op_by_op, run_mesh
from tests.sharding.random_programs import random_program
from tests.sharding.simulate import random_arrays

ONE = DeviceMesh(tp=1)
TP = DeviceMesh(tp=2)


def small_integers(program: Program, seed: int = 0) -> dict[str, torch.Tensor]:
    """Values that any order of additions leaves exact, as random_arrays gives them."""
    arrays, tensors = random_arrays(program, seed), program.tensor_map()
    return {
        name: torch.from_numpy(x).to(torch_dtype(tensors[name].dtype)) for name, x in arrays.items()
    }


def lowered(
    program: Program, mesh: DeviceMesh, annotations: Mapping[str, Layout], **options: Any
) -> tuple[Plan, LocalProgram, HostProgram]:
    """A checked host program; what it prints reads back."""
    plan = plan_program(program, mesh, CPU, annotations)
    local = localize(plan)
    settings = {"megakernel": False, "peer_memory": False, **options}
    raw = lower_program(local, **settings)
    host = run_passes(raw)
    check_host(order_kernels(raw))
    check_host(host)
    assert parse_host(print_host(host)) == host
    return plan, local, host


def assert_exact(
    program: Program,
    local: LocalProgram,
    host: HostProgram,
    *,
    seed: int = 0,
    bind: Bind = op_by_op,
) -> None:
    """All ranks together give and keep what the program does on one, bit by bit."""
    tensors = small_integers(program, seed)
    expected = run_program(program, {k: v.clone() for k, v in tensors.items()})
    names = {*program.outputs, *(state.name for state in program.with_role("state"))}
    found = join(run_mesh(host, local, tensors, bind), local, sorted(names))
    for name in names:
        assert torch.equal(found[name], expected[name]), name


def words(body: tuple[Node, ...]) -> list[str]:
    """A word or two a node, ops and collectives by kind."""
    found = []
    for node in walk_nodes(body):
        line = print_node(node)
        found.append(line.partition(" = ")[2].partition("[")[0] if " = " in line else line)
    return found


def loops(host: HostProgram) -> list[ForLoop]:
    return [node for node in host.body if isinstance(node, ForLoop)]


def allocated_bytes(host: HostProgram, name: str, *, in_loop: bool) -> int:
    """Bytes of the one allocation of a buffer."""
    outside = [n for n in host.body if isinstance(n, Allocate) and n.buffer == name]
    inside = [
        n for loop in loops(host) for n in loop.body if isinstance(n, Allocate) and n.buffer == name
    ]
    assert (len(outside), len(inside)) == (not in_loop, in_loop)
    return host.buffer_map()[name].num_bytes


def sums() -> Program:
    """Case N1: a from x, and from it a sum and a half."""
    p = ProgramBuilder("sums")
    x = p.input("x", (4, 6, 8))
    a = x.map("a0 + 1", name="a")
    b = p.reduce(a, 2, name="b")
    return p.build(b, a.map("a0 / 2", name="c"))


def two_linears(hidden: int, rows: int = 6) -> Program:
    p = ProgramBuilder("two")
    x, w1, w2 = p.input("x", (rows, 3)), p.weight("w1", (3, hidden)), p.weight("w2", (hidden, 3))
    h = p.linear(x, w1, spec="m k, k n -> m n", name="h")
    return p.build(p.linear(h, w2, spec="m k, k n -> m n", name="y"))


def row_parallel(dtype: str = "bf16") -> Program:
    p = ProgramBuilder("row_parallel")
    x, w = p.input("x", (6, 4), dtype), p.weight("w", (2, 4), dtype)
    return p.build(p.linear(x, w, name="y"))


SPLIT_SUM = {"x": shard(1, "tp"), "w": shard(1, "tp")}


def gathered(size: int) -> tuple[Program, dict[str, Layout]]:
    """An all-gather of rows and two ops on them, column-parallel, in ring order."""
    p = ProgramBuilder("gathered")
    x, w = p.input("x", (12, 4)), p.weight("w", (4, 4))
    program = p.build(p.linear(x, w, name="h").map("relu(a0)", name="y"))
    ring = shard(1, "tp") | stream(0, size, ring="tp")
    return program, {"x": shard(0, "tp"), "w": shard(0, "tp"), "h": shard(1, "tp"), "y": ring}


CASES = {
    "n1": (sums(), ONE, {"x": stream(0, 2)}),
    "n2": (sums(), ONE, {"x": stream(0, 2), "b": stream(1, 2)}),
    "n3": (two_linears(15), ONE, {"h": stream(1, 3), "y": stream(0, 3)}),
    "n6": (row_parallel(), TP, {**SPLIT_SUM, "y": stream(0, 3)}),
    "uneven": (two_linears(5, rows=7), ONE, {"x": stream(0, 3)}),
    "ring": (gathered(2)[0], TP, gathered(2)[1]),
}


MESHES = [
    DeviceMesh(tp=1),
    DeviceMesh(tp=2),
    DeviceMesh(dp=2, tp=2),
    DeviceMesh(dp=1, tp=3),
    DeviceMesh.from_ranks([3, 1], ["tp"]),
    DeviceMesh.from_ranks([[5, 2], [0, 7]], ["dp", "tp"]),
    DeviceMesh(a=2, one=1, b=2),
    DeviceMesh(tp=5),
]


def random_marks(program: Program, mesh: DeviceMesh, seed: int) -> dict[str, Layout]:
    """Annotations of some tensors: chunks of a dim, in ring order at times, or a shard, or both."""
    rng = random.Random(seed)
    marks: dict[str, Layout] = {}
    for tensor in program.tensors:
        rank = len(tensor.shape)
        if not rank or rng.random() > 0.4:
            continue
        layout = replicate()
        axis, size = rng.choice(mesh.axes)
        dim = rng.randrange(rank)
        if rng.random() < 0.4 and fits(tensor.shape[dim], size):
            layout = shard(dim, axis)
            others = [name for name in mesh.names if name != axis]
            if others and rng.random() < 0.5:
                layout = layout | shard(rng.randrange(rank), rng.choice(others))
        if rng.random() < 0.7:
            ring = axis if rng.random() < 0.3 else ""
            num = size if ring else rng.choice((1, 2, 3, 4, 9))
            along = dim if ring and rng.random() < 0.7 else rng.randrange(-rank, rank)
            chunks = stream(along, num, ring=ring)
            layout = layout | chunks if rng.random() < 0.5 else chunks
        marks[tensor.name] = layout
    return marks


def without_dead_ops(program: Program) -> Program:
    """The program without ops whose results nobody sees: nothing has to wait for those."""
    roots, needed, kept = alias_roots(program), set(program.outputs), []
    needed |= {roots[name] for name in needed}
    for op in reversed(program.ops):
        if {roots[access.tensor] for access in op.writes} & needed:
            kept.append(op)
            needed |= {roots[access.tensor] for access in op.reads}
    used = {a.tensor for op in kept for a in accesses(op)} | set(program.outputs)
    tensors = tuple(t for t in program.tensors if t.name in used)
    return replace(program, name="random", ops=tuple(reversed(kept)), tensors=tensors)


def plan_marked(program: Program, mesh: DeviceMesh, seed: int) -> Plan:
    """A plan under random annotations; those that can't be followed are left out one by one."""
    return plan_following(program, mesh, random_marks(program, mesh, seed))[0]


def plan_following(
    program: Program,
    mesh: DeviceMesh,
    annotations: Mapping[str, Layout],
    overlap: OverlapRequest = CHEAPEST,
) -> tuple[Plan, dict[str, Layout]]:
    """A plan under annotations, but for those that can't be followed, which are left out, the last
    one first; and those that are left.
    """
    marks = dict(annotations)
    while True:
        try:
            return plan_program(program, mesh, CPU, marks, overlap=overlap), marks
        except PlanError:
            if not marks:
                raise
            marks.popitem()


def planned(
    seed: int, mesh: DeviceMesh, *, megakernel: bool = False, live: bool = False
) -> tuple[Plan, LocalProgram, HostProgram]:
    """A random program lowered with random options. live: without dead ops."""
    program = random_program(seed, num_ops=4 + seed % 7)
    plan = plan_marked(without_dead_ops(program) if live else program, mesh, seed)
    local = localize(plan)
    options = {"max_streams": 1 + seed % 4, "fuse": seed % 2 == 1}
    raw = lower_program(local, megakernel=megakernel, peer_memory=False, **options)
    host = run_passes(raw)
    check_host(order_kernels(raw))
    check_host(host)
    assert parse_host(print_host(host)) == host
    return plan, local, host
