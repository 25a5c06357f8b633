"""Where rules fit: at other sizes and constants, with operands in another order, by cost."""

from dataclasses import replace

import pytest
import torch

from distmega.errors import VerifyError
from distmega.kernels.machines import H200
from distmega.program.builder import ProgramBuilder
from distmega.program.kinds import FUSED_GRAPH
from distmega.program.types import Program
from distmega.superopt.chains import joined_program
from distmega.superopt.graph.text import parse_graph, print_graph
from distmega.superopt.matching import find_matches
from distmega.superopt.optimize import Optimizer
from distmega.superopt.programs import read_case
from distmega.superopt.proof.equivalence import prove
from distmega.superopt.resize import confirmed_rule, resized_rule
from distmega.superopt.rewrite import apply_rules, fuse_graphs, graph_program
from distmega.superopt.rules import RewriteRule, shipped_rules
from distmega.superopt.search.schedule import SearchLimits
from tests.superopt import programs
from tests.superopt.test_rules import inputs_of, run

QUICK = SearchLimits(num_scheduled=24, num_kept=3, splits=(4,))


def best_rule(program: Program) -> RewriteRule:
    optimizer = Optimizer(program, H200, QUICK)
    for _ in optimizer.run():
        pass
    return optimizer.rules[0]


@pytest.fixture(scope="module")
def norm_rule() -> RewriteRule:
    return best_rule(programs.norm_linear("f32"))


@pytest.fixture(scope="module")
def gated_rule() -> RewriteRule:
    return best_rule(programs.gated("f32"))


def shipped(name: str) -> RewriteRule:
    (rule,) = [rule for rule in shipped_rules() if rule.name == name]
    return rule


def fused(program: Program, *rules: RewriteRule) -> list[str]:
    """Names of the rules that made ops of a program."""
    made = fuse_graphs(program, rules)
    return [str(op.attr("rule")) for op in made.ops if op.kind == FUSED_GRAPH]


def norm_linear(rows: int, k: int, n: int, eps: float) -> Program:
    p = ProgramBuilder("other")
    x = p.rms_norm(p.input("hidden", (rows, k), "f32"), p.weight("scale", (k,), "f32"), eps)
    return p.build(p.linear(x, p.weight("out", (n, k), "f32")))


@pytest.mark.parametrize(("rows", "k", "n", "eps"), [(8, 256, 512, 1e-5), (3, 96, 80, 1e-6),
                                                     (2, 1000, 24, 0.5)])  # fmt: skip
def test_free_extents_and_constants_may_differ(
    norm_rule: RewriteRule, rows: int, k: int, n: int, eps: float
):
    program = norm_linear(rows, k, n, eps)
    assert norm_rule.proof.free == tuple(norm_rule_axes(norm_rule))
    assert norm_rule.proof.constants == (1e-5,)
    made = apply_rules(program, [norm_rule])
    assert "rms_norm" not in {op.kind for op in made.ops}
    inputs = inputs_of(program)
    for one, two in zip(run(made, inputs), run(program, inputs), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


def norm_rule_axes(rule: RewriteRule) -> list[str]:
    return [axis for axis, _ in parse_graph(rule.graph).extents if not axis.endswith("_i")]


def test_a_single_row_is_another_program(norm_rule: RewriteRule):
    assert fused(norm_linear(1, 256, 512, 1e-5), norm_rule) == []


def gated_in_parts() -> Program:
    """The gated MLP with operands in another order, its activation an op of its own."""
    p = ProgramBuilder("parts")
    x = p.input("x", (16, 128), "f32")
    up, gate = (p.linear(x, p.weight(name, (320, 128), "f32")) for name in ("up", "gate"))
    return p.build((up * gate.map("silu(a0)")).map("a0 - 1.0"))


def test_operands_that_commute_and_cut_chains_fit(gated_rule: RewriteRule):
    program = gated_in_parts()
    (match,) = find_matches(program, [gated_rule])
    assert match.names["gate"] == "gate"
    assert match.ops == ("linear_0", "linear_1", "pointwise_2", "pointwise_3")
    made = fuse_graphs(program, [gated_rule])
    assert [op.kind for op in made.ops] == [FUSED_GRAPH, "pointwise"]
    as_ops = apply_rules(program, [gated_rule])
    assert {op.name.partition(".")[0] for op in as_ops.ops} == {"gated", "pointwise_4"}
    inputs = inputs_of(program)
    for one, two in zip(run(as_ops, inputs), run(program, inputs), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


def test_operands_that_do_not_commute_are_told_apart(gated_rule: RewriteRule):
    """silu of the one that comes second: gate and up change places; a quotient fits nowhere."""
    p = ProgramBuilder("turned")
    x = p.input("x", (16, 128), "f32")
    one, two = (p.linear(x, p.weight(name, (320, 128), "f32")) for name in ("one", "two"))
    program = p.build(one.map("a0 * silu(a1)", two))
    (match,) = find_matches(program, [gated_rule])
    assert (match.names["gate"], match.names["up"]) == ("two", "one")
    ops = tuple(
        replace(op, attrs=(("expr", "(a0 / silu(a1))"),)) if op.kind == "pointwise" else op
        for op in program.ops
    )
    assert not [*find_matches(replace(program, ops=ops), [gated_rule])]


def test_swapped_operands_of_a_contraction_fit(norm_rule: RewriteRule):
    """The weight first, the result the same."""
    p = ProgramBuilder("swapped")
    x = p.rms_norm(p.input("x", (4, 256), "f32"), p.weight("g", (256,), "f32"), 1e-5)
    w = p.weight("w", (512, 256), "f32")
    program = p.build(p.linear(w, x, spec="o c, r c -> r o"))
    assert fused(program, norm_rule) == [norm_rule.name]


def test_what_a_proof_binds_is_refused():
    rule = shipped("qknorm_attention.ctx4096.heads32.dim128.rows1")
    assert "d" not in rule.proof.free
    with pytest.raises(VerifyError, match=r"axis d of 64; .*leaves free: axis m1, axis m11"):
        resized_rule(rule, (("d", 64),))
    with pytest.raises(VerifyError, match="1e-06"):
        resized_rule(rule, (), ((1e-6, 1e-5),))
    with pytest.raises(VerifyError, match="at least 2 along each axis"):
        resized_rule(rule, (("m1", 1),))
    assert not [*find_matches(read_case("qknorm_attention ctx=64 heads=4 dim=64"), [rule])]


def test_an_own_size_is_the_rule_itself(norm_rule: RewriteRule):
    assert resized_rule(norm_rule, ()) is norm_rule
    other = confirmed_rule(norm_rule, (("m0", 6), ("d", 64)))
    assert other.launches == ()
    assert prove(other.program, parse_graph(other.graph)).tests == norm_rule.proof.tests


def test_a_constant_of_two_meanings_keeps_its_sizes():
    """A factor that happens to be one over the norm's extent would have to be two numbers."""
    p = ProgramBuilder("twice")
    x = p.rms_norm(p.input("x", (4, 256), "f32"), p.weight("g", (256,), "f32"), 1e-5)
    program = p.build(p.linear(x, p.weight("w", (512, 256), "f32")).map(f"a0 * {1 / 256!r}"))
    rule = best_rule(program)
    with pytest.raises(VerifyError, match=r"0.00390625 is also a mean's share"):
        resized_rule(rule, (("d", 128),), ((1 / 256, 1 / 256),))
    assert resized_rule(rule, (("d", 128),), ((1 / 256, 1 / 128),))


def test_a_wrong_constant_at_another_size_is_found(norm_rule: RewriteRule):
    """A graph that has the share of its own extent as a number of another origin."""
    graph = parse_graph(norm_rule.graph)
    wrong = print_graph(graph).replace("0.00390625", "0.0039062501")
    assert wrong != norm_rule.graph
    planted = replace(norm_rule, graph=wrong)
    with pytest.raises(VerifyError, match="differs over finite fields"):
        confirmed_rule(planted, (("m0", 8),))


def test_a_graph_of_computed_constants_holds_for_its_own_only():
    """Two factors that became one number."""
    p = ProgramBuilder("factors")
    x = p.input("x", (16, 64), "f32")
    program = p.build(x.map("a0 * 3.0"), x.map("a0 * 5.0").map("a0 * 7.0"))
    rule = best_rule(program)
    assert "35" in rule.graph
    assert rule.proof.constants == ()
    assert rule.proof.free == ("i0", "i1")


def test_rules_that_save_nothing_are_not_used(norm_rule: RewriteRule):
    program = norm_linear(4, 256, 512, 1e-5)
    slow = replace(norm_rule, graph_us=norm_rule.program_us)
    assert fused(program, norm_rule) == [norm_rule.name]
    assert fused(program, slow) == []
    assert apply_rules(program, [slow]) == program


def test_of_several_rules_the_one_that_saves_most_is_used(norm_rule: RewriteRule):
    program = norm_linear(4, 256, 512, 1e-5)
    better = replace(norm_rule, name="better", graph_us=norm_rule.graph_us - 0.5)
    assert fused(program, norm_rule, better) == ["better"]
    measured = replace(norm_rule, name="measured", launches=((4, 1, 0),))
    assert fused(program, better, measured) == ["measured"]


def test_what_was_measured_decides_at_its_own_sizes(norm_rule: RewriteRule):
    program, other = norm_linear(4, 256, 512, 1e-5), norm_linear(6, 256, 512, 1e-5)
    slow = replace(norm_rule, name="slow", measured_us=3.0, library_us=2.0)
    assert fused(program, slow) == []
    assert fused(other, slow) == ["slow"]
    fast = replace(slow, name="fast", graph_us=norm_rule.program_us + 1, measured_us=1.0)
    assert fused(program, slow, fast) == ["fast"]


def test_a_rule_of_the_programs_own_size_comes_before_one_of_another():
    program = read_case("rmsnorm_linear k=2048 n=128256")
    assert fused(program, *shipped_rules()) == ["rmsnorm_linear.k2048.n128256.rows1"]


def test_rules_without_kernels_at_a_size_are_not_used(
    norm_rule: RewriteRule, monkeypatch: pytest.MonkeyPatch
):
    """What was asked is the rule at the program's sizes, which then is not compared in floats."""
    monkeypatch.setattr("distmega.superopt.matching.confirmed_rule", None)
    asked: list[tuple[int, ...]] = []

    def is_usable(rule: RewriteRule) -> bool:
        asked.append(rule.program.tensors[0].shape)
        return False

    program = norm_linear(6, 128, 64, 1e-5)
    assert fuse_graphs(program, [norm_rule], is_usable=is_usable) == program
    assert asked == [(6, 128)]


def test_a_cost_decides_where_one_is_given(norm_rule: RewriteRule):
    """Such as that of another kind of kernel."""
    program = norm_linear(4, 256, 512, 1e-5)
    assert apply_rules(program, [norm_rule], cost=lambda p: len(p.ops)) == program
    made = apply_rules(program, [norm_rule], cost=lambda p: -len(p.ops))
    assert len(made.ops) == len(graph_program(parse_graph(norm_rule.graph)).ops)


def test_chains_of_pointwise_ops_are_one():
    made = joined_program(gated_in_parts())
    assert [op.kind for op in made.ops] == ["linear", "linear", "pointwise"]
    assert made.ops[2].attr("expr") == "((a0 * silu(a1)) - 1.0)"
    inputs = inputs_of(made)
    (one,), (two,) = run(made, inputs), run(gated_in_parts(), inputs)
    torch.testing.assert_close(one, two)


def test_shipped_rules_fit_other_models_sizes():
    """Widths, heads, contexts and ranks that no rule was made for."""
    for case in ("gated_mlp k=5120 n=13824", "lora k=2048 n=8192 rank=64",
                 "rmsnorm_linear k=5120 n=32000", "ntrans hidden=3072",
                 "gqa_decode ctx=4096 heads=16 kv=2 dim=64"):  # fmt: skip
        assert len(fused(read_case(case), *shipped_rules())) == 1, case
