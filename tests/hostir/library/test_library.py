"""Every op kind against its formula in float64, and the forms it takes on one rank of several."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from distmega.errors import ProgramError, RequestError
from distmega.hostir.library import ops as library
from distmega.hostir.library.opaque import compile_opaque, encode_call
from distmega.hostir.library.opaque_text import find_operator, operator_name
from distmega.hostir.library.ops import linear_spec, run_op
from distmega.program.builder import ProgramBuilder
from distmega.program.kinds import kind_of, user_kinds
from distmega.program.ops import attention, lookups, norms, sampling
from distmega.program.ops import compute as ops
from distmega.program.ops.attention import append_values, attention_values
from distmega.program.types import Access, Axis, Index, Op, Tensor
from tests.hostir.programs import run_program


def declared(name: str, x: torch.Tensor, role: str = "input") -> Tensor:
    """A program tensor of x's shape."""
    dtype = {torch.int64: "i64", torch.bool: "bool"}.get(x.dtype, "f32")
    return Tensor(name=name, shape=tuple(x.shape), dtype=dtype, role=role)


def test_every_kind_has_a_function():
    parts = "pointwise", "norm", "heads", "attention", "linear", "groups", "product", "rows"
    fused = {f"fused_{part}" for part in parts}
    internal = {"take_shard", "split_linear", *fused}
    assert {*user_kinds(), *internal} == set(library.library_kinds())


def test_an_unknown_kind_is_named():
    op = Op(name="y", kind="fft", axes=(), reads=(), writes=())
    with pytest.raises(ProgramError, match=r"'y': kind 'fft'; expected one of linear"):
        library.compile_op(op, {})


@pytest.mark.parametrize(
    ("spec", "shapes", "grouped"),
    [
        ("m k, n k -> m n", [(3, 5), (4, 5)], True),
        ("m k, h g d k -> m h g d", [(3, 5), (2, 2, 3, 5)], True),
        ("m h g d, k h g d -> m k", [(3, 2, 2, 3), (5, 2, 2, 3)], True),
        ("a b k, n k -> a b n", [(2, 3, 5), (4, 5)], True),
        ("k m, n k -> m n", [(5, 3), (4, 5)], False),
        ("b m k, b n k -> b m n", [(2, 3, 5), (2, 4, 5)], False),
        ("m g k, g n k -> m g n", [(3, 2, 5), (2, 4, 5)], False),
        ("k g m, n g k -> g n m", [(5, 2, 3), (4, 2, 5)], False),
        ("g k, n g k -> n g", [(2, 5), (4, 2, 5)], False),
        ("m g, g n -> n m g", [(3, 2), (2, 4)], False),
        ("g k, g k -> g", [(2, 5), (2, 5)], False),
        ("g h m k, g h n k -> m h n g", [(2, 3, 3, 5), (2, 3, 4, 5)], False),
        ("m k, n k -> n m", [(3, 5), (4, 5)], False),
        ("m j k, n k -> m n", [(3, 2, 5), (4, 5)], False),
        ("k, k -> ", [(5,), (5,)], True),
        ("m, n -> m n", [(3,), (4,)], True),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_linear(spec: str, shapes: list[tuple[int, ...]], grouped: bool, bias: bool):
    x, w = (torch.randn(shape) for shape in shapes)
    left, out = spec.split(" -> ")
    tensors, operands = [declared("x", x), declared("w", w)], {"x": x, "w": w}
    axes = sorted(set(out.split()) & set(left.split(",")[1].split()), key=out.split().index)
    if bias:
        extents = dict(zip(left.split(",")[1].split(), w.shape, strict=True))
        operands["b"] = torch.randn([extents[axis] for axis in axes])
        tensors.append(declared("b", operands["b"]))
        spec = f"{left}, {' '.join(axes)} -> {out}"
    op, _ = ops.linear("y", *tensors, spec=spec)
    assert (linear_spec(op).num_rows >= 0) == grouped
    # The axes are single letters, so the spec without spaces is an einsum.
    code = f"{left}->{out}".replace(" ", "")
    expected = torch.einsum(code, x.double(), w.double())
    if bias:
        shape = [dict(zip(axes, operands["b"].shape, strict=True)).get(a, 1) for a in out.split()]
        expected += operands["b"].double().reshape(shape)
    result = run_op(op, operands, {})["y"]
    torch.testing.assert_close(result.double(), expected, rtol=1.3e-6, atol=1e-5)


class Operators(TorchDispatchMode):
    """Names of the operators of torch that make or fill a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view:
            self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("spec", ["m g k, g n k -> m g n", "g m k, g n k -> g m n"])
def test_products_side_by_side_are_written_where_they_belong(spec: str):
    """Einsum copies x and the result where groups are not outermost: 27 us of eight ops of groups
    of columns on an H200 where torch's take 20.
    """
    x = torch.randn((16, 8, 32) if spec.startswith("m") else (8, 16, 32))
    w = torch.randn(8, 24, 32)
    op, _ = ops.linear("y", declared("x", x), declared("w", w), spec=spec)
    with Operators() as operators:
        result = run_op(op, {"x": x, "w": w}, {})["y"]
    assert sorted(operators.names) == ["bmm", "new_empty"]
    assert result.is_contiguous()


def test_linear_sums_half_types_in_fp32():
    x, w = torch.ones(1, 4096, dtype=torch.bfloat16), torch.ones(1, 4096, dtype=torch.bfloat16)
    op, _ = ops.linear("y", declared("x", x), declared("w", w))
    assert run_op(op, {"x": x, "w": w}, {})["y"].item() == 4096


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_summed_in_fp32_without_a_copy(dtype: torch.dtype, dim: int):
    x = torch.ones((5000, 4096) if dim else (4096, 5000), dtype=dtype)
    op, _ = ops.reduce("y", declared("x", x), dim)
    with Operators() as operators:
        result = run_op(op, {"x": x}, {})["y"]
    assert torch.equal(result, torch.full((5000,), 4096, dtype=dtype))
    assert operators.names == ["sum"]


def test_linear_on_split_dims():
    x, w = torch.randn(3, 6), torch.randn(4, 6)
    split = declared("x", x.view(3, 2, 3)), declared("w", w.view(4, 2, 3))
    op, _ = ops.linear("y", *split, spec="m h d, n h d -> m n")
    joined = tuple(
        Access(tensor=access.tensor, dims=(access.dims[0], Index(axes=("h", "d"))))
        for access in op.reads
    )
    op = replace(op, reads=joined)
    torch.testing.assert_close(run_op(op, {"x": x, "w": w}, {})["y"], x @ w.T)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("silu(a0) * a1", lambda a, b: F.silu(a) * b),
        ("a0 * 0.5 + a1 ** 2", lambda a, b: a * 0.5 + b**2),
        ("maximum(a0, 0.25) - minimum(a1, -1)", lambda a, b: a.clamp(min=0.25) - b.clamp(max=-1)),
        ("gelu(a0) / (1 + exp(-a1))", lambda a, b: F.gelu(a) / (1 + torch.exp(-b))),
        ("a1", lambda a, b: b.expand(2, 3, 4)),
    ],
)
def test_pointwise_broadcasts(text: str, expected):
    a, b = torch.randn(2, 3, 4), torch.randn(3, 1)
    p = ProgramBuilder("p")
    x, y = p.input("a", a.shape), p.input("b", b.shape)
    program = p.build(p.pointwise(text, x, y, name="y"))
    result = run_program(program, {"a": a, "b": b})["y"]
    torch.testing.assert_close(result, expected(a, b))
    assert result.data_ptr() not in (a.data_ptr(), b.data_ptr())


def test_pointwise_reads_of_a_longer_operand_what_it_indexes():
    a = torch.randn(5, 4)
    op, _ = ops.pointwise("y", "a0 * 2", replace(declared("a", a), shape=(3, 4)))
    assert torch.equal(run_op(op, {"a": a}, {})["y"], 2 * a[:3])


def test_pointwise_computes_half_types_in_fp32():
    a = torch.tensor([256.0], dtype=torch.bfloat16)
    p = ProgramBuilder("p")
    program = p.build(p.input("a", (1,), "bf16").map("(a0 + 1) - a0", name="y"))
    assert run_program(program, {"a": a})["y"].item() == 1


@pytest.mark.parametrize("combine", ["sum", "max", "min"])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_reduce(combine: str, dim: int):
    x = torch.randn(2, 3, 4)
    op, _ = ops.reduce("y", declared("x", x), dim, combine)
    expected = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}[combine](x, dim)
    torch.testing.assert_close(run_op(op, {"x": x}, {})["y"], expected)


def test_rms_norm():
    x, weight = torch.randn(5, 16), torch.randn(16)
    op, _ = norms.rms_norm("y", declared("x", x), declared("w", weight), 1e-5)
    result = run_op(op, {"x": x, "w": weight}, {})["y"]
    torch.testing.assert_close(result, F.rms_norm(x, (16,), weight, 1e-5))


def test_layer_norm_and_softmax():
    x, weight, bias = torch.randn(5, 16), torch.randn(16), torch.randn(16)
    tensors = declared("x", x), declared("w", weight), declared("b", bias)
    op, _ = norms.layer_norm("y", *tensors, 1e-5)
    result = run_op(op, {"x": x, "w": weight, "b": bias}, {})["y"]
    torch.testing.assert_close(result, F.layer_norm(x, (16,), weight, bias, 1e-5))
    op, _ = norms.softmax("y", tensors[0])
    torch.testing.assert_close(run_op(op, {"x": x}, {})["y"], torch.softmax(x, -1))


def test_rope_rotates_pairs_half_a_head_apart():
    x, positions = torch.randn(3, 2, 8), torch.tensor([0, 4, 2])
    angles = torch.arange(6).unsqueeze(1) * torch.tensor([1.0, 0.5, 0.25, 0.125])
    table = torch.cat((angles.cos(), angles.sin()), 1)
    op, _ = attention.rope("y", declared("x", x), declared("p", positions), declared("t", table))
    result = run_op(op, {"x": x, "p": positions, "t": table}, {})["y"]
    turns = torch.polar(torch.ones(()), angles)[positions].unsqueeze(1)
    turned = torch.complex(x[..., :4], x[..., 4:]) * turns
    torch.testing.assert_close(result, torch.cat((turned.real, turned.imag), -1))


def naive_attention(q, k, v, positions, scale, window):
    """Row by row in float64."""
    m, h, g, _ = q.shape
    out = torch.zeros(m, h, g, v.shape[-1], dtype=torch.float64)
    for i in range(m):
        stop = int(positions[i]) + 1
        start = max(0, stop - window) if window else 0
        for head in range(h):
            keys, values = (c[head, start:stop].double() for c in (k, v))
            scores = torch.softmax(q[i, head].double() @ keys.T * scale, -1)
            out[i, head] = scores @ values
    return out


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("positions", [[5], [0], [0, 1, 2], [4, 5, 6, 7], [7, 2]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention(positions: list[int], window: int, dtype: torch.dtype):
    at, m = torch.tensor(positions), len(positions)
    q, k, v = torch.randn(m, 2, 3, 4), torch.randn(2, 9, 4), torch.randn(2, 9, 5)
    q, k, v = (t.to(dtype) for t in (q, k, v))
    # Rows that no query sees must not count, whatever they hold.
    k[:, max(positions) + 1 :], v[:, max(positions) + 1 :] = math.nan, math.nan
    tensors = [declared(n, t) for n, t in zip("qkvp", (q, k, v, at), strict=True)]
    op, _ = attention.attention("y", *tensors, scale=0.3, window=window)
    result = run_op(op, dict(zip("qkvp", (q, k, v, at), strict=True)), {})["y"]
    expected = naive_attention(q, k, v, at, 0.3, window)
    tolerance = 1e-5 if dtype == torch.float32 else 1.6e-2
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)
    assert result.dtype == dtype
    assert result.is_contiguous()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("attend", [library.attention, library.masked_attention])
def test_what_no_row_sees_does_not_count(
    attend: Callable[..., torch.Tensor], shared: bool, window: int, softcap: float, bad: float
):
    """Memory of a cache behind a sequence's end holds anything."""
    positions = [5, 0, 8, -1, 3]
    q = torch.randn(len(positions), 2, 3, 4)
    caches = [torch.randn(*[] if shared else [len(q)], 2, 12, 4) for _ in range(2)]
    seen = torch.zeros(len(q), 12, dtype=torch.bool)
    for row, position in enumerate(positions):
        seen[row, max(0, position + 1 - window) if window else 0 : position + 1] = True
    unseen = ~(seen.any(0)[:, None] if shared else seen[:, None, :, None])
    stale = [cache.masked_fill(unseen, bad) for cache in caches]
    at = torch.tensor(positions)
    found = attend(q, *stale, at, 0.3, window, softcap)
    expected = attend(
        q, *(cache.masked_fill(unseen, 0) for cache in caches), at, 0.3, window, softcap
    )
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("window", [0, 1, 3, 9])
@pytest.mark.parametrize(("num_rows", "context"), [(1, 9), (5, 5), (6, 9)])
def test_attention_in_order_reads_no_positions(num_rows: int, context: int, window: int):
    at = torch.arange(num_rows)
    q, k, v = torch.randn(num_rows, 2, 3, 4), torch.randn(2, context, 4), torch.randn(2, context, 5)
    k[:, num_rows:], v[:, num_rows:] = math.nan, math.nan
    tensors = [declared(n, t) for n, t in zip("qkvp", (q, k, v, at), strict=True)]
    op, _ = attention.attention("y", *tensors, scale=0.3, window=window, in_order=True)
    given = dict(zip("qkvp", (q, k, v, torch.full_like(at, 99)), strict=True))
    found = run_op(op, given, {})["y"].double()
    expected = naive_attention(q, k, v, at, 0.3, window)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(2, 8, 4), (3, 2, 8, 4)])
def test_positions_may_be_of_any_integers(shape: tuple[int, ...]):
    x, caches = torch.randn(3, 2, 4), torch.zeros(2, *shape)
    for cache, dtype in zip(caches, (torch.int32, torch.int64), strict=True):
        append_values(cache, x, torch.tensor([6, 0, 3], dtype=dtype))
    assert torch.equal(*caches)
    assert caches.any()


def test_rows_with_caches_of_their_own_may_be_in_order():
    q, k, v = torch.randn(4, 2, 3, 8), torch.randn(4, 2, 6, 8), torch.randn(4, 2, 6, 8)
    given = dict(zip("qkvp", (q, k, v, torch.arange(4)), strict=True))
    tensors = [declared(name, x) for name, x in given.items()]
    found = [
        run_op(attention.attention("y", *tensors, scale=0.3, in_order=in_order)[0], given, {})["y"]
        for in_order in (False, True)
    ]
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("window", [0, 3])
def test_rows_with_caches_of_their_own_are_sequences_on_their_own(window: int):
    at, caches = torch.tensor([6, 0, 3]), torch.randn(2, 3, 2, 8, 4)
    q, x = torch.randn(3, 2, 3, 4), torch.randn(3, 2, 4)
    alone = caches.clone()
    append_values(caches[0], x, at)
    found = library.attention(q, caches[0], caches[1], at, 0.3, window)
    for row in range(3):
        here, (keys, values) = at[row : row + 1], alone[:, row]
        append_values(keys, x[row : row + 1], here)
        one = library.attention(q[row : row + 1], keys, values, here, 0.3, window)
        torch.testing.assert_close(found[row : row + 1], one)
    assert torch.equal(caches, alone)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    "positions", [[-1], [-5], [-1, 2, 5], [-3, 0, 7], [-1, -4, -2], [99], [12, 9], [8, 3, -1]]
)
def test_positions_outside_of_a_cache_see_what_of_it_is_before_them(
    positions: list[int], own: bool, window: int, softcap: float
):
    rows = len(positions)
    q = torch.randn(rows, 2, 2, 4)
    k, v = (torch.randn(*((rows,) if own else ()), 2, 8, 4) for _ in range(2))
    at, how = torch.tensor(positions), (0.5, window, softcap)
    expected = attention_values(q, k, v, at, *how)
    assert expected.isfinite().all()
    assert not expected[(at < 0) | (at - window >= 8 if window else at < 0)].any()
    found = [library.attention(q, k, v, at, *how), library.masked_attention(q, k, v, at, *how)]
    if own:
        found.append(library.packed_attention(q, k, v, at, torch.arange(rows), *how))
    for each in found:
        torch.testing.assert_close(each, expected)


@pytest.mark.parametrize("num_caches", [1, 3])
@pytest.mark.parametrize("wrong", [3, -1])
def test_rows_of_sequences_without_a_cache_are_refused(num_caches: int, wrong: int):
    """One cache may be of all rows; the last one is not of sequence -1."""
    shape = (num_caches, 2, 8, 4) if num_caches > 1 else (2, 8, 4)
    q, cache, at = torch.randn(2, 2, 2, 4), torch.randn(shape), torch.tensor([3, 5])
    given = {"q": q, "cache": cache, "at": at, "ids": torch.tensor([0, wrong])}
    given["starts"] = torch.zeros(num_caches + 1, dtype=torch.long)
    q_, cache_, at_, *packed = (declared(name, x) for name, x in given.items())
    op, _ = attention.attention("a", q_, cache_, cache_, at_, 0.5, packed=tuple(packed))
    reference = kind_of(op).reference
    assert reference is not None
    message = rf"an id of {wrong} in a table of {num_caches} row"
    with pytest.raises(RequestError, match=message):
        run_op(op, given, {})
    with pytest.raises(RequestError, match=message):
        reference(op, {})(q, cache, cache, *list(given.values())[2:])


def test_kv_append_writes_in_place():
    cache, x, at = torch.zeros(2, 6, 3), torch.randn(2, 2, 3), torch.tensor([4, 1])
    op, _ = attention.kv_append(
        "a", declared("c", cache, "state"), declared("x", x), declared("p", at)
    )
    assert run_op(op, {"c": cache, "x": x, "p": at}, {})["c"] is cache
    torch.testing.assert_close(cache[:, [4, 1]], x.transpose(0, 1))
    assert cache[:, [0, 2, 3, 5]].count_nonzero() == 0
    for wrong in (6, -1):
        with pytest.raises(RequestError, match=f"an id of {wrong} in a table of 6 rows"):
            run_op(op, {"c": cache, "x": x, "p": torch.tensor([wrong, 0])}, {})


def with_attrs(op: Op, **attrs: int | str) -> Op:
    """The op with the attributes that localize gives."""
    return replace(op, attrs=tuple(sorted(attrs.items())))


@pytest.mark.parametrize("row", [(4,), (2, 3, 4)])
def test_embedding_by_shards_sums_to_the_whole(row: tuple[int, ...]):
    table, ids = torch.randn(10, *row), torch.tensor([9, 0, 3, 4])
    op, _ = lookups.embedding("y", declared("i", ids), declared("t", torch.empty(4, *row)))
    padded = torch.cat([table, torch.zeros(2, *row)])
    local = with_attrs(op, base_axis="tp", base_stride=4, extent=10)
    parts = [
        run_op(local, {"i": ids, "t": padded[4 * rank : 4 * rank + 4]}, {"tp": rank})["y"]
        for rank in range(3)
    ]
    assert torch.equal(sum(parts), table[ids])
    whole, _ = lookups.embedding("y", declared("i", ids), declared("t", table))
    assert torch.equal(run_op(whole, {"i": ids, "t": table}, {})["y"], table[ids])
    for wrong in (-1, 10, 2**40):
        ids[2] = wrong
        with pytest.raises(RequestError, match=f"id of {wrong} in a table of 10 rows; expected"):
            run_op(local, {"i": ids, "t": padded[:4]}, {"tp": 0})


def test_argmax_takes_the_lowest_index_and_masks_padding():
    x = torch.tensor([[1.0, 3.0, 3.0, 0.0], [-5.0, -6.0, -5.0, -7.0]])
    op, _ = sampling.argmax("y", declared("x", x))
    result = run_op(op, {"x": x}, {})
    assert result["y"].tolist() == [1, 0]
    assert result["y.value"].tolist() == [3.0, -5.0]
    local = with_attrs(op, base_axis="tp", base_stride=4, extent=6)
    negative = torch.tensor([[-3.0, -2.0, 0.0, 0.0]] * 2)
    assert run_op(local, {"x": negative}, {"tp": 1})["y"].tolist() == [5, 5]
    nothing = run_op(local, {"x": negative}, {"tp": 2})
    assert nothing["y.value"].tolist() == [-math.inf, -math.inf]


@pytest.mark.parametrize("view", [False, True])
def test_moves(view: bool):
    x = torch.randn(4, 6)
    p = ProgramBuilder("p")
    a = p.input("x", x.shape)
    outs = [
        p.slice(a, 1, 1, 6, 2, view=view, name="sliced"),
        p.transpose(a, (1, 0), view=view, name="transposed"),
        p.reshape(a, (2, 2, 3, 2), view=view, name="reshaped"),
    ]
    found = run_program(p.build(*outs), {"x": x})
    assert torch.equal(found["sliced"], x[:, 1:6:2])
    assert torch.equal(found["transposed"], x.T)
    assert torch.equal(found["reshaped"], x.reshape(2, 2, 3, 2))
    for out in outs:
        shared = found[out.name].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert shared == view
        assert view or found[out.name].is_contiguous()


def test_concat_and_set():
    x, y = torch.randn(2, 3), torch.randn(2, 4)
    p = ProgramBuilder("p")
    a, b = p.input("x", x.shape), p.input("y", y.shape)
    joined = p.concat([a, b], 1, name="joined")
    copy = p.set(joined, name="copy")
    assert torch.equal(run_program(p.build(copy), {"x": x, "y": y})["copy"], torch.cat((x, y), 1))


@given(extent=st.integers(1, 12), num_ranks=st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_take_shard_pads_with_zeros(extent: int, num_ranks: int):
    local = -(-extent // num_ranks)
    rank = Axis(name="r", extent=num_ranks, role="reduce", lookup=True)
    op = Op(
        name="y", kind="take_shard", axes=(Axis(name="n", extent=local), rank),
        reads=(Access(tensor="x", dims=(Index(axes=("r", "n")),)),),
        writes=(Access(tensor="y", dims=(Index(axes=("n",)),)),),
        attrs=(("dim", 0), ("mesh_axis", "tp"), ("num_ranks", num_ranks)),
    )  # fmt: skip
    x = torch.arange(1.0, extent + 1)
    parts = [run_op(op, {"x": x}, {"tp": rank})["y"] for rank in range(num_ranks)]
    assert torch.equal(torch.cat(parts), F.pad(x, (0, num_ranks * local - extent)))


@pytest.mark.parametrize(
    ("text", "dtype", "expected"),
    [
        ("where(lt(a0, 0), a1, 2 * a0)", "", lambda a, b: torch.where(a < 0, b, 2 * a)),
        ("le(a0, a1)", "bool", lambda a, b: a <= b),
        ("eq(a0, a0) - lt(a1, a0) * 2 + erf(a1)", "", lambda a, b: 1 - 2.0 * (b < a) + b.erf()),
        ("a0 + a1", "f64", lambda a, b: (a + b).double()),
        ("floor(a0)", "i64", lambda a, b: a.floor().long()),
    ],
)
def test_comparisons_and_other_result_types(text: str, dtype: str, expected):
    a, b = torch.randn(3, 4), torch.randn(3, 4)
    p = ProgramBuilder("p")
    operands = [p.input("a", a.shape), p.input("b", b.shape)][: 2 if "a1" in text else 1]
    program = p.build(p.pointwise(text, *operands, dtype=dtype, name="y"))
    result = run_program(program, {"a": a, "b": b})["y"]
    assert torch.equal(result, expected(a, b))
    assert result.dtype == expected(a, b).dtype


def test_whole_numbers_stay_exact():
    x = torch.tensor([2**53 + 1, -5, 7])
    p = ProgramBuilder("p")
    program = p.build(p.input("x", (3,), "i64").map("a0 * 3 - 1", name="y"))
    assert torch.equal(run_program(program, {"x": x})["y"], x * 3 - 1)


def formula_of_attention(q, k, v, mask, scale, softcap):
    """In float64, a head at a time, from the definition."""
    group = q.shape[1] // k.shape[1]
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    for head in range(q.shape[1]):
        scores = q[:, head].double() @ k[:, head // group].double().transpose(-1, -2) * scale
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        if mask is not None:
            here = mask.expand(q.shape[0], q.shape[1], *scores.shape[1:])[:, head]
            added = torch.where(here, 0.0, -math.inf) if here.dtype == torch.bool else here
            scores = scores + added
        weights = torch.softmax(scores, -1).nan_to_num(0.0)
        out[:, head] = weights @ v[:, head // group].double()
    return out


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("kind", ["none", "bools", "floats", "heads"])
def test_attend(kind: str, softcap: float):
    q, k, v = torch.randn(2, 6, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 4)
    masks = {
        "none": None,
        "bools": torch.rand(2, 1, 5, 7) < 0.5,
        "floats": torch.randn(1, 1, 5, 7),
        "heads": torch.randn(1, 6, 1, 7),
    }
    mask = masks[kind]
    if kind == "bools":
        mask[0, 0, 2] = False
    p = ProgramBuilder("p")
    given = {"q": q, "k": k, "v": v} | ({} if mask is None else {"mask": mask})
    handles = {
        name: p.input(name, x.shape, "bool" if x.dtype == torch.bool else "f32")
        for name, x in given.items()
    }
    out = p.attend(
        handles["q"], handles["k"], handles["v"], handles.get("mask"), 0.3, softcap, name="y"
    )
    result = run_program(p.build(out), given)["y"]
    expected = formula_of_attention(q, k, v, mask, 0.3, softcap)
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)


def test_lookups_and_sums_by_element():
    x, at = torch.randn(4, 9), torch.randint(0, 9, (4, 3))
    p = ProgramBuilder("p")
    given = p.input("x", (4, 9))
    largest, places = p.topk(given, 2, name="top")
    found = p.gather(given, p.input("at", (4, 3), "i64"), 1, name="found")
    spread = p.expand(p.slice(given, 0, 0, 1), (2, 4, 9), name="spread")
    program = p.build(largest, places, found, p.cumsum(given, name="sums"), spread)
    results = run_program(program, {"x": x, "at": at})
    values, chosen = torch.topk(x, 2)
    assert torch.equal(results["top.value"], values)
    assert torch.equal(results["top"], chosen)
    assert torch.equal(results["found"], torch.gather(x, 1, at))
    torch.testing.assert_close(results["sums"], x.cumsum(-1))
    assert torch.equal(results["spread"], x[:1].expand(2, 4, 9))


def test_an_operator_of_torch():
    x, w = torch.randn(1, 3, 8), torch.randn(5, 3, 2)
    call = encode_call(
        [x, w, None, [1], [0], [1], False, [0], 1], {"unused": torch.device("cpu")},
        lambda value: {id(x): {"tensor": 0}, id(w): {"tensor": 1}}.get(id(value)),
    )  # fmt: skip
    p = ProgramBuilder("p")
    operands = [p.input("x", x.shape), p.input("w", w.shape)]
    (out,) = p.opaque("aten.convolution.default", call, operands, [((1, 5, 7), "f32")], name="y")
    result = run_program(p.build(out), {"x": x, "w": w})["y"]
    torch.testing.assert_close(result, F.conv1d(x, w))


OTHER_CODE = (
    "builtins.eval", "builtins.exec", "builtins.__import__", "operator.call",
    "operator.methodcaller", "torch.load", "torch.sym_int.__globals__", "math.__loader__",
    "load_library", "aten.add", "aten.__class__", "operator", "", ".", "import_module", "math.pi",
)  # fmt: skip
"""What a program's text may not call."""


@pytest.mark.parametrize("target", OTHER_CODE)
def test_text_calls_operators_alone(target: str):
    with pytest.raises(ProgramError, match="expected an operator that this torch has"):
        find_operator(target)


OPERATORS = (
    "operator.add", "math.ceil", "torch.sym_int", "builtins.max", "aten.__lshift__.Scalar",
    "aten.__rshift__.Tensor", "aten.__and__.Scalar", "aten.__ior__.Tensor", "higher_order.cond",
)  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
def test_names_of_operators_and_functions_of_numbers_read_back(name: str):
    assert operator_name(find_operator(name)) == name


NAMED = '{"a=print(1), b": 1}'
WRONG_CALLS = (
    "", "x", "1", "[]", "[1]", "{}", '{"operands": 1}', '{"operands": [], "nodes": [1]}',
    "[" * 9999,
    '{"operands": [], "nodes": [["aten.add.Tensor", [{"node": 3}], {}]], "results": []}',
    f'{{"operands": [], "nodes": [["aten.rand.default", [[1]], {NAMED}]], "results": []}}',
    '{"operands": [], "nodes": [["builtins.exec", ["1"], {}]], "results": []}',
    '{"operands": [""], "nodes": [["aten.relu.default", [{"tensor": 0}], {"from": 1}]], '
    '"results": [{"node": 0}]}',
    f'{{"operands": [], "nodes": [], "results": [{{"float": 1{"0" * 400}}}]}}',
    '[[{"tensor": 7}], {}, [0]]', '[[{"tensor": -1}], {}, [0]]', '[[{"tensor": "a"}], {}, [0]]',
    '[[{"tensor": 0}], [], [0]]', '[[{"tensor": 0}], {}, [5]]', '[[{"tensor": 0}], {}, 7]',
    '[[{"a": 0}], {}, [0]]', '[[{"a": 0, "b": 1}], {}, [0]]', '[[{"tensor": 0}], {"a b": 1}, [0]]',
    '[[{"held": [0, "none"]}], {}, [0]]', '[[{"empty": [["a"], "torch.float32"]}], {}, [0]]',
    '["x", {}, [0]]',
)  # fmt: skip


@pytest.mark.parametrize("call", WRONG_CALLS)
def test_a_call_that_no_capture_wrote_is_named(call: str):
    p = ProgramBuilder("p")
    (out,) = p.opaque("aten.relu.default", call, [p.input("x", (4,))], [((4,), "f32")])
    with pytest.raises(ProgramError, match=r"call .* of an operator|operator 'builtins.exec'"):
        compile_opaque(p.build(out).ops[0])


def test_results_of_a_list_are_kept_by_position():
    p = ProgramBuilder("p")
    call = '[[{"tensor": 0}, 2], {}, [0, 1]]'
    results = [((2, 4), "f32"), ((1, 4), "f32")]
    program = p.build(*p.opaque("aten.split.Tensor", call, [p.input("x", (3, 4))], results))
    x = torch.randn(3, 4)
    for found, wanted in zip(compile_opaque(program.ops[0])([x]), x.split(2), strict=True):
        assert torch.equal(found, wanted)


def test_what_torch_lacks_or_text_can_not_hold_is_named():
    with pytest.raises(ProgramError, match=r"operator 'aten.nothing.default'; expected an operat"):
        find_operator("aten.nothing.default")
    with pytest.raises(ProgramError, match=r"an argument .* of type object"):
        encode_call([object()], {}, lambda value: None)
    with pytest.raises(ProgramError, match=r"the type torch.uint64 of .* held: .*torch\.uint8"):
        encode_call([torch.uint64], {}, lambda value: None)
