"""Random programs of rows in small whole numbers, which every way of computing gives exactly.

Weights have few entries of 1 or -1 a row and results are cut to a few values, so that every number
on the way is one of bf16's.
"""

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from distmega.program.builder import Handle, ProgramBuilder
from distmega.program.types import Program

MOST = 8
"""Absolute value of a result, at most."""
ENTRIES = 6
"""Of a row of weights that are not zero, at most."""
SIZES = (64, 72, 128, 160, 192, 320, 640, 1088)
SIZES_OF_ROWS = 3
"""Sizes of a program of several rows."""
FORMULAS = {
    1: ("a0", "relu(a0)", "abs(a0) - 3.0", "a0 * 2.0 - 1.0", "floor(a0 * 0.5)"),
    2: ("a0 + a1", "a1 - a0", "maximum(a0, a1)", "a0 * a1", "where(lt(a0, a1), a0 + 1.0, a1)"),
    3: ("a0 + a1 + a2", "a0 - a1 * a2", "maximum(a0, a1) - a2", "minimum(a2 - a0, a1)"),
}


@dataclass(slots=True)
class _Rows:
    """A program under construction. kept: what an epilogue may take, by elements of a row."""

    seed: int
    rows: int
    sizes: tuple[int, ...] = SIZES
    p: ProgramBuilder = field(default_factory=lambda: ProgramBuilder("rows"))
    kept: dict[int, list[Handle]] = field(default_factory=dict)
    num_weights: int = 0

    def build(self) -> Program:
        draw = random.Random(self.seed)
        if self.rows > 1:
            self.sizes = tuple(draw.sample(SIZES, SIZES_OF_ROWS))
        size, has_table = draw.choice(self.sizes), draw.random() < 0.3
        if has_table:
            table = self.p.weight("table", (48, size), "bf16")
            x = self.p.embedding(self.p.input("ids", (self.rows,), "i64"), table)
        else:
            x = self.p.input("x", (self.rows, size), "bf16")
        self.kept[size] = [x]
        for _ in range(draw.randint(1, 5)):
            x = self.step(draw, x)
        outs = [x]
        others = [one for each in self.kept.values() for one in each[1:] if one is not x]
        if others and draw.random() < 0.4:
            outs.append(draw.choice(others))
        if draw.random() < 0.3:
            outs.append(self.p.argmax(self.linear(draw, x, draw.choice((96, 1000)), bias=False)))
        return self.p.build(*outs)

    def linear(self, draw: random.Random, x: Handle, rows: int, *, bias: bool) -> Handle:
        self.num_weights += 1
        name = f"w{self.num_weights}"
        weight = self.p.weight(name, (rows, x.shape[-1]), "bf16")
        return self.p.linear(
            x, weight, self.p.weight(f"{name}.b", (rows,), "bf16") if bias else None
        )

    def step(self, draw: random.Random, x: Handle) -> Handle:
        """A contraction of x, or two that meet or stand side by side, and what follows it."""
        known = draw.choice([*self.kept, 0, 0])
        rows, bias = known or draw.choice(self.sizes), draw.random() < 0.4
        kind = draw.choice(("plain", "plain", "streams", "beside"))
        products = [self.linear(draw, x, rows, bias=bias) for _ in range(1 + (kind != "plain"))]
        if kind == "beside":
            return self.beside(draw, products)
        operands = self.kept.get(rows, []) if kind == "plain" else []
        taken = draw.sample(operands, min(len(operands), draw.randint(0, 2)))
        arguments = [*products, *taken]
        draw.shuffle(arguments)
        y = self.p.pointwise(clamped(draw.choice(FORMULAS[len(arguments)])), *arguments)
        if kind == "plain":
            self.kept.setdefault(rows, []).append(y)
        return y

    def beside(self, draw: random.Random, products: list[Handle]) -> Handle:
        """Two results of one x, each with a reader of its own that gives another vector."""
        ends = []
        size = draw.choice(self.sizes)
        for product in products:
            y = self.linear(draw, product, size, bias=False).map(clamped("a0"))
            self.kept.setdefault(size, []).append(y)
            ends.append(y)
        return draw.choice(ends)


def clamped(formula: str) -> str:
    return f"minimum(maximum({formula}, {-MOST}.0), {MOST}.0)"


def random_rows(seed: int, rows: int = 1) -> Program:
    """The program of a seed."""
    return _Rows(seed, rows).build()


def whole_numbers(program: Program, seed: int) -> dict[str, Tensor]:
    """Inputs and weights of a program."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(shape: tuple[int, ...], most: int) -> Tensor:
        return torch.randint(-most, most + 1, shape, generator=generator)

    values: dict[str, Tensor] = {}
    for tensor in program.tensors:
        if tensor.role == "temp":
            continue
        if tensor.dtype == "i64":
            values[tensor.name] = torch.randint(0, 48, tensor.shape, generator=generator)
        elif tensor.role == "input" or tensor.name == "table" or len(tensor.shape) == 1:
            values[tensor.name] = numbers(tensor.shape, 4).bfloat16()
        else:
            rows, columns = tensor.shape
            weight = torch.zeros(rows, columns)
            at = torch.randint(0, columns, (rows, ENTRIES), generator=generator)
            weight.scatter_(1, at, numbers((rows, ENTRIES), 1).float())
            values[tensor.name] = weight.bfloat16()
    return values
