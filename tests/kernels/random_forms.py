"""Random programs of rows in bf16, as layers of networks are made: residual sums of any form, norms
of every kind in every place, gates by any formula, attention, biases on some products, tables of
positions, several outputs.
"""

import random
from collections.abc import Callable

import torch
from torch import Tensor

from distmega.program.builder import Handle, ProgramBuilder
from distmega.program.types import Program

POSITIONS, VOCAB = 40, 50
WIDTHS = (8, 24, 40, 64, 72, 96, 160, 264)
INNER = (8, 16, 40, 72, 136)
ONE = (
    "silu(a0)", "gelu(a0)", "tanh(a0)", "relu(a0) ** 2.0", "a0", "sigmoid(a0) * a0 - 0.5",
    "exp(0.0 - abs(a0))", "where(lt(a0, 0.0), 0.1 * a0, a0)",
)  # fmt: skip
TWO = (
    "silu(a0) * a1", "a1 * gelu(a0)", "tanh(a0) + a1", "maximum(a0, a1)", "sin(a0) - cos(a1)",
)  # fmt: skip
THREE = ("silu(a0) * a1 + a2", "a0 * a1 * tanh(a2)")
SUMS = ("a0 + a1", "a0 + 0.5 * a1", "a0 * 0.7 - a1", "tanh(a0) + a1", "a0 - a1 * a1")
LONG_SUMS = ("a0 + a1 + a2", "a0 + a1 * a2", "a2 - tanh(a1) + a0")
HEADS = ((1, 1, 8), (2, 3, 24), (1, 4, 80), (3, 2, 56), (2, 1, 96))
"""Of keys, queries for each, elements."""


class Form:
    """A program under construction. rows: of x; attends: whether layers may."""

    def __init__(self, seed: int, rows: int, *, attends: bool) -> None:
        self.draw, self.rows = random.Random(seed), rows
        self.p, self.num = ProgramBuilder("form"), 0
        draw = self.draw
        self.size, self.heads = draw.choice(WIDTHS), draw.choice(HEADS)
        self.eps, self.wide = draw.choice((1e-5, 1e-6)), draw.random() < 0.2
        self.biased, self.rotated = draw.random() < 0.4, draw.random() < 0.7
        self.softcap = draw.choice((0.0, 0.0, 5.0))
        self.branches = (self.mlp, self.gated, self.attended) if attends else (self.mlp, self.gated)
        self.positions: Handle | None = None

    def name(self) -> str:
        self.num += 1
        return f"w{self.num}"

    def weight(self, shape: tuple[int, ...], dtype: str = "bf16") -> Handle:
        return self.p.weight(self.name(), shape, dtype)

    def at(self) -> Handle:
        self.positions = self.positions or self.p.input("positions", (self.rows,), "i64")
        return self.positions

    def linear(self, x: Handle, size: int) -> Handle:
        bias = self.weight((size,)) if self.biased and self.draw.random() < 0.8 else None
        return self.p.linear(x, self.weight((size, x.shape[-1])), bias)

    def norm(self, x: Handle) -> Handle:
        dtype, shape = "f32" if self.wide else "bf16", x.shape[-1:]
        kind = self.draw.choice(("rms", "rms", "both", "weight", "neither", "none"))
        if kind == "none":
            return x
        if kind == "rms":
            return self.p.rms_norm(x, self.weight(shape, dtype), self.eps)
        weight = None if kind == "neither" else self.weight(shape, dtype)
        bias = self.weight(shape, dtype) if kind == "both" else None
        return self.p.layer_norm(x, weight, bias, self.eps)

    def mlp(self, x: Handle) -> Handle:
        for _ in range(self.draw.choice((1, 1, 2))):
            x = self.linear(x, self.draw.choice(INNER)).map(self.draw.choice(ONE))
        return self.linear(x, self.size)

    def gated(self, x: Handle) -> Handle:
        formula = self.draw.choice((*TWO, *TWO, *THREE))
        inner = self.draw.choice(INNER)
        parts = [self.linear(x, inner) for _ in range(3 if "a2" in formula else 2)]
        return self.linear(self.p.pointwise(formula, *parts), self.size)

    def attended(self, x: Handle) -> Handle:
        p, (heads, group, dim) = self.p, self.heads
        q = p.reshape(
            self.linear(x, heads * group * dim), (self.rows, heads, group, dim), view=True
        )
        k, v = (
            p.reshape(self.linear(x, heads * dim), (self.rows, heads, dim), view=True)
            for _ in range(2)
        )
        if self.rotated:
            table = p.weight("angles", (POSITIONS, dim), "f32")
            q, k = p.rope(q, self.at(), table), p.rope(k, self.at(), table)
        shape = (*((self.rows,) if self.rows > 1 else ()), heads, POSITIONS, dim)
        caches = [p.state(self.name(), shape, "bf16") for _ in range(2)]
        for cache, new in zip(caches, (k, v), strict=True):
            p.kv_append(cache, new, self.at())
        window = self.draw.choice((0, 0, 5))
        out = p.attention(q, *caches, self.at(), dim**-0.5, window, softcap=self.softcap)
        return self.linear(p.reshape(out, (self.rows, heads * group * dim), view=True), self.size)

    def branch(self, x: Handle) -> Handle:
        return self.draw.choice(self.branches)(x)

    def layer(self, x: Handle, kept: list[Handle]) -> Handle:
        p, formula, form = self.p, self.draw.choice(SUMS), self.draw.randrange(7)
        normed = self.norm(x) if form in (0, 1, 2, 3, 6) else x
        y = self.branch(normed)
        match form:
            case 0:  # before
                return p.pointwise(formula, x, y)
            case 1:  # before and after
                return p.pointwise(formula, x, self.norm(y))
            case 2:  # two branches side by side
                return p.pointwise(self.draw.choice(LONG_SUMS), x, y, self.branch(normed))
            case 3:  # what is normalised goes on
                return p.pointwise(formula, normed, y)
            case 4:  # of the sum
                return self.norm(p.pointwise(formula, x, y))
            case 5:  # no sum
                return y
        return p.pointwise(self.draw.choice(LONG_SUMS), x, y, self.draw.choice(kept))

    def entry(self) -> Handle:
        shape, draw = (self.rows, self.size), self.draw
        if draw.random() < 0.5:
            x = self.p.input("x", shape, "bf16")
        else:
            ids = self.p.input("ids", (self.rows,), "i64")
            x = self.p.embedding(ids, self.p.weight("table", (VOCAB, self.size), "bf16"))
        if draw.random() < 0.3:
            x = x + self.p.embedding(self.at(), self.weight((POSITIONS, self.size)))
        return x.map(draw.choice(ONE)) if draw.random() < 0.15 else x

    def build(self) -> Program:
        kept = [self.entry()]
        for _ in range(self.draw.randint(1, 3)):
            kept.append(self.layer(kept[-1], kept))
        last = self.norm(kept[-1])
        ends: list[Callable[[], list[Handle]]] = [
            lambda: [self.p.softmax(self.linear(last, 40))],
            lambda: [self.linear(last, 104), kept[-1]],
            self.chooser(last, "a0"),
            self.chooser(last, "30.0 * tanh(a0 / 30.0)"),
        ]
        outs = self.draw.choice(ends)()
        if self.draw.random() < 0.3:
            outs.append(self.draw.choice(kept[1:]))
        return self.p.build(*{one.name: one for one in outs}.values())

    def chooser(self, x: Handle, formula: str) -> Callable[[], list[Handle]]:
        def end() -> list[Handle]:
            logits = self.linear(x, 97)
            logits = logits if formula == "a0" else logits.map(formula)
            return [self.p.argmax(logits), logits]

        return end


def random_form(seed: int, rows: int = 1, *, attends: bool = True) -> Program:
    """The program of a seed, of so many rows. attends: whether layers may have attention."""
    return Form(seed, rows, attends=attends).build()


def random_values(program: Program, seed: int) -> dict[str, Tensor]:
    """Inputs, weights and states; products of about 1."""
    generator = torch.Generator().manual_seed(seed)
    values: dict[str, Tensor] = {}
    for tensor in program.tensors:
        if tensor.role == "temp":
            continue
        if tensor.dtype == "i64":
            most = POSITIONS if tensor.name == "positions" else VOCAB
            values[tensor.name] = torch.randint(0, most, tensor.shape, generator=generator)
            continue
        x = torch.randn(tensor.shape, generator=generator)
        if tensor.role == "weight" and tensor.name not in ("table", "angles"):
            x = x * tensor.shape[-1] ** -0.5 if len(tensor.shape) > 1 else 1 + 0.1 * x
        values[tensor.name] = x if tensor.dtype == "f32" else x.bfloat16()
    return values
