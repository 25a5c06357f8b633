"""What a one-line request becomes: tensor parallelism from costs, shared layouts, limits, speed."""

import math
from dataclasses import replace
from itertools import product

import pytest

from distmega.errors import PlanError, VerifyError
from distmega.kernels.machines import CPU, H200
from distmega.program.builder import ProgramBuilder
from distmega.program.text import parse_program, print_program
from distmega.program.types import Program
from distmega.sharding import planner
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import (
    REPLICATED,
    Layout,
    Partial,
    Shard,
    replicate,
    shard,
)
from distmega.sharding.localize import localize
from distmega.sharding.planner import Plan, build_plan, plan_program
from distmega.sharding.resolve.resolve import InexactSplitError, RankSchedule
from distmega.sharding.search.signatures import OptionTable
from distmega.sharding.verify import verify_plan_parts
from tests.calls import num_calls
from tests.sharding.programs import decoder, mlp
from tests.sharding.random_programs import random_gathers, random_program
from tests.sharding.simulate import check_plan, random_arrays, run_whole

SMOL = {"hidden": 576, "heads": 3, "group": 3, "head": 64, "ffn": 1536, "vocab": 49152}
LARGE = {"hidden": 8192, "heads": 8, "group": 8, "head": 128, "ffn": 28672, "vocab": 128256}
LARGE |= {"dtype": "bf16", "tied": False, "context": 4096}


def divisions(plan: Plan) -> dict[str, list[str]]:
    """For each op the iteration axes it is divided by."""
    return {step.op.name: [o.axis for _, o in step.splits] for step in plan.decisions}


def collectives(plan: Plan) -> list[str]:
    return [f"{step.move.kind} {step.writes[0]}" for step in plan.reshards]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("machine", [CPU, H200], ids=lambda m: m.name)
@pytest.mark.parametrize("sizes", [SMOL, {}], ids=["smol", "tiny"])
def test_a_decoder_comes_out_tensor_parallel(ranks, machine, sizes):
    """Heads and ffn divided, two all-reduces a layer, the vocabulary divided: nothing named it."""
    program = decoder(layers=2, logits=False, **sizes)
    plan = plan_program(program, DeviceMesh(tp=ranks), machine)
    found = divisions(plan)
    for i in range(2):
        layer = {name.removeprefix(f"layers.{i}."): axes for name, axes in found.items()}
        heads = {"q", "k", "v", "k_append", "v_append", "attn", "o"}
        assert {name for name, axes in layer.items() if axes == ["h"]} >= heads
        assert layer["q_rope"] == layer["k_rope"] == ["h0"]
        assert layer["gate"] == layer["up"] == ["n"]
        assert layer["act"] == ["i1"]
        assert layer["down"] == ["k"]
        assert [layer[name] for name in ("a", "mid", "b", "out")] == [[]] * 4
    layers = [f"all_reduce layers.{i}.{name}" for i in range(2) for name in ("o", "down")]
    assert [text for text in collectives(plan) if "layers" in text] == layers
    if sizes:
        assert found["x"] == found["next"] == ["v"]
        assert found["logits"] == ["n"]
        assert collectives(plan) == ["all_reduce x", *layers, "all_reduce next.value"]
    else:
        check_plan(plan, random_arrays(program, 0), exact=False)


def test_prefill_shares_what_decode_keeps():
    mesh = DeviceMesh(tp=2)
    decode = plan_program(decoder(layers=2, **SMOL), mesh, CPU)
    kept = decode.persistent_layouts()
    assert {name for name in kept if name.endswith("cache")} == {
        f"layers.{i}.{part}_cache" for i in range(2) for part in "kv"
    }
    for rows in (3, 64):
        prefill = plan_program(decoder(layers=2, rows=rows, **SMOL), mesh, CPU, kept)
        assert prefill.persistent_layouts() == kept
        for name in kept:
            assert prefill.allocations[name] == decode.allocations[name]
    small = decoder(layers=2, rows=3)
    kept = plan_program(decoder(layers=2), mesh, CPU).persistent_layouts()
    check_plan(plan_program(small, mesh, CPU, kept), random_arrays(small, 0), exact=False)


def test_tied_weights_have_one_allocation():
    for ranks in (2, 3):
        program = decoder(logits=False, vocab=4001)
        plan = plan_program(program, DeviceMesh(tp=ranks), CPU)
        assert plan.layouts["embed"] == Layout.of({"tp": Shard(0, -(-4001 // ranks))})
        assert [name for name, (whole, _) in plan.locals.items() if whole == "embed"] == ["embed"]


def test_an_mlp_is_divided_by_its_inner_dim():
    plan = plan_program(mlp(), DeviceMesh(tp=4), CPU)
    assert divisions(plan) == {"h": ["n"], "a": ["i1"], "y": ["k"]}
    assert collectives(plan) == ["all_reduce y"]
    assert plan.memory.weight_bytes * 4 == 2 * 64 * 256 * 4


def total_us(plan: Plan) -> float:
    """What the search minimises: time, and residency of what is kept."""
    share = {
        name: math.prod(plan.allocations[name].local_shape)
        / math.prod(plan.allocations[name].shape)
        for name in plan.prices_us
    }
    return plan.time_us + sum(price * share[name] for name, price in plan.prices_us.items())


@pytest.mark.parametrize("machine", [CPU, H200], ids=lambda m: m.name)
def test_no_division_is_cheaper_than_the_planned_one(machine):
    """Against every combination of divisions of small programs."""
    mesh, num_programs = DeviceMesh(tp=2), 0
    for seed in range(60):
        program = random_program(seed, num_ops=2, overwrite=False)
        table = OptionTable.of(program)
        ways = [table.options(op, 2).options for op in program.ops]
        if math.prod(map(len, ways)) > 120:
            continue
        planned = plan_program(program, mesh, machine)
        best = total_us(planned)
        given = {t.name: REPLICATED for t in program.with_role("input")}
        given |= dict.fromkeys(program.outputs, REPLICATED)
        for combination in product(*ways):
            pairs = zip(program.ops, combination, strict=True)
            chosen = {op.name: (("tp", o),) if o.axis else () for op, o in pairs}
            options = {"annotations": {}, "prices_us": planned.prices_us, "table": table}
            try:
                other = build_plan(program, mesh, machine, chosen, given, **options)
            except (InexactSplitError, PlanError):
                continue
            assert best <= total_us(other) * 1.0001, (seed, planned.explain(), other.explain())
        num_programs += 1
    assert num_programs > 15


def test_one_rank_changes_nothing_but_names_nothing_either():
    program = decoder()
    plan = plan_program(program, DeviceMesh(tp=1), CPU)
    assert localize(plan).program == program
    assert not plan.reshards


def test_two_mesh_axes_divide_different_axes():
    program = decoder(layers=2, heads=2, group=2, hidden=16, ffn=16, vocab=16)
    plan = plan_program(program, DeviceMesh(a=2, b=2), CPU)
    attention = next(step for step in plan.decisions if step.op.kind == "attention")
    assert sorted(option.axis for _, option in attention.splits) == ["g", "h"]
    assert all(axis.parallel is not None for axis in plan.loops["layers.0.attn"].axes[:2])
    check_plan(plan, random_arrays(program, 0), exact=False)


def test_rows_stay_on_the_mesh_axis_they_are_annotated_with():
    program = mlp(rows=8)
    mesh = DeviceMesh(dp=2, tp=2)
    annotations = {"x": shard(0, "dp"), "y": shard(0, "dp")}
    plan = plan_program(program, mesh, CPU, annotations)
    assert divisions(plan) == {"h": ["m0", "n"], "a": ["i0", "i1"], "y": ["m0", "k"]}
    assert plan.allocations["x"].local_shape == (4, 64)
    assert {step.move.axis for step in plan.reshards} == {"tp"}
    check_plan(plan, random_arrays(program, 0))


def test_a_divided_sum_adds_its_bias_once():
    p = ProgramBuilder("p")
    x = p.input("x", (2, 6))
    program = p.build(p.linear(x, p.weight("w", (4, 6)), p.weight("b", (4,)), name="y"))
    plan = plan_program(program, DeviceMesh(tp=2), CPU, {"w": shard(1, "tp")})
    assert plan.layouts["b"] == Layout.of({"tp": Partial("sum")})
    check_plan(plan, random_arrays(program, 0))
    again = plan_program(program, DeviceMesh(tp=2), CPU, plan.persistent_layouts())
    assert again.fingerprint() == plan.fingerprint()


def test_a_divided_bias_does_not_keep_its_sum_from_being_divided_too():
    """x and w are held for a sum over ranks: a reduce-scatter, then the bias, nothing gathered."""
    p = ProgramBuilder("p")
    x, b = p.input("x", (6, 8)), p.input("b", (4,))
    program = p.build(p.linear(x, p.weight("w", (4, 8)), b, name="y"))
    marks = {"x": shard(1, "tp"), "w": shard(1, "tp"), "b": shard(0, "tp"), "y": shard(1, "tp")}
    plan = plan_program(program, DeviceMesh(tp=2), CPU, marks)
    assert [step.move.kind for step in plan.reshards] == ["reduce_scatter"]
    assert divisions(plan) == {"y.sum": ["k"], "y": ["n"]}
    check_plan(plan, random_arrays(program, 0))


@pytest.mark.parametrize("machine", [CPU, H200], ids=lambda m: m.name)
def test_costs_decide_between_a_derived_sum_and_an_annotated_result(machine):
    """Parts that follow from x are summed and scattered where that moves less than dividing the op
    as its result is annotated.
    """
    p = ProgramBuilder("p")
    a = p.input("x", (60, 80, 40)).map("a0 * 2", name="a")
    program = p.build(p.reduce(a, 0, name="b"))
    marks = {"x": shard(0, "tp"), "b": shard(0, "tp")}
    plan = plan_program(program, DeviceMesh(tp=2), machine, marks)
    assert collectives(plan) == ["reduce_scatter b"]
    check_plan(plan, random_arrays(program, 0))
    p = ProgramBuilder("p")
    a = p.input("x", (60, 8)).map("a0 * 2", name="a")
    program = p.build(p.linear(a, p.weight("w", (400, 8)), name="y"))
    marks = {"x": shard(1, "tp"), "y": shard(1, "tp")}
    plan = plan_program(program, DeviceMesh(tp=2), machine, marks)
    assert collectives(plan) == ["all_gather a.whole"]
    check_plan(plan, random_arrays(program, 0))


SUM = {"x": shard(1, "tp"), "w": shard(1, "tp")}
"""Annotations that divide the sum of `y` in the programs below."""


@pytest.mark.parametrize(
    "use",
    [
        lambda p, b: b.map("a0 * 2", name="z"),
        lambda p, b: p.pointwise("a0 + a1", p.input("r", (6, 4)), b, name="z"),
        lambda p, b: p.slice(b, 0, 0, 2, view=True).map("a0 + 1", name="z"),
        lambda p, b: p.linear(p.input("r", (6, 8)), p.weight("v", (4, 8)), b, name="z"),
        lambda p, b: b,
    ],
)
def test_a_bias_with_other_uses_is_added_after_the_sum(use):
    p = ProgramBuilder("p")
    x, w, b = p.input("x", (6, 8)), p.weight("w", (4, 8)), p.weight("b", (4,))
    program = p.build(p.linear(x, w, b, name="y"), use(p, b))
    plan = plan_program(program, DeviceMesh(tp=2), CPU, SUM)
    assert "y.sum" in divisions(plan)
    assert not plan.layouts["b"].partial_axes
    check_plan(plan, random_arrays(program, 0))


@pytest.mark.parametrize(
    "use",
    [
        lambda p, w: p.slice(w, 1, 1, 5, name="z"),
        lambda p, w: p.slice(w, 1, 1, 5, view=True).map("a0 + 1", name="z"),
        lambda p, w: p.concat([w, w], 1, name="z"),
    ],
)
@pytest.mark.parametrize("is_state", [False, True])
def test_what_one_use_of_a_weight_rules_out_others_do_without(use, is_state):
    """x would have w in parts along dim 1, of which the other op needs all."""
    p = ProgramBuilder("p")
    w = p.state("w", (4, 8)) if is_state else p.weight("w", (4, 8))
    program = p.build(p.linear(p.input("x", (6, 8)), w, name="y"), use(p, w))
    plan = plan_program(program, DeviceMesh(tp=2), CPU, {"x": shard(1, "tp")})
    assert "k" not in divisions(plan)["y"]
    assert "y reads x" in plan.explain()
    check_plan(plan, random_arrays(program, 0))


@pytest.mark.parametrize(
    ("heads", "group", "ranks", "most"), [(3, 3, 8, 5), (2, 2, 4, 3), (1, 1, 2, 1)]
)
def test_more_ranks_than_padded_heads_is_an_error(heads, group, ranks, most):
    with pytest.raises(PlanError) as caught:
        plan_program(decoder(heads=heads, group=group), DeviceMesh(tp=ranks), CPU)
    message = str(caught.value)
    assert f"tp={ranks}" in message
    assert f"at most tp={most}" in message
    assert "heads" in message


def test_a_memory_limit_is_kept_or_refused():
    program, mesh = decoder(layers=2, **SMOL), DeviceMesh(tp=2)
    free = plan_program(program, mesh, CPU)
    need = free.memory.total_bytes
    assert plan_program(program, mesh, CPU, memory_limit_bytes=need).memory.total_bytes <= need
    tight = plan_program(program, mesh, CPU, memory_limit_bytes=need - 1)
    assert tight.memory.total_bytes < need
    with pytest.raises(PlanError) as caught:
        plan_program(program, mesh, CPU, memory_limit_bytes=10**6)
    assert "needs" in caught.value.found
    assert "at most 1000000 bytes" in caught.value.expected


def test_a_state_that_an_op_can_not_write_is_named():
    annotations = {"layers.0.k_cache": shard(1, "tp")}
    with pytest.raises(PlanError) as caught:
        plan_program(decoder(), DeviceMesh(tp=2), CPU, annotations)
    assert "layers.0.k_append" in caught.value.found
    assert "layers.0.k_cache" in caught.value.remedy


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((ProgramBuilder("p"), DeviceMesh(tp=2), CPU), "ProgramBuilder in place of a Program"),
        ((mlp(), 2, CPU), r"int in place of a DeviceMesh; .* give DeviceMesh\(tp=2\)"),
        ((mlp(), DeviceMesh(tp=2), "h200"), "str in place of a Machine; .* H200"),
        ((mlp(), DeviceMesh(tp=2), CPU, ["w1"]), "list in place of a Mapping"),
    ],
)
def test_what_is_no_program_mesh_or_machine_is_named(given, message):
    with pytest.raises(PlanError, match=message):
        plan_program(*given)


def test_a_kind_that_nothing_defines_is_named_before_it_has_a_plan():
    p = ProgramBuilder("p")
    program = p.build(p.softmax(p.input("x", (4, 6)), name="y"))
    written = print_program(program).replace("softmax", "sofmax")
    with pytest.raises(PlanError, match=r"op 'y' of kind 'sofmax'; expected .*, softmax, "):
        plan_program(parse_program(written), DeviceMesh(tp=2), CPU)


def test_plans_are_reproducible_and_tell_apart():
    program = decoder(layers=2)
    prints = [plan_program(program, DeviceMesh(tp=2), CPU).fingerprint() for _ in range(2)]
    assert prints[0] == prints[1]
    assert prints[0] != plan_program(program, DeviceMesh(tp=3), CPU).fingerprint()
    other = plan_program(program, DeviceMesh(tp=2), CPU, {"layers.0.w_up": REPLICATED})
    assert prints[0] != other.fingerprint()


@pytest.mark.parametrize("mesh", [DeviceMesh(tp=2), DeviceMesh(dp=2, tp=2)], ids=str)
def test_local_programs_print_and_parse(mesh):
    local = localize(plan_program(decoder(layers=1, rows=5), mesh, H200))
    assert parse_program(print_program(local.program)) == local.program
    assert set(local.allocations) == set(local.program.tensor_map())


def plan_on_8(program: Program) -> None:
    localize(plan_program(program, DeviceMesh(tp=8), H200))


def test_planning_grows_with_the_layers_alone():
    few, many = (decoder(layers=n, **LARGE) for n in (10, 40))
    assert num_calls(lambda: plan_on_8(many)) < 4.4 * num_calls(lambda: plan_on_8(few))


def test_80_layers_are_planned_with_a_bounded_number_of_calls():
    program = decoder(layers=80, **LARGE)
    assert num_calls(lambda: plan_on_8(program)) < 2.4e6


def test_the_verifier_refuses_allocations_that_loops_do_not_match():
    program, mesh = mlp(), DeviceMesh(tp=2)
    plan = plan_program(program, mesh, CPU)
    schedule = RankSchedule(steps=plan.steps, locals=plan.locals, homes=plan.layouts)
    table = OptionTable.of(program)
    verify_plan_parts(schedule, plan.loops, plan.allocations, mesh, table)
    for name, wrong in (("w1", "w2"), ("h", "y"), ("x", "h")):
        broken = {**plan.allocations, name: plan.allocations[wrong]}
        with pytest.raises(VerifyError):
            verify_plan_parts(schedule, plan.loops, broken, mesh, table)
    loop = plan.loops["h"]
    swapped = replace(loop, axes=(*loop.axes[1:], loop.axes[0]))
    with pytest.raises(VerifyError, match="then device axes"):
        verify_plan_parts(schedule, {**plan.loops, "h": swapped}, plan.allocations, mesh, table)


def test_only_attention_must_divide_what_it_reads_of_states():
    p = ProgramBuilder("small_state")
    read = p.rms_norm(p.state("s", (1, 6)), p.weight("w", (6,)), 1e-5)
    program = p.build(read.map("a0 * 2"))
    plan = plan_program(program, DeviceMesh(tp=2), CPU)
    check_plan(plan, random_arrays(program, 0), exact=False)


def test_an_annotated_state_says_that_attention_need_not_divide():
    program, mesh = decoder(heads=1, group=1, hidden=4), DeviceMesh(tp=8)
    with pytest.raises(PlanError, match="tp=8 can't divide attention"):
        plan_program(program, mesh, CPU)
    whole = {f"layers.0.{part}_cache": replicate() for part in "kv"}
    check_plan(plan_program(program, mesh, CPU, whole), random_arrays(program, 0), exact=False)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gathers_of_rows_are_early_where_that_is_cheaper(ranks: int, monkeypatch):
    """And what leaves the program is the same."""
    moved = 0
    for seed in range(40):
        program = random_gathers(seed)
        plan = plan_program(program, DeviceMesh(tp=ranks), H200)
        arrays = random_arrays(program, seed)
        check_plan(plan, arrays)
        found, expected = run_whole(plan.program, arrays), run_whole(program, arrays)
        assert all((found[name] == expected[name]).all() for name in program.outputs)
        moved += plan.program is not program
        with monkeypatch.context() as patched:
            patched.setattr(planner, "gather_early", lambda program, kept: program)
            stays = plan_program(program, DeviceMesh(tp=ranks), H200)
        assert plan.time_us <= (1 + planner.SLACK) * stays.time_us
    assert 0 < moved < 40


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_program_without_annotations_has_a_plan(ranks: int):
    """The last op needs a state whole, and the cheapest ways before it all divide that."""
    p = ProgramBuilder("overwritten")
    first, x = p.state("first", (8, 8)), p.input("x", (8, 8))
    read = [p.state(f"s{n}", (8, 8)).map("tanh(a0) + 0.25") for n in range(4)]
    into, read_first = x.map("exp(a0)"), first.map("tanh(a0)")
    p.set(first, into)
    program = p.build(read_first, into, *(each.map("a0 * 2") for each in read))
    check_plan(
        plan_program(program, DeviceMesh(tp=ranks), CPU), random_arrays(program, 0), exact=False
    )
