"""Programs, each with the same in torch: an MLP, blocks of GPT-2, BERT and MLP-Mixer.

In: rows and sizes. Out: a Model, whose tensors are bf16 unless said otherwise. llama.py beside it
has decode steps of decoders; programs.py measures them, and tests run them small.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distmega.program.builder import Handle, ProgramBuilder
from distmega.program.types import Program
from distmega.sharding.layout.placements import Layout, shard

EPS = 1e-5
GELU_TANH = "0.5 * a0 * (1.0 + tanh(0.7978845608028654 * (a0 + 0.044715 * a0 * a0 * a0)))"

Tensors = Mapping[str, Tensor]
Region = Callable[[Callable[..., Any]], Callable[..., Any]]
"""From a function that every layer calls to one that does the same: compiled once for all layers.
Between ranks' collectives torch joins nothing, so there it costs no speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A program, how ranks divide it, and the same in torch on a rank's tensors by name, given the
    sum over ranks: its result, or the logits of a program that gives a token. position: of integer
    inputs, and a token. by_regions: as in_torch, each part that layers repeat through a Region.
    """

    program: Program
    marks: dict[str, Layout]
    in_torch: Callable[[Tensors, Callable[[Tensor], Tensor]], Tensor]
    by_regions: Callable[[Tensors, Callable[[Tensor], Tensor], Region], Tensor] | None = None
    position: int = 700


def gated_mlp(
    rows: int, layers: int = 16, hidden: int = 2048, inner: int = 8192, dtype: str = "bf16"
) -> Model:
    """x + (silu(norm(x) gate') * (norm(x) up')) down', layer after layer."""
    p = ProgramBuilder("gated_mlp")
    x = p.input("x", (rows, hidden), dtype)
    marks: dict[str, Layout] = {}
    for i in range(layers):
        normed = p.rms_norm(x, p.weight(f"{i}.norm", (hidden,), dtype), EPS)
        gate, up = (
            p.linear(normed, p.weight(f"{i}.{name}", (inner, hidden), dtype))
            for name in ("gate", "up")
        )
        down = p.weight(f"{i}.down", (hidden, inner), dtype)
        x = p.linear(gate.map("silu(a0) * a1", up), down).map("a0 + a1", x)
        marks |= {f"{i}.{name}": shard(0, "tp") for name in ("gate", "up")}
        marks[f"{i}.down"] = shard(1, "tp")

    def mix(h: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)

    def join(x: Tensor, mixed: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        x = x + mixed
        return x, F.rms_norm(x, (hidden,), norm, EPS)

    def by_regions(own: Tensors, total: Callable[[Tensor], Tensor], region: Region) -> Tensor:
        part, step, x = region(mix), region(join), own["x"]
        h = F.rms_norm(x, (hidden,), own["0.norm"], EPS)
        for i in range(layers):
            mixed = total(part(h, *(own[f"{i}.{name}"] for name in ("gate", "up", "down"))))
            if i + 1 < layers:
                x, h = step(x, mixed, own[f"{i + 1}.norm"])
        return x + mixed

    in_torch = partial(by_regions, region=lambda function: function)
    return Model(program=p.build(x), marks=marks, in_torch=in_torch, by_regions=by_regions)


def layer_norm(p: ProgramBuilder, x: Handle, name: str) -> Handle:
    weight, bias = (p.weight(f"{name}.{part}", x.shape[-1:], "bf16") for part in ("w", "b"))
    return p.layer_norm(x, weight, bias, EPS)


def _linear(p: ProgramBuilder, x: Handle, name: str, columns: int) -> Handle:
    weight = p.weight(f"{name}.w", (columns, x.shape[-1]), "bf16")
    return p.linear(x, weight, p.weight(f"{name}.b", (columns,), "bf16"))


def _torch_linear(own: Tensors, x: Tensor, name: str) -> Tensor:
    return F.linear(x, own[f"{name}.w"], own[f"{name}.b"])


def torch_norm(own: Tensors, x: Tensor, name: str) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], own[f"{name}.w"], own[f"{name}.b"], EPS)


def gpt2_step(
    rows: int = 0, layers: int = 12, hidden: int = 768, heads: int = 12, cached: int = 1024
) -> Model:
    """A decode step of GPT-2's blocks: one row at a position of caches, which are states."""
    p, dim = ProgramBuilder("gpt2_step"), hidden // heads
    x, at = p.input("x", (1, hidden), "bf16"), p.input("position", (1,), "i64")
    for i in range(layers):
        qkv = _linear(p, layer_norm(p, x, f"{i}.ln1"), f"{i}.qkv", 3 * hidden)
        parts = [p.slice(qkv, 1, n * hidden, (n + 1) * hidden, view=True) for n in range(3)]
        q = p.reshape(parts[0], (1, heads, 1, dim), view=True)
        k, v = (p.reshape(part, (1, heads, dim), view=True) for part in parts[1:])
        caches = [p.state(f"{i}.{name}", (heads, cached, dim), "bf16") for name in "kv"]
        for cache, new in zip(caches, (k, v), strict=True):
            p.kv_append(cache, new, at)
        mixed = p.reshape(p.attention(q, *caches, at, dim**-0.5), (1, hidden), view=True)
        x = x.map("a0 + a1", _linear(p, mixed, f"{i}.out", hidden))
        up = _linear(p, layer_norm(p, x, f"{i}.ln2"), f"{i}.up", 4 * hidden).map(GELU_TANH)
        x = x.map("a0 + a1", _linear(p, up, f"{i}.down", hidden))

    def in_torch(own: Tensors, total: Callable[[Tensor], Tensor]) -> Tensor:
        x, at = own["x"], own["position"]
        for i in range(layers):
            qkv = _torch_linear(own, torch_norm(own, x, f"{i}.ln1"), f"{i}.qkv")
            q, k, v = qkv.view(3, heads, 1, dim).unbind(0)
            keys, values = own[f"{i}.k"], own[f"{i}.v"]
            keys.index_copy_(1, at, k)
            values.index_copy_(1, at, v)
            seen = (torch.arange(cached, device=x.device) <= at)[None, None]
            mixed = F.scaled_dot_product_attention(
                q[None], keys[None], values[None], attn_mask=seen[None]
            )
            x = x + _torch_linear(own, mixed.reshape(1, hidden), f"{i}.out")
            up = _torch_linear(own, torch_norm(own, x, f"{i}.ln2"), f"{i}.up")
            x = x + _torch_linear(own, F.gelu(up, approximate="tanh"), f"{i}.down")
        return x

    return Model(program=p.build(x), marks={}, in_torch=in_torch)


def encoder(rows: int, layers: int = 12, hidden: int = 768, heads: int = 12) -> Model:
    """BERT-base's layers: norms behind the sums, attention to all rows."""
    p, dim = ProgramBuilder("encoder"), hidden // heads
    x = p.input("x", (rows, hidden), "bf16")
    for i in range(layers):
        qkv = p.reshape(_linear(p, x, f"{i}.qkv", 3 * hidden), (rows, 3, heads, dim), view=True)
        parts = (p.slice(qkv, 1, n, n + 1, view=True) for n in range(3))
        q, k, v = (p.transpose(part, (1, 2, 0, 3), view=True) for part in parts)
        mixed = p.transpose(p.attend(q, k, v, None, dim**-0.5), (0, 2, 1, 3))
        out = _linear(p, p.reshape(mixed, (rows, hidden), view=True), f"{i}.out", hidden)
        x = layer_norm(p, x.map("a0 + a1", out), f"{i}.ln1")
        up = _linear(p, x, f"{i}.up", 4 * hidden).map("gelu(a0)")
        x = layer_norm(p, x.map("a0 + a1", _linear(p, up, f"{i}.down", hidden)), f"{i}.ln2")

    def in_torch(own: Tensors, total: Callable[[Tensor], Tensor]) -> Tensor:
        x = own["x"]
        for i in range(layers):
            qkv = _torch_linear(own, x, f"{i}.qkv").view(1, rows, 3, heads, dim)
            q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
            mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
            x = x + _torch_linear(own, mixed.reshape(rows, hidden), f"{i}.out")
            x = torch_norm(own, x, f"{i}.ln1")
            up = F.gelu(_torch_linear(own, x, f"{i}.up"))
            x = torch_norm(own, x + _torch_linear(own, up, f"{i}.down"), f"{i}.ln2")
        return x

    return Model(program=p.build(x), marks={}, in_torch=in_torch)


def mixer(
    rows: int = 0, layers: int = 12, hidden: int = 768, patches: int = 196, inner: int = 384
) -> Model:
    """Blocks of MLP-Mixer: a perceptron over patches, then one over channels."""
    p = ProgramBuilder("mixer")
    x = p.input("x", (patches, hidden), "bf16")
    for i in range(layers):
        turned = p.transpose(layer_norm(p, x, f"{i}.ln1"), (1, 0), view=True)
        up = _linear(p, turned, f"{i}.up1", inner).map("gelu(a0)")
        down = p.transpose(_linear(p, up, f"{i}.down1", patches), (1, 0), view=True)
        x = x.map("a0 + a1", down)
        up = _linear(p, layer_norm(p, x, f"{i}.ln2"), f"{i}.up2", 4 * hidden).map("gelu(a0)")
        x = x.map("a0 + a1", _linear(p, up, f"{i}.down2", hidden))

    def in_torch(own: Tensors, total: Callable[[Tensor], Tensor]) -> Tensor:
        x = own["x"]
        for i in range(layers):
            up = F.gelu(_torch_linear(own, torch_norm(own, x, f"{i}.ln1").T, f"{i}.up1"))
            x = x + _torch_linear(own, up, f"{i}.down1").T
            up = F.gelu(_torch_linear(own, torch_norm(own, x, f"{i}.ln2"), f"{i}.up2"))
            x = x + _torch_linear(own, up, f"{i}.down2")
        return x

    return Model(program=p.build(x), marks={}, in_torch=in_torch)
