"""What the ops of a segment must agree on: what both kernels take from the first op for all."""

from dataclasses import replace
from functools import cache

import pytest

from bench.llama import llama_1b
from distmega.errors import UnsupportedError
from distmega.kernels.hopper.batch_plan.queues import build_batch_queues
from distmega.kernels.hopper.plan.segment import find_agreement
from distmega.kernels.hopper.plan.types import HEAD_DIMS
from distmega.kernels.hopper.plan.weight_order import order_weights
from distmega.kernels.hopper.row_plan.queues import build_queues
from distmega.kernels.machines import H200
from distmega.kernels.runtime.arena import Space, layout_arena
from distmega.kernels.tasks.fuse import fuse_segment
from distmega.program.builder import Handle, ProgramBuilder
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.localize import localize
from distmega.sharding.planner import plan_program


@cache
def decoder() -> Program:
    """Two layers on one rank."""
    model = llama_1b("plain", 2, hidden=256, heads=(4, 2, 64), inner=512, vocab=512, position=64)
    return localize(plan_program(model.program, DeviceMesh(tp=1), H200, model.marks)).program


def with_another(segment: Program, name: str) -> Program:
    """The second layer reads a tensor of its own in place of `name`."""
    readers = [at for at, op in enumerate(segment.ops) if name in (r.tensor for r in op.reads)]
    second = readers[len(readers) // 2 :]
    assert len(second) * 2 == len(readers), "each layer reads it as often"
    ops = tuple(
        replace(
            op,
            reads=tuple(
                replace(read, tensor=f"{name}.2") if read.tensor == name else read
                for read in op.reads
            ),
        )
        if at in second
        else op
        for at, op in enumerate(segment.ops)
    )
    tensor = replace(segment.tensor_map()[name], name=f"{name}.2")
    return replace(segment, ops=ops, tensors=(*segment.tensors, tensor))


def test_a_decoder_agrees():
    found = find_agreement(decoder(), fuse_segment(decoder()), max_rows=1, head_dims=HEAD_DIMS)
    assert (found.rows, found.num_ranks) == (1, 1)
    assert found.attention is not None
    assert (found.attention.num_heads, found.attention.num_kv_heads) == (4, 2)
    assert found.embedding is not None
    assert found.entry == found.embedding.out


@pytest.mark.parametrize("name", ["rope", "position"])
def test_layers_that_rotate_otherwise_are_refused(name: str):
    """Kernels are given one table and one vector of positions."""
    segment = with_another(decoder(), name)
    with pytest.raises(UnsupportedError, match=rf"several of .*{name}\.2"):
        find_agreement(segment, fuse_segment(segment), max_rows=16, head_dims=HEAD_DIMS)
    weights = layout_arena(Space.WEIGHT, order_weights(segment))
    states = layout_arena(Space.STATE, segment.with_role("state"))
    with pytest.raises(UnsupportedError, match=rf"several of .*{name}\.2"):
        build_queues(segment, weights, states, 132)


class Odd:
    """What programs may do and kernels can't; `made` computes what is a weight elsewhere."""

    def __init__(self, rows: int) -> None:
        self.p, self.rows = ProgramBuilder("odd"), rows
        self.x = self.p.input("x", (rows, 64), "bf16")

    def weight(self, name: str, *shape: int, dtype: str = "bf16") -> Handle:
        return self.p.weight(name, shape, dtype)

    def made(self, name: str, *shape: int, dtype: str = "bf16") -> Handle:
        return self.weight(f"{name}.0", *shape, dtype=dtype).map("a0 + 1.0", name=name)

    def linear(self, x: Handle, name: str, size: int) -> Handle:
        return self.p.linear(x, self.weight(name, size, x.shape[-1]))

    def attention(
        self, table: Handle | None = None, *, values: int = 16, late: bool = False
    ) -> Handle:
        p, front = self.p, (self.rows,) if self.rows > 1 else ()
        at = p.input("at", (self.rows,), "i64")
        q, k, v = (
            p.reshape(self.linear(self.x, name, 2 * size), (self.rows, 2, *shape), view=True)
            for name, size, shape in (
                ("q", 16, (1, 16)),
                ("k", 16, (16,)),
                ("v", values, (values,)),
            )
        )
        if table:
            q, k = p.rope(q, at, table), p.rope(k, at, table)
        caches = [p.state(f"{x.name}_cache", (*front, 2, 24, x.shape[-1]), "bf16") for x in (k, v)]
        if late:
            out = p.attention(q, *caches, at, 0.25)
        for held, new in zip(caches, (k, v), strict=True):
            p.kv_append(held, new, at)
        out = out if late else p.attention(q, *caches, at, 0.25)
        return self.linear(p.reshape(out, (self.rows, 2 * values), view=True), "o", 64)


REFUSED = {
    "norm": (
        lambda o: o.linear(o.p.rms_norm(o.x, o.made("n", 64), 1e-5), "w", 32),
        "with 'n', which is no weight",
    ),
    "norm of a state": (
        lambda o: o.linear(o.p.rms_norm(o.x, o.p.state("n", (64,), "bf16"), 1e-5), "w", 32),
        "with 'n', which is no weight",
    ),
    "bias": (
        lambda o: o.p.linear(o.x, o.weight("w", 32, 64), o.p.input("b", (32,), "bf16")),
        "with 'b', which is no weight",
    ),
    "table": (
        lambda o: o.x + o.linear(
            o.p.embedding(o.p.input("ids", (o.rows,), "i64"), o.made("t", 9, 64)), "w", 64
        ),
        "with 't', which is no weight",
    ),
    "angles": (lambda o: o.attention(o.made("t", 24, 16, dtype="f32")), "with 't', which is no"),
    "values of another width": (lambda o: o.attention(values=24), r"keys and values of \[16, 24\]"),
    "an append behind attention": (lambda o: o.attention(late=True), "of kind kv_append does not"),
    "no products": (lambda o: o.x.map("tanh(a0)"), "a program without products of weights"),
}  # fmt: skip


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", REFUSED)
def test_what_kernels_would_read_elsewhere_is_refused(name: str, rows: int):
    make, message = REFUSED[name]
    odd = Odd(rows)
    segment = odd.p.build(make(odd))
    weights = layout_arena(Space.WEIGHT, order_weights(segment))
    states = layout_arena(Space.STATE, segment.with_role("state"))
    build = build_queues if rows == 1 else build_batch_queues
    with pytest.raises(UnsupportedError, match=message):
        build(segment, weights, states, 8)
