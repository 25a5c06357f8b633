"""Which products make one column of two, and that they give what products and formulas give."""

from dataclasses import replace

import pytest
import torch

from bench.models import gated_mlp
from distmega.engine.decode_planner import lower_decode, plan_decode
from distmega.engine.prefill_planner import lower_prefill
from distmega.engine.requests import EngineOptions, Experts
from distmega.errors import VerifyError
from distmega.hostir.check.check import check_host
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.hostir.ir.nodes import FusedMatmul, LibraryOp
from distmega.hostir.ir.text import parse_host, print_host
from distmega.hostir.ir.verify import verify_host
from distmega.hostir.run.evaluator import Evaluator
from distmega.kernels.library.device_ops import KernelOps
from distmega.kernels.machines import H200
from distmega.models.presets import PRESETS
from distmega.program.builder import Handle, ProgramBuilder
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from tests.hostir.passes.test_fuse import lowered, steps
from tests.hostir.programs import random_tensors, run_program


def gated(
    expression: str = "silu(a0) * a1",
    *,
    turned: bool = False,
    first: int = 0,
    width: int = 6,
    other: str = "",
    dtype: str = "f32",
) -> Program:
    """A product of 12 columns, two parts of them, and a formula of these. other: what else is done
    with them. dtype: of the weight.
    """
    p = ProgramBuilder("gated")
    x = p.input("x", (2, 5, 8))
    product = p.linear(x, p.weight("w", (12, 8), dtype=dtype), name="product")

    def part(name: str, start: int) -> Handle:
        return p.slice(product, 2, start, start + width, view=True, name=name)

    gate, up = part("gate", first), part("up", 12 - width)
    operands = (up, gate) if turned else (gate, up)
    y = p.pointwise(expression, *operands, name="y")
    out = p.linear(y, p.weight("v", (3, width)), name="z")
    if other == "gate":
        return p.build(out, gate.map("a0 * 2", name="seen"))
    return p.build(out, *([product] if other == "product" else []))


def check(program: Program) -> list[str]:
    """As test_fuse.check."""
    host = lowered(program)
    assert parse_host(print_host(host)) == host
    check_host(host)
    tensors = random_tensors(host)
    expected = run_program(program, dict(tensors))
    for ops in (None, KernelOps()):
        found = Evaluator(host, SingleCommunicator(host.mesh), {}, ops=ops).run(tensors)
        for name in program.outputs:
            torch.testing.assert_close(found[name], expected[name])
    return [step for step in steps(host) if not step.startswith("view")]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("expression", ["silu(a0) * a1", "gelu(a0) * a1 + 1", "a0 - 2 * a1"])
def test_halves_of_a_product_become_one_column(expression: str, turned: bool):
    assert check(gated(expression, turned=turned)) == ["fused_linear y", "linear z"]


@pytest.mark.parametrize(
    "program",
    [
        gated(width=5),
        gated(first=2),
        gated(other="product"),
        gated(other="gate"),
        gated(dtype="bf16"),
    ],
    ids=[
        "parts that are no halves",
        "halves that overlap",
        "an output",
        "a half read twice",
        "a weight of another type",
    ],
)
def test_other_parts_stay_as_they_are(program: Program):
    assert check(program)[:2] == ["linear product", "pointwise y"]


def pair(
    expression: str = "silu(a0) * a1",
    *,
    width: int = 6,
    other_x: bool = False,
    seen: str = "",
    between: bool = False,
) -> Program:
    """Two products of one x and a formula of these. other_x: of two. seen: one that is read twice.
    between: a third product stands between them.
    """
    p = ProgramBuilder("pair")
    x, z = p.input("x", (2, 5, 8)), p.input("z", (2, 5, 8))
    gate = p.linear(x, p.weight("gate_w", (6, 8)), name="gate")
    others = [gate] if seen == "gate" else []
    if between:
        others.append(p.linear(z, p.weight("third_w", (6, 8)), name="third"))
    up = p.linear(z if other_x else x, p.weight("up_w", (width, 8)), name="up")
    turned = up if width == 6 else p.slice(up, 2, 0, 6, name="cut")
    y = p.pointwise(expression, gate, turned, name="y")
    out = p.linear(y, p.weight("v", (3, 6)), name="out")
    return p.build(out, *others)


@pytest.mark.parametrize("expression", ["silu(a0) * a1", "a0 - 2 * a1", "gelu(a1) * a0 + 1"])
def test_two_products_of_one_x_become_one_column(expression: str):
    assert check(pair(expression)) == ["fused_linear y", "linear out"]
    program = gated_mlp(5, 2, 16, 24).program
    host = lowered(program)
    kinds = [step.split()[0] for step in steps(host) if not step.startswith("view")]
    assert kinds.count("fused_linear") == 2


@pytest.mark.parametrize(
    ("expression", "order"),
    [("a0 * a1 + a2", "gug"), ("a0 * a1 - a2", "uug"), ("a0 + a1 * a2 - a3", "gguu")],
)
@pytest.mark.parametrize("is_grouped", [False, True])
def test_a_formula_may_name_a_product_twice(expression: str, order: str, *, is_grouped: bool):
    p = ProgramBuilder("twice")
    x = p.input("x", (9, 8))
    if is_grouped:
        routing = p.route(p.top_k(p.input("scores", (9, 4)), 2)[1], 4)
        rows = p.gather_rows(x, routing)
        weights = {name: p.weight(name, (4, 6, 8)) for name in "gu"}
        products = {name: p.grouped_linear(rows, w, routing) for name, w in weights.items()}
        operands = [products[name] for name in order]
        y = p.grouped_pointwise(expression, *operands, routing=routing, name="y")
    else:
        products = {name: p.linear(x, p.weight(name, (6, 8))) for name in "gu"}
        y = p.pointwise(expression, *(products[name] for name in order), name="y")
    assert check(p.build(y))[-1] == ("fused_groups y" if is_grouped else "fused_linear y")


@pytest.mark.parametrize(
    "program",
    [pair(other_x=True), pair(seen="gate"), pair(between=True), pair(width=7)],
    ids=["of two x", "one is an output", "work between", "of other widths"],
)
def test_other_products_stay_as_they_are(program: Program):
    assert "linear gate" in check(program)


@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize(
    "dtypes",
    [("f32", "bf16"), ("bf16", "bf16")],
    ids=["weights of two types", "weights of another type than x"],
)
def test_products_of_several_types_stay_as_they_are(dtypes: tuple[str, str], is_grouped: bool):
    p = ProgramBuilder("others")
    x, types = p.input("x", (9, 8)), dict(zip(("gate", "up"), dtypes, strict=True))
    if is_grouped:
        weights, chosen = p.top_k(p.input("scores", (9, 4)), 2, name="chosen")
        routing = p.route(chosen, 4, name="routing")
        rows = p.gather_rows(x, routing, name="rows")
        gate, up = (
            p.grouped_linear(rows, p.weight(f"{n}_w", (4, 6, 8), dtype=t), routing, name=n)
            for n, t in types.items()
        )
        y = p.grouped_pointwise("a0 * a1", gate, up, routing=routing, name="y")
        out = p.scatter_add(y, weights, routing, name="out")
    else:
        gate, up = (
            p.linear(x, p.weight(f"{n}_w", (6, 8), dtype=t), name=n) for n, t in types.items()
        )
        out = p.pointwise("a0 * a1", gate, up, name="y")
    assert "pointwise y" in check(p.build(out))


def experts(
    expression: str = "silu(a0) * a1", *, other_rows: bool = False, seen: bool = False
) -> Program:
    """Two products of each row with matrices of its group and a formula of these. other_rows: of
    two tensors of rows. seen: one product is an output.
    """
    p = ProgramBuilder("experts")
    x, z = p.input("x", (9, 8)), p.input("z", (9, 8))
    weights, chosen = p.top_k(p.input("scores", (9, 4)), 2, name="chosen")
    routing = p.route(chosen, 4, name="routing")
    rows = p.gather_rows(x, routing, name="rows")
    others = p.gather_rows(z, routing, name="others") if other_rows else rows
    gate = p.grouped_linear(rows, p.weight("gate_w", (4, 6, 8)), routing, name="gate")
    up = p.grouped_linear(others, p.weight("up_w", (4, 6, 8)), routing, name="up")
    y = p.grouped_pointwise(expression, gate, up, routing=routing, name="y")
    out = p.scatter_add(y, weights, routing, name="out")
    return p.build(out, *([gate] if seen else []))


@pytest.mark.parametrize("expression", ["silu(a0) * a1", "a0 - 2 * a1", "gelu(a1) * a0 + 1"])
def test_two_products_of_one_group_become_one_column(expression: str):
    found = check(experts(expression))
    assert [step for step in found if "group" in step] == ["fused_groups y"]
    assert "pointwise y" not in found


@pytest.mark.parametrize("given", [{"other_rows": True}, {"seen": True}])
def test_other_products_of_groups_stay_as_they_are(given: dict[str, bool]):
    assert {"grouped_linear gate", "grouped_linear up", "pointwise y"} <= {*check(experts(**given))}


@pytest.mark.parametrize(
    ("split", "shape"), [("tensor", (128, 384, 2048)), ("expert", (64, 768, 2048))]
)
def test_experts_of_two_ranks_open_in_their_products(split: Experts, shape: tuple[int, ...]):
    """Ranks have a part of each expert's columns, or whole experts."""
    config = replace(PRESETS["qwen3-30b-a3b"], num_layers=2)
    options = EngineOptions(max_context=4096, experts=split)
    staged = plan_decode(config, DeviceMesh(tp=2), H200, options)
    host = lower_prefill(lower_decode(config, staged, options, peer_memory=True), 512, "none")
    mixed = [n.op for n in host.body if isinstance(n, LibraryOp) and n.op.kind == "fused_groups"]
    assert [op.name.removesuffix(".partial") for op in mixed] == [
        f"layers.{n}.expert_mixed" for n in (0, 1)
    ]
    assert {host.buffer_map()[op.reads[1].tensor].shape for op in mixed} == {shape}
    assert bool(mixed[0].get("group_axis", "")) == (split == "expert")
    assert parse_host(print_host(host)) == host


def test_a_prompts_gate_opens_in_its_product():
    """On one GPU and on two, where rows are gathered beside it, at any size."""
    config = replace(PRESETS["qwen3-8b"], num_layers=3)
    options = EngineOptions(max_context=4096)
    for ranks in (1, 2):
        staged = plan_decode(config, DeviceMesh(tp=ranks), H200, options)
        plan = lower_decode(config, staged, options, peer_memory=ranks > 1)
        host = lower_prefill(plan, 2048, "none")
        buffers = host.buffer_map()
        made = [
            node.out if isinstance(node, FusedMatmul) else node.op.writes[0].tensor
            for node in host.body
            if (isinstance(node, FusedMatmul) and node.mixes)
            or (isinstance(node, LibraryOp) and node.op.kind == "fused_linear")
        ]
        assert made[:2] == ["layers.0.ffn_mixed", "layers.1.ffn_mixed"]
        assert buffers[made[0]].shape == (2048, config.ffn // ranks)
        assert "layers.0.gate@layers.0.up" not in buffers
        assert parse_host(print_host(host)) == host


def test_a_mixed_product_of_other_shapes_is_refused():
    config = replace(PRESETS["qwen3-8b"], num_layers=3)
    options = EngineOptions(max_context=4096)
    staged = plan_decode(config, DeviceMesh(tp=2), H200, options)
    host = lower_prefill(lower_decode(config, staged, options, peer_memory=True), 2048, "none")
    whole = [replace(n, mixes="") if isinstance(n, FusedMatmul) else n for n in host.body]
    with pytest.raises(VerifyError, match="shapes as all_gather_matmul over 2 ranks"):
        verify_host(replace(host, body=tuple(whole)), freed=True)
