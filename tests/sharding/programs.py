"""Programs that tests of sharding plan: a small decoder, an MLP, random graphs of ops."""

import math
import random

from distmega.builder import Handle, ProgramBuilder
from distmega.errors import ProgramError
from distmega.program import Program


def decoder(
    *,
    layers: int = 1,
    rows: int = 1,
    sequences: bool = False,
    hidden: int = 12,
    heads: int = 3,
    group: int = 3,
    head: int = 4,
    ffn: int = 10,
    vocab: int = 11,
    context: int = 8,
    tied: bool = True,
    logits: bool = True,
    bias: bool = False,
    dtype: str = "f32",
) -> Program:
    """A decoder with the names and shapes that models/decoder.py uses.

    sequences: rows are sequences with caches of their own, not tokens of one.
    """
    own = (rows,) if sequences else ()
    p = ProgramBuilder("decoder")
    tokens, ids = p.input("tokens", (rows,), "i64"), p.input("positions", (rows,), "i64")
    embed = p.weight("embed", (vocab, hidden), dtype)
    table = p.weight("rope_table", (context, head), "f32")
    x = p.embedding(tokens, embed, name="x")
    for i in range(layers):
        caches = (*own, heads, context, head)
        x = _block(p, f"layers.{i}", x, ids, table, heads, group, head, ffn, caches, bias, dtype)
    x = p.rms_norm(x, p.weight("norm", (hidden,), dtype), 1e-5, name="final")
    if rows > 1 and not sequences:
        x = p.slice(x, 0, rows - 1, rows, name="last")
    out = p.linear(x, embed if tied else p.weight("head", (vocab, hidden), dtype), name="logits")
    best = p.argmax(out, name="next")
    return p.build(out, best) if logits else p.build(best)


def _block(
    p: ProgramBuilder,
    name: str,
    x: Handle,
    ids: Handle,
    table: Handle,
    h: int,
    g: int,
    d: int,
    f: int,
    cache: tuple[int, ...],
    bias: bool,
    dtype: str,
) -> Handle:
    k = x.shape[1]
    caches = [p.state(f"{name}.{part}_cache", cache, dtype) for part in "kv"]
    a = p.rms_norm(x, p.weight(f"{name}.attn_norm", (k,), dtype), 1e-5, name=f"{name}.a")
    shapes = {"q": ("h g d", (h, g, d)), "k": ("h d", (h, d)), "v": ("h d", (h, d))}
    parts = {}
    for part, (axes, shape) in shapes.items():
        weight = p.weight(f"{name}.w{part}", (*shape, k), dtype)
        added = p.weight(f"{name}.b{part}", shape, dtype) if bias else None
        spec = f"m k, {axes} k{f', {axes}' if bias else ''} -> m {axes}"
        parts[part] = p.linear(a, weight, added, spec, name=f"{name}.{part}")
    q = p.rope(parts["q"], ids, table, name=f"{name}.q_rope")
    keys = p.rope(parts["k"], ids, table, name=f"{name}.k_rope")
    p.kv_append(caches[0], keys, ids, name=f"{name}.k_append")
    p.kv_append(caches[1], parts["v"], ids, name=f"{name}.v_append")
    o = p.attention(q, *caches, ids, d**-0.5, name=f"{name}.attn")
    wo = p.weight(f"{name}.wo", (k, h, g, d), dtype)
    o = p.linear(o, wo, spec="m h g d, k h g d -> m k", name=f"{name}.o")
    x = p.pointwise("a0 + a1", x, o, name=f"{name}.mid")
    b = p.rms_norm(x, p.weight(f"{name}.ffn_norm", (k,), dtype), 1e-5, name=f"{name}.b")
    gate = p.linear(b, p.weight(f"{name}.w_gate", (f, k), dtype), name=f"{name}.gate")
    up = p.linear(b, p.weight(f"{name}.w_up", (f, k), dtype), name=f"{name}.up")
    act = p.pointwise("silu(a0) * a1", gate, up, name=f"{name}.act")
    down = p.linear(act, p.weight(f"{name}.w_down", (k, f), dtype), name=f"{name}.down")
    return p.pointwise("a0 + a1", x, down, name=f"{name}.out")


def mlp(rows: int = 4, hidden: int = 64, ffn: int = 256) -> Program:
    """Two linears with a pointwise between."""
    p = ProgramBuilder("mlp")
    x = p.input("x", (rows, hidden))
    h = p.linear(x, p.weight("w1", (ffn, hidden)), name="h").map("relu(a0)", name="a")
    return p.build(p.linear(h, p.weight("w2", (hidden, ffn)), name="y"))


EXTENTS = (3, 4, 6, 7, 8)
UNARY = ("relu(a0)", "a0 + 1.0", "abs(a0) - 2.0", "a0 * 2.0", "neg(a0)")
BINARY = ("a0 + a1", "a0 * a1", "a0 - a1", "maximum(a0, a1)")


def random_program(seed: int, *, num_ops: int = 6, overwrite: bool = False) -> Program:
    """A graph of ops that keep small integers exact. overwrite: with views and sets into them."""
    rng = random.Random(seed)
    p = ProgramBuilder(f"random {seed}")
    known = [p.input("x0", [rng.choice(EXTENTS) for _ in range(rng.choice((1, 2, 2, 3)))])]
    known.append(p.input("x1", [rng.choice(EXTENTS) for _ in range(2)]))
    if rng.random() < 0.3:
        ids = p.input("ids", (rng.choice((2, 3)),), "i64")
        known.append(p.embedding(ids, p.weight("table", (7, rng.choice(EXTENTS)))))
    for n in range(num_ops):
        known.append(_random_op(p, rng, known, n, overwrite))
    outputs = [known[-1], *rng.sample(known[3:-1], min(2, len(known) - 4))]
    return p.build(*{handle.name: handle for handle in outputs}.values())


def flattened(p: ProgramBuilder, x: Handle, *, view: bool) -> Handle:
    """All elements of x in one dim; a copy where no view can show them so."""
    size = math.prod(x.shape)
    try:
        return p.reshape(x, (size,), view=view)
    except ProgramError:
        return p.reshape(x, (size,))


def _random_op(
    p: ProgramBuilder, rng: random.Random, known: list[Handle], n: int, overwrite: bool
) -> Handle:
    x = rng.choice(known[-3:])
    rank = len(x.shape)
    dim = rng.randrange(rank)
    match rng.choice(KINDS + ("into",) * overwrite):
        case "linear" if rank <= 3:
            extent = rng.choice(EXTENTS)
            biases = [y for y in known if y.shape == (extent,)]
            bias = p.weight(f"b{n}", (extent,)) if rng.random() < 0.4 else None
            if bias is None and biases and rng.random() < 0.5:
                bias = rng.choice(biases)
            w = p.weight(f"w{n}", (extent, x.shape[-1]))
            return p.linear(x, w, bias)
        case "square" if rank == 2:
            return p.linear(x.map("minimum(maximum(a0, neg(2.0)), 2.0)"), x)
        case "self" if rank == 2:
            return p.linear(x, x, spec=rng.choice(("m k, n k -> m n", "k m, k n -> n m")))
        case "batch" if rank == 3:
            w = p.weight(f"w{n}", (x.shape[0], rng.choice(EXTENTS), x.shape[-1]))
            return p.linear(x, w, spec="b m k, b n k -> m b n")
        case "binary":
            same = [y for y in known if y.shape == x.shape]
            return p.pointwise(rng.choice(BINARY), x, rng.choice(same))
        case "vector":
            return p.pointwise("a0 * a1", x, p.weight(f"v{n}", x.shape[-1:]))
        case "reduce" if rank > 1:
            return p.reduce(x, dim, rng.choice(("sum", "max", "min")))
        case "slice" if x.shape[dim] > 3:
            stop = rng.choice((x.shape[dim] - 1, x.shape[dim]))
            return p.slice(x, dim, rng.choice((0, 1)), stop, view=rng.random() < 0.3)
        case "concat" if rank < 3:
            return p.concat([x, x] if rng.random() < 0.3 else [x, x.map("a0 - 1.0")], dim)
        case "transpose":
            order = rng.sample(range(rank), rank)
            return p.transpose(x, order, view=rng.random() < 0.3)
        case "reshape" if rank == 2:
            return flattened(p, x, view=rng.random() < 0.3)
        case "reshape" if x.shape[-1] % 2 == 0 and rank < 3:
            return p.reshape(x, [*x.shape[:-1], x.shape[-1] // 2, 2])
        case "set":
            return p.set(x)
        case "argmax" if rank == 2 and p._ops:
            p.argmax(x)
            return x.map("a0 + 0.0")
        case "into":
            base = p.set(x)
            part = p.slice(base, dim, 0, x.shape[dim] - 1, view=True) if x.shape[dim] > 1 else base
            p.set(part.map("a0 + 1.0"), into=part)
            return base
    return x.map(rng.choice(UNARY))


KINDS = (
    "linear", "linear", "binary", "vector", "reduce", "slice", "concat", "transpose", "reshape",
    "set", "unary", "argmax", "self", "square", "batch",
)  # fmt: skip
