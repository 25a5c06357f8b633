"""Products of one operand whose weights are neighbours become one; results stay the same."""

from dataclasses import replace

import pytest
import torch

from distmega.engine.decode_planner import lower_decode, plan_decode
from distmega.engine.prefill_planner import lower_prefill
from distmega.engine.requests import EngineOptions
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.hostir.ir.nodes import FusedMatmul, LibraryOp
from distmega.hostir.ir.text import print_node
from distmega.hostir.ir.uses import storage_of, view_sources
from distmega.hostir.lower.join_products import join_products
from distmega.hostir.lower.lower import lower_program
from distmega.hostir.passes.passes import run_passes
from distmega.hostir.run.evaluator import Evaluator, made_before_views
from distmega.kernels.machines import CPU, H200
from distmega.models.presets import PRESETS
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.localize import localize
from distmega.sharding.planner import plan_program

NEIGHBOURS = {"a": "b", "b": "c", "c": "d"}


def branching(*, between: str = "") -> Program:
    """x times a [2, 3, 8], b [4, 8] and c [5, 8]; d [6, 8] is multiplied by another operand."""
    p = ProgramBuilder("branching")
    x = p.input("x", (3, 8))
    scratch = p.pointwise("a0 + 1.0", x, name="scratch")
    a = p.linear(scratch, p.weight("a", (2, 3, 8)), spec="m k, h d k -> m h d", name="pa")
    if between == "overwritten":
        p.set(p.pointwise("a0 * 2.0", x, name="twice"), scratch)
    if between == "row":
        row = p.slice(scratch, 0, 1, 2, view=True, name="row")
        p.set(p.slice(x, 0, 0, 1, name="first"), row)
    b = p.linear(scratch, p.weight("b", (4, 8)), name="pb")
    bias = p.weight("bias", (5,)) if between == "bias" else None
    c = p.linear(scratch, p.weight("c", (5, 8)), bias, name="pc")
    d = p.linear(x, p.weight("d", (6, 8)), name="pd")
    return p.build(*(p.reduce(y, -1, "sum", name=f"sum_{y.name}") for y in (a, b, c, d)))


def joined_ops(program: Program, neighbours: dict[str, str]) -> list[str]:
    plan = plan_program(program, DeviceMesh(tp=1), CPU)
    found = join_products(localize(plan), neighbours, CPU)
    ops = (op for op in found.program.ops if op.name.startswith("p"))
    return [print_node(LibraryOp(op=op)) for op in ops]


def test_neighbours_are_multiplied_once_and_results_are_views():
    assert joined_ops(branching(), NEIGHBOURS) == [
        "pa@pc = linear[m0:3 n:15 k0:8:reduce:sum] scratch(m0, k0) a@c(n, k0) -> pa@pc(m0, n)",
        "pa = view[i0:3 i1:2 i2:3] pa@pc(i0, i1.i2) -> pa(i0, i1, i2)",
        "pb = view[i0:3 i1:4] pa@pc(i0, i1+6) -> pb(i0, i1)",
        "pc = view[i0:3 i1:5] pa@pc(i0, i1+10) -> pc(i0, i1)",
        "pd = linear[m0:3 n:6 k:8:reduce:sum] x(m0, k) d(n, k) -> pd(m0, n)",
    ]


def test_weights_that_several_products_read_are_joined_once():
    p = ProgramBuilder("twice")
    x, a, b = p.input("x", (3, 8)), p.weight("a", (8, 8)), p.weight("b", (8, 8))
    for turn in range(2):
        parts = p.linear(x, a, name=f"pa{turn}"), p.linear(x, b, name=f"pb{turn}")
        x = p.pointwise("a0 * a1", *parts, name=f"x{turn}")
    plan = plan_program(p.build(x), DeviceMesh(tp=1), CPU)
    local = localize(plan)
    joined = join_products(local, {"a": "b"}, CPU)
    assert [tensor.name for tensor in joined.program.with_role("weight")] == ["a", "b", "a@b"]
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (8, 8), "b": (8, 8), "x": (3, 8)}
    given = {n: torch.randint(-4, 5, s, generator=generator) / 4 for n, s in shapes.items()}
    both = {"a@b": torch.cat([given["a"], given["b"]])}
    outs = []
    for each in (local, joined):
        host = run_passes(lower_program(each, megakernel=False, peer_memory=False))
        comm = SingleCommunicator(plan.mesh)
        outs.append(Evaluator(host, comm, {}).run({**given, **both})["x1"])
    torch.testing.assert_close(outs[1], outs[0])


@pytest.mark.parametrize(
    ("between", "neighbours", "names"),
    [
        ("", {"b": "c"}, ["pa", "pb@pc", "pb", "pc", "pd"]),
        ("", {"a": "c"}, ["pa", "pb", "pc", "pd"]),
        ("bias", NEIGHBOURS, ["pa@pb", "pa", "pb", "pc", "pd"]),
        ("overwritten", NEIGHBOURS, ["pa", "pb@pc", "pb", "pc", "pd"]),
        ("row", NEIGHBOURS, ["pa", "pb@pc", "pb", "pc", "pd"]),
    ],
)
def test_what_is_not_side_by_side_stays_apart(
    between: str, neighbours: dict[str, str], names: list[str]
):
    program = branching(between=between)
    assert [text.split(" =")[0] for text in joined_ops(program, neighbours)] == names


def test_results_are_those_of_separate_products():
    plan = plan_program(branching(), DeviceMesh(tp=1), CPU)
    comm, local = SingleCommunicator(DeviceMesh(tp=1)), localize(plan)
    torch.manual_seed(0)
    arena = torch.randn(21, 8)
    given = {"x": torch.randn(3, 8), "a": arena[:6].view(2, 3, 8), "b": arena[6:10]}
    given |= {"c": arena[10:15], "d": arena[15:21], "a@c": arena[:15]}
    results = []
    for each in (local, join_products(local, NEIGHBOURS, CPU)):
        host = run_passes(lower_program(each, megakernel=False, peer_memory=False))
        results.append(Evaluator(host, comm, {}).run(given))
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected)


def test_a_product_that_is_viewed_afterwards_is_not_copied():
    """What has a view before it is written, or is written again, is written in place."""
    for program, made in ((branching(), {"pa@pc"}), (branching(between="row"), {"pb@pc"})):
        local = join_products(
            localize(plan_program(program, DeviceMesh(tp=1), CPU)), NEIGHBOURS, CPU
        )
        host = run_passes(lower_program(local, megakernel=False, peer_memory=False))
        sources = view_sources(host.body)
        viewed = {storage_of(name, sources) for name in sources}
        assert made_before_views(host, sources) & viewed == made


def test_a_gather_with_several_readers_runs_beside_their_joined_product():
    """Rows scattered between sums: four kernels a layer but for what the first one reads. The last
    layer has one row behind its attention, of which all ranks want the sums.
    """
    config = replace(PRESETS["qwen3-8b"], num_layers=3)
    options = EngineOptions(max_context=4096)
    staged = plan_decode(config, DeviceMesh(tp=2), H200, options)
    decode_plan = lower_decode(config, staged, options, peer_memory=True)
    fused = {
        size: [
            (node.kind, node.w)
            for node in lower_prefill(decode_plan, size, "none").body
            if isinstance(node, FusedMatmul)
        ]
        for size in (100, 2048)
    }
    assert fused[2048] == [
        ("matmul_reduce_scatter", "layers.0.wo"),
        ("all_gather_matmul", "layers.0.w_gate@layers.0.w_up"),
        ("matmul_reduce_scatter", "layers.0.w_down"),
        ("all_gather_matmul", "layers.1.wq@layers.1.wv"),
        ("matmul_reduce_scatter", "layers.1.wo"),
        ("all_gather_matmul", "layers.1.w_gate@layers.1.w_up"),
        ("matmul_reduce_scatter", "layers.1.w_down"),
        ("matmul_all_reduce", "layers.2.wo"),
        ("matmul_all_reduce", "layers.2.w_down"),
    ]
    assert {kind for kind, _ in fused[100]} == {"matmul_all_reduce"}
    assert len(fused[100]) == 6
