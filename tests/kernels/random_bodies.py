"""Random programs around one kind of work each, of random extents and 1 to 16 rows, in floats."""

import random
from collections.abc import Callable

from distmega.program.builder import Handle, ProgramBuilder
from distmega.program.types import Program
from tests.kernels.row_programs import attending, matrix

FORMULAS = {
    1: ("tanh(a0)", "silu(a0)", "gelu(a0)", "relu(a0) * 0.5", "a0 / (1.0 + abs(a0))"),
    2: ("silu(a0) * a1", "a0 + a1", "maximum(a0, a1)", "gelu(a1) * a0", "a0 - tanh(a1)"),
    3: ("a0 + a1 * sigmoid(a2)", "a0 - a1 + a2", "maximum(a0, a1) * tanh(a2)"),
}


LEAST = 256
"""Elements of a row whose error is looked at: of fewer it is chance."""


def num_rows(draw: random.Random) -> int:
    """1 as often as more."""
    return 1 if draw.random() < 0.5 else draw.randint(2, 16)


def elements(draw: random.Random, most: int, least: int = 8) -> int:
    """Of a row that products take."""
    return 8 * draw.randint(least // 8, most // 8)


def normed(p: ProgramBuilder, draw: random.Random, x: Handle, name: str) -> Handle:
    """Some norm of rows."""
    length = x.shape[-1:]
    kind, eps = draw.choice(("rms", "layer", "layer")), 1e-5
    weight = p.weight(f"{name}.g", length, "bf16")
    if kind == "rms":
        return p.rms_norm(x, weight, eps, name=name)
    bias = p.weight(f"{name}.s", length, "bf16") if draw.random() < 0.5 else None
    return p.layer_norm(x, weight, bias, eps, name=name)


def products(draw: random.Random) -> Program:
    """Two contractions with an epilogue each, a norm in front of the second one or not."""
    p = ProgramBuilder("products")
    rows, inner = num_rows(draw), elements(draw, 3000, LEAST)
    x = p.input("x", (rows, elements(draw, 6000)), "bf16")
    bias = draw.random() < 0.5
    streams = [matrix(p, x, inner, f"y{i}", bias=bias) for i in range(draw.randint(1, 2))]
    y = p.pointwise(draw.choice(FORMULAS[len(streams)]), *streams, name="y")
    z = normed(p, draw, y, "n") if draw.random() < 0.5 else y
    outer = draw.choice((inner, elements(draw, 4000, LEAST)))
    out = matrix(p, z, outer, "z", bias=draw.random() < 0.5)
    carried = [y] * (outer == inner)
    return p.build(p.pointwise(draw.choice(FORMULAS[1 + len(carried)]), out, *carried, name="out"))


def rows_alone(draw: random.Random) -> Program:
    """Norms, softmax and formulas of whole rows behind a contraction."""
    p = ProgramBuilder("rows")
    rows, size = num_rows(draw), elements(draw, 2000, LEAST)
    x = p.input("x", (rows, elements(draw, 1500)), "bf16")
    y = matrix(p, x, size, "y", bias=draw.random() < 0.5).map("tanh(a0)", name="t")
    outs = []
    for i in range(draw.randint(1, 2)):
        kind = draw.choice(("norm", "softmax", "both"))
        z = p.softmax(y, name=f"m{i}") if kind == "softmax" else normed(p, draw, y, f"n{i}")
        if kind == "both":
            z = p.pointwise(draw.choice(FORMULAS[2]), z, y, name=f"f{i}")
        outs.append(z)
    return p.build(*outs)


def attention(draw: random.Random) -> Program:
    """A decode step of one or two layers, sequences at positions of their own."""
    rows = num_rows(draw)
    dim = 8 * draw.randint(1, 32)
    heads = max(draw.randint(1, 3), -(-LEAST // dim))
    biased = draw.random() < 0.25
    return attending(
        layers=draw.randint(1, 2), heads=heads, dim=dim, group=draw.randint(1, 12), rows=rows,
        softcap=draw.choice((0.0, 0.0, 0.5, 5.0)), window=draw.choice((0, draw.randint(1, 400))),
        biased=biased, each_head=not biased and draw.random() < 0.5,
        dtype=draw.choice(("bf16", "f32")), ffn=elements(draw, 600), vocab=draw.randint(40, 700),
        context=draw.randint(100, 1500),
    )  # fmt: skip


def choice(draw: random.Random) -> Program:
    """Tokens looked up, and the next ones chosen from logits with a bias or without."""
    p = ProgramBuilder("choice")
    vocab, size = draw.randint(10, 40000), elements(draw, 700)
    ids = p.input("ids", (num_rows(draw),), "i64")
    x = p.embedding(ids, p.weight("table", (draw.randint(20, 3000), size), "bf16"), name="x")
    x = normed(p, draw, x, "n") if draw.random() < 0.7 else x
    logits = matrix(p, x, vocab, "logits", bias=draw.random() < 0.5)
    return p.build(p.argmax(logits, name="next"))


BODIES: tuple[Callable[[random.Random], Program], ...] = (
    products, attention, rows_alone, attention, choice, products,
)  # fmt: skip


def random_body(seed: int) -> Program:
    """The program of a seed."""
    return BODIES[seed % len(BODIES)](random.Random(seed))
