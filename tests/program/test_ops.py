"""Each op's shapes and access maps, against their docstrings, and an error for each misuse."""

from collections.abc import Callable

import pytest

from distmega.errors import ProgramError
from distmega.program.kinds import user_kinds
from distmega.program.ops import compute as ops
from distmega.program.ops import data_movement, lookups, norms
from distmega.program.ops.attention import attend, attention, biased_attention, kv_append, rope
from distmega.program.ops.opaque import opaque
from distmega.program.ops.parts import Built
from distmega.program.ops.sampling import argmax, cutoff, sample, top
from distmega.program.text import print_op
from distmega.program.types import Op, Tensor
from tests.program import experts


def t(name: str, *shape: int, dtype: str = "f32", role: str = "input") -> Tensor:
    return Tensor(name=name, shape=shape, dtype=dtype, role=role)


def ids(name: str, *shape: int) -> Tensor:
    return t(name, *shape, dtype="i64")


def printed(op: Op) -> str:
    """Axes and accesses without the op's name."""
    return print_op(op).partition(" = ")[2]


X, W, B = t("x", 8, 64), t("w", 32, 64), t("b", 32)
Q, K, V = t("q", 5, 3, 2, 16), t("k", 3, 100, 16), t("v", 3, 100, 24)
CACHE = t("cache", 3, 100, 16, role="state")
POSITIONS = ids("p", 5)

STATEMENTS: list[tuple[Built, str]] = [
    (ops.linear("y", X, W), "linear[m0:8 n:32 k:64:reduce:sum] x(m0, k) w(n, k) -> y(m0, n)"),
    (
        ops.linear("y", X, W, B),
        "linear[m0:8 n:32 k:64:reduce:sum] x(m0, k) w(n, k) b(n) -> y(m0, n)",
    ),
    (
        ops.linear("y", t("x", 8, 3, 4), t("w", 9, 3, 4), spec="m h d, n h d -> m n"),
        "linear[m:8 n:9 h:3:reduce:sum d:4:reduce:sum] x(m, h, d) w(n, h, d) -> y(m, n)",
    ),
    (
        ops.linear("y", t("x", 7), t("w", 7), spec="k, k ->"),
        "linear[k:7:reduce:sum] x(k) w(k) -> y()",
    ),
    (
        ops.pointwise("y", "a0 * a1 + a2", X, t("s", 1, 64), t("c")),
        "pointwise[i0:8 i1:64] x(i0, i1) s(#0, i1) c() -> y(i0, i1) | expr='((a0 * a1) + a2)'",
    ),
    (
        ops.pointwise("y", "a0 + a1", t("x", 4, 1), t("z", 3, 1, 5)),
        "pointwise[i0:3 i1:4 i2:5] x(i1, #0) z(i0, #0, i2) -> y(i0, i1, i2) | expr='(a0 + a1)'",
    ),
    (
        ops.reduce("y", t("x", 2, 3, 4), 1, "max"),
        "reduce[i0:2 i1:3:reduce:max i2:4] x(i0, i1, i2) -> y(i0, i2) | combine='max'",
    ),
    (
        ops.reduce("y", X, -1),
        "reduce[i0:8 i1:64:reduce:sum] x(i0, i1) -> y(i0) | combine='sum'",
    ),
    (
        norms.rms_norm("y", X, t("g", 64), 1e-5),
        "rms_norm[m0:8 d:64 r:64:reduce] x(m0, d) x(m0, r) g(d) -> y(m0, d) | eps=1e-05",
    ),
    (
        norms.layer_norm("y", X, t("g", 64), t("b", 64), 1e-5),
        "layer_norm[m0:8 d:64 r:64:reduce] x(m0, d) x(m0, r) g(d) b(d) -> y(m0, d) | eps=1e-05",
    ),
    (
        norms.softmax("y", t("x", 2, 3, 4)),
        "softmax[m0:2 m1:3 d:4 r:4:reduce] x(m0, m1, d) x(m0, m1, r) -> y(m0, m1, d)",
    ),
    (
        rope("y", t("x", 5, 3, 16), POSITIONS, t("table", 100, 16)),
        "rope[m:5 h0:3 d:16 r:16:reduce t:100:reduce:lookup]"
        " x(m, h0, d) x(m, h0, r) p(m) table(t, r) -> y(m, h0, d)",
    ),
    (
        kv_append("y", CACHE, t("x", 5, 3, 16), POSITIONS),
        "kv_append[h:3 d:16 m:5:reduce t:100:scatter:lookup] x(m, h, d) p(m) -> cache(h, t, d)",
    ),
    (
        kv_append("y", t("c", 5, 3, 100, 16, role="state"), t("x", 5, 3, 16), POSITIONS),
        "kv_append[h:3 d:16 m:5 t:100:scatter:lookup] x(m, h, d) p(m) -> c(m, h, t, d)",
    ),
    (
        attention("y", Q, t("k", 5, 3, 9, 16), t("v", 5, 3, 9, 24), POSITIONS, 0.25),
        "attention[m:5 h:3 g:2 e:24 d:16:reduce t:9:reduce]"
        " q(m, h, g, d) k(m, h, t, d) v(m, h, t, e) p(m) -> y(m, h, g, e) | scale=0.25 window=0",
    ),
    (
        attention("y", Q, K, V, POSITIONS, 0.25, window=7),
        "attention[m:5 h:3 g:2 e:24 d:16:reduce t:100:reduce]"
        " q(m, h, g, d) k(h, t, d) v(h, t, e) p(m) -> y(m, h, g, e) | scale=0.25 window=7",
    ),
    (
        attention("y", Q, K, V, POSITIONS, 0.25, softcap=30.0),
        "attention[m:5 h:3 g:2 e:24 d:16:reduce t:100:reduce] q(m, h, g, d) k(h, t, d)"
        " v(h, t, e) p(m) -> y(m, h, g, e) | scale=0.25 softcap=30.0 window=0",
    ),
    (
        biased_attention("y", Q, K, V, POSITIONS, t("b", 100, 3, 2), 0.25),
        "biased_attention[m:5 h:3 g:2 e:24 d:16:reduce t:100:reduce] q(m, h, g, d) k(h, t, d)"
        " v(h, t, e) p(m) b(t, h, g) -> y(m, h, g, e) | scale=0.25 window=0",
    ),
    (
        lookups.embedding("y", POSITIONS, t("table", 100, 8)),
        "embedding[m:5 d:8 v:100:reduce:sum:lookup] p(m) table(v, d) -> y(m, d)",
    ),
    (
        lookups.embedding("y", POSITIONS, t("table", 100, 2, 4, 8)),
        "embedding[m:5 h0:2 h1:4 d:8 v:100:reduce:sum:lookup]"
        " p(m) table(v, h0, h1, d) -> y(m, h0, h1, d)",
    ),
    (
        argmax("y", X),
        "argmax[m0:8 v:64:reduce:argmax] x(m0, v) -> y.value(m0) y(m0)",
    ),
    (
        top("y", t("x", 2, 64), 9),
        "top[m:2 s:4 u:16:reduce c:9:scatter] x(m, s.u) -> y(m, s, c)",
    ),
    (
        cutoff("y", t("x", 2, 4, 9), t("settings", 2, 3)),
        "cutoff[m:2 i:3:reduce v0:4:reduce v1:9:reduce j:2:scatter]"
        " x(m, v0, v1) settings(m, i) -> y(m, j)",
    ),
    (
        sample("y", t("x", 2, 64), t("limits", 2, 2), ids("seeds", 2), ids("p", 2)),
        "sample[m:2 v:64:reduce:argmax j:2:reduce]"
        " x(m, v) limits(m, j) seeds(m) p(m) -> y.value(m) y(m)",
    ),
    (data_movement.copy("y", X), "set[i0:8 i1:64] x(i0, i1) -> y(i0, i1)"),
    (data_movement.copy("y", CACHE, t("z", 3, 100, 16)), "set[i0:3 i1:100 i2:16]"
        " cache(i0, i1, i2) -> z(i0, i1, i2)"),
    (
        data_movement.slice_dim("y", X, 1, 3, 10, 2),
        "slice[i0:8 i1:4] x(i0, i1*2+3) -> y(i0, i1)",
    ),
    (
        data_movement.slice_dim("y", X, -2, 0, 8, kind="view"),
        "view[i0:8 i1:64] x(i0, i1) -> y(i0, i1)",
    ),
    (
        data_movement.concat("y", [t("x", 2, 3), t("z", 4, 3), t("u", 1, 3)], 0),
        "concat[i0:7 i1:3] x(i0, i1) z(i0-2, i1) u(i0-6, i1) -> y(i0, i1) | dim=0",
    ),
    (
        data_movement.transpose("y", t("x", 2, 3, 4), (2, 0, 1)),
        "transpose[i2:4 i0:2 i1:3] x(i0, i1, i2) -> y(i2, i0, i1)",
    ),
    (data_movement.reshape("y", t("x", 6, 4), (2, 3, 4)), "reshape[i0:2 i1:3 i2:4]"
        " x(i0.i1, i2) -> y(i0, i1, i2)"),
    (
        data_movement.reshape("y", t("x", 2, 6), (4, 3), "view"),
        "view[i0:2 i1:2 i2:3] x(i0, i1.i2) -> y(i0.i1, i2)",
    ),
    (data_movement.reshape("y", t("x", 1, 4, 1), (4,)), "reshape[i0:4] x(#0, i0, #0) -> y(i0)"),
    (data_movement.reshape("y", t("x", 1), ()), "reshape[] x(#0) -> y()"),
    (
        ops.pointwise("y", "lt(a0, 3)", ids("x", 4), dtype="bool"),
        "pointwise[i0:4] x(i0) -> y(i0) | dtypes=('bool',) expr='lt(a0, 3.0)'",
    ),
    (
        norms.layer_norm("y", X, None, None, 1e-5),
        "layer_norm[m0:8 d:64 r:64:reduce] x(m0, d) x(m0, r) -> y(m0, d) | eps=1e-05",
    ),
    (
        norms.cumprod("y", t("x", 2, 3)),
        "cumprod[m0:2 d:3 r:3:reduce] x(m0, d) x(m0, r) -> y(m0, d)",
    ),
    (
        norms.cumsum("y", t("x", 2, 3)),
        "cumsum[m0:2 d:3 r:3:reduce] x(m0, d) x(m0, r) -> y(m0, d)",
    ),
    (data_movement.expand("y", t("x", 3, 1), (2, 3, 4)), "expand[i0:2 i1:3 i2:4]"
        " x(i1, #0) -> y(i0, i1, i2)"),
    (
        attend("y", t("q", 2, 6, 5, 16), t("k", 2, 3, 9, 16), t("v", 2, 3, 9, 24),
                      t("seen", 1, 1, 5, 9, dtype="bool"), 0.25, 30.0),
        "attend[b:2 h:3 g:2 m:5 e:24 d:16:reduce t:9:reduce] q(b, h.g, m, d) k(b, h, t, d)"
        " v(b, h, t, e) seen(#0, #0, m, t) -> y(b, h.g, m, e) | scale=0.25 softcap=30.0",
    ),
    (
        lookups.gather("y", t("x", 4, 9), ids("at", 4, 2), 1),
        "gather[i0:4 i1:2 v:9:reduce:lookup] x(i0, v) at(i0, i1) -> y(i0, i1) | dim=1",
    ),
    (
        lookups.topk("y", t("x", 4, 9), 2),
        "topk[m0:4 u:9:reduce c:2:scatter] x(m0, u) -> y.value(m0, c) y(m0, c)",
    ),
    (
        opaque("y", "aten.fft_rfft.default", '[[{"tensor": 0}], {}]', [t("x", 4)], [((3,), "f32")]),
        "opaque[r0_0:4:reduce w0_0:3:scatter] x(r0_0) -> y(w0_0)"
        """ | call='[[{"tensor": 0}], {}]' target='aten.fft_rfft.default'""",
    ),
    *experts.STATEMENTS,
]  # fmt: skip


@pytest.mark.parametrize(("built", "expected"), STATEMENTS, ids=lambda v: str(v)[:40])
def test_an_op_is_stated_as_documented(built: Built, expected: str):
    assert printed(built[0]) == expected


def test_every_kind_of_a_program_is_stated_above():
    assert {built[0].kind for built, _ in STATEMENTS} == set(user_kinds())


@pytest.mark.parametrize(("built", "expected"), STATEMENTS, ids=lambda v: str(v)[:40])
def test_outputs_have_the_extents_of_their_axes(built: Built, expected: str):
    op, tensors = built
    for tensor in tensors:
        (write,) = (access for access in op.writes if access.tensor == tensor.name)
        sizes = []
        for index, extent in zip(write.dims, tensor.shape, strict=True):
            size = 1
            for axis in index.axes:
                size *= op.axis(axis).extent
            sizes.append(extent if index.is_grouped else size)
        assert tensor.shape == tuple(sizes)
        assert tensor.role == "temp"


def test_output_dtypes():
    bf16 = t("x", 8, 64, dtype="bf16")
    assert ops.linear("y", bf16, W)[1][0].dtype == "bf16"
    assert lookups.embedding("y", POSITIONS, bf16)[1][0].dtype == "bf16"
    value, found = argmax("y", bf16)[1]
    assert (value.dtype, found.dtype) == ("bf16", "i64")


def test_in_place_ops_declare_no_tensor():
    assert kv_append("y", CACHE, t("x", 5, 3, 16), POSITIONS)[1] == ()
    assert data_movement.copy("y", X, t("z", 8, 64))[1] == ()


MISUSES: dict[str, tuple[Callable[[], Built], str]] = {
    "a bias alone": (lambda: norms.layer_norm("y", X, None, t("b", 64), 1e-5), "without a weight"),
    "no broadcast": (
        lambda: data_movement.expand("y", t("x", 2, 1), (3, 4)),
        "(2, 1) repeated to (3, 4)",
    ),
    "a mask of numbers": (
        lambda: attend(
            "y",
            t("q", 1, 2, 3, 4),
            t("k", 1, 2, 5, 4),
            t("v", 1, 2, 5, 4),
            ids("seen", 1, 1, 3, 5),
            1.0,
        ),
        "mask of dtype i64",
    ),
    "query heads": (
        lambda: attend("y", t("q", 1, 3, 3, 4), t("k", 1, 2, 5, 4), t("v", 1, 2, 5, 4), None, 1.0),
        "(1, 3, 3, 4), (1, 2, 5, 4)",
    ),
    "a gather of other rows": (lambda: lookups.gather("y", X, ids("at", 3, 2), 1), "(3, 2)"),
    "too many of a row": (lambda: lookups.topk("y", X, 65), "65 largest"),
    "no operator": (lambda: opaque("y", "sort", "[[], {}]", [X], [((8,), "f32")]), "'sort'"),
    "linear: extents differ": (lambda: ops.linear("y", X, t("w", 32, 65)), "64 and 65"),
    "linear: w of three dims": (lambda: ops.linear("y", X, t("w", 2, 32, 64)), "(2, 32, 64)"),
    "linear: scalar x": (lambda: ops.linear("y", t("x"), W), "shape ()"),
    "linear: no arrow": (lambda: ops.linear("y", X, W, spec="m k, n k"), "'m k, n k'"),
    "linear: bias without group": (
        lambda: ops.linear("y", X, W, B, spec="m k, n k -> m n"),
        "for 3 operands",
    ),
    "linear: axis twice": (lambda: ops.linear("y", X, W, spec="k k, n k -> n"), "['k', 'k']"),
    "linear: output axis twice": (
        lambda: ops.linear("y", X, W, spec="m k, n k -> m m"),
        "['m', 'm']",
    ),
    "linear: unknown output axis": (lambda: ops.linear("y", X, W, spec="m k, n k -> z"), "['z']"),
    "linear: output axis of the bias alone": (
        lambda: ops.linear("y", X, W, B, spec="m k, n k, p -> m n p"),
        "['m', 'n', 'p']",
    ),
    "linear: reduced bias axis": (
        lambda: ops.linear("y", X, W, t("b", 64), spec="m k, n k, k -> m n"),
        "bias ['k']",
    ),
    "linear: axis that is no name": (
        lambda: ops.linear("y", X, W, spec="m.a k, n k -> m.a n"),
        "['m.a', 'k']",
    ),
    "pointwise: too few operands": (lambda: ops.pointwise("y", "a0 + a1", X), "over 1 operand"),
    "pointwise: too many operands": (lambda: ops.pointwise("y", "a0", X, X), "over 2 operands"),
    "pointwise: a constant": (lambda: ops.pointwise("y", "1.0", X), "expression '1.0' over 1"),
    "pointwise: none": (lambda: ops.pointwise("y", "1.0"), "over 0 operands"),
    "pointwise: no broadcast": (lambda: ops.pointwise("y", "a0 + a1", X, B), "(32,)"),
    "reduce: dim": (lambda: ops.reduce("y", X, 2), "dim 2"),
    "reduce: dim of a scalar": (lambda: ops.reduce("y", t("x"), 0), "dim 0"),
    "reduce: combine": (lambda: ops.reduce("y", X, 0, "mean"), "'mean'"),
    "rms_norm: weight": (lambda: norms.rms_norm("y", X, B, 1e-5), "(32,)"),
    "layer_norm: bias": (lambda: norms.layer_norm("y", X, t("g", 64), B, 1e-5), "(32,)"),
    "softmax: scalar": (lambda: norms.softmax("y", t("x")), "shape ()"),
    "rms_norm: scalar": (lambda: norms.rms_norm("y", t("x"), t("g"), 1e-5), "shape ()"),
    "rms_norm: eps": (lambda: norms.rms_norm("y", X, t("g", 64), float("inf")), "eps inf"),
    "rope: odd d": (lambda: rope("y", t("x", 5, 3), POSITIONS, t("c", 9, 3)), "(5, 3)"),
    "rope: one dim": (lambda: rope("y", t("x", 6), ids("p", 6), t("c", 9, 6)), "(6,)"),
    "rope: table": (lambda: rope("y", t("x", 5, 4), POSITIONS, t("c", 9, 6)), "(9, 6)"),
    "rope: table of three dims": (
        lambda: rope("y", t("x", 5, 4), POSITIONS, t("c", 9, 4, 4)),
        "(9, 4, 4)",
    ),
    "rope: positions": (lambda: rope("y", t("x", 4, 4), POSITIONS, t("c", 9, 4)), "(5,)"),
    "rope: float positions": (
        lambda: rope("y", t("x", 5, 4), t("p", 5), t("c", 9, 4)),
        "'p' of dtype f32",
    ),
    "kv_append: no state": (lambda: kv_append("y", K, t("x", 5, 3, 16), POSITIONS), "(input)"),
    "kv_append: heads": (lambda: kv_append("y", CACHE, t("x", 5, 2, 16), POSITIONS), "2, 16"),
    "kv_append: four dims": (
        lambda: kv_append("y", t("c", 3, 9, 16, 1, role="state"), t("x", 5, 3, 16), POSITIONS),
        "(3, 9, 16, 1)",
    ),
    "kv_append: cache of one dim": (
        lambda: kv_append("y", t("c", 3, role="state"), t("x", 5, 3), POSITIONS),
        "(3,)",
    ),
    "kv_append: float positions": (
        lambda: kv_append("y", CACHE, t("x", 5, 3, 16), t("p", 5)),
        "'p' of dtype f32",
    ),
    "attention: q": (lambda: attention("y", X, K, V, POSITIONS, 1.0), "(8, 64)"),
    "attention: k": (
        lambda: attention("y", Q, t("k", 3, 100, 8), V, POSITIONS, 1.0),
        "(3, 100, 8)",
    ),
    "attention: v of other length": (
        lambda: attention("y", Q, K, t("v", 3, 99, 24), POSITIONS, 1.0),
        "(3, 99, 24)",
    ),
    "attention: v of two dims": (
        lambda: attention("y", Q, K, t("v", 3, 100), POSITIONS, 1.0),
        "(3, 100)",
    ),
    "attention: v of four dims": (
        lambda: attention("y", Q, K, t("v", 3, 100, 24, 2), POSITIONS, 1.0),
        "(3, 100, 24, 2)",
    ),
    "attention: positions": (lambda: attention("y", Q, K, V, ids("p", 4), 1.0), "(4,)"),
    "biased attention: bias": (
        lambda: biased_attention("y", Q, K, V, POSITIONS, t("b", 3, 2, 100), 1.0),
        "bias (3, 2, 100)",
    ),
    "attention: window": (lambda: attention("y", Q, K, V, POSITIONS, 1.0, -1), "window -1"),
    "attention: scale": (lambda: attention("y", Q, K, V, POSITIONS, float("nan")), "scale nan"),
    "embedding: table": (lambda: lookups.embedding("y", POSITIONS, B), "(32,)"),
    "embedding: ids of two dims": (lambda: lookups.embedding("y", ids("i", 2, 3), W), "(2, 3)"),
    "embedding: float ids": (lambda: lookups.embedding("y", t("i", 5), W), "'i' of dtype f32"),
    "argmax: scalar": (lambda: argmax("y", t("x")), "without dims"),
    "top: more than there are": (lambda: top("y", X, 65), "the 65 largest of rows of (8, 64)"),
    "top: none": (lambda: top("y", X, 0), "the 0 largest"),
    "top: one dim": (lambda: top("y", B, 1), "(32,)"),
    "cutoff: settings": (lambda: cutoff("y", X, t("s", 8, 2)), "settings (8, 2)"),
    "cutoff: scalar": (lambda: cutoff("y", t("x"), t("s", 0, 3)), "x ()"),
    "sample: limits": (
        lambda: sample("y", X, t("l", 8, 3), ids("s", 8), ids("p", 8)),
        "limits (8, 3)",
    ),
    "sample: a seed too few": (
        lambda: sample("y", X, t("l", 8, 2), ids("s", 7), ids("p", 8)),
        "seeds (7,)",
    ),
    "sample: float seeds": (
        lambda: sample("y", X, t("l", 8, 2), t("s", 8), ids("p", 8)),
        "'s' of dtype f32",
    ),
    "set: shape": (lambda: data_movement.copy("y", X, B), "(32,)"),
    "slice: empty": (lambda: data_movement.slice_dim("y", X, 0, 3, 3), "3:3:1"),
    "slice: past the end": (lambda: data_movement.slice_dim("y", X, 0, 0, 9), "0:9:1"),
    "slice: negative": (lambda: data_movement.slice_dim("y", X, 0, -2, 8), "-2:8:1"),
    "slice: step": (lambda: data_movement.slice_dim("y", X, 0, 0, 8, 0), "0:8:0"),
    "slice: dim": (lambda: data_movement.slice_dim("y", X, -3, 0, 8), "dim -3"),
    "concat: none": (lambda: data_movement.concat("y", [], 0), "no tensors"),
    "concat: extents": (lambda: data_movement.concat("y", [X, t("z", 8, 63)], 0), "(8, 63)"),
    "concat: dims": (lambda: data_movement.concat("y", [X, B], 0), "(32,)"),
    "concat: dim": (lambda: data_movement.concat("y", [X, X], 2), "dim 2"),
    "transpose: repeated": (lambda: data_movement.transpose("y", X, (0, 0)), "[0, 0]"),
    "transpose: too few": (lambda: data_movement.transpose("y", X, (0,)), "[0]"),
    "reshape: size": (lambda: data_movement.reshape("y", X, (8, 63)), "(8, 63)"),
    "reshape: negative": (lambda: data_movement.reshape("y", X, (-8, -64)), "(-8, -64)"),
    "reshape: uneven": (lambda: data_movement.reshape("y", t("x", 6, 4), (8, 3)), "(8, 3)"),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_a_misuse_names_the_op_and_the_value(misuse: str):
    call, value = MISUSES[misuse]
    with pytest.raises(ProgramError) as caught:
        call()
    assert "op 'y'" in caught.value.found
    assert value in caught.value.found
    assert caught.value.expected
    assert caught.value.remedy
