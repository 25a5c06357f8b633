"""Programs of one row or more whose norms, softmax and sums follow no contraction, by name."""

from collections.abc import Callable, Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from distmega.program.builder import Handle, ProgramBuilder
from distmega.program.ops.attention import biased_attention
from distmega.program.types import Program

HIDDEN, FFN, VOCAB, CONTEXT = 256, 512, 328, 160
FIRST = 70
"""Position of the first row of a prompt."""


def matrix(p: ProgramBuilder, x: Handle, rows: int, name: str, *, bias: bool = False) -> Handle:
    """A linear with weights of its own."""
    weight = p.weight(f"{name}.w", (rows, x.shape[-1]), "bf16")
    return p.linear(x, weight, p.weight(f"{name}.b", (rows,), "bf16") if bias else None, name=name)


def rms(p: ProgramBuilder, x: Handle, name: str, dtype: str = "bf16", eps: float = 1e-5) -> Handle:
    return p.rms_norm(x, p.weight(f"{name}.w", x.shape[-1:], dtype), eps, name=name)


def norm_at_the_end(rows: int) -> Program:
    """Two norms of a result leave, one of them with a bias."""
    p = ProgramBuilder("end")
    y = matrix(p, p.input("x", (rows, HIDDEN), "bf16"), HIDDEN, "y").map("tanh(a0)", name="t")
    n = p.layer_norm(
        y, p.weight("n.w", (HIDDEN,), "bf16"), p.weight("n.b", (HIDDEN,), "bf16"), 1e-3, name="n"
    )
    return p.build(n, rms(p, y, "m", eps=1e-2))


def classifier(rows: int, classes: int = 1000) -> Program:
    """A softmax behind logits with a bias."""
    p = ProgramBuilder("classifier")
    h = matrix(p, p.input("x", (rows, HIDDEN), "bf16"), FFN, "h", bias=True).map("relu(a0)")
    return p.build(p.softmax(matrix(p, h, classes, "logits", bias=True), name="out"))


def post_norms(rows: int, dtype: str = "bf16") -> Program:
    """x + norm(f(x)) twice a layer, and a norm before f; a token is chosen, with a bias."""
    p = ProgramBuilder("post")
    ids, table = p.input("ids", (rows,), "i64"), p.weight("table", (VOCAB, HIDDEN), "bf16")
    x = p.embedding(ids, table, name="x")
    for i in range(2):
        y = matrix(p, rms(p, x, f"before{i}", dtype, 1e-6), HIDDEN, f"y{i}")
        x = p.pointwise("a0 + a1 * 0.5", x, rms(p, y, f"after{i}", dtype, 1e-3), name=f"x{i}")
        gate, up = (matrix(p, x, FFN, f"{name}{i}") for name in ("gate", "up"))
        down = matrix(p, gate.map("silu(a0)") * up, HIDDEN, f"down{i}")
        x = p.pointwise("a0 + a1", x, rms(p, down, f"last{i}", dtype, 1e-3), name=f"z{i}")
    logits = matrix(p, rms(p, x, "final", dtype, 1e-6), VOCAB, "logits", bias=True)
    return p.build(p.argmax(logits, name="next"), x)


def two_tables(rows: int) -> Program:
    """Tokens and positions have embeddings, whose sum goes on."""
    p = ProgramBuilder("tables")
    ids, positions = (p.input(name, (rows,), "i64") for name in ("ids", "positions"))
    x = p.embedding(ids, p.weight("tokens", (VOCAB, HIDDEN), "bf16"), name="t")
    at = p.embedding(positions, p.weight("places", (CONTEXT, HIDDEN), "bf16"), name="at")
    x = p.pointwise("a0 * 2.0 + a1", x, at, name="x")
    y = matrix(p, rms(p, x, "n"), HIDDEN, "y", bias=True)
    return p.build(p.pointwise("a0 + a1", x, y, name="out"))


def scaled_table(rows: int) -> Program:
    """A function of the row that comes in is what all others take."""
    p = ProgramBuilder("scaled")
    table = p.weight("table", (VOCAB, HIDDEN), "bf16")
    x = p.embedding(p.input("ids", (rows,), "i64"), table, name="e").map("a0 * 3.0", name="x")
    y = matrix(p, rms(p, x, "n"), HIDDEN, "y")
    return p.build(p.pointwise("a0 - a1", x, y, name="out"))


def norm_of_input(rows: int) -> Program:
    """The row that comes in is normalised, and that is carried."""
    p = ProgramBuilder("entry")
    x = p.layer_norm(p.input("x", (rows, HIDDEN), "bf16"), None, None, 1e-5, name="n")
    y = matrix(p, x, FFN, "h").map("gelu(a0)")
    return p.build(p.pointwise("a0 + a1", x, matrix(p, y, HIDDEN, "y"), name="out"))


def wide_norms(rows: int) -> Program:
    """As post_norms, with weights of norms in f32."""
    return post_norms(rows, "f32")


def plain_layer_norms(rows: int, dtype: str = "bf16") -> Program:
    """Layer norms without a bias in front of products, one for others too; a softmax leaves."""
    p = ProgramBuilder("plain")
    ids, table = p.input("ids", (rows,), "i64"), p.weight("table", (VOCAB, HIDDEN), "bf16")
    x = p.embedding(ids, table, name="x")
    for i in range(2):
        n = p.layer_norm(x, p.weight(f"n{i}.w", (HIDDEN,), dtype), None, 1e-5, name=f"n{i}")
        h = matrix(p, n, FFN, f"h{i}").map("gelu(a0)")
        others = (x, n) if i else (x,)
        sums = "a0 + a1 + a2" if i else "a0 + a1"
        x = p.pointwise(sums, matrix(p, h, HIDDEN, f"y{i}"), *others, name=f"x{i}")
    n = p.layer_norm(x, p.weight("final.w", (HIDDEN,), dtype), None, 1e-5, name="final")
    out = p.softmax(x, name="out")
    return p.build(p.argmax(matrix(p, n, VOCAB, "logits"), name="next"), out)


def wide_layer_norms(rows: int) -> Program:
    """As plain_layer_norms, with weights of norms in f32."""
    return plain_layer_norms(rows, "f32")


def attending(
    layers: int = 2, heads: int = 4, dim: int = 64, softcap: float = 0.0, ffn: int = FFN,
    vocab: int = VOCAB, dtype: str = "bf16", group: int = 1, window: int = 0, rows: int = 1,
    biased: bool = False, each_head: bool = False, context: int = CONTEXT,
) -> Program:  # fmt: skip
    """A decode step of layers with norms of all queries and keys together, and of what is added.

    heads: of keys, each with `group` query heads. window: of every other layer. rows: sequences,
    each with caches of its own. biased: whether scores have a bias instead of rotated queries and
    keys. each_head: whether these are normalised, and not all together. context: of the caches.
    """
    p = ProgramBuilder("attending")
    hidden = heads * dim
    ids, positions = (p.input(name, (rows,), "i64") for name in ("ids", "positions"))
    front = (rows,) if rows > 1 else ()
    angles = None if biased else p.weight("angles", (context, dim), "f32")
    slopes = p.weight("slopes", (context, heads, group), "f32") if biased else None
    x = p.embedding(ids, p.weight("table", (vocab, hidden), "bf16"), name="x")
    for i in range(layers):
        q, k, v = (
            matrix(p, x, hidden * (group if name == "q" else 1), f"{name}{i}") for name in "qkv"
        )
        if each_head:
            q = p.reshape(q, (rows, heads, group, dim), view=True)
            k = p.reshape(k, (rows, heads, dim), view=True)
        q, k = (rms(p, each, f"{name}n{i}", dtype) for each, name in ((q, "q"), (k, "k")))
        q = p.reshape(q, (rows, heads, group, dim), view=True)
        k = p.reshape(k, (rows, heads, dim), view=True)
        if angles:
            q, k = p.rope(q, positions, angles), p.rope(k, positions, angles)
        shape = *front, heads, context, dim
        caches = [p.state(f"{name}_cache{i}", shape, "bf16") for name in "kv"]
        v = p.reshape(v, (rows, heads, dim), view=True)
        for cache, each in zip(caches, (k, v), strict=True):
            p.kv_append(cache, each, positions)
        options = {"scale": dim**-0.5, "window": 0 if i % 2 else window, "softcap": softcap}
        if slopes:
            out = p.op(biased_attention, q, *caches, positions, slopes, name=f"att{i}", **options)
        else:
            out = p.attention(q, *caches, positions, **options)
        y = matrix(p, p.reshape(out, (rows, group * hidden), view=True), hidden, f"o{i}")
        x = p.pointwise("a0 + a1", x, rms(p, y, f"after{i}", dtype), name=f"x{i}")
        gate, up = (matrix(p, x, ffn, f"{name}{i}") for name in ("gate", "up"))
        down = matrix(p, gate.map("silu(a0)") * up, hidden, f"down{i}")
        x = p.pointwise("a0 + a1", x, rms(p, down, f"last{i}", dtype), name=f"z{i}")
    logits = matrix(p, rms(p, x, "final", dtype), vocab, "logits")
    return p.build(p.argmax(logits, name="next"), x)


def attending_columns(
    rows: int, *, turned: str = "", order: str = "qkv", joined: bool = True, keeps: bool = False
) -> Program:
    """A decode step of sequences with caches of their own, whose queries, keys and values are
    columns of one product, in this order, unless `joined` is False. turned: as of attending_rows.
    keeps: whether the product leaves, too.
    """
    p, kv_heads, group, dim = ProgramBuilder("columns"), 2, 2, 64
    x, at = p.input("x", (rows, HIDDEN), "bf16"), p.input("positions", (rows,), "i64")
    table = p.weight("angles", (CONTEXT, dim), "f32") if turned else None
    sizes = {"q": kv_heads * group * dim, "k": kv_heads * dim, "v": kv_heads * dim}
    outs = []
    for i in range(2):
        n, made, stop = rms(p, x, f"n{i}"), {}, 0
        if joined:
            outs.append(matrix(p, n, sum(sizes.values()), f"qkv{i}", bias=True))
        for name in order:
            if joined:
                part = p.slice(outs[-1], 1, stop, stop + sizes[name], view=True)
            else:
                part = matrix(p, n, sizes[name], f"{name}{i}", bias=True)
            one = p.reshape(part, (rows, sizes[name] // dim, dim), view=True)
            if turned == "norm" and name != "v":
                one = rms(p, one, f"{name}_norm{i}")
            made[name] = p.rope(one, at, table) if table and name != "v" else one
            stop += sizes[name]
        caches = [p.state(f"{n}{i}_cache", (rows, kv_heads, CONTEXT, dim), "bf16") for n in "kv"]
        for cache, name in zip(caches, "kv", strict=True):
            p.kv_append(cache, made[name], at)
        q = p.reshape(made["q"], (rows, kv_heads, group, dim), view=True)
        mixed = p.reshape(p.attention(q, *caches, at, dim**-0.5), (rows, sizes["q"]), view=True)
        x = p.pointwise("a0 + a1", x, matrix(p, mixed, HIDDEN, f"o{i}"), name=f"x{i}")
        up = matrix(p, rms(p, x, f"m{i}"), FFN, f"up{i}", bias=True).map("gelu(a0)")
        x = p.pointwise("a0 + a1", x, matrix(p, up, HIDDEN, f"down{i}"), name=f"z{i}")
    return p.build(x, *outs if keeps else ())


def attending_rows(
    rows: int,
    *,
    sees: str = "all",
    kv_heads: int = 2,
    group: int = 3,
    dim: int = 24,
    joined: bool = False,
    softcap: float = 0.0,
    window: int = 0,
    mask: tuple[int, ...] = (),
    given: str = "",
    dtype: str = "bool",
    turned: str = "",
    leaves: bool = False,
) -> Program:
    """Rows that see each other, in no cache. sees: "all", those up to a "position", or what a mask
    says, of which `mask` tells the heads, rows and keys that it has, and `given` that it comes with
    each call. joined: queries, keys and values are one product. turned: "rope", or "norm" for norms
    of heads before that. leaves: whether the result of attention leaves as it is, too.
    """
    p = ProgramBuilder("rows")
    x, heads = p.input("x", (rows, HIDDEN), "bf16"), kv_heads * group
    sizes = {"q": heads * dim, "k": kv_heads * dim, "v": kv_heads * dim}
    if joined:
        qkv, stops = matrix(p, x, sum(sizes.values()), "qkv"), [0]
        for size in sizes.values():
            stops.append(stops[-1] + size)
        made = [p.slice(qkv, 1, *ends, view=True) for ends in pairwise(stops)]
    else:
        made = [matrix(p, x, size, name) for name, size in sizes.items()]
    at = p.input("positions", (rows,), "i64") if turned or sees == "position" else None
    made = [p.reshape(one, (rows, one.shape[1] // dim, dim), view=True) for one in made]
    if turned and at is not None:
        table = p.weight("angles", (CONTEXT, dim), "f32")
        for i, name in enumerate("qk"):
            one = rms(p, made[i], f"{name}_norm") if turned == "norm" else made[i]
            made[i] = p.rope(one, at, table)
    if sees == "position":
        assert at is not None
        q = p.reshape(made[0], (rows, kv_heads, group, dim), view=True)
        k, v = (p.transpose(one, (1, 0, 2)) for one in made[1:])
        mixed = p.attention(q, k, v, at, dim**-0.5, window=window, softcap=softcap)
    else:
        declared = p.input if given else p.weight
        seen = declared("mask", (1, *mask), dtype) if mask else None
        heads_first = [
            p.reshape(p.transpose(one, (1, 0, 2), view=joined), (1, one.shape[1], rows, dim))
            for one in made
        ]
        mixed = p.attend(*heads_first, seen, dim**-0.5, softcap, name="mixed")
        if leaves:
            return p.build(mixed)
        mixed = p.transpose(mixed, (0, 2, 1, 3))
    y = matrix(p, p.reshape(mixed, (rows, heads * dim), view=True), HIDDEN, "o")
    return p.build(p.pointwise("a0 + a1", y, x, name="y"))


SELF_ATTENTION: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "all": {}, "joined": {"joined": True, "dim": 64}, "positions": {"sees": "position"},
    "window": {"sees": "position", "window": 2, "softcap": 0.5},
    "mask of heads": {"mask": (6, 5, 5)}, "one mask": {"mask": (1, 5, 5), "dim": 136},
    "mask of keys": {"mask": (1, 1, 5), "kv_heads": 1, "group": 9, "dim": 8},
    "given mask": {"mask": (1, 5, 5), "given": "input"},
    "added mask": {"mask": (6, 1, 5), "given": "input", "dtype": "f32"},
    "rotated": {"turned": "rope", "dim": 64},
    "normed": {"turned": "norm", "sees": "position", "dim": 96},
    "leaves": {"leaves": True, "mask": (1, 5, 5), "given": "input"},
})  # fmt: skip
"""For `attending_rows` of 5 rows."""


def crossing(rows: int, memory: int, *, given: str = "", dim: int = 32) -> Program:
    """Rows that see those before, then rows of another input: a layer of a decoder with an encoder.
    given: "input", "weight" or "state", where keys and values of the latter are given as heads.
    """
    p = ProgramBuilder("crossing")
    x, heads, kv_heads = p.input("x", (rows, HIDDEN), "bf16"), 6, 2
    before = p.input("mask", (1, 1, rows, rows), "bool")

    def turned(y: Handle) -> Handle:
        split = p.reshape(y, (1, y.shape[0], y.shape[1] // dim, dim))
        return p.transpose(split, (0, 2, 1, 3))

    def joined(mixed: Handle) -> Handle:
        return p.reshape(p.transpose(mixed, (0, 2, 1, 3)), (rows, heads * dim))

    n = rms(p, x, "n")
    own = [turned(matrix(p, n, heads * dim, f"own_{name}")) for name in "qkv"]
    x = p.pointwise("a0 + a1", x, matrix(p, joined(p.attend(*own, before, 0.1)), HIDDEN, "own_o"))
    q = turned(matrix(p, rms(p, x, "m"), heads * dim, "q"))
    if given:
        declared = {"input": p.input, "weight": p.weight, "state": p.state}[given]
        k, v = (declared(name, (1, kv_heads, memory, dim), "bf16") for name in "kv")
    else:
        y = p.input("memory", (memory, HIDDEN), "bf16")
        k, v = (turned(matrix(p, y, kv_heads * dim, name)) for name in "kv")
    x = p.pointwise("a0 + a1", x, matrix(p, joined(p.attend(q, k, v, None, 0.2)), HIDDEN, "o"))
    return p.build(p.pointwise("a0 + tanh(a1)", x, matrix(p, x, HIDDEN, "last"), name="y"))


def sequences(num: int, rows: int, *, mask: tuple[int, ...] = (), dim: int = 32) -> Program:
    """Several sequences of as many rows each, which see nothing of each other."""
    p = ProgramBuilder("sequences")
    x, heads = p.input("x", (num, rows, HIDDEN), "bf16"), 4
    made = [
        p.transpose(
            p.reshape(matrix(p, x, heads * dim, name), (num, rows, heads, dim)), (0, 2, 1, 3)
        )
        for name in "qkv"
    ]
    seen = p.input("mask", mask, "bool") if mask else None
    mixed = p.transpose(p.attend(*made, seen, dim**-0.5), (0, 2, 1, 3))
    y = matrix(p, p.reshape(mixed, (num, rows, heads * dim)), HIDDEN, "o")
    return p.build(p.pointwise("a0 + a1", y, x, name="y"))


def prompt(
    rows: int,
    *,
    kv_heads: int = 2,
    group: int = 2,
    dim: int = 64,
    turned: str = "rope",
    biased: bool = False,
    window: int = 0,
    softcap: float = 0.0,
    layers: int = 2,
    context: int = CONTEXT,
) -> Program:
    """Rows of one sequence: tokens whose keys and values go into one cache of `context` positions
    before rows see them.
    """
    p = ProgramBuilder("prompt")
    ids, at = p.input("ids", (rows,), "i64"), p.input("positions", (rows,), "i64")
    table = p.weight("angles", (context, dim), "f32")
    shapes = {"q": (kv_heads, group, dim), "k": (kv_heads, dim), "v": (kv_heads, dim)}
    x = p.embedding(ids, p.weight("table", (VOCAB, HIDDEN), "bf16"), name="x")
    for i in range(layers):
        n, made = rms(p, x, f"n{i}"), {}
        for name, shape in shapes.items():
            axes = "h g d" if name == "q" else "h d"
            weight = p.weight(f"{name}{i}.w", (*shape, HIDDEN), "bf16")
            made[name] = p.linear(n, weight, spec=f"m k, {axes} k -> m {axes}")
            if name != "v" and turned == "norm":
                made[name] = rms(p, made[name], f"{name}{i}_norm")
            if name != "v" and turned:
                made[name] = p.rope(made[name], at, table)
        caches = [p.state(f"{name}{i}_cache", (kv_heads, context, dim), "bf16") for name in "kv"]
        for cache, name in zip(caches, "kv", strict=True):
            p.kv_append(cache, made[name], at)
        if biased:
            bias = p.weight(f"bias{i}", (context, kv_heads, group), "f32")
            mixed = p.op(biased_attention, made["q"], *caches, at, bias, scale=dim**-0.5)
        else:
            mixed = p.attention(made["q"], *caches, at, dim**-0.5, window=window, softcap=softcap)
        y = p.linear(
            mixed, p.weight(f"o{i}.w", (HIDDEN, *shapes["q"]), "bf16"),
            spec="m h g d, k h g d -> m k",
        )  # fmt: skip
        x = p.pointwise("a0 + a1", x, y, name=f"x{i}")
        n = rms(p, x, f"m{i}")
        gate, up = (matrix(p, n, FFN, f"{name}{i}") for name in ("gate", "up"))
        x = p.pointwise("a0 + a1", x, matrix(p, gate.map("silu(a0)") * up, HIDDEN, f"down{i}"))
    logits = matrix(p, rms(p, x, "final"), VOCAB, "logits")
    return p.build(p.argmax(logits, name="next"), logits, x)


PROMPTS: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "rope": {}, "norm": {"turned": "norm", "dim": 128, "kv_heads": 1, "group": 4},
    "plain": {"turned": "", "dim": 24}, "biased": {"turned": "", "biased": True, "group": 5},
    "window": {"window": 5, "dim": 96}, "softcap": {"softcap": 0.5, "dim": 256, "kv_heads": 1},
})  # fmt: skip
"""For `prompt`."""

PROGRAMS: Mapping[str, Callable[[int], Program]] = MappingProxyType(
    {
        one.__name__: one
        for one in (
            norm_at_the_end, classifier, post_norms, wide_norms, two_tables, scaled_table,
            norm_of_input, plain_layer_norms, wide_layer_norms,
        )
    }
)  # fmt: skip


HEADS: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "24": {"dim": 24}, "56 of each": {"dim": 56, "each_head": True},
    "80 capped": {"dim": 80, "softcap": 0.5, "dtype": "f32"},
    "96 of each": {"dim": 96, "group": 3, "each_head": True, "window": 40},
    "128 capped": {"dim": 128, "softcap": 2.0, "window": 40},
    "128 of each": {"dim": 128, "group": 4, "each_head": True, "dtype": "f32"},
    "64 biased": {"heads": 2, "group": 3, "biased": True, "window": 40},
    "80 biased": {"heads": 2, "dim": 80, "biased": True, "softcap": 0.5},
    "128 biased": {"heads": 1, "dim": 128, "group": 16, "biased": True},
    "136": {"heads": 2, "dim": 136, "group": 3, "window": 40, "context": 300},
    "192 biased": {"heads": 1, "dim": 192, "group": 7, "biased": True},
    "200 of each": {"heads": 1, "dim": 200, "group": 12, "each_head": True},
    "256 capped": {"heads": 1, "dim": 256, "group": 8, "softcap": 5.0, "context": 700},
})  # fmt: skip
"""Heads for `attending` of several rows."""


def random_values(program: Program, seed: int = 0, first: int = FIRST) -> dict[str, Tensor]:
    """Inputs, weights and states; products of about 1. first: position of the first row, of rows
    over one cache.
    """
    generator = torch.Generator().manual_seed(seed)
    values: dict[str, Tensor] = {}
    contexts = {tensor.shape[-2] for tensor in program.with_role("state")} or {CONTEXT}
    contexts |= {op.extents["t"] for op in program.ops if op.kind == "attention"}
    states = program.with_role("state")
    tables = {tensor.shape[0] for tensor in program.with_role("weight") if tensor.name == "table"}
    for tensor in program.tensors:
        if tensor.role == "temp":
            continue
        if tensor.name == "positions" and any(len(one.shape) == 3 for one in states):
            values[tensor.name] = first + torch.arange(tensor.num_elements)
            continue
        if tensor.dtype == "i64":
            most = min(contexts) if tensor.name == "positions" else min(tables, default=VOCAB)
            values[tensor.name] = torch.randint(0, most, tensor.shape, generator=generator)
            continue
        x = torch.randn(tensor.shape, generator=generator)
        if tensor.dtype == "bool":
            values[tensor.name] = x < 0.4
            continue
        if tensor.role == "weight":
            scaled = {1: 1 + 0.1 * x, 2: x * tensor.shape[-1] ** -0.5}
            x = scaled.get(len(tensor.shape), x * HIDDEN**-0.5 if tensor.dtype == "bf16" else x)
        values[tensor.name] = x if tensor.dtype == "f32" else x.bfloat16()
    return values
