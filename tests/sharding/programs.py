"""Programs that tests of sharding plan: a small decoder, an MLP; random ones are next door."""

from distmega.program.builder import Handle, ProgramBuilder
from distmega.program.types import Program


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
