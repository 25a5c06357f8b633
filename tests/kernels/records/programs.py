"""Programs of every kind of instruction that the kernel of records has, and what torch gives."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from distmega.hostir.library.ops import run_op
from distmega.hostir.library.torch_types import torch_dtype
from distmega.program.builder import Handle, ProgramBuilder
from distmega.program.ops import norms
from distmega.program.ops.attention import biased_attention
from distmega.program.types import Program
from tests.kernels.records.random_attention import LATE, SEQUENCES, random_attention

Make = Callable[[ProgramBuilder, str], Sequence[Handle]]

POSITIONS = 40
"""Rows of tables and caches."""
UNARY = (
    "exp", "abs", "neg", "relu", "silu", "gelu", "tanh", "sigmoid", "sin", "cos", "erf", "floor"
)  # fmt: skip
POSITIVE = "log", "log2", "log10", "sqrt", "rsqrt"
BINARY = "add", "sub", "mul", "div", "maximum", "minimum", "eq", "lt", "le"


def linear(p: ProgramBuilder, dtype: str) -> Sequence[Handle]:
    w, bias = p.weight("w", (27, 33), dtype), p.weight("b", (27,), dtype)
    return [p.linear(p.input("x", (3, 33), dtype), w, bias)]


def whole_linear(p: ProgramBuilder, dtype: str) -> Sequence[Handle]:
    return [p.linear(p.input("x", (3, 33), dtype), p.weight("w", (27, 33), dtype))]


def batched(p: ProgramBuilder, dtype: str) -> Sequence[Handle]:
    x, w = p.input("x", (8, 3, 61), dtype), p.weight("w", (8, 50, 61), dtype)
    return [p.linear(x, w, spec="b m k, b n k -> b m n").map("a0 * 2.0")]


def several_sums(p: ProgramBuilder, dtype: str) -> Sequence[Handle]:
    x, w = p.input("x", (5, 3, 7), dtype), p.weight("w", (7, 9, 3), dtype)
    row_bias = p.weight("b", (5, 9), dtype)
    a_row = p.linear(p.input("y", (5, 7), dtype), p.weight("v", (9, 7), dtype), row_bias,
                     spec="m k, n k, m n -> m n")  # fmt: skip
    return [p.linear(x, w, spec="m a b, b n a -> m n"), a_row]


def readme_mlp(p: ProgramBuilder, dtype: str) -> Sequence[Handle]:
    x = p.input("x", (256, 512), dtype)
    h = p.linear(x, p.weight("up", (2048, 512), dtype)).map("silu(a0)")
    return [p.linear(h, p.weight("down", (512, 2048), dtype))]


def tiled(p: ProgramBuilder, dtype: str) -> Sequence[Handle]:
    """Products by tiles of tensor cores, whose edges are cut: also of an operand that lies by
    columns, and into one, and of so long a sum that 4 rows at an edge are a tile.
    """
    x, w = p.input("x", (140, 100), dtype), p.weight("w", (200, 100), dtype)
    h = p.linear(x, w, p.weight("b", (200,), dtype))
    turned = p.transpose(h, (1, 0), view=True)
    down = p.linear(turned, p.weight("down", (72, 140), dtype))
    y, long = p.input("y", (68, 1056), dtype), p.weight("long", (96, 1056), dtype)
    return [h, p.transpose(down, (1, 0)), p.linear(y, long)]


def odd_gate(p: ProgramBuilder, dtype: str) -> Sequence[Handle]:
    x = p.input("x", (3, 61), dtype)
    h = p.rms_norm(x, p.weight("n", (61,), dtype), 1e-5)
    gate, up = (p.linear(h, p.weight(name, (173, 61), dtype)) for name in ("gate", "up"))
    mixed = p.pointwise("tanh(a0) * a1", gate, up)
    return [x + p.linear(mixed, p.weight("down", (61, 173), dtype))]


def broadcast(p: ProgramBuilder, dtype: str) -> Sequence[Handle]:
    xs = [p.input(f"x{n}", shape, dtype) for n, shape in enumerate(((5, 33), (33,), (5, 1), (1,)))]
    more = [p.input(f"y{n}", (5, 33), dtype) for n in range(3)]
    return [p.pointwise("a0 + a1 * a2 - a3 * a4 + a5 * a6", *xs, *more)]


def functions(p: ProgramBuilder, dtype: str) -> Sequence[Handle]:
    x, y = p.input("x", (3, 7), dtype), p.input("y", (3, 7), dtype)
    outs = [p.pointwise(f"{name}(a0)", x) for name in UNARY]
    outs += [p.pointwise(f"{name}(abs(a0) + 0.5)", x) for name in POSITIVE]
    outs += [p.pointwise(f"{name}(a0, a1)", x, y) for name in BINARY]
    return [*outs, p.pointwise("where(lt(a0, a1), abs(a0) ** a1, 0.3)", x, y)]


def mixed_types(p: ProgramBuilder, dtype: str) -> Sequence[Handle]:
    x, i = p.input("x", (5, 9), dtype), p.input("i", (5, 9), "i32")
    small = p.pointwise("lt(a0, 1)", x, dtype="bool")
    return [
        small,
        p.pointwise("where(a0, a1, a2)", small, x, i, dtype="f32"),
        p.pointwise("a0 + a1", i, x, dtype="f16"),
        p.pointwise("floor(a0 * 3.0)", x, dtype="i64"),
        p.pointwise("a0 * 7 - 2 ** 3 + maximum(a0, -a0)", i),
    ]


def whole_powers(p: ProgramBuilder, dtype: str) -> Sequence[Handle]:
    """And what else becomes a float of whole numbers."""
    x, y = p.input("x", (3, 7), dtype), p.input("y", (3, 7), dtype)
    texts = ("a0 ** -1", "a0 ** a1", "a0 ** 3 - silu(a0) + gelu(a1)")
    return [p.pointwise(text, *(x, y)[: 1 + ("a1" in text)], dtype="f32") for text in texts]


def reductions(p: ProgramBuilder, dtype: str) -> Sequence[Handle]:
    x = p.input("x", (6, 130, 5), dtype)
    return [p.reduce(x, dim, how) for dim in range(3) for how in ("sum", "max", "min")]


def normed(p: ProgramBuilder, dtype: str) -> Sequence[Handle]:
    x = p.input("x", (3, 5, 1037), dtype)
    weight, bias = p.weight("w", (1037,), dtype), p.weight("b", (1037,), dtype)
    return [
        p.rms_norm(x, weight, 1e-5),
        p.layer_norm(x, weight, bias, 1e-3),
        p.layer_norm(x, None, None, 1e-5),
        p.softmax(x),
    ]


def long_and_short_rows(p: ProgramBuilder, dtype: str) -> Sequence[Handle]:
    """Norms of rows that an SM has not at once, and of many that it has."""
    long, x = p.input("long", (2, 8200), dtype), p.input("x", (150, 96), dtype)
    turned = p.transpose(p.input("y", (40, 7), dtype), (1, 0), view=True)
    ws = [p.weight(f"w{n}", (n,), dtype) for n in (8200, 96, 40)]
    return [
        *(p.layer_norm(row, w, w, 1e-5) for row, w in zip((long, x, turned), ws, strict=True)),
        *(p.softmax(row) for row in (long, x, turned)),
        p.rms_norm(x, ws[1], 1e-5), p.rms_norm(long, ws[0], 1e-5),
    ]  # fmt: skip


def scans(p: ProgramBuilder, dtype: str) -> Sequence[Handle]:
    x = p.input("x", (3, 1100), dtype)
    return [p.cumsum(x), p.op(norms.cumprod, p.input("y", (4, 9), dtype))]


def looked_up(p: ProgramBuilder, dtype: str) -> Sequence[Handle]:
    x = p.embedding(p.input("ids", (5,), "i64"), p.weight("table", (POSITIONS, 13), dtype))
    picked = p.gather(p.input("x", (6, 3, 9), dtype), p.input("places", (11, 3, 9), "i32"), 0)
    return [x, picked]


def moves(p: ProgramBuilder, dtype: str) -> Sequence[Handle]:
    x = p.input("x", (6, 10), dtype)
    return [
        p.slice(x, 1, 1, 9, 3), p.concat([x, p.slice(x, 0, 1, 4)], 0), p.transpose(x, (1, 0)),
        p.reshape(x, (3, 2, 2, 5)), p.expand(x, (2, 6, 10)),
        p.transpose(p.input("y", (2, 3, 4, 5, 6, 2), dtype), (5, 3, 1, 4, 2, 0)),
    ]  # fmt: skip


def boxed(p: ProgramBuilder, dtype: str) -> Sequence[Handle]:
    """Formulas and copies by boxes: several boxes, cut ones, rows and columns that are all alike,
    rows that lie side by side, in one operand or more than a Pointwise has fields for.
    """
    x, turned = p.input("x", (70, 150), dtype), p.input("turned", (150, 70), dtype)
    turned = p.transpose(turned, (1, 0), view=True)
    row, column = p.input("row", (150,), dtype), p.input("column", (70, 1), dtype)
    more = [p.input(f"x{n}", (70, 150), dtype) for n in range(2)]
    long = p.input("long", (3, 9000), dtype)
    parts = p.input("parts", (6, 40, 24), dtype)
    return [
        p.pointwise("a0 + a1 * a2 - a3 * a4 + a5", x, turned, row, column, *more),
        p.pointwise("a0 * a1", row, column),
        long.map("maximum(a0, a1)", p.slice(long, 1, 0, 1, view=True)),
        p.transpose(parts, (1, 0, 2)), p.transpose(parts, (2, 0, 1)), p.transpose(parts, (2, 1, 0)),
        p.slice(parts, 1, 3, 38, 2), p.concat([x, more[0]], 1),
    ]  # fmt: skip


def states(p: ProgramBuilder, dtype: str) -> Sequence[Handle]:
    state, x = p.state("total", (5, 7), dtype), p.input("x", (5, 7), dtype)
    p.set(p.pointwise("maximum(a0, a1)", state, x), state)
    p.set(p.slice(x, 0, 3, 5), p.slice(state, 0, 1, 3, view=True))
    return [p.set(state)]


def largest(p: ProgramBuilder, dtype: str) -> Sequence[Handle]:
    x = p.input("x", (6, 1900), dtype)
    token = p.argmax(x)
    return [token, p.value_of(token), *p.topk(p.input("y", (3, 4, 19)), 5)]


def no_numbers(p: ProgramBuilder, dtype: str) -> Sequence[Handle]:
    """The largest of rows some of whose elements, or all, are no numbers, or infinite."""
    token = p.argmax(p.input("holes", (4, 1500), dtype))
    return [token, p.value_of(token), *p.topk(p.input("few_holes", (4, 1, 19), dtype), 5)]


def rotated(p: ProgramBuilder, dtype: str) -> Sequence[Handle]:
    x = p.input("x", (5, 48), dtype)
    part = p.reshape(p.slice(x, 1, 8, 32, view=True), (5, 2, 12), view=True)
    angles = p.weight("angles", (POSITIONS, 12))
    positions, cache = (
        p.input("positions", (5,), "i64"),
        p.state("cache", (5, 2, POSITIONS, 12), dtype),
    )
    turned = p.rope(part, positions, angles)
    p.kv_append(cache, turned, positions)
    return [turned, p.set(cache)]


def attended(
    p: ProgramBuilder, dtype: str, *, own: bool = False, dim: int = 24, window: int = 0,
    softcap: float = 0.0,
) -> Sequence[Handle]:  # fmt: skip
    rows, heads, group, e = 5, 2, 3, 17
    front = (rows,) if own else ()
    k = p.state("k", (*front, heads, POSITIONS, dim), dtype)
    v = p.state("v", (*front, heads, POSITIONS, e), dtype)
    q, positions = (
        p.input("q", (rows, heads, group, dim), dtype),
        p.input("positions", (rows,), "i64"),
    )
    return [p.attention(q, k, v, positions, dim**-0.5, window, softcap=softcap)]


def of_own_caches(p: ProgramBuilder, dtype: str) -> Sequence[Handle]:
    return attended(p, dtype, own=True, softcap=3.0)


def in_a_window(p: ProgramBuilder, dtype: str) -> Sequence[Handle]:
    return attended(p, dtype, dim=256, window=7)


def with_biases(p: ProgramBuilder, dtype: str) -> Sequence[Handle]:
    q, positions = p.input("q", (5, 4, 2, 8), dtype), p.input("positions", (5,), "i64")
    caches = [p.state(name, (4, POSITIONS, 8), dtype) for name in "kv"]
    table = p.weight("scores", (POSITIONS, 4, 2))
    return [p.op(biased_attention, q, *caches, positions, table, scale=0.3, window=4)]


def without_a_cache(p: ProgramBuilder, dtype: str) -> Sequence[Handle]:
    """Of rows that see each other, under a mask and without."""
    rows, heads, dim = 64, 4, 16
    x, made = p.input("x", (rows, 64), dtype), []
    for name in "qkv":
        w = p.weight(name, (heads, dim, 64), dtype)
        y = p.linear(x, w, spec="m k, h d k -> m h d")
        made.append(p.reshape(p.transpose(y, (1, 0, 2), view=True), (1, heads, rows, dim)))
    masks = (
        p.input("mask", (1, 1, rows, rows), "bool"),
        p.input("far", (1, heads, rows, rows)),
        None,
    )
    return [p.attend(*made, mask, dim**-0.5) for mask in masks]


KINDS: Mapping[str, tuple[Make, Sequence[str]]] = MappingProxyType({
    make.__name__: (make, dtypes)
    for make, dtypes in (
        (linear, ("f32", "bf16", "f16", "f64")), (whole_linear, ("i32", "i64")),
        (batched, ("f32", "bf16")), (several_sums, ("f32", "bf16")),
        (readme_mlp, ("f32", "bf16")), (tiled, ("bf16", "f16")), (odd_gate, ("f32", "bf16", "f16")),
        (broadcast, ("f32", "bf16", "i32", "i64", "f64")), (functions, ("f32", "f64")),
        (mixed_types, ("f32",)), (whole_powers, ("i32",)), (reductions, ("f32", "bf16", "i64")),
        (normed, ("f32", "bf16", "f64")), (long_and_short_rows, ("bf16", "f32", "f16")),
        (scans, ("f32", "f16", "i64")),
        (looked_up, ("f32", "bf16", "bool")),
        (moves, ("f32", "bf16", "i64", "bool", "f64")),
        (boxed, ("bf16", "f32", "i32", "f64", "bool")), (states, ("f32", "i64")),
        (largest, ("f32", "bf16")), (no_numbers, ("f32", "bf16")), (rotated, ("f32", "bf16")),
        (attended, ("f32", "bf16", "f16")), (of_own_caches, ("f32",)), (in_a_window, ("bf16",)),
        (with_biases, ("f32",)), (without_a_cache, ("f32", "bf16")),
    )
})  # fmt: skip


def program_of(kind: str, dtype: str) -> Program:
    """A program by the name of its kind, or of random attention by its seed."""
    if kind.isdecimal():
        return random_attention(int(kind), dtype)
    p = ProgramBuilder(kind)
    return p.build(*KINDS[kind][0](p, dtype))


NAMES: Sequence[tuple[str, str]] = tuple(
    (kind, dtype) for kind, (_, dtypes) in KINDS.items() for dtype in dtypes
)
"""Kind and type of all programs."""


def values_of(program: Program) -> dict[str, Tensor]:
    """Inputs, weights and states; products of about 1, indices that are there."""
    generator = torch.Generator().manual_seed(1)
    limits = {"ids": POSITIONS, "positions": POSITIONS, "places": 6}
    limits |= {"late": LATE, "sequences": SEQUENCES, "starts": 1}
    least = {"late": -LATE // 4}  # positions of rows that see nothing
    values: dict[str, Tensor] = {}
    for tensor in program.tensors:
        if tensor.role == "temp":
            continue
        if tensor.name in limits:
            x = torch.randint(
                least.get(tensor.name, 0), limits[tensor.name], tensor.shape, generator=generator
            )
        elif tensor.dtype == "bool":
            x = torch.rand(tensor.shape, generator=generator) < 0.5
        elif tensor.dtype.startswith("i"):
            x = torch.randint(-9, 9, tensor.shape, generator=generator)
        else:
            x = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            if tensor.role == "weight" and len(tensor.shape) > 1:
                x *= tensor.shape[-1] ** -0.5
        if tensor.name == "holes":
            x[0], x[1, 1200], x[2, 700:] = -torch.inf, torch.inf, torch.nan
        elif tensor.name == "few_holes":
            x[0, 0, 5:], x[1, 0, 2], x[2, 0, 4] = -torch.inf, torch.inf, torch.nan
        values[tensor.name] = x.to(torch_dtype(tensor.dtype))
    return values


def expected_of(program: Program, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors after the ops, one by one by the library."""
    found = {name: x.clone() for name, x in values.items()}
    for op in program.ops:
        for name, x in run_op(op, found, {"tp": 0}).items():
            if name in found and not op.is_view:
                found[name].copy_(x)
            else:
                found[name] = x
    return found


def tolerance(program: Program, name: str) -> float:
    """Of an output by its type: that of its roundings in a chain of ops."""
    dtype = program.tensor_map()[name].dtype
    return {"bf16": 4e-2, "f16": 5e-3, "f32": 2e-4, "f64": 1e-6}.get(dtype, 0.0)
