"""The six programs of the paper (Mirage), at any sizes: what the benchmark searches.

Comes in: a case such as "lora k=4096 n=4096 rank=16 rows=1". Goes out: a Program in bf16.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from distmega.arguments import shown
from distmega.errors import RequestError
from distmega.program.builder import Handle, ProgramBuilder
from distmega.program.types import Program

DTYPE = "bf16"


def gqa_decode(rows: int, ctx: int, heads: int, kv: int, dim: int) -> Program:
    """Attention of one new token each of `rows` sequences to a cache of ctx tokens, kv heads."""
    p = ProgramBuilder("gqa_decode")
    q = p.input("q", (rows, kv, heads // kv, dim), DTYPE)
    k, v = (p.input(name, (rows, kv, ctx, dim), DTYPE) for name in ("k", "v"))
    scores = p.linear(q, k, spec="m h g d, m h t d -> m h g t")
    weights = p.softmax(scores.map(f"a0 * {dim**-0.5!r}"))
    return p.build(p.linear(weights, v, spec="m h g t, m h t e -> m h g e"))


def qknorm_attention(rows: int, ctx: int, heads: int, dim: int) -> Program:
    """Attention whose queries and keys are normalized by their heads' root mean squares."""
    p = ProgramBuilder("qknorm_attention")
    q = p.input("q", (rows, heads, dim), DTYPE)
    k, v = (p.input(name, (heads, ctx, dim), DTYPE) for name in ("k", "v"))
    q = p.rms_norm(q, p.weight("wq", (dim,), DTYPE), 1e-6)
    k = p.rms_norm(k, p.weight("wk", (dim,), DTYPE), 1e-6)
    scores = p.linear(q, k, spec="m h d, h t d -> m h t").map(f"a0 * {dim**-0.5!r}")
    return p.build(p.linear(p.softmax(scores), v, spec="m h t, h t e -> m h e"))


def rmsnorm_linear(rows: int, k: int, n: int) -> Program:
    """A norm, then a linear layer."""
    p = ProgramBuilder("rmsnorm_linear")
    x = p.rms_norm(p.input("x", (rows, k), DTYPE), p.weight("g", (k,), DTYPE), 1e-5)
    return p.build(p.linear(x, p.weight("w", (n, k), DTYPE)))


def lora(rows: int, k: int, n: int, rank: int) -> Program:
    """A linear layer beside one of low rank."""
    p = ProgramBuilder("lora")
    x = p.input("x", (rows, k), DTYPE)
    low = p.linear(x, p.weight("a", (rank, k), DTYPE))
    high = p.linear(low, p.weight("b", (n, rank), DTYPE))
    return p.build(p.linear(x, p.weight("w", (n, k), DTYPE)) + high)


def gated_mlp(rows: int, k: int, n: int) -> Program:
    """The first half of a gated MLP: silu of one linear layer times another."""
    p = ProgramBuilder("gated_mlp")
    x = p.input("x", (rows, k), DTYPE)
    gate, up = (p.linear(x, p.weight(name, (n, k), DTYPE)) for name in ("gate", "up"))
    return p.build(gate.map("silu(a0) * a1", up))


def ntrans(rows: int, hidden: int) -> Program:
    """nGPT's residual step: norm(x + alpha (norm(h) - x)), norms of length 1."""
    p = ProgramBuilder("ntrans")
    x, h = (p.input(name, (rows, hidden), DTYPE) for name in ("x", "h"))
    alpha = p.weight("alpha", (hidden,), DTYPE)

    def unit(a: Handle) -> Handle:
        total = p.reshape(p.reduce(a.map("a0 * a0"), 1), (rows, 1))
        return a.map("a0 * rsqrt(a1 + 1e-06)", total)

    return p.build(unit(x.map("a0 + a1 * (a2 - a0)", alpha, unit(h))))


@dataclass(frozen=True, slots=True)
class ProgramFamily:
    """A program by its sizes' names."""

    build: Callable[..., Program]
    sizes: tuple[str, ...]


FAMILIES = {
    "gqa_decode": ProgramFamily(gqa_decode, ("ctx", "heads", "kv", "dim")),
    "qknorm_attention": ProgramFamily(qknorm_attention, ("ctx", "heads", "dim")),
    "rmsnorm_linear": ProgramFamily(rmsnorm_linear, ("k", "n")),
    "lora": ProgramFamily(lora, ("k", "n", "rank")),
    "gated_mlp": ProgramFamily(gated_mlp, ("k", "n")),
    "ntrans": ProgramFamily(ntrans, ("hidden",)),
}
"""Programs by name."""

PAPER_CASES = (
    "gqa_decode ctx=8192 heads=32 kv=8 dim=128",
    "qknorm_attention ctx=4096 heads=32 dim=128",
    "rmsnorm_linear k=4096 n=4096",
    "lora k=4096 n=4096 rank=16",
    "gated_mlp k=4096 n=11008",
    "ntrans hidden=4096",
)


_SIZE = re.compile(r"([a-z]+)=([0-9]{1,18})")


def read_case(text: str) -> Program:
    """The program that "NAME SIZE=N ... rows=N" names; rows is 1 unless said. RequestError."""
    name, *words = text.split() or [""]
    family = FAMILIES.get(name)
    sizes = {match[1]: match[2] for match in map(_SIZE.fullmatch, words) if match}
    wanted = {*family.sizes, "rows"} if family else set()
    if not family or {"rows": "1", **sizes}.keys() != wanted or len(sizes) != len(words):
        forms = "; ".join(f"{n} {' '.join(f'{s}=N' for s in f.sizes)}" for n, f in FAMILIES.items())
        raise _wrong_case(text, f"one of: {forms}, with rows=N")
    numbers = {key: int(value) for key, value in {"rows": "1", **sizes}.items()}
    if min(numbers.values()) < 1:
        raise _wrong_case(text, "sizes of at least 1")
    if numbers.get("heads", 0) % numbers.get("kv", 1):
        raise _wrong_case(text, "as many heads for each of kv")
    return family.build(**numbers)


def _wrong_case(text: str, expected: str) -> RequestError:
    return RequestError(f"case {shown(text)}", expected=expected, remedy="correct it")
