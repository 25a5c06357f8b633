"""Programs that are no language model's decode step, through compile_plan: distmega, torch.compile
and torch's own CUDA graph of the same ops, alternating.

    python -m bench.programs "gated_mlp rows=1" "gated_mlp rows=64 tp=2" gpt2_step ...

Five processes time every case by GPU events, calls queued, in turns; records hold the medians of
the processes. They set up a case at the same time, then one after the other measures alone: see
Turns. Torch compiles before that, each case in a process of its own, and keeps what it compiles;
a single process (--processes 1) compiles for itself. The floor is what a GPU needs to read its
weights and states, or for its products if that is longer, at rates measured in the same process.
The host's time of a call, while the GPU is at rest, stands apart in its own file. Weights are
random, bf16. Over ranks the peers are torch with NCCL in a CUDA graph, compiled or not. Writes
bench/results/programs-<device>.json and programs-host-<device>.json.
"""

import argparse
import json
import multiprocessing
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from bench.cases import read_case
from bench.decode import meet
from bench.options import at_least, gpus_of_cases, read_options
from bench.ranks import TIMEOUT_S, run_on_ranks
from bench.records import Record, add_book_options, open_book
from bench.timing import Call, captured, copy_bytes_per_us, elapsed_us, flops_per_us
from bench.turns import Turns, tune_alone
from distmega.compiled import CompiledProgram
from distmega.hostir.comm.communicator import Communicator
from distmega.hostir.comm.nccl_native import NativeNccl
from distmega.hostir.library.torch_types import torch_dtype
from distmega.kernels.machines import H200
from distmega.program.builder import Handle, ProgramBuilder
from distmega.program.types import Program
from distmega.sharding.layout.placements import Layout, shard
from distmega.sharding.planner import plan_program

OURS, COMPILED, GRAPH = "ours", "torch.compile", "torch graph"
VARIANTS = ("plain", "gelu", "layernorm", "parallel", "postnorm", "heads96")
"""Of llama-1b."""
CASES = (
    *(f"gated_mlp rows={rows}" for rows in (1, 16, 64, 256, 1024)),
    *(f"gated_mlp rows={rows} tp=2" for rows in (1, 16, 64, 256, 1024)),
    "gpt2_step", "encoder rows=128", "mixer",
    *(f"llama-1b variant={name}{tp}" for tp in ("", " tp=2") for name in VARIANTS),
)  # fmt: skip
CALLS = 16
"""Calls between two events."""
HOST_CALLS = 50
"""Calls of which the host's time is the median."""
EPS = 1e-5
GELU_TANH = "0.5 * a0 * (1.0 + tanh(0.7978845608028654 * (a0 + 0.044715 * a0 * a0 * a0)))"
TOLERANCE = 0.06
"""Of the largest value, between distmega and torch, both in bf16 through many layers."""

Tensors = Mapping[str, Tensor]
Region = Callable[[Callable[..., Any]], Callable[..., Any]]
"""From a function that every layer calls to one that does the same: compiled once for all layers.
Between ranks' collectives torch joins nothing, so there it costs no speed."""
Line = Mapping[str, Any]
"""What a process found of a case: `us` and `host_us` by name, `floor_us`, how `far` from torch."""


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


@dataclass(frozen=True, slots=True)
class Case:
    """What a case's name says."""

    text: str
    name: str
    rows: int
    num_ranks: int
    variant: str = ""


def parse_case(text: str) -> Case:
    """Reads "gated_mlp rows=N tp=N", "encoder rows=N", "gpt2_step", "mixer" or "llama-1b
    variant=NAME tp=N".
    """
    variant = re.search(r" variant=(\S+)", text)
    numbers = ("rows",) if text.startswith(("gated_mlp", "encoder")) else ()
    name, *found, num_ranks = read_case(text.replace(variant[0], "") if variant else text, *numbers)
    chosen = variant[1] if variant else ""
    if name not in MODELS or (chosen in VARIANTS) != (name == "llama-1b"):
        expected = f"one of {', '.join(MODELS)}, llama-1b with variant={'|'.join(VARIANTS)}"
        raise SystemExit(f"case {text!r}; expected {expected}; correct it")
    return Case(text, name, found[0] if found else 0, num_ranks, chosen)


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


def _layer_norm(p: ProgramBuilder, x: Handle, name: str) -> Handle:
    weight, bias = (p.weight(f"{name}.{part}", x.shape[-1:], "bf16") for part in ("w", "b"))
    return p.layer_norm(x, weight, bias, EPS)


def _linear(p: ProgramBuilder, x: Handle, name: str, columns: int) -> Handle:
    weight = p.weight(f"{name}.w", (columns, x.shape[-1]), "bf16")
    return p.linear(x, weight, p.weight(f"{name}.b", (columns,), "bf16"))


def _torch_linear(own: Tensors, x: Tensor, name: str) -> Tensor:
    return F.linear(x, own[f"{name}.w"], own[f"{name}.b"])


def _torch_norm(own: Tensors, x: Tensor, name: str) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], own[f"{name}.w"], own[f"{name}.b"], EPS)


def gpt2_step(
    rows: int = 0, layers: int = 12, hidden: int = 768, heads: int = 12, cached: int = 1024
) -> Model:
    """A decode step of GPT-2's blocks: one row at a position of caches, which are states."""
    p, dim = ProgramBuilder("gpt2_step"), hidden // heads
    x, at = p.input("x", (1, hidden), "bf16"), p.input("position", (1,), "i64")
    for i in range(layers):
        qkv = _linear(p, _layer_norm(p, x, f"{i}.ln1"), f"{i}.qkv", 3 * hidden)
        parts = [p.slice(qkv, 1, n * hidden, (n + 1) * hidden, view=True) for n in range(3)]
        q = p.reshape(parts[0], (1, heads, 1, dim), view=True)
        k, v = (p.reshape(part, (1, heads, dim), view=True) for part in parts[1:])
        caches = [p.state(f"{i}.{name}", (heads, cached, dim), "bf16") for name in "kv"]
        for cache, new in zip(caches, (k, v), strict=True):
            p.kv_append(cache, new, at)
        mixed = p.reshape(p.attention(q, *caches, at, dim**-0.5), (1, hidden), view=True)
        x = x.map("a0 + a1", _linear(p, mixed, f"{i}.out", hidden))
        up = _linear(p, _layer_norm(p, x, f"{i}.ln2"), f"{i}.up", 4 * hidden).map(GELU_TANH)
        x = x.map("a0 + a1", _linear(p, up, f"{i}.down", hidden))

    def in_torch(own: Tensors, total: Callable[[Tensor], Tensor]) -> Tensor:
        x, at = own["x"], own["position"]
        for i in range(layers):
            qkv = _torch_linear(own, _torch_norm(own, x, f"{i}.ln1"), f"{i}.qkv")
            q, k, v = qkv.view(3, heads, 1, dim).unbind(0)
            keys, values = own[f"{i}.k"], own[f"{i}.v"]
            keys.index_copy_(1, at, k)
            values.index_copy_(1, at, v)
            seen = (torch.arange(cached, device=x.device) <= at)[None, None]
            mixed = F.scaled_dot_product_attention(
                q[None], keys[None], values[None], attn_mask=seen[None]
            )
            x = x + _torch_linear(own, mixed.reshape(1, hidden), f"{i}.out")
            up = _torch_linear(own, _torch_norm(own, x, f"{i}.ln2"), f"{i}.up")
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
        x = _layer_norm(p, x.map("a0 + a1", out), f"{i}.ln1")
        up = _linear(p, x, f"{i}.up", 4 * hidden).map("gelu(a0)")
        x = _layer_norm(p, x.map("a0 + a1", _linear(p, up, f"{i}.down", hidden)), f"{i}.ln2")

    def in_torch(own: Tensors, total: Callable[[Tensor], Tensor]) -> Tensor:
        x = own["x"]
        for i in range(layers):
            qkv = _torch_linear(own, x, f"{i}.qkv").view(1, rows, 3, heads, dim)
            q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
            mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
            x = x + _torch_linear(own, mixed.reshape(rows, hidden), f"{i}.out")
            x = _torch_norm(own, x, f"{i}.ln1")
            up = F.gelu(_torch_linear(own, x, f"{i}.up"))
            x = _torch_norm(own, x + _torch_linear(own, up, f"{i}.down"), f"{i}.ln2")
        return x

    return Model(program=p.build(x), marks={}, in_torch=in_torch)


def mixer(
    rows: int = 0, layers: int = 12, hidden: int = 768, patches: int = 196, inner: int = 384
) -> Model:
    """Blocks of MLP-Mixer: a perceptron over patches, then one over channels."""
    p = ProgramBuilder("mixer")
    x = p.input("x", (patches, hidden), "bf16")
    for i in range(layers):
        turned = p.transpose(_layer_norm(p, x, f"{i}.ln1"), (1, 0), view=True)
        up = _linear(p, turned, f"{i}.up1", inner).map("gelu(a0)")
        down = p.transpose(_linear(p, up, f"{i}.down1", patches), (1, 0), view=True)
        x = x.map("a0 + a1", down)
        up = _linear(p, _layer_norm(p, x, f"{i}.ln2"), f"{i}.up2", 4 * hidden).map("gelu(a0)")
        x = x.map("a0 + a1", _linear(p, up, f"{i}.down2", hidden))

    def in_torch(own: Tensors, total: Callable[[Tensor], Tensor]) -> Tensor:
        x = own["x"]
        for i in range(layers):
            up = F.gelu(_torch_linear(own, _torch_norm(own, x, f"{i}.ln1").T, f"{i}.up1"))
            x = x + _torch_linear(own, up, f"{i}.down1").T
            up = F.gelu(_torch_linear(own, _torch_norm(own, x, f"{i}.ln2"), f"{i}.up2"))
            x = x + _torch_linear(own, up, f"{i}.down2")
        return x

    return Model(program=p.build(x), marks={}, in_torch=in_torch)


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
    """A decode step of Llama-3.2-1B with `position` cached tokens, and what may stand in place of
    its parts. variant: plain; gelu: gates by gelu; layernorm: layer norms, and biases
    everywhere; parallel: attention and feed-forward of the same normed row; postnorm: norm(x +
    f(x)); heads96: 24 query and 6 kv heads of 96. heads: query heads, kv heads, elements of each.
    with_state: gives what the head reads too.
    """
    cached = -(-(position + 1) // 8) * 8  # as torch's attention wants masks
    num_heads, kv_heads, dim = heads
    if variant == "heads96":
        num_heads, kv_heads, dim = num_heads * 3 // 4, kv_heads * 3 // 4, 96
    group, has_bias = num_heads // kv_heads, variant == "layernorm"
    gate = "gelu(a0) * a1" if variant == "gelu" else "silu(a0) * a1"
    p = ProgramBuilder(f"llama_{variant}")
    token, at = p.input("token", (1,), "i64"), p.input("position", (1,), "i64")
    table, rope = p.weight("embed", (vocab, hidden), "bf16"), p.weight("rope", (cached, dim))
    marks: dict[str, Layout] = {"embed": shard(0, "tp")}

    def norm(x: Handle, name: str) -> Handle:
        if has_bias:
            return _layer_norm(p, x, name)
        return p.rms_norm(x, p.weight(f"{name}.w", x.shape[-1:], "bf16"), EPS)

    def linear(x: Handle, name: str, shape: tuple[int, ...], spec: str, split: int) -> Handle:
        marks[f"{name}.w"] = shard(split, "tp")
        left, out = spec.split("->")
        weight = p.weight(f"{name}.w", shape, "bf16")
        if not has_bias:
            return p.linear(x, weight, spec=spec)
        columns = " ".join(out.split()[1:])
        bias = p.weight(f"{name}.b", shape[:1] if split else shape[:-1], "bf16")
        return p.linear(x, weight, bias, spec=f"{left}, {columns} -> {out}")

    def attention(x: Handle, i: int) -> Handle:
        q = linear(x, f"{i}.q", (kv_heads, group, dim, hidden), "m k, h g d k -> m h g d", 0)
        k, v = (
            linear(x, f"{i}.{name}", (kv_heads, dim, hidden), "m k, h d k -> m h d", 0)
            for name in "kv"
        )
        caches = [p.state(f"{i}.{name}_cache", (kv_heads, cached, dim), "bf16") for name in "kv"]
        p.kv_append(caches[0], p.rope(k, at, rope), at)
        p.kv_append(caches[1], v, at)
        mixed = p.attention(p.rope(q, at, rope), *caches, at, dim**-0.5)
        shape = (hidden, kv_heads, group, dim)
        return linear(mixed, f"{i}.o", shape, "m h g d, k h g d -> m k", 1)

    def feed_forward(x: Handle, i: int) -> Handle:
        pair = [
            linear(x, f"{i}.{n}", (inner, hidden), "m k, n k -> m n", 0) for n in ("gate", "up")
        ]
        mixed = p.pointwise(gate, *pair)
        return linear(mixed, f"{i}.down", (hidden, inner), "m k, n k -> m n", 1)

    x = p.embedding(token, table)
    for i in range(layers):
        if variant == "postnorm":
            x = norm(x.map("a0 + a1", attention(x, i)), f"{i}.norm1")
            x = norm(x.map("a0 + a1", feed_forward(x, i)), f"{i}.norm2")
        elif variant == "parallel":
            h = norm(x, f"{i}.norm1")
            x = p.pointwise("a0 + a1 + a2", x, attention(h, i), feed_forward(h, i))
        else:
            x = x.map("a0 + a1", attention(norm(x, f"{i}.norm1"), i))
            x = x.map("a0 + a1", feed_forward(norm(x, f"{i}.norm2"), i))
    x = x if variant == "postnorm" else norm(x, "norm")
    chosen = p.argmax(p.linear(x, table))
    program = p.build(chosen, x) if with_state else p.build(chosen)

    def in_torch(own: Tensors, total: Callable[[Tensor], Tensor]) -> Tensor:
        at, activate = own["position"], F.gelu if variant == "gelu" else F.silu
        cos, sin = own["rope"][at].to(own["embed"].dtype).chunk(2, -1)
        seen = (torch.arange(cached, device=at.device) <= at)[None, None]

        def normed(x: Tensor, name: str) -> Tensor:
            if has_bias:
                return _torch_norm(own, x, name)
            return F.rms_norm(x, x.shape[-1:], own[f"{name}.w"], EPS)

        def product(x: Tensor, name: str) -> Tensor:
            weight, bias = own[f"{name}.w"], own.get(f"{name}.b")
            flat = weight.reshape(-1, x.shape[-1])
            return F.linear(x, flat, None if bias is None else bias.reshape(-1))

        def rotated(x: Tensor) -> Tensor:
            a, b = x.chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

        def attend(x: Tensor, i: int) -> Tensor:
            q, k, v = (product(x, f"{i}.{name}").view(-1, dim) for name in "qkv")
            keys, values = own[f"{i}.k_cache"], own[f"{i}.v_cache"]
            keys.index_copy_(1, at, rotated(k)[:, None])
            values.index_copy_(1, at, v[:, None])
            queries = rotated(q).view(1, -1, group, dim)  # a kv head's, all at the same position
            mixed = F.scaled_dot_product_attention(
                queries, keys[None], values[None], attn_mask=seen
            )
            out = own[f"{i}.o.w"].reshape(hidden, -1)
            bias = own.get(f"{i}.o.b")
            return total(F.linear(mixed.reshape(1, -1), out, bias))

        def mix(x: Tensor, i: int) -> Tensor:
            inside = activate(product(x, f"{i}.gate")) * product(x, f"{i}.up")
            return total(product(inside, f"{i}.down"))

        table = own["embed"]
        x = table[own["token"] % len(table)]
        if len(table) < vocab:  # ranks have parts of it, in their order
            x = total(x * (own["token"] // len(table) == dist.get_rank()))
        for i in range(layers):
            if variant == "postnorm":
                x = normed(x + attend(x, i), f"{i}.norm1")
                x = normed(x + mix(x, i), f"{i}.norm2")
            elif variant == "parallel":
                h = normed(x, f"{i}.norm1")
                x = x + attend(h, i) + mix(h, i)
            else:
                x = x + attend(normed(x, f"{i}.norm1"), i)
                x = x + mix(normed(x, f"{i}.norm2"), i)
        logits = F.linear(x if variant == "postnorm" else normed(x, "norm"), table)
        if len(table) == vocab:
            return logits
        parts = [torch.empty_like(logits) for _ in range(vocab // len(table))]
        dist.all_gather(parts, logits)
        return torch.cat(parts, -1)

    return Model(program=program, marks=marks, in_torch=in_torch, position=position)


MODELS: dict[str, Callable[[Case], Model]] = {
    "gated_mlp": lambda case: gated_mlp(case.rows),
    "gpt2_step": lambda case: gpt2_step(),
    "encoder": lambda case: encoder(case.rows),
    "mixer": lambda case: mixer(),
    "llama-1b": lambda case: llama_1b(case.variant),
}


def own_tensors(step: CompiledProgram, rank: int, position: int) -> dict[str, Tensor]:
    """Random tensors of a rank, weights scaled to keep values around 1; inputs are all ranks'."""
    tensors: dict[str, Tensor] = {}
    for buffer in step.host.buffers:
        if buffer.role == "temp":
            continue
        shared = buffer.role == "input" or len(buffer.shape) < 2
        torch.manual_seed(len(tensors) if shared else 1000 * (1 + rank) + len(tensors))
        if buffer.dtype == "i64":
            tensors[buffer.name] = torch.tensor([position], device="cuda")
            continue
        x = torch.randn(buffer.shape, device="cuda")
        if buffer.role == "weight":
            x = x * buffer.shape[-1] ** -0.5 if len(buffer.shape) > 1 else 1 + 0.1 * x
        tensors[buffer.name] = x.to(torch_dtype(buffer.dtype))
    return tensors


def floor_us(step: CompiledProgram) -> float:
    """What a rank reads once, or its products, whichever takes longer."""
    num_bytes = sum(b.num_bytes for b in step.host.buffers if b.role in ("weight", "state"))
    tensors = step.host.buffer_map()
    rows = {b.shape[0] for b in step.host.buffers if b.role == "input" and len(b.shape) > 1} | {1}
    weights = sum(
        b.num_bytes // 2 for b in tensors.values() if b.role == "weight" and len(b.shape) > 1
    )
    return max(num_bytes / copy_bytes_per_us(), 2.0 * max(rows) * weights / flops_per_us())


def host_us(call: Call) -> float:
    """The host's time of a call while its GPU is at rest: a graph with NCCL's nodes is not taken
    while another is under way.
    """
    times = []
    for _ in range(HOST_CALLS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return 1e6 * statistics.median(times)


def measure(
    case: Case,
    comm: Communicator,
    rounds: int,
    with_compile: bool,
    turn: Callable[[], AbstractContextManager[None]],
) -> Line:
    """Medians over rounds in which each is timed once, all ranks at the same time. Without rounds
    all is compiled and run, and nothing timed. turn: around what is timed.
    """
    model = MODELS[case.name](case)
    plan = plan_program(model.program, comm.mesh, H200, model.marks)
    step = CompiledProgram(plan, comm, f"cuda:{torch.cuda.current_device()}", warm=True)
    own = own_tensors(step, comm.rank, model.position)
    for name, tensor in step.tensors.items():
        tensor.copy_(own[name])
    inputs = {b.name: own[b.name] for b in step.host.buffers if b.role == "input"}

    def total(x: Tensor) -> Tensor:
        if comm.mesh.num_ranks > 1:
            dist.all_reduce(x)
        return x

    def in_torch() -> Tensor:
        return model.in_torch(own, total)

    step.bind(inputs)  # read where they are, as the peers do
    with torch.inference_mode():
        expected = in_torch().float()
        (found,) = step(inputs).values()
        if found.dtype == torch.int64:  # a token: how far its logit is from the highest
            found = expected + (expected.max() - expected[:, found[0]])
        far = float((found.float() - expected).abs().max() / expected.abs().max())
        assert far < TOLERANCE, f"{case.text}: {far} from torch"
        assert step.stats.replayed, step.stats.reason
        graph, _ = captured(in_torch)
        runs: dict[str, Call] = {OURS: lambda: step(inputs), GRAPH: graph.replay}
        if with_compile:
            torch._dynamo.reset()
            # in a graph of ours: its own would copy the weights, which are no parameters, each call
            tune = partial(torch.compile, mode="max-autotune-no-cudagraphs", fullgraph=True)
            tuned = tune(in_torch)
            if comm.mesh.num_ranks > 1 and model.by_regions is not None:
                tuned = partial(model.by_regions, own, total, tune)
            runs[COMPILED] = captured(tuned)[0].replay
        for run in runs.values():
            for _ in range(3):
                run()
        torch.cuda.synchronize()
        if not rounds:
            return {}
        times: dict[str, list[float]] = {name: [] for name in runs}
        with turn():
            for number in range(rounds):
                for name, run in list(runs.items())[:: -1 if number % 2 else 1]:
                    meet(comm)
                    us = elapsed_us(lambda run=run: [run() for _ in range(CALLS)], CALLS)
                    times[name].append(us)
            hosts = {name: host_us(run) for name, run in runs.items()}
            floor = floor_us(step)
            torch.cuda.empty_cache()  # other processes need it
    return {
        "case": case.text,
        "device": torch.cuda.get_device_name(),
        "us": {name: statistics.median(each) for name, each in times.items()},
        "host_us": hosts,
        "floor_us": floor,
        "far": far,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a process does: cases, one a step, all on as many ranks; "" where it has none. into: a
    file for a line each. rounds: 0 only to compile.
    """

    cases: tuple[str, ...]
    num_ranks: int
    rounds: int
    with_compile: bool
    into: Path
    turns: Turns


def run_rank(given: Communicator, job: Job) -> None:
    """Measures a job's cases on this rank; the first writes their lines."""
    many = given.mesh.num_ranks > 1
    comm = NativeNccl(given.mesh, given.rank, TIMEOUT_S) if many else given
    tune_alone(Path(f"{job.turns.store}.tuning"))
    for step, text in enumerate(job.cases):
        turn = partial(job.turns.take, step, comm)
        if not text:
            with turn():
                continue
        found = measure(parse_case(text), comm, job.rounds, job.with_compile, turn)
        if comm.rank == 0 and found:
            with job.into.open("a") as file:
                file.write(json.dumps(found) + "\n")
        torch.cuda.empty_cache()


def run_job(job: Job) -> None:
    """A process's work."""
    run_on_ranks(run_rank, job.num_ranks, job)


def run_jobs(
    jobs: Sequence[Job], *, all_or_none: bool, target: Callable[[Job], None] = run_job
) -> set[str]:
    """Does jobs at the same time, a process each; the cases of those that failed. all_or_none: the
    first that fails ends the others.
    """
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=target, args=(job,)) for job in jobs]
    for process in processes:
        process.start()
    running = {p.sentinel: (p, job) for p, job in zip(processes, jobs, strict=True)}
    failed: set[str] = set()
    while running:
        for sentinel in wait([*running]):
            process, job = running.pop(sentinel)
            process.join()
            if process.exitcode:
                failed |= {case for case in job.cases if case}
                for other, _ in running.values() if all_or_none else ():
                    other.terminate()
    return failed


def compiling(cases: Sequence[str], num_ranks: int, into: Path, store: str) -> list[Job]:
    """A process a case."""
    turns = Turns(store=store, number=0, num=1)
    return [
        Job(
            cases=(case,),
            num_ranks=num_ranks,
            rounds=0,
            with_compile=True,
            into=into,
            turns=turns,
        )
        for case in cases
    ]


def measuring(
    cases: Sequence[str], num_ranks: int, into: Path, store: str, options: argparse.Namespace
) -> list[Job]:
    """`processes` for each case, as many groups of cases as may run at once."""
    num_groups = min(len(cases), max(1, options.at_once // options.processes))
    steps = -(-len(cases) // num_groups)
    groups = [tuple(cases[group::num_groups]) for group in range(num_groups)]
    num = num_groups * options.processes
    return [
        Job(
            cases=group + ("",) * (steps - len(group)),
            num_ranks=num_ranks,
            rounds=options.rounds,
            with_compile=number < options.compiles,
            into=into,
            turns=Turns(store=store, number=number * num_groups + at, num=num),
        )
        for number in range(options.processes)
        for at, group in enumerate(groups)
    ]


def medians(lines: Sequence[Line], key: str) -> dict[str, float]:
    """By name, over processes; a name that not all have counts where it is."""
    names = dict.fromkeys(name for line in lines for name in line[key])
    return {
        name: round(statistics.median(line[key][name] for line in lines if name in line[key]), 1)
        for name in names
    }


def main() -> None:
    """Runs the processes and writes the records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=CASES)
    parser.add_argument("--processes", type=at_least(0), default=5)
    parser.add_argument(
        "--compiles", type=at_least(0), default=5, help="processes with torch.compile too"
    )
    parser.add_argument(
        "--at-once", type=at_least(1), default=5, help="processes, where there are more"
    )
    parser.add_argument("--rounds", type=at_least(1), default=9)
    parser.add_argument("--keep", type=Path, help="file of lines to add to, of earlier runs too")
    add_book_options(parser)
    options = read_options(parser, gpus_of_cases(lambda text: parse_case(text).num_ranks))
    cases = [*map(parse_case, options.cases)]
    book = open_book(options.results, options.commit)
    failed: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        lines = options.keep or Path(folder) / "lines"
        for ranks in sorted({case.num_ranks for case in cases}):
            some = [case.text for case in cases if case.num_ranks == ranks]
            failed |= run_cases(some, ranks, lines, f"{folder}/turns-{ranks}", options)
        texts = lines.read_text().splitlines() if lines.exists() else []
    read = [json.loads(text) for text in texts]
    for case in cases:
        mine = [line for line in read if line["case"] == case.text]
        if not mine:
            continue
        for benchmark, record in records(case, mine):
            book.write(benchmark, record)
            print(record, flush=True)
        ratios = " ".join(f"{line['us'][OURS] / line['us'][GRAPH]:.3f}" for line in mine)
        far = max(line["far"] for line in mine)
        print(f"  of {GRAPH}, a process each: {ratios}; furthest from torch {far:.4f}", flush=True)
    if failed:
        sys.exit(f"{len(failed)} cases failed, as said above: {', '.join(sorted(failed))}")


def run_cases(
    cases: Sequence[str], num_ranks: int, into: Path, store: str, options: argparse.Namespace
) -> set[str]:
    """Compiles and measures cases of as many ranks; those that failed. One process that measures
    finds nothing that another has compiled, so none does that before.
    """
    failed: set[str] = set()
    compiles_apart = options.compiles > 0 and options.processes != 1
    for start in range(0, len(cases) if compiles_apart else 0, options.at_once):
        jobs = compiling(cases[start : start + options.at_once], num_ranks, into, store)
        failed |= run_jobs(jobs, all_or_none=False)
    left = [case for case in cases if case not in failed]
    if left and options.processes:
        failed |= run_jobs(measuring(left, num_ranks, into, store, options), all_or_none=True)
    return failed


def records(case: Case, lines: Sequence[Line]) -> Iterator[tuple[str, Record]]:
    """Those of a case, with the benchmark that they belong to: time on the GPU, of the host."""
    floor = round(statistics.median(line["floor_us"] for line in lines), 1)
    for benchmark, key, text in (
        ("programs", "us", case.text),
        ("programs-host", "host_us", f"host time of {case.text}"),
    ):
        found = medians(lines, key)
        yield (
            benchmark,
            Record(
                case=text,
                device=lines[0]["device"],
                num_gpus=case.num_ranks,
                ours_us=found.pop(OURS),
                peers=found,
                floor_us=floor if key == "us" else found[GRAPH],
            ),
        )


if __name__ == "__main__":
    main()
