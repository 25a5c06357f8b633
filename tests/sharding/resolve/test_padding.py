"""Padding is proved harmless, or the division refused."""

import numpy as np
import pytest

from distmega.kernels.machines import CPU
from distmega.program.builder import ProgramBuilder
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import REPLICATED, shard
from distmega.sharding.planner import build_plan, plan_program
from distmega.sharding.resolve.padding import Pad, inexact_reason, result_pads
from distmega.sharding.resolve.resolve import InexactSplitError
from distmega.sharding.search.signatures import OptionTable
from tests.sharding.programs import decoder
from tests.sharding.simulate import check_plan, join_arrays, random_arrays, run_local

ZERO, FINITE, ANY = Pad.ZERO, Pad.FINITE, Pad.ANY


def pointwise_pad(text: str, *pads: Pad) -> Pad:
    p = ProgramBuilder("p")
    xs = [p.input(f"x{i}", (3,)) for i in range(len(pads))]
    op = p.build(p.pointwise(text, *xs)).ops[0]
    return result_pads(op, ("i0",), [{"i0": pad} for pad in pads])["i0"]


@pytest.mark.parametrize(
    ("text", "pads", "expected"),
    [
        ("silu(a0) * a1", (ZERO, ZERO), ZERO),
        ("silu(a0) * a1", (ZERO, FINITE), ZERO),
        ("silu(a0) * a1", (ZERO, ANY), ANY),
        ("sigmoid(a0)", (ZERO,), FINITE),
        ("exp(a0)", (ZERO,), FINITE),
        ("exp(a0)", (FINITE,), ANY),
        ("log(a0)", (ZERO,), ANY),
        ("a0 / a1", (ZERO, ZERO), ANY),
        ("a0 / 4", (ZERO,), ZERO),
        ("a0 + 1", (ZERO,), FINITE),
        ("a0 - a1", (ZERO, ZERO), ZERO),
    ],
)
def test_padding_through_expressions(text, pads, expected):
    assert pointwise_pad(text, *pads) == expected


def linear_op(bias: bool):
    p = ProgramBuilder("p")
    b = p.weight("b", (3,)) if bias else None
    return p.build(p.linear(p.input("x", (3, 3)), p.weight("w", (3, 3)), b)).ops[0]


@pytest.mark.parametrize(
    ("x", "w", "exact"),
    [(ZERO, ZERO, True), (FINITE, ZERO, True), (ANY, ZERO, False), (FINITE, FINITE, False)],
)
def test_a_sum_over_padding_needs_a_zero_factor_and_finite_others(x, w, exact):
    reason = inexact_reason(linear_op(False), ("k",), [{"k": x}, {"k": w}], ())
    assert (reason == "") is exact


def test_a_bias_decides_what_padded_columns_hold():
    pads = [{}, {"n": ZERO}, {"n": ZERO}]
    assert result_pads(linear_op(True), ("n",), pads)["n"] == ZERO
    assert result_pads(linear_op(True), ("n",), [{}, {"n": ZERO}, {"n": FINITE}])["n"] == FINITE


def test_heads_stay_zero_all_the_way_and_groups_do_not():
    program = decoder(heads=3, group=3)
    ops = {op.kind: op for op in program.ops}
    zero = [{"h": ZERO}] * 3 + [{}]
    assert result_pads(ops["attention"], ("h",), zero)["h"] == ZERO
    assert result_pads(ops["attention"], ("g",), [{"g": ZERO}, {}, {}, {}])["g"] == FINITE
    rope = next(op for op in program.ops if op.kind == "rope")
    assert result_pads(rope, ("h0",), [{"h0": ZERO}, {"h0": ZERO}, {}, {}])["h0"] == ZERO


def test_padded_positions_must_be_valid_positions():
    p = ProgramBuilder("p")
    op = p.build(p.embedding(p.input("ids", (3,), "i64"), p.weight("t", (4, 2)))).ops[0]
    assert inexact_reason(op, ("m",), [{"m": ZERO}, {}], (0,)) == ""
    assert "could be looked up" in inexact_reason(op, ("m",), [{"m": FINITE}, {}], (0,))


def ratio_program():
    """A sum over quotients, whose padding 0/0 isn't a number."""
    p = ProgramBuilder("ratio")
    x, y = p.input("x", (2, 3)), p.input("y", (2, 3))
    q = p.pointwise("a0 / a1", x, y, name="q")
    return p.build(p.linear(q, p.weight("w", (4, 3)), name="out"))


def test_a_sum_over_undefined_padding_is_refused():
    program, mesh = ratio_program(), DeviceMesh(tp=2)
    table = OptionTable.of(program)
    columns = table.options(program.ops[0], 2).by_axis("i1")
    sums = table.options(program.ops[1], 2).by_axis("k")
    chosen = {"q": (("tp", columns),), "out": (("tp", sums),)}
    given = dict.fromkeys(("x", "y", "out"), REPLICATED)
    options = {"annotations": {}, "prices_us": {}, "table": table}
    with pytest.raises(InexactSplitError, match="provably zero"):
        build_plan(program, mesh, CPU, chosen, given, **options)
    arrays = random_arrays(program, 0)
    arrays["y"] = np.abs(arrays["y"]) + 1
    check_plan(plan_program(program, mesh, CPU, {"q": shard(1, "tp")}), arrays, exact=False)


def test_padding_of_a_state_stays_zero():
    """What is written to an unevenly divided state must be zero where it is padded."""
    p = ProgramBuilder("p")
    y = p.input("x", (3, 2)).map("a0 + 1.0", name="y")
    state = p.state("s", (3, 2))
    p.set(y, into=state, name="write")
    program = p.build(p.set(state, name="out"))
    table, mesh = OptionTable.of(program), DeviceMesh(tp=2)
    rows = {op.name: (("tp", table.options(op, 2).options[1]),) for op in program.ops}
    given = dict.fromkeys(("x", "out"), REPLICATED)
    with pytest.raises(InexactSplitError, match="must stay zero"):
        build_plan(program, mesh, CPU, rows, given, annotations={}, prices_us={}, table=table)
    check_plan(plan_program(program, mesh, CPU, {"s": shard(0, "tp")}), random_arrays(program, 0))


@pytest.mark.parametrize("ranks", [2, 4, 5])
def test_nine_heads_of_three_kv_heads_are_exact(ranks):
    """Padded heads hold zeros in weights and caches, and the result is that of nine heads."""
    program = decoder(layers=2, hidden=36, heads=3, group=3, head=4, vocab=17)
    plan = plan_program(program, DeviceMesh(tp=ranks), CPU)
    layout = plan.layouts["layers.0.k_cache"]
    assert plan.layouts["layers.0.wq"] == layout == plan.layouts["layers.0.wk"]
    assert plan.allocations["layers.0.wq"].local_shape[0] == -(-3 // ranks)
    local = check_plan(plan, random_arrays(program, 3), exact=False)
    domain = local.allocations["layers.0.k_cache"]
    ranges = [domain.local_range(0, {"tp": rank}) for rank in range(ranks)]
    assert sum(stop - start for start, stop in ranges) == 3
    arrays = random_arrays(program, 3)
    for here, (start, stop) in zip(run_local(local, arrays), ranges, strict=True):
        assert not here["layers.1.k_cache"][stop - start :].any()


def test_groups_are_divided_where_kv_heads_can_not_be():
    program = decoder(hidden=24, heads=1, group=8, head=4)
    plan = plan_program(program, DeviceMesh(tp=4), CPU)
    attention = next(step for step in plan.decisions if step.op.kind == "attention")
    assert [option.axis for _, option in attention.splits] == ["g"]
    assert plan.layouts["layers.0.k_cache"] == REPLICATED
    check_plan(plan, random_arrays(program, 1), exact=False)


def test_joined_arrays_are_all_written():
    program = decoder(vocab=11)
    plan = plan_program(program, DeviceMesh(tp=3), CPU, {"logits": shard(1, "tp")})
    local = check_plan(plan, random_arrays(program, 1), exact=False)
    parts = [here["logits"] for here in run_local(local, random_arrays(program, 1))]
    assert [part.shape for part in parts] == [(1, 4)] * 3
    assert join_arrays(parts, local.allocations["logits"], local.mesh).shape == (1, 11)


@pytest.mark.parametrize("through_view", [False, True])
def test_padding_that_an_overwrite_leaves_is_seen_through_views(through_view):
    """Rows divided unevenly are summed over once they were overwritten by what is not zero in
    padding, which is at hand in parts although it is annotated whole.
    """
    p = ProgramBuilder("p")
    base = p.set(p.input("x", (5, 3)), name="base")
    view = p.slice(base, 1, 0, 2, view=True, name="view")
    changed, read = (view, base) if through_view else (base, view)
    p.set(changed.map("a0 + 1", name="more"), into=changed)
    double = read.map("a0 * 2")
    program = p.build(p.linear(double, read, spec="k m, k n -> n m", name="y"))
    marks = {"base": shard(0, "tp"), "more": REPLICATED}
    plan = plan_program(program, DeviceMesh(tp=2), CPU, marks)
    assert plan.layouts["view"] == plan.layouts["base"]
    check_plan(plan, random_arrays(program, 0))
