"""Each opcode on random shapes and tilings equals a formula in numpy, in float64."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distmega.kernels.tasks.groups import expand_groups
from distmega.kernels.tasks.types import RangeSplit, TaskGroup
from distmega.program.builder import ProgramBuilder
from distmega.program.ops import norms, sampling
from distmega.program.ops.attention import biased_attention
from distmega.program.types import Op, Program
from tests.kernels.running import launch_all, make_ranks, random_values, tiled_kernel

Array = np.ndarray
SMALL = st.integers(1, 5)
WHOLE = dict.fromkeys(("attention", "biased_attention", "attend"), ("e",))
"""Parallel axes that tasks may not cut, by kind."""

many = settings(max_examples=30, deadline=None, derandomize=True)


@st.composite
def cuts(draw: st.DrawFn, op: Op) -> tuple[RangeSplit, ...]:
    """Random tilings: composed axes or separate ones, uneven."""
    whole = WHOLE.get(op.kind, ())
    names = [a.name for a in op.axes if a.role == "parallel" and a.name not in whole]
    groups: list[tuple[str, ...]] = [(name,) for name in names]
    if len(names) > 1 and draw(st.booleans()):
        at = draw(st.integers(0, len(names) - 2))
        groups[at : at + 2] = [tuple(names[at : at + 2])]
    splits = []
    for axes in groups:
        extent = math.prod(op.axis(name).extent for name in axes)
        inner = draw(st.sets(st.integers(1, max(1, extent - 1)), max_size=2))
        bounds = sorted({0, extent, *(cut for cut in inner if cut < extent)})
        splits.append(RangeSplit(axes=axes, bounds=tuple(bounds)))
    return tuple(splits)


def run(
    draw: st.DataObject, program: Program, values: dict[str, torch.Tensor] | None = None
) -> tuple[dict[str, Array], list[Array]]:
    """Inputs as numpy float64 (indices as int64), and the outputs, of a program cut at random."""
    cut = [op for op in program.ops if not op.is_view]
    groups = [TaskGroup(op=op, splits=draw.draw(cuts(op), label=op.name)) for op in cut]
    (rank,) = make_ranks(tiled_kernel(program, groups), seed=draw.draw(st.integers(0, 99)))
    given_values = random_values(program, draw.draw(st.integers(0, 9))) | (values or {})
    rank.fill(given_values)
    launch_all([rank])
    states = [tensor.name for tensor in program.with_role("state")]
    outputs = [exact(rank.tensors[name]) for name in (*program.outputs, *states)]
    return {name: exact(value) for name, value in given_values.items()}, outputs


def exact(x: torch.Tensor) -> Array:
    """As numpy; floats in float64."""
    return x.numpy() if x.dtype == torch.int64 else x.double().numpy()


def close(actual: Array, expected: Array, tolerance: float = 2e-5) -> None:
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


LINEARS = [
    ("m k, n k -> m n", False),
    ("m k, n k, n -> m n", True),
    ("m k, h g d k -> m h g d", False),
    ("m k, h d k, h d -> m h d", True),
    ("m h g d, k h g d -> m k", False),
    ("m k, k n -> m n", False),
    ("a m k, n k -> a m n", False),
    ("k, n k -> n", False),
    ("b m k, b n k -> b m n", False),
    ("m b k, b n k, b n -> m b n", True),
    ("m b k, b n k, n -> m b n", True),
    ("m a b, n b a -> m n", False),
    ("m a b, n b, m n -> n m", True),
    ("a m b k, n k a b, m -> m n", True),
]


@pytest.mark.parametrize(("spec", "biased"), LINEARS)
@given(data=st.data())
@many
def test_linear(data, spec, biased):
    left, _, _ = spec.partition("->")
    names = {n: data.draw(SMALL, label=n) for n in left.replace(",", " ").split()}
    shapes = [tuple(names[n] for n in part.split()) for part in left.split(",")]
    p = ProgramBuilder("linear")
    x, w = p.input("x", shapes[0]), p.weight("w", shapes[1])
    bias = p.weight("bias", shapes[2]) if biased else None
    arrays, (out,) = run(data, p.build(p.linear(x, w, bias, spec=spec)))
    groups, result = left.replace(" ", "").split(","), spec.replace(" ", "").split("->")[1]
    expected = np.einsum(f"{','.join(groups[:2])}->{result}", arrays["x"], arrays["w"])
    if biased:
        ones = np.ones([names[n] for n in result])
        expected = expected + np.einsum(f"{groups[2]},{result}->{result}", arrays["bias"], ones)
    close(out, expected)


POINTWISE: list[tuple[str, int, Callable[..., Array]]] = [
    ("silu(a0) * a1", 2, lambda a, b: a / (1 + np.exp(-a)) * b),
    ("a0 + 0.1", 1, lambda a: a + 0.1),
    ("maximum(a0, a1) - a2 / 3.0", 3, lambda a, b, c: np.maximum(a, b) - c / 3),
    ("exp(-a0) * a1 + a2 * a3", 4, lambda a, b, c, d: np.exp(-a) * b + c * d),
    ("a0 * a5 - a1 * a4 + a2 * a3", 6, lambda a, b, c, d, e, f: a * f - b * e + c * d),
]


@pytest.mark.parametrize(("text", "num_args", "formula"), POINTWISE)
@given(data=st.data())
@many
def test_pointwise(data, text, num_args, formula):
    """Operands broadcast: each dim of each operand is full, or 1, or missing in front."""
    shape = data.draw(st.lists(SMALL, min_size=1, max_size=4))
    p = ProgramBuilder("pointwise")
    args = []
    for i in range(num_args):
        own = [data.draw(st.sampled_from((1, extent))) for extent in shape] if i else shape
        args.append(p.input(f"x{i}", own[data.draw(st.integers(0, len(own) - 1)) if i else 0 :]))
    arrays, (out,) = run(data, p.build(p.pointwise(text, *args)))
    close(out, np.broadcast_to(formula(*(arrays[f"x{i}"] for i in range(num_args))), shape))


@pytest.mark.parametrize("combine", ["sum", "max", "min"])
@given(data=st.data())
@many
def test_reduce(data, combine):
    shape = data.draw(st.lists(SMALL, min_size=2, max_size=4))
    dim = data.draw(st.integers(0, len(shape) - 1))
    p = ProgramBuilder("reduce")
    arrays, (out,) = run(data, p.build(p.reduce(p.input("x", shape), dim, combine)))
    close(out, getattr(np, combine)(arrays["x"], axis=dim))


@given(data=st.data())
@many
def test_rms_norm(data):
    shape = data.draw(st.lists(SMALL, min_size=2, max_size=3))
    p = ProgramBuilder("rms_norm")
    x, w = p.input("x", shape), p.weight("w", shape[-1:])
    arrays, (out,) = run(data, p.build(p.rms_norm(x, w, 1e-5)))
    x64 = arrays["x"]
    close(out, x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-5) * arrays["w"])


@given(data=st.data())
@many
def test_layer_norm(data):
    shape = data.draw(st.lists(SMALL, min_size=2, max_size=3))
    num_vectors = data.draw(st.integers(0, 2))
    p = ProgramBuilder("layer_norm")
    vectors = [p.weight(name, shape[-1:]) for name in ("w", "b")[:num_vectors]]
    x = p.input("x", shape)
    arrays, (out,) = run(data, p.build(p.layer_norm(x, *vectors, *[None] * (2 - num_vectors), 0.1)))
    far = arrays["x"] - arrays["x"].mean(-1, keepdims=True)
    expected = far / np.sqrt((far**2).mean(-1, keepdims=True) + 0.1)
    close(out, expected * arrays.get("w", 1.0) + arrays.get("b", 0.0))


@given(data=st.data())
@many
def test_softmax(data):
    """Of rows, whose elements may stand apart."""
    shape = data.draw(st.lists(SMALL, min_size=1, max_size=3))
    p = ProgramBuilder("softmax")
    x, turned = p.input("x", shape), data.draw(st.booleans())
    seen = p.transpose(x, range(len(shape))[::-1], view=True) if turned else x
    arrays, (out,) = run(data, p.build(p.softmax(seen)))
    x64 = arrays["x"].T if turned else arrays["x"]
    chances = np.exp(x64 - x64.max(-1, keepdims=True))
    close(out, chances / chances.sum(-1, keepdims=True))


@pytest.mark.parametrize("name", ["cumsum", "cumprod"])
@given(data=st.data())
@many
def test_scans(data, name):
    shape = data.draw(st.lists(SMALL, min_size=1, max_size=3))
    p = ProgramBuilder("scan")
    arrays, (out,) = run(data, p.build(p.op(getattr(norms, name), p.input("x", shape))))
    close(out, getattr(np, name)(arrays["x"], axis=-1))


def positions_of(data: st.DataObject, num: int, context: int) -> torch.Tensor:
    """Distinct positions, in any order."""
    order = data.draw(st.permutations(range(context)), label="positions")
    return torch.tensor(order[:num])


@given(data=st.data())
@many
def test_rope(data):
    m, *heads = data.draw(st.lists(SMALL, min_size=1, max_size=3))
    half, context = data.draw(SMALL), m + 3
    p = ProgramBuilder("rope")
    x, positions = p.input("x", (m, *heads, 2 * half)), p.input("positions", (m,), "i64")
    program = p.build(p.rope(x, positions, p.weight("table", (context, 2 * half))))
    arrays, (out,) = run(data, program, {"positions": positions_of(data, m, context)})
    rows = arrays["table"][arrays["positions"]].reshape(m, *[1] * len(heads), 2 * half)
    (cos, sin), (left, right) = (np.split(both, 2, -1) for both in (rows, arrays["x"]))
    close(out, np.concatenate([left * cos - right * sin, right * cos + left * sin], -1))


@given(data=st.data())
@many
def test_kv_append(data):
    """All rows into one cache, or each into its own."""
    m, h, d = (data.draw(SMALL) for _ in range(3))
    context, own = m + 3, data.draw(st.booleans())
    p = ProgramBuilder("kv_append")
    cache = p.state("cache", (m, h, context, d) if own else (h, context, d))
    p.kv_append(cache, p.input("x", (m, h, d)), p.input("positions", (m,), "i64"))
    arrays, (out,) = run(data, p.build(), {"positions": positions_of(data, m, context)})
    expected = arrays["cache"].copy()
    for row, position in enumerate(arrays["positions"]):
        (expected[row] if own else expected)[:, position] = arrays["x"][row]
    close(out, expected)


@given(data=st.data())
@many
def test_attention(data):
    m, h, g, d, e = (data.draw(SMALL) for _ in range(5))
    context, window = m + 3, data.draw(st.integers(0, 3))
    own = (m,) if data.draw(st.booleans()) else ()
    p = ProgramBuilder("attention")
    q, positions = p.input("q", (m, h, g, d)), p.input("positions", (m,), "i64")
    k, v = p.state("k", (*own, h, context, d)), p.state("v", (*own, h, context, e))
    program = p.build(p.attention(q, k, v, positions, 0.3, window))
    arrays, (out, *_) = run(data, program, {"positions": positions_of(data, m, context)})
    expected = np.zeros((m, h, g, e))
    for i, position in enumerate(arrays["positions"]):
        seen = slice(max(0, position + 1 - window) if window else 0, position + 1)
        keys, values = (arrays[n][i] if own else arrays[n] for n in "kv")
        keys, values = keys[:, seen], values[:, seen]
        weights = np.exp(0.3 * np.einsum("hgd,htd->hgt", arrays["q"][i], keys))
        expected[i] = np.einsum("hgt,hte->hge", weights / weights.sum(-1, keepdims=True), values)
    close(out, expected)


def weighed(scores: Array, values: Array) -> Array:
    """Values by the softmax of scores [..., t]; zeros where all of these are -inf."""
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = weights.sum(-1, keepdims=True)
    return weights / np.where(total, total, 1) @ values


@given(data=st.data())
@many
def test_attend(data):
    """Over keys anywhere, views of rows or not, under masks of every form."""
    b, h, g, m, t, d, e = (data.draw(SMALL) for _ in range(7))
    p = ProgramBuilder("attend")
    cap = data.draw(st.sampled_from((0.0, 2.0)))
    q, k, v = (
        p.input("q", (b, h * g, m, d)),
        p.input("k", (b, t, h, d)),
        p.input("v", (b, h, t, e)),
    )
    keys = p.transpose(k, (0, 2, 1, 3), view=data.draw(st.booleans()))
    form = data.draw(st.sampled_from(("none", "bool", "f32")))
    values = {}
    mask = None
    if form != "none":
        shape = [data.draw(st.sampled_from((1, extent))) for extent in (b, h * g, m, t)]
        mask = p.input("mask", shape, form)
        if form == "bool":
            values["mask"] = torch.rand(shape) < 0.6
    arrays, (out,) = run(data, p.build(p.attend(q, keys, v, mask, 0.3, cap)), values)
    shown = arrays["k"].transpose(0, 2, 3, 1).repeat(g, 1)
    scores = 0.3 * arrays["q"] @ shown
    scores = cap * np.tanh(scores / cap) if cap else scores
    if form == "f32":
        scores = scores + arrays["mask"]
    elif form == "bool":
        scores = np.where(values["mask"].numpy(), scores, -np.inf)
    close(out, weighed(scores, arrays["v"].repeat(g, 1)))


@given(data=st.data())
@many
def test_attention_with_biases(data):
    m, h, g, d, e = (data.draw(SMALL) for _ in range(5))
    context, window = m + 3, data.draw(st.integers(0, 3))
    p = ProgramBuilder("biased")
    q, positions = p.input("q", (m, h, g, d)), p.input("positions", (m,), "i64")
    k, v = p.state("k", (h, context, d)), p.state("v", (h, context, e))
    bias = p.weight("bias", (context, h, g))
    made = p.op(biased_attention, q, k, v, positions, bias, scale=0.3, window=window)
    arrays, (out, *_) = run(data, p.build(made), {"positions": positions_of(data, m, context)})
    at, here = np.arange(context), arrays["positions"][:, None]
    seen = (at <= here) & ((at > here - window) if window else True)
    scores = 0.3 * np.einsum("mhgd,htd->mhgt", arrays["q"], arrays["k"])
    scores = scores + arrays["bias"].transpose(1, 2, 0)
    scores = np.where(seen[:, None, None], scores, -np.inf)
    close(out, weighed(scores, arrays["v"]))


@given(data=st.data())
@many
def test_rows_of_several_sequences(data):
    """Appended, then seen: each row those of its own sequence."""
    lengths = data.draw(st.lists(SMALL, min_size=1, max_size=3))
    h, g, d = (data.draw(SMALL) for _ in range(3))
    m, context = sum(lengths), 6
    p = ProgramBuilder("packed")
    vectors = [p.input(n, (m,), "i64") for n in ("positions", "sequences")]
    starts = p.input("starts", (len(lengths) + 1,), "i64")
    caches = [p.state(n, (len(lengths), h, context, d)) for n in "kv"]
    for cache, name in zip(caches, ("x", "y"), strict=True):
        p.kv_append(cache, p.input(name, (m, h, d)), *vectors)
    q = p.input("q", (m, h, g, d))
    packed = (vectors[1], starts)
    program = p.build(p.attention(q, *caches, vectors[0], 0.3, packed=packed))
    values = {
        "positions": torch.cat([torch.arange(n) for n in lengths]),
        "sequences": torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        "starts": torch.tensor([0, *lengths]).cumsum(0),
    }
    arrays, (out, *_) = run(data, program, values)
    expected = np.zeros((m, h, g, d))
    for first, rows in zip(values["starts"].tolist(), lengths, strict=False):
        for row in range(first, first + rows):
            keys, seen = (arrays[n][first : row + 1].swapaxes(0, 1) for n in ("x", "y"))
            scores = 0.3 * np.einsum("hgd,htd->hgt", arrays["q"][row], keys)
            expected[row] = weighed(scores, seen)
    close(out, expected)


@given(data=st.data())
@many
def test_gather(data):
    shape = data.draw(st.lists(SMALL, min_size=1, max_size=5))
    dim = data.draw(st.integers(0, len(shape) - 1))
    chosen = [data.draw(SMALL) if n == dim else extent for n, extent in enumerate(shape)]
    ids = torch.randint(0, shape[dim], chosen)
    p = ProgramBuilder("gather")
    program = p.build(p.gather(p.input("x", shape), p.input("ids", chosen, "i64"), dim))
    arrays, (out,) = run(data, program, {"ids": ids})
    close(out, np.take_along_axis(arrays["x"], arrays["ids"], dim), 0)


@given(data=st.data())
@many
def test_topk(data):
    shape = data.draw(st.lists(SMALL, min_size=1, max_size=3))
    num = data.draw(st.integers(1, shape[-1]))
    x = torch.stack([torch.randperm(shape[-1]) for _ in range(math.prod(shape[:-1]))])
    p = ProgramBuilder("topk")
    program = p.build(*p.topk(p.input("x", shape), num))
    arrays, (values, index) = run(data, program, {"x": x.float().view(shape)})
    order = np.argsort(-arrays["x"], axis=-1)[..., :num]
    close(values, np.take_along_axis(arrays["x"], order, -1), 0)
    assert (index == order).all()


@given(data=st.data())
@many
def test_experts(data):
    """Rows to their experts and back, of all rows or of the first few, cut at random."""
    m, d, n, e = (data.draw(SMALL) for _ in range(4))
    c, some = data.draw(st.integers(1, e)), data.draw(st.booleans())
    used = data.draw(st.integers(1, m)) if some else m
    p = ProgramBuilder("experts")
    x, given_rows = p.input("x", (m, d)), p.input("used", (1,), "i64")
    weights, chosen = p.top_k(p.input("scores", (m, e)), c)
    routing = p.route(chosen, e, given_rows if some else None)
    rows = p.gather_rows(x, routing)
    up = p.grouped_linear(rows, p.weight("up", (e, n, d)), routing)
    h = p.grouped_pointwise("tanh(a0) * a1", up, up, routing=routing)
    y = p.grouped_linear(h, p.weight("down", (e, d, n)), routing)
    program = expand_groups(p.build(p.scatter_add(y, weights, routing)))
    arrays, (out,) = run(data, program, {"used": torch.tensor([used])})
    scores = arrays["scores"]
    chances = np.exp(scores - scores.max(-1, keepdims=True))
    chances /= chances.sum(-1, keepdims=True)
    expected = np.zeros((m, d))
    for row in range(used):
        for expert in np.argsort(-scores[row])[:c]:
            h = arrays["up"][expert] @ arrays["x"][row]
            h = np.tanh(h) * h
            expected[row] += chances[row, expert] * (arrays["down"][expert] @ h)
    close(out, expected)


@given(data=st.data())
@many
def test_embedding(data):
    m, vocab = data.draw(SMALL), data.draw(SMALL)
    row = data.draw(st.lists(SMALL, min_size=1, max_size=3))
    ids = torch.tensor(data.draw(st.lists(st.integers(0, vocab - 1), min_size=m, max_size=m)))
    p = ProgramBuilder("embedding")
    program = p.build(p.embedding(p.input("ids", (m,), "i64"), p.weight("table", (vocab, *row))))
    arrays, (out,) = run(data, program, {"ids": ids})
    close(out, arrays["table"][arrays["ids"]], 0)


@given(data=st.data())
@many
def test_argmax(data):
    shape = data.draw(st.lists(SMALL, min_size=1, max_size=3))
    values = torch.randint(0, 3, shape).float()
    p = ProgramBuilder("argmax")
    index = p.argmax(p.input("x", shape), name="best")
    program = p.build(index)
    arrays, (out,) = run(data, program, {"x": values})
    assert (out == arrays["x"].argmax(-1)).all()


@given(data=st.data())
@many
def test_sampling_equals_the_library(data):
    """top, cutoff and sample together, cut at random."""
    rows, vocab = data.draw(SMALL), data.draw(st.integers(4, 40))
    p = ProgramBuilder("sampling")
    x, settings = p.input("x", (rows, vocab)), p.input("settings", (rows, 3))
    seeds, positions = p.input("seeds", (rows,), "i64"), p.input("positions", (rows,), "i64")
    candidates = p.top(x, min(vocab, 3)) if data.draw(st.booleans()) else x
    limits = p.cutoff(candidates, settings, name="limits")
    program = p.build(limits, p.sample(x, limits, seeds, positions, name="next"))
    values = {
        "settings": torch.tensor([[0.7, 3.0, 0.8]] * rows),
        "seeds": torch.arange(rows) + 2**40,
        "positions": torch.arange(rows) * 9,
    }
    arrays, (least, chosen) = run(data, program, values)
    logits = torch.from_numpy(arrays["x"]).float()
    expected = sampling.cutoff_values(logits, values["settings"])
    np.testing.assert_array_equal(least, expected.double().numpy())
    drawn = sampling.sample_values(
        logits, expected, values["seeds"], values["positions"], 0, vocab
    )[1]
    assert (chosen == drawn.numpy()).all()


@given(data=st.data())
@many
def test_copies(data):
    """slice, concat, transpose, reshape, set and views of them, cut at random."""
    shape = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=3))
    dim = data.draw(st.integers(0, len(shape) - 1))
    order = data.draw(st.permutations(range(len(shape))))
    start = data.draw(st.integers(0, shape[dim] - 1))
    step = data.draw(st.integers(1, 2))
    p = ProgramBuilder("copies")
    x, y = p.input("x", shape), p.input("y", shape)
    joined = p.concat([x, y, x], dim)
    turned = p.transpose(joined, order, view=data.draw(st.booleans()))
    flat = p.reshape(p.set(turned), (math.prod(turned.shape),), view=data.draw(st.booleans()))
    part = p.slice(joined, dim, start, 3 * shape[dim], step, view=data.draw(st.booleans()))
    state = p.state("state", part.shape)
    p.set(part, into=state)
    arrays, (first, second, last) = run(data, p.build(p.set(flat), p.set(turned)))
    expected = np.concatenate([arrays["x"], arrays["y"], arrays["x"]], dim)
    close(second, expected.transpose(order), 0)
    close(first, expected.transpose(order).ravel(), 0)
    close(last, np.take(expected, range(start, 3 * shape[dim], step), dim), 0)
