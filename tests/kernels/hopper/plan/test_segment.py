"""What the ops of a segment must agree on: what both kernels take from the first op for all."""

from dataclasses import replace
from functools import cache

import pytest

from bench.programs import llama_1b
from distmega.errors import UnsupportedError
from distmega.kernels.hopper.plan.segment import find_agreement
from distmega.kernels.hopper.plan.types import HEAD_DIMS
from distmega.kernels.hopper.plan.weight_order import order_weights
from distmega.kernels.hopper.row_plan.queues import build_queues
from distmega.kernels.machines import H200
from distmega.kernels.runtime.arena import Space, layout_arena
from distmega.kernels.tasks.fuse import fuse_segment
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
