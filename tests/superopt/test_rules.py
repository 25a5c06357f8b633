"""Rules files are kept whole or refused whole, and applied rules leave results as they are."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distmega.compiled import CompiledProgram
from distmega.errors import ProgramError, RequestError, VerifyError
from distmega.hostir.check.check import check_host
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.hostir.ir.nodes import LibraryOp, walk_nodes
from distmega.hostir.ir.text import parse_host, print_host
from distmega.hostir.library.ops import compile_op, op_operands
from distmega.hostir.lower.lower import lower_program
from distmega.hostir.passes.passes import run_passes
from distmega.hostir.run.evaluator import Evaluator
from distmega.kernels.library.device_ops import KernelOps
from distmega.kernels.machines import CPU, H200
from distmega.kernels.megakernel import compile_megakernel
from distmega.program.builder import ProgramBuilder
from distmega.program.kinds import FUSED_GRAPH
from distmega.program.text import parse_program, print_program
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.planner import plan_program
from distmega.superopt.graph.text import parse_graph
from distmega.superopt.optimize import Optimizer, divided_rule
from distmega.superopt.rewrite import apply_rules, graph_op, graph_program
from distmega.superopt.rules import RewriteRule, read_rules, shipped_rules, write_rules
from distmega.superopt.search.schedule import SearchLimits
from tests.hostir.programs import local, renamed
from tests.kernels.running import launch_all, make_ranks
from tests.superopt import programs

QUICK = SearchLimits(num_scheduled=40, num_kept=6, splits=(4,))
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def rules_of(program: Program) -> list[RewriteRule]:
    optimizer = Optimizer(program, H200, QUICK)
    for _ in optimizer.run():
        pass
    return optimizer.rules


@pytest.fixture(scope="module")
def norm_rules() -> list[RewriteRule]:
    return rules_of(programs.norm_linear("f32"))


def run(program: Program, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The program by library ops."""
    values = dict(inputs)
    for op in program.ops:
        results = compile_op(op, {})([values[name] for name in op_operands(op)])
        values.update(zip((a.tensor for a in op.writes), results, strict=True))
    return [values[name] for name in program.outputs]


def inputs_of(program: Program) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        t.name: torch.randn(t.shape, dtype=torch.float64).to(DTYPES[t.dtype])
        for t in program.tensors
        if t.role != "temp"
    }


def test_file_keeps_rules_and_proofs(tmp_path: Path, norm_rules: list[RewriteRule]):
    path = tmp_path / "rules.json"
    write_rules(path, norm_rules)
    assert read_rules(path) == norm_rules
    assert norm_rules[0].proof.log2_bound == 40
    assert [p.name for p in tmp_path.iterdir()] == ["rules.json"]


@pytest.mark.parametrize("change", ["graph", "proof", "version", "digest", "rule", "shape", "text"])
def test_edited_file_is_refused_whole(tmp_path: Path, norm_rules: list[RewriteRule], change: str):
    path = tmp_path / "rules.json"
    write_rules(path, norm_rules)
    body = json.loads(path.read_text())
    match change:
        case "graph":
            body["rules"][0]["graph"][-2] = body["rules"][0]["graph"][-2] + " "
        case "proof":
            body["rules"][-1]["proof"]["tests"] += 1
        case "version":
            body["version"] += 1
        case "digest":
            body["digest"] = "0" * 64
        case "rule":
            del body["rules"][0]
        case "shape":
            body = body["rules"]
    path.write_text("{" if change == "text" else json.dumps(body))
    with pytest.raises(RequestError, match=r"rules file .*run `distmega superopt` again"):
        read_rules(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", 5),
        ("machine", "h2OO"),
        ("as_ops", "no"),
        ("program_us", "x"),
        ("graph_us", [1]),
        ("measured_us", True),
        ("library_us", 10**400),
        ("launches", ((float("inf"), 1, 1),)),
        ("launches", ((4, 2),)),
        ("tests", "many"),
        ("worst", float("nan")),
        ("extents", (("a", float("inf")),)),
        ("constants", ({},)),
    ],
)
def test_what_is_of_another_type_or_machine_is_refused(
    tmp_path: Path, norm_rules: list[RewriteRule], field: str, value: object
):
    """Though the digest is right."""
    path, rule = tmp_path / "rules.json", norm_rules[0]
    part = rule if hasattr(rule, field) else rule.proof
    changed = replace(part, **{field: value})
    write_rules(path, [changed if part is rule else replace(rule, proof=changed)])
    with pytest.raises(RequestError, match=r"a rule can't be read"):
        read_rules(path)


def test_missing_file_and_folder_are_named(tmp_path: Path, norm_rules: list[RewriteRule]):
    with pytest.raises(RequestError, match="can't be read"):
        read_rules(tmp_path / "none.json")
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    with pytest.raises(RequestError, match=r"can.t be read .*brackets"):
        read_rules(deep)
    with pytest.raises(RequestError, match="can't be written"):
        write_rules(tmp_path / "none" / "rules.json", norm_rules)


@pytest.mark.parametrize(
    "build",
    [programs.norm_linear, programs.lora, programs.gated,
     lambda dtype: programs.attention(dtype, ctx=128, heads=2)],
    ids=["norm_linear", "lora", "gated", "attention"],
)  # fmt: skip
def test_graph_as_ops_computes_the_same(build):
    program = build("f32")
    inputs = inputs_of(program)
    expected = run(program, inputs)
    made = 0
    for rule in rules_of(program):
        if not rule.as_ops:
            continue
        as_ops = graph_program(parse_graph(rule.graph))
        assert parse_program(print_program(as_ops)) == as_ops
        for one, two in zip(run(as_ops, inputs), expected, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-3)  # results of some hundreds
        made += 1
    assert made


@pytest.mark.parametrize(
    "build",
    [programs.norm_linear, lambda dtype: programs.attention(dtype, ctx=128, heads=2)],
    ids=["norm_linear", "attention"],
)
def test_found_graphs_are_megakernels(build):
    """The interpreter runs a graph's ops as tasks of one kernel."""
    program = build("f32")
    inputs = inputs_of(program)
    expected = run(program, inputs)
    made = [graph_program(parse_graph(rule.graph)) for rule in rules_of(program) if rule.as_ops]
    for as_ops in (made[0], made[-1]):
        (rank,) = make_ranks(compile_megakernel(as_ops, DeviceMesh(), num_sms=3))
        rank.fill(inputs)
        launch_all([rank])
        for name, wanted in zip(as_ops.outputs, expected, strict=True):
            torch.testing.assert_close(rank.tensors[name], wanted, rtol=1e-4, atol=1e-4)


def blocks(dtype: str) -> Program:
    """Two norms with linear layers, the second norm's result used twice, a residual."""
    p = ProgramBuilder("blocks")
    x = p.input("x", (4, 256), dtype)
    h = p.rms_norm(x, p.weight("g0", (256,), dtype), 1e-5)
    y = p.linear(h, p.weight("w0", (512, 256), dtype))
    down = p.linear(y.map("silu(a0)"), p.weight("d", (256, 512), dtype)) + x
    h = p.rms_norm(down, p.weight("g1", (256,), dtype), 1e-5, name="shared")
    one = p.linear(h, p.weight("w1", (512, 256), dtype))
    last = p.rms_norm(down, p.weight("g2", (256,), dtype), 1e-5)
    two = p.linear(last, p.weight("w2", (512, 256), dtype))
    return p.build(one, two, h)


def test_rules_are_applied_wherever_they_fit(norm_rules: list[RewriteRule]):
    program = blocks("f32")
    made = apply_rules(program, norm_rules)
    name = next(rule.name for rule in norm_rules if rule.as_ops)
    assert [op.name for op in made.ops if op.kind == "rms_norm"] == ["shared"]
    named = {op.name.partition(".v")[0] for op in made.ops if op.name.startswith(name)}
    assert len({n.partition("#")[2].partition(".")[0] for n in named}) == 2
    inputs = inputs_of(program)
    for one, two in zip(run(made, inputs), run(program, inputs), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


def test_what_rules_make_has_names_that_the_program_has_not(norm_rules: list[RewriteRule]):
    program = blocks("f32")
    made = apply_rules(program, norm_rules)
    new = {op.name for op in made.ops} - {op.name for op in program.ops}
    clashing = renamed(program, {"shared": min(new), "w2": max(new)})
    again = apply_rules(clashing, norm_rules)
    assert [op.kind for op in again.ops] == [op.kind for op in made.ops]


def test_host_programs_run_rules_graphs_as_ops(norm_rules: list[RewriteRule]):
    program, best = blocks("f32"), norm_rules[0]
    raw = lower_program(
        local(program), megakernel=False, peer_memory=False, fuse=True, rules=norm_rules
    )
    host = run_passes(raw)
    check_host(host)
    assert parse_host(print_host(host)) == host
    ops = [node.op for node in walk_nodes(host.body) if isinstance(node, LibraryOp)]
    graphs = [op for op in ops if op.kind == FUSED_GRAPH]
    assert [op.attr("rule") for op in graphs] == [best.name] * 2
    assert [op.writes[0].tensor for op in graphs] == ["linear_1", "linear_8"]
    assert "fused_norm shared" in {f"{op.kind} {op.name}" for op in ops}
    inputs = inputs_of(program)
    found = Evaluator(
        host, SingleCommunicator(host.mesh), {}, ops=KernelOps(rules=lambda: norm_rules)
    ).run(inputs)
    for name, wanted in zip(program.outputs, run(program, inputs), strict=True):
        torch.testing.assert_close(found[name], wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(ProgramError, match=f"rule '{best.name}'; expected one of none"):
        Evaluator(host, SingleCommunicator(host.mesh), {}, ops=KernelOps()).run(inputs)


def test_compiled_programs_read_a_file_and_explain_its_rules(
    tmp_path: Path, norm_rules: list[RewriteRule]
):
    path = tmp_path / "rules.json"
    write_rules(path, norm_rules)
    program, mesh = blocks("f32"), DeviceMesh(tp=1)
    plan = plan_program(program, mesh, CPU)
    made = CompiledProgram(plan, SingleCommunicator(mesh), rules=read_rules(path))
    shown = f"is made by rule {norm_rules[0].name} at its own sizes: "
    assert made.explain().count(shown) == 2
    assert made.stats.rules == (norm_rules[0].name,) * 2
    plain = CompiledProgram(plan, SingleCommunicator(mesh))
    assert "rule" not in plain.explain()
    inputs = inputs_of(program)
    found, expected = made(inputs), plain(inputs)
    for name, wanted in expected.items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-4, atol=1e-4)


def test_the_shipped_file_is_read_and_its_rules_have_names_of_their_own():
    rules = shipped_rules()
    assert len({rule.name for rule in rules}) == len(rules) > 0
    for rule in rules:
        kernels = parse_graph(rule.graph).kernels
        assert len(rule.launches) in (0, len(kernels))
        assert graph_op(rule).ops[0].attr("rule") == rule.name
        assert rule.proof.log2_bound >= 40


def test_a_shipped_rule_is_what_its_division_gives():
    (rule,) = [rule for rule in shipped_rules() if rule.name == "ntrans.hidden4096.rows1"]
    found = divided_rule(rule, parse_graph(rule.graph), rule.launches, H200)
    assert found.program_us == pytest.approx(rule.program_us)  # Python 3.12 adds more exactly
    assert replace(found, program_us=rule.program_us) == rule
    wrong = parse_graph(rule.graph.replace("+ 1e-06", "+ 2e-06"))
    with pytest.raises(VerifyError):
        divided_rule(rule, wrong, rule.launches, H200)


def test_rules_leave_programs_alone_that_they_do_not_fit(norm_rules: list[RewriteRule]):
    for program in (programs.lora("f32"), programs.norm_linear("bf16"), blocks("bf16"),
                    programs.norm_linear("f32", rows=1)):  # fmt: skip
        assert apply_rules(program, norm_rules) == program


def test_a_changed_state_is_not_read_later(norm_rules: list[RewriteRule]):
    """A norm of a state, and an overwrite of it before the result is used."""
    p = ProgramBuilder("states")
    s = p.state("s", (4, 256))
    h = p.rms_norm(s, p.weight("g", (256,)), 1e-5)
    p.set(p.input("new", (4, 256)), into=s)
    program = p.build(p.linear(h, p.weight("w", (512, 256))))
    assert apply_rules(program, norm_rules) == program


def test_a_kernel_loads_what_another_stored_as_it_lies():
    """In one dim, where the output has one more, of one element."""
    graph = parse_graph(
        """
ugraph stored
  axis k:3
  axis n:2
  input y: f32[1, k]
  weight w: f32[n, k]
  temp v: f32[n]
  temp z: f32[1, n]
  kernel k0 grid n:2
    load y = y(1, k) imap - fmap -
    load w = w(n, k) imap 0 fmap -
    before v = contract[n] y w over k
    store v omap 0 fmap -
  kernel k1 grid n:2
    load v = v(n) imap 0 fmap -
    before z = map[n] 'abs(a0)' v
    store z omap 1 fmap -
  return z
"""
    )
    y, w = torch.randn(1, 3), torch.randn(2, 3)
    (z,) = run(graph_program(graph), {"y": y, "w": w})
    torch.testing.assert_close(z, (y @ w.T).abs())


def test_ops_that_no_output_needs_are_left_out():
    p = ProgramBuilder("unused")
    x, g = p.input("x", (4, 6)), p.weight("g", (6,))
    p.rms_norm(x, g, 1e-5)
    program = p.build(x.map("a0 * 2").map("exp(a0)"))
    (rule,) = rules_of(program)
    assert [op.kind for op in rule.program.ops] == ["pointwise", "pointwise"]
    assert "g" not in rule.program.tensor_map()
    (applied,) = apply_rules(program, [rule], lambda one: len(one.ops)).ops[1:]
    assert applied.attr("expr") == "exp((a0 * 2.0))"


def test_an_update_of_a_state_is_no_op_that_nobody_needs():
    p = ProgramBuilder("updated")
    x, state = p.input("x", (4, 6)), p.state("s", (4, 6))
    p.set(x.map("a0 + 1"), into=state)
    with pytest.raises(ProgramError, match="uses a state"):
        rules_of(p.build(x.map("a0 * 2")))


def test_joined_operands_are_no_ordinary_ops():
    graphs = [parse_graph(rule.graph) for rule in rules_of(programs.lora("f32"))]
    joined = [g for g in graphs if any(op.kind == "cat" for k in g.kernels for op in k.ops)]
    for graph in joined:
        with pytest.raises(ProgramError, match="joins operands"):
            graph_program(graph)
    text = """ugraph joined
  axis k:32
  axis r:32
  axis n:32
  input x: f32[k]
  input t: f32[r]
  input w: f32[n, k]
  input b: f32[n, r]
  temp y: f32[n]
  kernel k0
    load x = x(k) imap none fmap -
    load t = t(r) imap none fmap -
    load w = w(n, k) imap none fmap -
    load b = b(n, r) imap none fmap -
    before u = cat[k_r] x t over k, r as k_r
    before v = cat[n, k_r] w b over k, r as k_r
    before y = contract[n] u v over k_r
    store y omap none fmap -
  return y
"""
    with pytest.raises(ProgramError, match="joins operands"):
        graph_program(parse_graph(text))
