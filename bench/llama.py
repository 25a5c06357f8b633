"""A decode step of Llama-3.2-1B, and of decoders with other parts, each with the same in torch.

In: a variant and sizes. Out: a Model (models.py), whose program gives a token and whose torch gives
logits. Used by programs.py and by tests, which run it small.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from bench.models import EPS, Model, Tensors, layer_norm, torch_norm
from distmega.program.builder import Handle, ProgramBuilder
from distmega.program.types import Program
from distmega.sharding.layout.placements import Layout, shard

VARIANTS = ("plain", "gelu", "layernorm", "parallel", "postnorm", "heads96")
"""plain: as Llama has it; gelu: gates by gelu; layernorm: layer norms, and biases everywhere;
parallel: attention and feed-forward of the same normed row; postnorm: norm(x + f(x)); heads96: 24
query and 6 kv heads of 96.
"""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """Sizes of a step. dim: elements of a head; cached: positions of a cache."""

    variant: str
    layers: int
    hidden: int
    num_heads: int
    kv_heads: int
    dim: int
    inner: int
    vocab: int
    cached: int

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.num_heads // self.kv_heads

    @property
    def has_bias(self) -> bool:
        """Whether matrices have biases, and norms are layer norms."""
        return self.variant == "layernorm"


def llama_1b(
    variant: str,
    layers: int = 16,
    hidden: int = 2048,
    heads: tuple[int, int, int] = (32, 8, 64),
    inner: int = 8192,
    vocab: int = 128256,
    position: int = 512,
    with_state: bool = False,
) -> Model:
    """A decode step with `position` cached tokens. variant: of VARIANTS. heads: query heads, kv
    heads, elements of each. with_state: gives what the head reads too.
    """
    num_heads, kv_heads, dim = heads
    if variant == "heads96":
        num_heads, kv_heads, dim = num_heads * 3 // 4, kv_heads * 3 // 4, 96
    shape = StepSizes(
        variant=variant,
        layers=layers,
        hidden=hidden,
        num_heads=num_heads,
        kv_heads=kv_heads,
        dim=dim,
        inner=inner,
        vocab=vocab,
        cached=-(-(position + 1) // 8) * 8,  # as torch's attention wants masks
    )
    step = _Step(shape, ProgramBuilder(f"llama_{variant}"))

    def in_torch(own: Tensors, total: Callable[[Tensor], Tensor]) -> Tensor:
        return _InTorch(shape, own, total).logits()

    program = step.program(with_state)
    return Model(program=program, marks=step.marks, in_torch=in_torch, position=position)


class _Parts(Protocol[T]):
    """What a layer is made of, for rows of type T."""

    def norm(self, x: T, name: str) -> T: ...
    def attention(self, x: T, i: int) -> T: ...
    def feed_forward(self, x: T, i: int) -> T: ...
    def add(self, *rows: T) -> T: ...


def _layer(variant: str, parts: _Parts[T], x: T, i: int) -> T:
    """Layer i, by the parts that a variant has in its order."""
    if variant == "postnorm":
        x = parts.norm(parts.add(x, parts.attention(x, i)), f"{i}.norm1")
        return parts.norm(parts.add(x, parts.feed_forward(x, i)), f"{i}.norm2")
    if variant == "parallel":
        h = parts.norm(x, f"{i}.norm1")
        return parts.add(x, parts.attention(h, i), parts.feed_forward(h, i))
    x = parts.add(x, parts.attention(parts.norm(x, f"{i}.norm1"), i))
    return parts.add(x, parts.feed_forward(parts.norm(x, f"{i}.norm2"), i))


@dataclass(slots=True)
class _Step:
    """The program under construction. marks: how ranks divide its weights."""

    shape: StepSizes
    p: ProgramBuilder
    marks: dict[str, Layout] = field(default_factory=dict)
    at: Handle = field(init=False)
    rope: Handle = field(init=False)

    def program(self, with_state: bool) -> Program:
        """The whole step; with_state: as llama_1b takes it."""
        shape, p = self.shape, self.p
        token, self.at = p.input("token", (1,), "i64"), p.input("position", (1,), "i64")
        table = p.weight("embed", (shape.vocab, shape.hidden), "bf16")
        self.rope = p.weight("rope", (shape.cached, shape.dim))
        self.marks["embed"] = shard(0, "tp")
        x = p.embedding(token, table)
        for i in range(shape.layers):
            x = _layer(shape.variant, self, x, i)
        x = x if shape.variant == "postnorm" else self.norm(x, "norm")
        chosen = p.argmax(p.linear(x, table))
        return p.build(chosen, x) if with_state else p.build(chosen)

    def norm(self, x: Handle, name: str) -> Handle:
        if self.shape.has_bias:
            return layer_norm(self.p, x, name)
        return self.p.rms_norm(x, self.p.weight(f"{name}.w", x.shape[-1:], "bf16"), EPS)

    def add(self, *rows: Handle) -> Handle:
        return self.p.pointwise(" + ".join(f"a{n}" for n in range(len(rows))), *rows)

    def linear(self, x: Handle, name: str, shape: tuple[int, ...], spec: str, split: int) -> Handle:
        """A product of a weight of this shape, whose dim `split` ranks divide."""
        self.marks[f"{name}.w"] = shard(split, "tp")
        left, out = spec.split("->")
        weight = self.p.weight(f"{name}.w", shape, "bf16")
        if not self.shape.has_bias:
            return self.p.linear(x, weight, spec=spec)
        columns = " ".join(out.split()[1:])
        bias = self.p.weight(f"{name}.b", shape[:1] if split else shape[:-1], "bf16")
        return self.p.linear(x, weight, bias, spec=f"{left}, {columns} -> {out}")

    def attention(self, x: Handle, i: int) -> Handle:
        p, shape = self.p, self.shape
        heads, group, dim, hidden = shape.kv_heads, shape.group, shape.dim, shape.hidden
        q = self.linear(x, f"{i}.q", (heads, group, dim, hidden), "m k, h g d k -> m h g d", 0)
        k, v = (
            self.linear(x, f"{i}.{name}", (heads, dim, hidden), "m k, h d k -> m h d", 0)
            for name in "kv"
        )
        caches = [p.state(f"{i}.{name}_cache", (heads, shape.cached, dim), "bf16") for name in "kv"]
        p.kv_append(caches[0], p.rope(k, self.at, self.rope), self.at)
        p.kv_append(caches[1], v, self.at)
        mixed = p.attention(p.rope(q, self.at, self.rope), *caches, self.at, dim**-0.5)
        return self.linear(
            mixed, f"{i}.o", (hidden, heads, group, dim), "m h g d, k h g d -> m k", 1
        )

    def feed_forward(self, x: Handle, i: int) -> Handle:
        inner, hidden = self.shape.inner, self.shape.hidden
        gate = "gelu(a0) * a1" if self.shape.variant == "gelu" else "silu(a0) * a1"
        pair = [
            self.linear(x, f"{i}.{name}", (inner, hidden), "m k, n k -> m n", 0)
            for name in ("gate", "up")
        ]
        mixed = self.p.pointwise(gate, *pair)
        return self.linear(mixed, f"{i}.down", (hidden, inner), "m k, n k -> m n", 1)


class _InTorch:
    """The same step on a rank's tensors by name; total: the sum over ranks."""

    def __init__(self, shape: StepSizes, own: Tensors, total: Callable[[Tensor], Tensor]) -> None:
        self.shape, self.own, self.total = shape, own, total
        self.at = own["position"]
        self.cos, self.sin = own["rope"][self.at].to(own["embed"].dtype).chunk(2, -1)
        self.seen = (torch.arange(shape.cached, device=self.at.device) <= self.at)[None, None]

    def logits(self) -> Tensor:
        """[1, vocab], those of all ranks."""
        x, table, variant = self.embedded(), self.own["embed"], self.shape.variant
        for i in range(self.shape.layers):
            x = _layer(variant, self, x, i)
        logits = F.linear(x if variant == "postnorm" else self.norm(x, "norm"), table)
        if len(table) == self.shape.vocab:
            return logits
        parts = [torch.empty_like(logits) for _ in range(self.shape.vocab // len(table))]
        dist.all_gather(parts, logits)
        return torch.cat(parts, -1)

    def embedded(self) -> Tensor:
        token, table = self.own["token"], self.own["embed"]
        x = table[token % len(table)]
        if len(table) < self.shape.vocab:  # ranks have parts of it, in their order
            x = self.total(x * (token // len(table) == dist.get_rank()))
        return x

    def norm(self, x: Tensor, name: str) -> Tensor:
        if self.shape.has_bias:
            return torch_norm(self.own, x, name)
        return F.rms_norm(x, x.shape[-1:], self.own[f"{name}.w"], EPS)

    def add(self, *rows: Tensor) -> Tensor:
        first, *others = rows
        for x in others:
            first = first + x
        return first

    def product(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self.own[f"{name}.w"], self.own.get(f"{name}.b")
        flat = weight.reshape(-1, x.shape[-1])
        return F.linear(x, flat, None if bias is None else bias.reshape(-1))

    def rotated(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * self.cos - b * self.sin, b * self.cos + a * self.sin), -1)

    def attention(self, x: Tensor, i: int) -> Tensor:
        q, k, v = (self.product(x, f"{i}.{name}").view(-1, self.shape.dim) for name in "qkv")
        keys, values = self.own[f"{i}.k_cache"], self.own[f"{i}.v_cache"]
        keys.index_copy_(1, self.at, self.rotated(k)[:, None])
        values.index_copy_(1, self.at, v[:, None])
        # a kv head's queries, all at the same position
        queries = self.rotated(q).view(1, -1, self.shape.group, self.shape.dim)
        mixed = F.scaled_dot_product_attention(
            queries, keys[None], values[None], attn_mask=self.seen
        )
        out, bias = self.own[f"{i}.o.w"].reshape(self.shape.hidden, -1), self.own.get(f"{i}.o.b")
        return self.total(F.linear(mixed.reshape(1, -1), out, bias))

    def feed_forward(self, x: Tensor, i: int) -> Tensor:
        activate = F.gelu if self.shape.variant == "gelu" else F.silu
        inside = activate(self.product(x, f"{i}.gate")) * self.product(x, f"{i}.up")
        return self.total(self.product(inside, f"{i}.down"))
