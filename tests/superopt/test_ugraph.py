"""uGraphs print, parse back and keep their rules."""

from dataclasses import replace

import numpy as np
import pytest

from distmega.errors import DistmegaError, ParseError, VerifyError
from distmega.superopt.graph.arithmetic import Float
from distmega.superopt.graph.interpret import run_graph
from distmega.superopt.graph.text import parse_graph, print_graph
from distmega.superopt.graph.ugraph import UGraph, rescalings, shared_bytes
from distmega.superopt.graph.verify import verify_graph
from tests.superopt.exact import Exact, random_fractions
from tests.superopt.graphs import NORM_LINEAR

SPLIT = """\
ugraph split
  axis t_o:4
  axis t_i:8
  axis e:16
  input s: f32[t_o.t_i]
  input v: f32[t_o.t_i, e]
  temp y: f32[e]
  kernel k0 loop t_o:4
    load s = s(t_o.t_i) imap none fmap 0
    load v = v(t_o.t_i, e) imap none fmap 0
    body a = max[t_o] s over t_i
    body p = map[t_o, t_i] 'exp((a0 - a1))' s a
    body l = sum[t_o] p over t_i
    body o = contract[t_o, e] p v over t_i
    body m = max[] a over t_o
    body r = map[t_o] 'exp((a0 - a1))' a m
    body ll = contract[] r l over t_o
    body oo = contract[e] r o over t_o
    after y = map[e] '(a0 / a1)' oo ll
    store y omap none fmap -
  return y
"""


@pytest.mark.parametrize("text", [NORM_LINEAR, SPLIT])
def test_graph_parses_back(text: str):
    graph = parse_graph(text)
    assert print_graph(graph) == text
    assert parse_graph(print_graph(graph)) == graph


def test_blocks_and_iterations_compute_the_whole():
    graph, rng = parse_graph(NORM_LINEAR), np.random.default_rng(0)
    x, w = rng.standard_normal((1, 4, 64)), rng.standard_normal((1, 32, 64))
    y = run_graph(graph, {"x": (x,), "w": (w,)}, Float())["y"][0]
    expected = x @ w.transpose(0, 2, 1) / np.sqrt((x * x).sum(-1, keepdims=True) + 1.0)
    np.testing.assert_allclose(y, expected, rtol=1e-12)


def test_running_maximum_computes_a_softmax():
    graph, rng = parse_graph(SPLIT), np.random.default_rng(0)
    assert rescalings(graph.kernels[0]) == {"r"}
    s, v = 500.0 * rng.standard_normal((1, 32)), rng.standard_normal((1, 32, 16))
    y = run_graph(graph, {"s": (s,), "v": (v,)}, Float())["y"][0]
    weights = np.exp(s - s.max())
    np.testing.assert_allclose(y[0], weights[0] @ v[0] / weights.sum(), rtol=1e-12)


def test_interpreter_is_exact_over_fractions():
    text = NORM_LINEAR.replace("(a0 * rsqrt((a1 + 1.0)))", "(a0 / (a1 + 1.0))")
    graph, rng = parse_graph(text), np.random.default_rng(0)
    x, w = random_fractions((4, 64), rng), random_fractions((32, 64), rng)
    y = run_graph(graph, {"x": x, "w": w}, Exact())["y"][0]
    product = (x[0][0, 1] * w[0][0, 2]).sum()
    assert y[0, 1, 2] == product / ((x[0][0, 1] ** 2).sum() + 1)


def test_shared_memory_is_counted_and_bounded():
    graph = parse_graph(NORM_LINEAR)
    (kernel,) = graph.kernels
    loads = 2 * 2 * (2 * 32 + 8 * 32)
    assert shared_bytes(graph, kernel) == loads + 4 * (2 + 2 * 8)
    assert verify_graph(graph, loads + 72) == graph
    with pytest.raises(VerifyError, match="shared bytes"):
        verify_graph(graph, loads + 71)


BROKEN = [
    ("grid n:4 m:2", "grid n:5 m:2", "divides axis 'n' in 5"),
    ("grid n:4 m:2", "grid n:4 k:2", "divides an axis twice"),
    ("imap - 0 fmap 1", "imap 0 - fmap 1", "imap"),
    ("fmap 1\n    load w", "fmap 0\n    load w", "fmap"),
    ("x = x(m, k)", "x = y(m, k)", "loads 'y'"),
    ("over k\n    body a", "over n\n    body a", "reduces"),
    ("a = contract[m, n] x w", "a = contract[m, n] x q", "reads"),
    ("a = contract[m, n]", "a = contract[n]", "reduces"),
    ("after y", "body y", "stands in 'body'"),
    ("body s", "before s", "stands in 'before'"),
    ("store y omap 1 0", "store y omap 0 1", "omap"),
    ("store y omap 1 0 fmap -", "store a omap 1 0 fmap -", "stores 'a'"),
    ("(a0 * rsqrt((a1 + 1.0)))", "(a0 * rsqrt((a2 + 1.0)))", "reduces"),
    ("return y", "return x, z", "never stored"),
    ("axis m:4", "axis m:1", "less than 2|divides"),
    ("w: bf16[n, k]", "w: bf16[k, n]", "imap|loads"),
]


@pytest.mark.parametrize(("old", "new", "found"), BROKEN, ids=[new for _, new, _ in BROKEN])
def test_broken_graphs_are_refused(old: str, new: str, found: str):
    assert old in NORM_LINEAR
    with pytest.raises(DistmegaError, match=found):
        parse_graph(NORM_LINEAR.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("r = map[t_o] 'exp((a0 - a1))' a m", "r = map[t_o] 'exp((a1 - a0))' a m"),
        ("p = map[t_o, t_i] 'exp((a0 - a1))' s a", "p = map[t_o, t_i] 'exp((a0 - a1))' s m"),
        ("ll = contract[] r l over t_o", "ll = max[] r over t_o"),
        ("r = map[t_o] 'exp((a0 - a1))' a m", "r = map[t_o] 'exp(((0.0 - 2.0) * (a0 - a1)))' a m"),
    ],
)
def test_only_rescaled_sums_need_the_maximum_early(old: str, new: str):
    assert old in SPLIT
    with pytest.raises(VerifyError, match=r"stands in 'body'|reads"):
        parse_graph(SPLIT.replace(old, new))


def test_rescalings_themselves_may_be_summed():
    text = "ll = contract[] r l over t_o\n    body z = sum[] r over t_o"
    assert parse_graph(SPLIT.replace("ll = contract[] r l over t_o", text))


@pytest.mark.parametrize(
    "text",
    [
        "", "ugraph x", "ugraph x\n  axis k\n  return y\n", NORM_LINEAR.replace("store", "put"),
        NORM_LINEAR.replace("m:4", f"m:{'9' * 5000}"), NORM_LINEAR.replace("omap 1 0", "omap 1 0-"),
        NORM_LINEAR.replace("loop k:2", "loop k:²"),
    ],
)  # fmt: skip
def test_unreadable_text_is_refused(text: str):
    with pytest.raises(ParseError, match="cannot read"):
        parse_graph(text)


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("weight w: bf16", "weight w: bf61", "'w' of dtype 'bf61'"),
        ("kernel k0", "kernel k-0", "kernel 'k-0'; expected a name that a function can have"),
        ("kernel k0", "kernel def", "kernel 'def'; expected a name that a function can have"),
    ],
)
def test_what_no_kernel_could_be_written_of_is_refused(old: str, new: str, found: str):
    with pytest.raises(VerifyError, match=found):
        parse_graph(NORM_LINEAR.replace(old, new))


def test_two_tensors_of_one_name_are_refused():
    graph = parse_graph(NORM_LINEAR)
    twice: UGraph = replace(graph, tensors=(*graph.tensors, graph.tensors[0]))
    with pytest.raises(VerifyError, match="share a name"):
        verify_graph(twice)
