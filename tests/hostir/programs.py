"""Small programs for the tests of the host IR, and a runner for segments."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from distmega.compiled import CompiledProgram
from distmega.errors import CheckError
from distmega.hostir.check.check import check_host
from distmega.hostir.ir.nodes import (
    Collective,
    CollectiveKind,
    ForLoop,
    HostProgram,
    Node,
    Wait,
    WaitEvent,
    WaitSignal,
    walk_nodes,
)
from distmega.hostir.ir.text import parse_host
from distmega.hostir.library.ops import run_op
from distmega.hostir.library.torch_types import torch_dtype
from distmega.kernels.machines import CPU
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Access, Program, verify_program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import shard
from distmega.sharding.localize import LocalProgram, localize
from distmega.sharding.planner import plan_program


def collective_of(kind: CollectiveKind, **attrs: int | str) -> Collective:
    """One of x into y over tp."""
    return Collective(
        kind=kind,
        mesh_axis="tp",
        ins=("x",),
        outs=("y",),
        handle="h",
        attrs=tuple(attrs.items()),
    )


def local(program: Program, mesh: DeviceMesh | None = None) -> LocalProgram:
    """A program that is already one rank's."""
    return LocalProgram(program=program, mesh=mesh or DeviceMesh(tp=1), allocations={})


def mlp() -> Program:
    """Two linears with a gate between."""
    p = ProgramBuilder("mlp")
    x = p.input("x", (4, 8))
    h = p.linear(x, p.weight("w1", (16, 8)), name="h").map("silu(a0)", name="act")
    return p.build(p.linear(h, p.weight("w2", (8, 16)), name="y"))


def chain() -> Program:
    """Case N21: three ops in a row, f64 [8, 8]."""
    p = ProgramBuilder("chain")
    x = p.input("x", (8, 8), "f64")
    a = x.map("a0 + 1", name="a")
    b = a.map("a0 * 2", name="b")
    return p.build(b.map("a0 - 3", name="c"))


STREAMED = """
host streamed on mesh(tp=2)
  streams 3, events 3
  input x: f32[6, 4]
  weight w: f32[4, 4]
  temp y: f32[6, 4]
  temp x_i: f32[2, 4]
  temp y_i: f32[2, 4]
  temp p_i: f32[2, 4]
  body
    allocate y
    record event 0
    for i in 3:
      stream 1 + i % 2
      wait event 0
      slice x_i of x dim 0 by i
      slice y_i of y dim 0 by i
      allocate p_i
      p_i = linear[m:2 n:4 k:4:reduce:sum] x_i(m, k) w(n, k) -> p_i(m, n)
      all_reduce tp (p_i) -> (y_i) as sum | combine='sum'
      wait sum
      free p_i
      record event 1 + i % 2
    stream 0
    wait event 1
    wait event 2
  return y
"""
"""Case N6 with a ring of two streams: row chunks, each a linear and an all-reduce."""

RING = """
host ring on mesh(pp=3)
  streams 1, events 0
  input x: f32[4]
  temp from_left: f32[4]
  body
    allocate from_left
    send x to pp[+1] as out
    recv from_left from pp[-1] as in
    wait out
    wait in
    signal done to pp[+1]
    wait signal done from pp[-1]
  return from_left
"""


def streamed() -> HostProgram:
    """See STREAMED."""
    return parse_host(STREAMED)


def without(host: HostProgram, number: int) -> HostProgram:
    """The program without the node of that index in printed order."""
    count = -1

    def keep(body: tuple[Node, ...]) -> tuple[Node, ...]:
        nonlocal count
        kept: list[Node] = []
        for node in body:
            count += 1
            mine = count
            if isinstance(node, ForLoop):
                node = replace(node, body=keep(node.body))
            if mine != number:
                kept.append(node)
        return tuple(kept)

    return replace(host, body=keep(host.body))


def random_tensors(host: HostProgram, seed: int = 0) -> dict[str, Tensor]:
    """A tensor for each buffer that the caller gives."""
    generator = torch.Generator().manual_seed(seed)
    return {
        b.name: torch.randn(b.shape, generator=generator).to(torch_dtype(b.dtype))
        for b in host.buffers
        if b.role != "temp"
    }


def inputs_of(step: CompiledProgram, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of the values that are inputs of a program."""
    return {b.name: values[b.name] for b in step.host.buffers if b.role == "input"}


def renamed(program: Program, names: Mapping[str, str]) -> Program:
    """The program with other names of tensors and of ops."""

    def operands(found: tuple[Access, ...]) -> tuple[Access, ...]:
        return tuple(replace(a, tensor=names.get(a.tensor, a.tensor)) for a in found)

    return verify_program(
        Program(
            name=program.name,
            tensors=tuple(replace(t, name=names.get(t.name, t.name)) for t in program.tensors),
            ops=tuple(
                replace(
                    op,
                    name=names.get(op.name, op.name),
                    reads=operands(op.reads),
                    writes=operands(op.writes),
                )
                for op in program.ops
            ),
            outputs=tuple(names.get(name, name) for name in program.outputs),
        )
    )


def run_program(
    program: Program, tensors: Mapping[str, Tensor], coordinate: Mapping[str, int] | None = None
) -> dict[str, Tensor]:
    """All tensors of a program, one op after the other: the reference. States change in place."""
    env = dict(tensors)
    for op in program.ops:
        for name, result in run_op(op, env, coordinate or {"tp": 0}).items():
            written_before = name in env and op.kind != "kv_append"
            fresh = result if op.is_view else result.contiguous()
            env[name] = env[name].copy_(result) if written_before else fresh
    return env


def run_program_in(
    dtype: torch.dtype, program: Program, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """As run_program, with floats of this type; the tensors given stay as they are."""
    given = {n: x.to(dtype, copy=True) if x.is_floating_point() else x.clone()
             for n, x in tensors.items()}  # fmt: skip
    return run_program(program, given)


class SegmentRunner:
    """Runs a segment op by op, as a megakernel would: on copies of its inputs."""

    def __init__(self, segment: Program, coordinate: Mapping[str, int] | None = None) -> None:
        self.segment, self.coordinate = segment, coordinate

    def launch(self, tensors: Mapping[str, Tensor]) -> None:
        given = {t.name: tensors[t.name] for t in self.segment.tensors if t.role != "temp"}
        given |= {t.name: given[t.name].clone() for t in self.segment.with_role("input")}
        found = run_program(self.segment, given, self.coordinate)
        for name in self.segment.outputs:
            tensors[name].copy_(found[name])


def flipped() -> Program:
    """An operator of torch's, which no megakernel does."""
    p = ProgramBuilder("flips")
    call = '[[{"tensor": 0}, [1]], {}, [0]]'
    x = p.input("x", (2, 8))
    return p.build(*p.opaque("aten.flip.default", call, [x], [((2, 8), "f32")], name="turned"))


def attention_block(num_tokens: int) -> Program:
    """Embedding, one attention layer with 3 kv heads of 2 query heads, and the next token."""
    p = ProgramBuilder("block")
    tokens, positions = (p.input(name, (num_tokens,), "i64") for name in ("tokens", "positions"))
    table = p.weight("rope_table", (16, 4))
    embed = p.weight("embed", (22, 12))
    x = p.embedding(tokens, embed, name="x")
    normed = p.rms_norm(x, p.weight("norm", (12,)), 1e-5)
    q = p.linear(normed, p.weight("wq", (3, 2, 4, 12)), spec="m k, h g d k -> m h g d")
    k = p.linear(normed, p.weight("wk", (3, 4, 12)), spec="m k, h d k -> m h d")
    v = p.linear(normed, p.weight("wv", (3, 4, 12)), spec="m k, h d k -> m h d")
    k_cache, v_cache = p.state("k_cache", (3, 16, 4)), p.state("v_cache", (3, 16, 4))
    p.kv_append(k_cache, p.rope(k, positions, table), positions)
    p.kv_append(v_cache, v, positions)
    rotated = p.rope(q, positions, table)
    mixed = p.attention(rotated, k_cache, v_cache, positions, scale=0.5)
    out = p.linear(mixed, p.weight("wo", (12, 3, 2, 4)), spec="m h g d, k h g d -> m k")
    logits = p.linear(x + out, embed, name="logits")
    return p.build(logits, p.argmax(logits, name="next"))


def block_tensors(num_tokens: int) -> dict[str, Tensor]:
    """Tensors of the whole block, the same in every process."""
    generator = torch.Generator().manual_seed(7)
    tensors = {
        t.name: torch.randn(t.shape, generator=generator)
        for t in attention_block(num_tokens).tensors
        if t.role in ("weight", "state")
    }
    tokens = torch.randint(22, (num_tokens,), generator=generator)
    return {**tensors, "tokens": tokens, "positions": torch.arange(num_tokens)}


def shard_tensors(
    tensors: Mapping[str, Tensor], local: LocalProgram, rank: int
) -> dict[str, Tensor]:
    """Each tensor's part on one rank, zeros where it is padded."""
    coordinate = local.mesh.coordinate(rank)
    parts = {}
    for name, whole in tensors.items():
        domain = local.allocations[name]
        parts[name] = torch.zeros(domain.local_shape, dtype=whole.dtype)
        part = whole[domain.local_slices(coordinate)]
        parts[name][tuple(map(slice, part.shape))] = part
    return parts


def sharded_mlp() -> LocalProgram:
    """Column-parallel, then row-parallel, with one all-reduce at the end."""
    plan = plan_program(mlp(), DeviceMesh(tp=2), CPU, annotations={"w1": shard(0, "tp")})
    return localize(plan)


def with_views() -> Program:
    """A view that a library op and two segments use, and one that leaves."""
    p = ProgramBuilder("viewed")
    x = p.input("x", (4, 6))
    a = x.map("a0 + 1", name="a")
    flat = p.reshape(a, (24,), view=True, name="flat")
    half = p.slice(flat, 0, 0, 12, view=True, name="half")
    b = half.map("a0 * 2", name="b")
    top = p.reduce(b, 0, "max", name="top")
    c = p.concat([b, half], 0, name="c")
    return p.build(top, c, p.transpose(a, (1, 0), view=True, name="turned"))


def wait_numbers(host: HostProgram) -> list[int]:
    """Indices of the nodes that wait."""
    return [
        number
        for number, node in enumerate(walk_nodes(host.body))
        if isinstance(node, Wait | WaitEvent | WaitSignal)
    ]


def require_every_wait(host: HostProgram) -> None:
    """Fails if the program is sound without one of its waits."""
    for number in wait_numbers(host):
        with pytest.raises(CheckError):
            check_host(without(host, number))
