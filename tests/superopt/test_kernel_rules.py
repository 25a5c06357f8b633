"""Rules in megakernels: other ops, where these are faster there or only these fit."""

import math

import pytest
import torch

from distmega.compiled import CompiledProgram
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.kernels.machines import CPU, H200
from distmega.kernels.tasks.cost import segment_us
from distmega.kernels.tasks.fuse import fuse_segment
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.planner import plan_program
from distmega.superopt.programs import read_case
from distmega.superopt.rewrite import apply_rules, rules_of_ops
from distmega.superopt.rules import RewriteRule, shipped_rules
from tests.superopt.test_matching import best_rule
from tests.superopt.test_rules import inputs_of, run

DTYPE = "bf16"


def cost(program: Program) -> float:
    return segment_us(program, H200)


def head(count: int = 1) -> Program:
    """Norms and linear layers, the norm's result times a factor, as of logits that are scaled."""
    p = ProgramBuilder("head")
    x = p.input("x", (1, 64), DTYPE)
    for number in range(count):
        h = p.rms_norm(x, p.weight(f"g{number}", (64,), DTYPE), 1e-5)
        x = p.linear(h.map("a0 * 0.0625"), p.weight(f"w{number}", (64, 64), DTYPE))
    return p.build(x)


@pytest.fixture
def known() -> dict[str, RewriteRule]:
    return {rule.name: rule for rule in shipped_rules()}


@pytest.mark.parametrize("count", [1, 3])
def test_the_fuse_pass_has_fewer_ops_by_a_rule(known: dict[str, RewriteRule], count: int):
    """A factor before a linear layer is a fused op of its own; behind it, it is the epilogue."""
    program = head(count)
    made = apply_rules(program, shipped_rules(), cost)
    assert len(fuse_segment(program)) == 2 * count
    assert len(fuse_segment(made)) == count
    assert cost(made) < cost(program)
    used = rules_of_ops(made, known)
    assert [name.partition("#")[0] for name in used] == ["scaled_linear.k4096.n4096.rows1"] * count
    inputs = inputs_of(program)
    for one, two in zip(run(made, inputs), run(program, inputs), strict=True):
        torch.testing.assert_close(one, two, rtol=0.02, atol=0.02)


def test_a_program_that_no_kernel_takes_is_made_to_fit(known: dict[str, RewriteRule]):
    """All places of a rule at once, since one alone is no help."""

    def strict(program: Program) -> float:
        before = {op.writes[0].tensor for op in program.ops if op.kind == "pointwise"}
        read = {op.reads[0].tensor for op in program.ops if op.kind == "linear"}
        return math.inf if before & read else 1.0

    program = head(3)
    linears = [op for op in program.ops if op.kind == "linear"]
    made = apply_rules(program, shipped_rules(), strict)
    assert strict(program) == math.inf
    assert strict(made) == 1.0
    assert len(rules_of_ops(made, known)) == len(linears) == 3
    assert apply_rules(program, [], strict) == program


def test_what_the_fuse_pass_does_as_well_stays(known: dict[str, RewriteRule]):
    """A norm is a prologue already: the rule for library kernels costs more here."""
    p = ProgramBuilder("norm")
    h = p.rms_norm(p.input("x", (1, 64), DTYPE), p.weight("g", (64,), DTYPE), 1e-5)
    program = p.build(p.linear(h, p.weight("w", (64, 64), DTYPE)))
    assert apply_rules(program, shipped_rules()) != program
    assert apply_rules(program, shipped_rules(), cost) == program


def scaled_twice(k: int, n: int) -> Program:
    """A factor before a linear layer, one behind it."""
    p = ProgramBuilder("twice")
    x = p.input("x", (2, k), "f32")
    return p.build(p.linear(x.map("a0 * 3.0"), p.weight("w", (n, k), "f32")).map("relu(a0 * 5.0)"))


def test_a_compiled_megakernel_names_the_rule():
    """On a CPU, whose kernel has fewer tasks then; the rule at another width."""
    rule = best_rule(scaled_twice(256, 128))
    program, mesh = scaled_twice(96, 64), DeviceMesh(tp=1)
    plan = plan_program(program, mesh, CPU)
    made = CompiledProgram(plan, SingleCommunicator(mesh), megakernel=True, rules=[rule])
    plain = CompiledProgram(plan, SingleCommunicator(mesh), megakernel=True)
    assert made.stats.rules == (rule.name,)
    assert plain.stats.rules == ()
    assert f"are made by rule {rule.name}\n" in made.explain()
    assert made.stats.num_tasks < plain.stats.num_tasks
    inputs = inputs_of(program)
    (found,), (wanted,) = made(inputs).values(), plain(inputs).values()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_an_op_of_a_rule_may_take_more_operands_than_an_instruction_has_fields():
    """The rule's last op takes five; a record before the instruction holds what is left over."""
    program, mesh = read_case("ntrans hidden=96"), DeviceMesh(tp=1)
    plan = plan_program(program, mesh, CPU)
    made, plain = (
        CompiledProgram(plan, SingleCommunicator(mesh), megakernel=True, rules=rules)
        for rules in (shipped_rules(), [])
    )
    assert [name.partition(".")[0] for name in made.stats.rules] == ["ntrans"]
    assert made.stats.num_megakernels == 1
    inputs = inputs_of(program)
    for found, wanted in zip(made(inputs).values(), plain(inputs).values(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)
