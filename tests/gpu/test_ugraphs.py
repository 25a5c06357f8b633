"""uGraphs' kernels on a GPU: small graphs of every form, and compiled programs by shipped rules."""

import numpy as np
import pytest
import torch

from distmega.compiled import CompiledProgram, lowering
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.kernels.machines import H200
from distmega.kernels.ugraphs.geometry import graph_plans, has_plan, rule_plan
from distmega.kernels.ugraphs.runner import GraphRunner
from distmega.kernels.ugraphs.source import GraphLaunch
from distmega.program.builder import ProgramBuilder
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.planner import plan_program
from distmega.superopt.graph.arithmetic import Float
from distmega.superopt.graph.interpret import run_graph
from distmega.superopt.graph.text import parse_graph
from distmega.superopt.programs import read_case
from distmega.superopt.rules import shipped_rules
from tests.kernels.ugraphs.graphs import GRAPHS, TURNS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("text", GRAPHS.values(), ids=GRAPHS)
def test_small_graphs(text: str, early: bool):
    graph = parse_graph(text)
    launches = [GraphLaunch(num_warps=4, stages=2, early=early)] * len(graph.kernels)
    rng, run = np.random.default_rng(0), GraphRunner.of(graph, launches)
    inputs = {t.name: rng.standard_normal(run.shape(t)) for t in graph.tensors if t.role != "temp"}
    expected = run_graph(graph, {name: (x[None],) for name, x in inputs.items()}, Float())
    given = {name: torch.from_numpy(x).float().cuda() for name, x in inputs.items()}
    for _ in range(3):
        found = run(given)
    for name in graph.outputs:
        wanted = torch.tensor(expected[name][0][0], dtype=torch.float32).cuda()
        torch.testing.assert_close(found[name], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("constant", [(), ("w",)])
@pytest.mark.parametrize("resident", [0, 1, 5, 12])
def test_blocks_taken_in_turn_or_eager(resident: int, constant: tuple[str, ...]):
    """Each of several launches reads what the one before wrote."""
    graph = parse_graph(TURNS)
    launch = GraphLaunch(
        num_warps=4, stages=1, early=resident > 0, eager=True, resident=resident,
        constant=frozenset(constant),
    )  # fmt: skip
    run = GraphRunner.of(graph, [launch])
    torch.manual_seed(0)
    given = {
        t.name: torch.randn(run.shape(t), device="cuda") for t in graph.tensors if t.role != "temp"
    }
    for _ in range(20):
        x = given["x"]
        y = run(given)["y"]
        wanted = (x * given["g"]) @ given["w"].T * ((x * x).sum(1, keepdim=True) + 1.0).rsqrt()
        torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)
        given["x"] = y[:, : x.shape[1]].contiguous()


def test_compiled_programs_use_shipped_rules():
    """The last norm and the logits of a decoder, in the middle of other ops."""
    size, vocab = 2048, 128256
    p = ProgramBuilder("head")
    x = p.input("x", (1, size), "bf16").map("a0 * 2.0")
    h = p.rms_norm(x, p.weight("g", (size,), "bf16"), 1e-5)
    logits = p.linear(h, p.weight("w", (vocab, size), "bf16"))
    program = p.build(logits.map("a0 * 0.5"))
    mesh = DeviceMesh(tp=1)
    run = CompiledProgram(
        plan_program(program, mesh, H200), SingleCommunicator(mesh), "cuda:0", megakernel=False
    )
    name = f"rmsnorm_linear.k{size}.n{vocab}.rows1"
    assert f"is made by rule {name}" in run.explain()
    torch.manual_seed(0)
    tensors = {
        t.name: torch.randn(t.shape, device="cuda").bfloat16()
        for t in program.tensors
        if t.role != "temp"
    }
    for _ in range(3):
        (found,) = run(tensors).values()
    assert run.stats.replayed
    x = 2.0 * tensors["x"].double()
    h = x / (x.square().mean() + 1e-5).sqrt() * tensors["g"].double()
    wanted = 0.5 * h @ tensors["w"].double().T
    error = (found.double() - wanted).abs().max() / wanted.abs().max()
    assert error < 0.01


OTHER_SIZES = (
    "rmsnorm_linear k=2560 n=9728",
    "lora k=2048 n=8192 rank=64",
    "gated_mlp k=1536 n=8960 rows=5",
    "gqa_decode ctx=1000 heads=16 kv=2 dim=64",
    "qknorm_attention ctx=512 heads=8 dim=128",
    "ntrans hidden=3072 rows=7",
)


@pytest.mark.parametrize("case", OTHER_SIZES)
def test_rules_hold_at_sizes_of_no_rule(case: str, monkeypatch: pytest.MonkeyPatch):
    """Also where they are predicted to gain too little to be used."""
    monkeypatch.setattr(lowering, "pays", has_plan)
    program, mesh = read_case(case), DeviceMesh(tp=1)
    plan = plan_program(program, mesh, H200)
    run = CompiledProgram(plan, SingleCommunicator(mesh), "cuda:0", megakernel=False)
    plain = CompiledProgram(plan, SingleCommunicator(mesh), "cuda:0", megakernel=False, rules=())
    assert len(run.stats.rules) == 1
    assert plain.stats.rules == ()
    torch.manual_seed(0)
    tensors = {
        t.name: torch.randn(t.shape, device="cuda").bfloat16()
        for t in program.tensors
        if t.role != "temp"
    }
    for (name, found), wanted in zip(run(tensors).items(), plain(tensors).values(), strict=True):
        error = (found.double() - wanted.double()).abs().max() / wanted.double().abs().max()
        assert error < 0.02, name


def test_a_megakernel_takes_a_factor_before_a_linear_layer():
    """Behind it, by a shipped rule, the factor is the kernel's epilogue."""
    p = ProgramBuilder("scaled")
    h = p.rms_norm(p.input("x", (1, 2048), "bf16"), p.weight("g", (2048,), "bf16"), 1e-5)
    program = p.build(p.linear(h.map("a0 * 0.0625"), p.weight("w", (4096, 2048), "bf16")))
    mesh = DeviceMesh(tp=1)
    plan = plan_program(program, mesh, H200)
    run = CompiledProgram(plan, SingleCommunicator(mesh), "cuda:0", megakernel=True)
    plain = CompiledProgram(plan, SingleCommunicator(mesh), "cuda:0", megakernel=False, rules=())
    assert [name.split(".")[0] for name in run.stats.rules] == ["scaled_linear"]
    assert run.stats.num_megakernels == 1
    torch.manual_seed(0)
    tensors = {
        t.name: torch.randn(t.shape, device="cuda").bfloat16()
        for t in program.tensors
        if t.role != "temp"
    }
    (found,), (wanted,) = run(tensors).values(), plain(tensors).values()
    error = (found.double() - wanted.double()).abs().max() / wanted.double().abs().max()
    assert error < 0.02


@pytest.mark.parametrize("rule", shipped_rules(), ids=[rule.name for rule in shipped_rules()])
def test_shipped_rules_kernels_give_what_their_plans_give(rule):
    """Measured launches and the model's own first choice agree."""
    plans = [rule_plan(rule), graph_plans(parse_graph(rule.graph), H200, 1)[0]]
    torch.manual_seed(0)
    inputs = {
        t.name: torch.randn(t.shape, device="cuda").bfloat16() * 0.25
        for t in rule.program.tensors
        if t.role != "temp"
    }
    one, two = (GraphRunner.of(plan.graph, plan.launches)(inputs) for plan in plans)
    for name, x in one.items():
        assert torch.isfinite(x).all()
        error = (x.double() - two[name].double()).abs().max() / x.double().abs().max()
        assert error < 0.01
