"""Small programs, and random ones, for the superoptimizer's tests."""

import numpy as np

from distmega.program.builder import Handle, ProgramBuilder
from distmega.program.types import Program

UNARY = ("a0 * a0", "a0 * 0.5", "a0 + 2.0", "exp(a0 * 0.25)", "1.0 / a0", "silu(a0)")
BINARY = ("a0 * a1", "a0 + a1", "a0 - a1", "a0 / a1")


def random_program(seed: int, dtype: str = "f32") -> Program:
    """One to four ops over x [4, 4], y [4, 4] and w [4, 4]; at most one exp on a path."""
    rng = np.random.default_rng(seed)
    p = ProgramBuilder(f"random{seed}")
    values: list[tuple[Handle, bool]] = [
        (p.input(name, (4, 4), dtype), False) for name in ("x", "y", "w")
    ]
    for _ in range(int(rng.integers(1, 5))):
        a, b = (values[int(rng.integers(max(0, len(values) - 3), len(values)))] for _ in range(2))
        kind = int(rng.integers(4))
        has_exp = a[1] or b[1]
        if kind == 0:
            texts = [t for t in UNARY if not (a[1] and ("exp" in t or "silu" in t))]
            text = texts[int(rng.integers(len(texts)))]
            values.append((a[0].map(text), a[1] or "exp" in text or "silu" in text))
        elif kind == 1:
            values.append((a[0].map(BINARY[int(rng.integers(4))], b[0]), has_exp))
        elif kind == 2 and a[0].name != b[0].name:
            values.append((p.linear(a[0], b[0], spec="m k, n k -> m n"), has_exp))
        else:
            total = p.reshape(p.reduce(a[0], 1), (4, 1))
            values.append((b[0].map(BINARY[int(rng.integers(2))], total), has_exp))
    return p.build(values[-1][0])


def attention(dtype: str = "bf16", ctx: int = 256, heads: int = 4) -> Program:
    """One query a head over a cache."""
    p = ProgramBuilder("attention")
    q = p.input("q", (heads, 64), dtype)
    k, v = (p.input(name, (heads, ctx, 64), dtype) for name in ("k", "v"))
    scores = p.linear(q, k, spec="h d, h t d -> h t").map("a0 * 0.125")
    return p.build(p.linear(p.softmax(scores), v, spec="h t, h t e -> h e"))


def norm_linear(dtype: str = "bf16", rows: int = 4, k: int = 256, n: int = 512) -> Program:
    """A norm, then a linear layer."""
    p = ProgramBuilder("norm_linear")
    x = p.rms_norm(p.input("x", (rows, k), dtype), p.weight("g", (k,), dtype), 1e-5)
    return p.build(p.linear(x, p.weight("w", (n, k), dtype)))


def lora(dtype: str = "bf16") -> Program:
    """A linear layer beside one of low rank."""
    p = ProgramBuilder("lora")
    x = p.input("x", (16, 256), dtype)
    low = p.linear(x, p.weight("a", (16, 256), dtype))
    high = p.linear(low, p.weight("b", (512, 16), dtype))
    return p.build(p.linear(x, p.weight("w", (512, 256), dtype)) + high)


def gated(dtype: str = "bf16") -> Program:
    """silu of one linear layer times another."""
    p = ProgramBuilder("gated")
    x = p.input("x", (16, 256), dtype)
    gate, up = (p.linear(x, p.weight(name, (512, 256), dtype)) for name in ("gate", "up"))
    return p.build(gate.map("silu(a0) * a1", up))
