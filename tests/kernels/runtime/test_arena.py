"""Layout of arenas: alignment, sharing, views, and the torch memory over them."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distmega.errors import PlanError, ProgramError
from distmega.kernels.runtime.arena import ALIGNMENT_BYTES, Space, layout_arena, layout_segment
from distmega.kernels.runtime.memory import allocate_arena, arena_views, operand_view
from distmega.program.builder import ProgramBuilder
from distmega.program.dtypes import ITEM_BYTES
from distmega.program.types import Program, Tensor

SHAPES = st.lists(st.integers(1, 9), max_size=3).map(tuple)


@given(st.lists(st.tuples(SHAPES, st.sampled_from(list(ITEM_BYTES))), max_size=8))
@settings(max_examples=50, deadline=None)
def test_tensors_are_aligned_and_apart(kinds):
    tensors = [
        Tensor(name=f"t{i}", shape=shape, dtype=dtype, role="weight")
        for i, (shape, dtype) in enumerate(kinds)
    ]
    layout = layout_arena(Space.WEIGHT, [*tensors, *tensors])
    end = 0
    for tensor in tensors:
        assert layout.offset(tensor.name) % ALIGNMENT_BYTES == 0
        assert layout.offset(tensor.name) >= end
        end = layout.offset(tensor.name) + tensor.num_bytes
    assert end <= layout.num_bytes < end + ALIGNMENT_BYTES
    arena = allocate_arena(layout)
    views = arena_views(layout, arena)
    for i, view in enumerate(views.values()):
        view.fill_(i % 2)
    for i, (view, tensor) in enumerate(zip(views.values(), tensors, strict=True)):
        assert view.shape == tensor.shape
        assert view.is_contiguous()
        assert view.data_ptr() - arena.data_ptr() == layout.offset(tensor.name)
        assert (view == i % 2).all()
    assert arena.data_ptr() % ALIGNMENT_BYTES == 0


def test_two_shapes_under_one_name_are_refused():
    tensors = [Tensor(name="w", shape=(n,), dtype="f32", role="weight") for n in (4, 5)]
    with pytest.raises(PlanError, match=r"'w' is both f32\[4\] and f32\[5\]"):
        layout_arena(Space.WEIGHT, tensors)


def test_an_arena_beyond_int32_words_is_refused():
    huge = Tensor(name="w", shape=(2**38,), dtype="i32", role="weight")
    with pytest.raises(PlanError, match="use more ranks"):
        layout_arena(Space.WEIGHT, [huge])


def mlp() -> Program:
    p = ProgramBuilder("mlp")
    h = p.linear(p.input("x", (2, 4)), p.weight("w1", (8, 4))).map("relu(a0)")
    return p.build(p.linear(h, p.weight("w2", (4, 8))))


def test_segments_share_arenas_with_other_programs():
    program = mlp()
    others = [Tensor(name="other", shape=(100,), dtype="f32", role="weight")]
    shared = layout_arena(Space.WEIGHT, [*others, *program.with_role("weight")])
    layout = layout_segment(program, weights=shared)
    assert layout.weights is shared
    assert layout.operands["w2"].offset_bytes == shared.offset("w2") > 400
    with pytest.raises(PlanError, match="holds nothing under 'w1'"):
        layout_segment(program, weights=layout_arena(Space.WEIGHT, others))


def test_spaces_follow_roles():
    p = ProgramBuilder("roles")
    x = p.input("x", (2,))
    p.set(x, into=p.state("s", (2,)))
    p.set(x, into=p.state("y.recv", (2,)))
    total = p.pointwise("a0 + a1", x, p.weight("w", (2,)), name="sum")
    layout = layout_segment(p.build(total))
    spaces = {name: operand.space for name, operand in layout.operands.items()}
    assert spaces == {
        "x": Space.ACT,
        "s": Space.STATE,
        "y.recv": Space.PEER,
        "w": Space.WEIGHT,
        "sum": Space.ACT,
    }
    assert layout.peers.num_bytes == ALIGNMENT_BYTES


def test_views_share_storage():
    p = ProgramBuilder("views")
    x = p.input("x", (4, 6))
    turned = p.transpose(x, (1, 0), view=True, name="turned")
    part = p.slice(turned, 0, 1, 6, 2, view=True, name="part")
    split = p.reshape(x, (2, 2, 6), view=True, name="split")
    layout = layout_segment(p.build(p.set(part), p.set(split)))
    arenas = [allocate_arena(arena) for arena in layout.arenas]
    values = torch.arange(24.0).view(4, 6)
    operand_view(arenas, layout.operands["x"]).copy_(values)
    assert torch.equal(operand_view(arenas, layout.operands["part"]), values.t()[1:6:2])
    assert torch.equal(operand_view(arenas, layout.operands["split"]), values.view(2, 2, 6))


def test_a_view_that_would_move_elements_is_refused():
    p = ProgramBuilder("views")
    turned = p.transpose(p.input("x", (4, 6)), (1, 0), view=True)
    program = p.build(p.set(p.reshape(turned, (24,), name="flat")))
    moving = (replace(op, kind="view" if op.name == "flat" else op.kind) for op in program.ops)
    program = replace(program, ops=tuple(moving))
    with pytest.raises(ProgramError, match="use reshape, which copies"):
        layout_segment(program)
