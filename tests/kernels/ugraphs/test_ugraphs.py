"""uGraphs as kernels: interpreted, they give what the graph gives; compiled for sm_90a, they use
tensor cores and spill nothing; found graphs run as megakernels.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from distmega.errors import UnsupportedError
from distmega.kernels.machines import H200
from distmega.kernels.ugraphs import ops
from distmega.kernels.ugraphs.geometry import (
    LATENCY_US,
    PRODUCT_ELEMENTS,
    GraphPlan,
    _Block,
    graph_plans,
    has_plan,
    pays,
    rule_plan,
)
from distmega.kernels.ugraphs.ops import GraphOp
from distmega.kernels.ugraphs.runner import load_kernels
from distmega.kernels.ugraphs.source import GraphLaunch, graph_source, kernel_tensors
from distmega.superopt.graph.regrid import regrid_kernel, with_kernels
from distmega.superopt.graph.text import parse_graph
from distmega.superopt.resize import resized_rule
from distmega.superopt.rules import RewriteRule, shipped_rules
from tests.forked import run_module
from tests.kernels.sm90 import Machine, compile_kernel
from tests.kernels.ugraphs.graphs import GRAPHS, TURNS

TYPES = {"bf16": "*bf16", "f32": "*fp32"}


def test_interpreted_kernels_give_what_graphs_give(tmp_path: Path):
    cases = {name: (text, "") for name, text in GRAPHS.items()}
    cases |= {f"turns of {n}": (TURNS, f":{n}") for n in (1, 5, 12)}
    files = []
    for number, (text, resident) in enumerate(cases.values()):
        path = tmp_path / f"{number}.txt"
        path.write_text(text)
        files.append(f"{path}{resident}")
    done = run_module("tests.kernels.ugraphs.interpreted", *files)
    assert done.returncode == 0, done.stderr
    errors = dict(zip(cases, map(float, done.stdout.split()), strict=True))
    assert all(error < 2e-6 for error in errors.values()), errors


RULE_CASES = {
    "rmsnorm_linear k=64 n=32": 1,
    "lora k=64 n=32 rank=16": 2,
    "gated_mlp k=64 n=32 rows=16": 1,
    "gqa_decode ctx=128 heads=4 kv=2 dim=16": 2,
}
"""Small cases of shipped rules, and how many kernels each becomes."""

MORE_CASES = {
    "rmsnorm_linear k=80 n=24": 1,
    "lora k=64 n=32 rank=16 rows=8": 2,
    "gated_mlp k=48 n=24": 1,
    "ntrans hidden=96": 1,
    "ntrans hidden=96 rows=6": 1,
    "gqa_decode ctx=256 heads=4 kv=2 dim=16 rows=16": 1,
    "qknorm_attention ctx=128 heads=2 dim=128": 2,
    "qknorm_attention ctx=128 heads=2 dim=128 rows=4": 3,
}


@pytest.mark.parametrize(
    "cases", [RULE_CASES, pytest.param(MORE_CASES, marks=pytest.mark.nightly)], ids=["few", "more"]
)
def test_compiled_programs_run_shipped_rules_kernels_interpreted(cases: dict[str, int]):
    """At sizes that no rule was made for: kernels ran, and the results are the programs'."""
    done = run_module("tests.kernels.ugraphs.interpreted_rules", *cases)
    assert done.returncode == 0, done.stderr
    for (case, kernels), line in zip(cases.items(), done.stdout.splitlines(), strict=True):
        name, launched, error = line.split()
        assert name.startswith(f"{case.split()[0]}."), line
        assert int(launched) == kernels, line
        assert float(error) < 0.01, line


def compiled(plan: GraphPlan) -> list[Machine]:
    """The kernels of a plan."""
    kernels, tensors = load_kernels(plan.graph, plan.launches), plan.graph.tensor_map()
    found = []
    for kernel, launch in zip(plan.graph.kernels, plan.launches, strict=True):
        names = kernel_tensors(kernel)
        types: dict[str, object] = {
            f"t{number}": TYPES[tensors[name].dtype] for number, name in enumerate(names)
        }
        found.append(compile_kernel(kernels[kernel.name], types, {}, launch.num_warps, None))
    return found


@pytest.mark.parametrize("text", GRAPHS.values(), ids=GRAPHS)
def test_every_form_compiles_for_blocks_that_start_early(text: str):
    """Triton interprets neither the wait nor the hints before it: only a compiler sees them."""
    graph = parse_graph(text)
    launches = (GraphLaunch(num_warps=4, stages=2, early=True),) * len(graph.kernels)
    source = graph_source(graph, launches)
    codes = compiled(GraphPlan(graph=graph, launches=launches, time_us=0.0))
    for code, text in zip(codes, source.split("@triton.jit")[1:], strict=True):
        before, after = code.ptx.split("griddepcontrol.wait")
        assert before.count("cp.async.bulk.prefetch.L2") == text.count("prefetch(")
        assert "ld.global" not in before
        assert "prefetch" not in after


def test_few_columns_are_padded_where_tensor_cores_read_rows_from_shared_memory():
    """All tiles of keys and values are copied there ahead; none comes through registers."""
    (code,) = compiled(rule_plan(rule("gqa_decode.ctx8192.heads32.kv8.dim128.rows16")))
    assert "wgmma.mma_async" in code.ptx
    assert "mma.sync" not in code.ptx
    assert code.ptx.count("ld.global") <= 2, "the queries"
    assert code.stack_bytes == 0


@pytest.mark.parametrize("rows", [2, 3, 4])
def test_few_rows_of_an_mlp_spill_nothing(rows: int):
    """Fewer columns than tensor cores take at once are padded, and not all are summed at once."""
    known = rule("gated_mlp.k4096.n11008.rows16")
    sized = resized_rule(known, (("m0", rows), ("k", 2048), ("n", 4096)))
    (code,) = compiled(rule_plan(sized))
    assert code.stack_bytes == 0
    graph = parse_graph(sized.graph)
    looped = regrid_kernel(graph, graph.kernels[0], (("n", 512),), 4)
    graph = with_kernels(graph, [looped], 2**40)
    launches = (GraphLaunch(num_warps=8, stages=2),)
    (code,) = compiled(GraphPlan(graph=graph, launches=launches, time_us=0.0))
    assert "mma.sync" in code.ptx
    assert code.stack_bytes == 0
    assert _Block(graph, replace(looped, loop=None)).held(8) > PRODUCT_ELEMENTS


def test_two_stages_leave_memory_at_rest_between_iterations():
    """An iteration's loads start when those of the one before are there."""
    (found,) = [r for r in shipped_rules() if r.name == "gated_mlp.k4096.n11008.rows16"]
    graph = parse_graph(resized_rule(found, (("m0", 64), ("k", 2048), ("n", 8192))).graph)
    divided = regrid_kernel(graph, graph.kernels[0], (("n", 128),), 8)
    block = _Block(graph, divided)
    two, one = (GraphLaunch(num_warps=8, stages=n) for n in (2, 1))
    rate = H200.memory_bandwidth_bytes_per_us / H200.num_sms
    read = block.moving * divided.loop[1] / rate
    assert block.waits_us(two, 1, 1, rate) == pytest.approx(read + 8 * LATENCY_US)
    assert block.waits_us(one, 1, 1, rate) == block.waits_us(two, 1, 1, rate)
    assert block.waits_us(replace(two, stages=3), 1, 1, rate) == pytest.approx(
        block.waits_us(two, 1, 1, rate) / 2
    )


def test_eager_blocks_read_what_is_constant_before_they_wait():
    """Without constants of their own there is nothing to do before, and they don't start early."""
    graph = parse_graph(TURNS)
    late = GraphLaunch(num_warps=4, stages=1, eager=True, constant=frozenset({"g"}))
    assert not late.starts_early(graph.kernels[0])
    (code,) = compiled(GraphPlan(graph=graph, launches=(late,), time_us=0.0))
    assert "griddepcontrol" not in code.ptx
    launch = GraphLaunch(num_warps=4, stages=1, eager=True, constant=frozenset({"g", "w"}))
    assert launch.starts_early(graph.kernels[0])
    before, after = graph_source(graph, [launch]).split("gdc_wait()\n")
    assert [f"t{n}" for n in range(3) if f"tl.load(t{n} " in before] == ["t1", "t2"]
    assert "tl.load(t0 " in after
    (code,) = compiled(GraphPlan(graph=graph, launches=(launch,), time_us=0.0))
    before, after = code.ptx.split("griddepcontrol.wait")
    assert "ld.global" in before
    assert "ld.global" in after
    assert "st.global" not in before


@pytest.mark.parametrize(
    ("constant", "waits_for"), [((), ("t0", "t1", "t2")), (("w",), ("t0", "t1"))]
)
def test_blocks_that_are_taken_in_turn(constant: tuple[str, ...], waits_for: tuple[str, ...]):
    """What no kernel writes is loaded before the wait; one tile is always under way."""
    graph = parse_graph(TURNS)
    launch = GraphLaunch(
        num_warps=4, stages=1, early=True, resident=5, constant=frozenset(constant)
    )
    text = graph_source(graph, [launch])
    _, after = text.split("gdc_wait()\n")
    assert [f"t{n}" for n in range(3) if f"tl.load(t{n} " in after.partition("for turn")[0]] == [
        *waits_for
    ]
    once, each = after.split("for turn in tl.range(tl.program_id(0), 12, 5, num_stages=1):")
    assert "v0 = " in once
    assert "v1 = " in once
    assert "x2_next = tl.load(t2 " in each
    assert " & (turn < 7), other=0.0" in each
    (code,) = compiled(GraphPlan(graph=graph, launches=(launch,), time_us=0.0))
    assert code.stack_bytes == 0
    loads = code.ptx.split("griddepcontrol.wait")[0].count("ld.global")
    assert (loads > 0) == bool(constant)
    looped = parse_graph(VECTOR_NORM)
    with pytest.raises(UnsupportedError, match="a loop of their own"):
        graph_source(looped, [launch])


class _Waits(Exception):
    """A block has come to its wait."""


def asked_for(source: str, block: int) -> set[int]:
    """Offsets, in elements of f32, of what a block asks for before it waits."""
    found: set[int] = set()

    def prefetch(starts: np.ndarray, num_bytes: int) -> None:
        assert num_bytes % 16 == 0
        for start in starts:
            found.update(range(start, start + num_bytes // 4))

    def wait() -> None:
        raise _Waits

    made: dict[str, Any] = {
        "triton": SimpleNamespace(jit=lambda function: function),
        "tl": SimpleNamespace(program_id=lambda _: block, arange=np.arange, minimum=np.minimum),
        "gdc_launch_dependents": lambda: None,
        "gdc_wait": wait,
        "prefetch": prefetch,
    }
    exec(source[source.index("@triton.jit") :], made)
    with pytest.raises(_Waits):
        made["k0"](*[0] * made["k0"].__code__.co_argcount)
    return found


def test_blocks_that_start_early_ask_for_their_first_tiles():
    graph = parse_graph(GRAPHS["columns of many rows, which early blocks ask for"])
    source = graph_source(graph, [GraphLaunch(num_warps=4, stages=2, early=True)])
    weight = np.arange(2 * 48 * 64).reshape(2, 48, 64)
    for block in range(8):
        columns = slice(block % 4 * 16, block % 4 * 16 + 16)
        assert asked_for(source, block) == set(weight[block // 4, :32, columns].flat)
    graph = parse_graph(GRAPHS["running maximum, extents that are no powers of two"])
    source = graph_source(graph, [GraphLaunch(num_warps=4, stages=2, early=True)])
    keys = np.arange(2 * 36 * 24).reshape(2, -1)
    for block in range(2):
        assert asked_for(source, block) == set(keys[block, : 24 * 24])


VECTOR_NORM = """\
ugraph norm_linear
  axis d:4096
  axis n:4096
  input x: bf16[1, d]
  weight g: bf16[d]
  weight w: bf16[n, d]
  temp y: bf16[1, n]
  kernel k0 grid n:2048 loop d:64
    load x = x(1, d) imap - fmap 1
    load g = g(d) imap - fmap 0
    load w = w(n, d) imap 0 fmap 1
    body v0 = contract[] x x over d
    body v1 = map[d] '(a0 * a1)' x g
    body v2 = contract[n] w v1 over d
    after y = map[n] '(rsqrt(((a0 * 0.000244140625) + 1e-05)) * a1)' v0 v2
    store y omap 1 fmap -
  return y
"""


def test_a_matrix_times_a_vector_is_loaded_ahead_and_uses_no_tensor_cores():
    (code,) = compiled(graph_plans(parse_graph(VECTOR_NORM), H200, 1, (8, 16, 32))[0])
    assert code.stack_bytes == 0
    assert "mma" not in code.ptx
    assert "cp.async.cg.shared.global" in code.ptx
    assert code.shared_bytes > 32768, "bytes under way on an SM"


def test_products_of_matrices_use_tensor_cores():
    text = VECTOR_NORM.replace("  axis d:", "  axis m:16\n  axis d:").replace("[1, ", "[m, ")
    text = text.replace("x(1, d)", "x(m, d)").replace("contract[]", "contract[m]")
    text = text.replace("map[d]", "map[m, d]").replace("contract[n]", "contract[m, n]")
    text = text.replace("map[n]", "map[m, n]").replace("n:2048", "n:128")
    (code,) = compiled(graph_plans(parse_graph(text), H200, 1)[0])
    assert "mma" in code.ptx


def rule(name: str) -> RewriteRule:
    (found,) = [rule for rule in shipped_rules() if rule.name == name]
    return found


def test_a_kernel_that_leaves_sms_free_starts_early():
    (code,) = compiled(rule_plan(rule("ntrans.hidden4096.rows16")))
    first = code.ptx.index("griddepcontrol.launch_dependents")
    hint = code.ptx.index("cp.async.bulk.prefetch.L2")
    wait = code.ptx.index("griddepcontrol.wait")
    assert first < hint < wait < code.ptx.index("ld.global")
    assert "st.global" not in code.ptx[:wait]


def test_a_single_block_has_many_warps_by_the_model():
    """Each thread adds up a quarter of what one of the measured launch does."""
    (plan,) = graph_plans(parse_graph(rule("ntrans.hidden4096.rows1").graph), H200, 1)
    assert [launch.num_warps for launch in plan.launches] == [16]
    (code,) = compiled(plan)
    assert code.stack_bytes == 0
    assert code.ptx.count("ld.global.L1::evict_first.L2::cache_hint.v4") == 3, "one of each tensor"
    (large,) = graph_plans(parse_graph(VECTOR_NORM), H200, 1)
    assert large.launches[0].num_warps <= 8


@pytest.mark.parametrize(
    "name",
    ["qknorm_attention.ctx4096.heads32.dim128.rows1", "gated_mlp.k4096.n11008.rows16"],
)
def test_large_kernels_start_in_turn_and_spill_nothing(name: str):
    for code in compiled(rule_plan(rule(name))):
        assert "griddepcontrol" not in code.ptx
        assert code.stack_bytes == 0


def test_sources_say_what_blocks_take():
    graph = parse_graph(VECTOR_NORM)
    text = graph_source(graph, [GraphLaunch(num_warps=4, stages=3)])
    assert "def k0(t0, t1, t2, t3):" in text
    assert "o_n = block % 2048 * 2" in text
    assert "for i in tl.range(0, 64, num_stages=3):" in text


def test_plans_are_other_divisions_of_the_same_graph():
    graph = parse_graph(VECTOR_NORM)
    plans = graph_plans(graph, H200, 6)
    assert len({(p.graph.kernels[0].grid, p.graph.kernels[0].loop) for p in plans}) == 6
    assert [p.time_us for p in plans] == sorted(p.time_us for p in plans)
    for plan in plans:
        assert plan.graph.tensors == graph.tensors
        assert [op.name for op in plan.graph.kernels[0].ops] == ["v0", "v1", "v2", "y"]


def test_rules_that_can_be_launched_are_told_from_others():
    known = rule("rmsnorm_linear.k4096.n4096.rows1")
    assert has_plan(known)
    assert has_plan(resized_rule(known, (("n", 8192),)))
    looped = rule("rmsnorm_linear.k4096.n128256.rows1")
    assert has_plan(looped)
    assert not has_plan(resized_rule(looped, (("n", 2**20),))), "offsets of 32 bits"


def test_rules_pay_where_their_kernels_do():
    """As measured: one row, or operands that tensor cores take as they are; products of what a
    kernel makes in every block lose against one library call from some rows on.
    """
    norm, mlp = rule("rmsnorm_linear.k2048.n128256.rows1"), rule("gated_mlp.k4096.n11008.rows16")
    assert pays(norm)
    sized = resized_rule(mlp, (("m0", 8), ("k", 2048), ("n", 8192)))
    assert pays(sized)
    assert [launch.resident for launch in rule_plan(sized).launches] == [0], "a product"
    rows = rule("rmsnorm_linear.k4096.n4096.rows16")
    for m in (8, 32):
        assert not pays(resized_rule(rows, (("m0", m), ("d", 2048), ("n", 128256))))


def test_a_value_that_no_sm_holds_is_named():
    text = VECTOR_NORM.replace("n:2048 loop d:64", "n:2048").replace(" fmap 1", " fmap -")
    text = text.replace("fmap 0", "fmap -").replace("body ", "before ").replace("after ", "before ")
    text = text.replace("axis d:4096", "axis d:24576")
    with pytest.raises(UnsupportedError, match="no division of kernel 'k0' fits"):
        graph_plans(parse_graph(text), H200, 1)


def test_kernels_are_given_rows_where_prefetches_can_begin(monkeypatch: pytest.MonkeyPatch):
    """At multiples of 16 bytes, side by side; what is copied for that is not constant to them."""
    op = GraphOp(next(iter(shipped_rules())))
    op.constant = frozenset(op.inputs[-2:])
    given: dict[str, torch.Tensor] = {}

    def run(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        given.update(inputs)
        return dict.fromkeys(op.graph.outputs, torch.zeros(1))

    runners = {frozenset(op.inputs[-2:-1]): run}
    op.runner = runners.__getitem__  # type: ignore[method-assign, assignment]
    monkeypatch.setattr(ops, "is_interpreted", lambda: True)
    xs = [torch.arange(9.0)[1:].view(2, 4) for _ in op.inputs]
    xs[-2] = xs[-2].clone()
    op([*xs[:-1], torch.arange(8.0).view(4, 2).T])
    assert [x.tolist() for x in given.values()][:-1] == [x.tolist() for x in xs[:-1]]
    assert all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in given.values())
