"""Programs of other forms than the paper's: the search ends, what it proves is equal."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from distmega.errors import ProgramError
from distmega.kernels.machines import H200
from distmega.program.builder import Handle, ProgramBuilder
from distmega.program.types import Program
from distmega.superopt.graph.interpret import run_graph
from distmega.superopt.graph.text import parse_graph
from distmega.superopt.optimize import Optimizer
from distmega.superopt.proof.rounding import Rounded
from distmega.superopt.rewrite import fuse_graphs, graph_program
from distmega.superopt.search.schedule import SearchLimits
from tests.superopt.test_rules import inputs_of, run

DTYPE = "bf16"
QUICK = SearchLimits(num_scheduled=24, num_kept=3, splits=(4,))


def linear(
    p: ProgramBuilder, x: Handle, name: str, n: int, k: int, *, bias: bool = False
) -> Handle:
    vector = p.weight(f"{name}_bias", (n,), DTYPE) if bias else None
    return p.linear(x, p.weight(name, (n, k), DTYPE), bias=vector)


def layer_norm_linear() -> Program:
    p = ProgramBuilder("layer_norm_linear")
    x = p.input("x", (4, 256), DTYPE)
    vectors = (p.weight(name, (256,), DTYPE) for name in ("g", "b"))
    return p.build(linear(p, p.layer_norm(x, *vectors, 1e-5), "w", 128, 256))


def softmax_of_a_linear() -> Program:
    p = ProgramBuilder("softmax_of_a_linear")
    return p.build(p.softmax(linear(p, p.input("x", (16, 128), DTYPE), "w", 64, 128)))


def product_of_linears() -> Program:
    p = ProgramBuilder("product_of_linears")
    x, y = (p.input(name, (8, k), DTYPE) for name, k in (("x", 128), ("y", 64)))
    return p.build(linear(p, x, "a", 256, 128) * linear(p, y, "b", 256, 64))


def residual_norm_linear() -> Program:
    """The sum leaves too."""
    p = ProgramBuilder("residual_norm_linear")
    x, r = (p.input(name, (1, 512), DTYPE) for name in ("x", "r"))
    total = x + r
    h = p.rms_norm(total, p.weight("g", (512,), DTYPE), 1e-6)
    return p.build(linear(p, h, "w", 128, 512), total)


def swiglu_with_biases() -> Program:
    p = ProgramBuilder("swiglu")
    x = p.input("x", (2, 128), DTYPE)
    gate, up = (linear(p, x, name, 256, 128, bias=True) for name in ("gate", "up"))
    return p.build(linear(p, gate.map("silu(a0) * a1", up), "down", 128, 256, bias=True))


def attention_with_a_bias() -> Program:
    p = ProgramBuilder("attention_with_a_bias")
    q = p.input("q", (4, 64), DTYPE)
    k, v = (p.input(name, (4, 256, 64), DTYPE) for name in ("k", "v"))
    scores = p.linear(q, k, spec="h d, h t d -> h t")
    scores = scores.map("a0 * 0.125 + a1", p.input("bias", (4, 256), DTYPE))
    return p.build(p.linear(p.softmax(scores), v, spec="h t, h t e -> h e"))


def mean_over_rows() -> Program:
    p = ProgramBuilder("mean_over_rows")
    x = p.input("x", (64, 128), DTYPE)
    mean = p.reduce(x.map("a0 * 0.015625"), 0)
    return p.build(mean.map("a0 * a1", p.weight("w", (128,), DTYPE)))


def sum_of_exponentials() -> Program:
    p = ProgramBuilder("sum_of_exponentials")
    x = p.input("x", (16, 256), DTYPE)
    top = p.reshape(p.reduce(x, 1, "max"), (16, 1))
    return p.build(p.reduce(x.map("exp(a0 - a1)", top), 1))


def queries_keys_values() -> Program:
    p = ProgramBuilder("queries_keys_values")
    x = p.rms_norm(p.input("x", (4, 128), DTYPE), p.weight("g", (128,), DTYPE), 1e-5)
    return p.build(*(linear(p, x, name, 64, 128) for name in ("q", "k", "v")))


def gelu_mlp() -> Program:
    p = ProgramBuilder("gelu_mlp")
    x = p.input("x", (8, 128), DTYPE)
    h = linear(p, x, "up", 256, 128, bias=True).map("gelu(a0)")
    return p.build(linear(p, h, "down", 128, 256, bias=True) + x)


def square_linear_residual() -> Program:
    """x is read along the reduced axis and along the other one, of the same extent."""
    p = ProgramBuilder("square_linear_residual")
    x = p.input("x", (4, 128), DTYPE)
    return p.build(x + linear(p, x, "w", 128, 128))


def attention_of_rows_to_themselves() -> Program:
    """No tensor outside has the keys' axis: x is read along it."""
    p = ProgramBuilder("attention_of_rows_to_themselves")
    x = p.input("x", (16, 32), DTYPE)
    scores = p.softmax(p.linear(x, x).map("a0 * 0.25"))
    return p.build(p.linear(scores, x, spec="m n, n k -> m k"))


def symmetric_sum() -> Program:
    p = ProgramBuilder("symmetric_sum")
    x = p.input("x", (64, 64), DTYPE)
    return p.build(x + p.transpose(x, (1, 0)))


FEW = (
    softmax_of_a_linear, mean_over_rows, sum_of_exponentials, attention_with_a_bias,
    square_linear_residual, symmetric_sum, attention_of_rows_to_themselves,
)  # fmt: skip
MORE = (
    layer_norm_linear, product_of_linears, swiglu_with_biases, residual_norm_linear,
    queries_keys_values, gelu_mlp,
)  # fmt: skip


@pytest.mark.parametrize(
    "build", [*FEW, *(pytest.param(build, marks=pytest.mark.nightly) for build in MORE)]
)
def test_programs_of_other_forms_are_proven_and_equal(build: Callable[[], Program]):
    """Each within its limits; what is proven computes the same, also where the program has it."""
    program = build()
    optimizer = Optimizer(program, H200, QUICK)
    for _ in optimizer.run():
        pass
    assert optimizer.rules
    assert optimizer.search.num_recipes <= (1 + len(program.ops) * 2) * QUICK.num_scheduled
    inputs = inputs_of(program)
    expected = run(program, inputs)
    for rule in optimizer.rules:
        if rule.as_ops:
            found = run(graph_program(parse_graph(rule.graph)), inputs)
            for one, two in zip(found, expected, strict=True):
                scale = float(two.float().abs().max())
                torch.testing.assert_close(one, two, rtol=0.02, atol=0.02 * scale)
    best = optimizer.rules[0]
    made = fuse_graphs(program, [best])
    assert (made != program) == (best.graph_us < best.program_us)


def test_where_the_fastest_overflow_the_next_ones_are_proven():
    """Attention without its largest score needs fewer ops."""
    optimizer = Optimizer(attention_with_a_bias(), H200, SearchLimits(num_scheduled=24, num_kept=1))
    for _ in optimizer.run():
        pass
    assert len(optimizer.rules) == 1
    assert optimizer.refused
    assert all("overflows" in refusal.reason for refusal in optimizer.refused)


def test_what_an_op_computes_is_read_along_its_own_axes():
    p = ProgramBuilder("p")
    h = linear(p, p.input("x", (4, 64), DTYPE), "v", 128, 64)
    program = p.build(h + linear(p, h, "w", 128, 128))
    with pytest.raises(ProgramError, match="it reads 'linear_1' along two axes at once"):
        Optimizer(program, H200, QUICK)


def test_means_over_any_extent_are_proven():
    """1/30 is no float: the graph divides as the program does."""
    p = ProgramBuilder("centred")
    x = p.input("x", (3, 30), DTYPE)
    mean = p.reshape(p.reduce(x, 1), (3, 1))
    program = p.build(linear(p, x.map("a0 - a1 / 30.0", mean), "w", 14, 30))
    optimizer = Optimizer(program, H200, QUICK)
    for _ in optimizer.run():
        pass
    assert optimizer.rules
    assert not optimizer.refused


def test_more_ops_are_tried_where_all_graphs_overflow():
    """With a bias and odd sizes all graphs of the fewest ops take no maximum."""
    p = ProgramBuilder("biased")
    q, bias = p.input("q", (2, 6, 24), DTYPE), p.input("m", (6, 36), DTYPE)
    k, v = (p.input(name, (2, 36, 24), DTYPE) for name in ("k", "v"))
    scores = p.linear(q, k, spec="h q d, h t d -> h q t").map("a0 * 0.2 + a1", bias)
    program = p.build(p.linear(p.softmax(scores), v, spec="h q t, h t e -> h q e"))
    optimizer = Optimizer(program, H200, QUICK)
    for _ in optimizer.run():
        pass
    assert optimizer.rules
    assert any("overflows" in refusal.reason for refusal in optimizer.refused)


def softmax_of_scores() -> Program:
    p = ProgramBuilder("softmax_of_scores")
    scores = p.softmax(p.input("s", (8, 256), "f32"))
    return p.build(p.linear(scores, p.weight("v", (16, 256), "f32")))


def masked_attention() -> Program:
    p = ProgramBuilder("masked_attention")
    q = p.input("q", (2, 64, 16), "f32")
    k, v = (p.input(name, (2, 256, 16), "f32") for name in "kv")
    products = p.linear(q, k, spec="h m d, h t d -> h m t")
    scores = products.map("a0*0.25+a1", p.input("mask", (64, 256), "f32"))
    return p.build(p.linear(p.softmax(scores), v, spec="h m t, h t e -> h m e"))


@pytest.mark.parametrize(
    ("make", "changed"),
    [
        (softmax_of_scores, {"s": np.full((8, 256), 100.0)}),
        (masked_attention, {"mask": np.triu(np.full((64, 256), -np.inf), 193)}),
    ],
)
def test_rules_stay_finite_where_the_program_does(
    make: Callable[[], Program], changed: dict[str, NDArray[np.float64]]
):
    """Scores of 100 that come in as they are; a mask that hides whole parts of the keys."""
    program = make()
    rng = np.random.default_rng(0)
    given = {t.name: rng.standard_normal(t.shape) for t in program.tensors if t.role != "temp"}
    planes = {
        name: (x.astype(np.float32)[None], np.zeros((1, *x.shape)))
        for name, x in (given | changed).items()
    }
    optimizer = Optimizer(program, H200, SearchLimits())
    for _ in optimizer.run():
        pass
    assert optimizer.rules
    assert any("overflows" in refusal.reason for refusal in optimizer.refused)
    for rule in optimizer.rules:
        with np.errstate(all="ignore"):
            found = run_graph(parse_graph(rule.graph), planes, Rounded())
        assert np.isfinite(found[program.outputs[0]][0]).all(), rule.graph
