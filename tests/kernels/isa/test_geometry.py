"""Parts of tasks: what merges, what is walked, what is clipped, and what no instruction can say."""

import pytest

from distmega.errors import UnsupportedError
from distmega.kernels.isa import lowering
from distmega.kernels.isa.lowering import is_encodable, lower_group
from distmega.kernels.isa.opcodes import (
    Contract,
    Copy,
    ExtraOperand,
    Instruction,
    Linear,
    Nop,
    Pointwise,
)
from distmega.kernels.runtime.arena import layout_segment
from distmega.kernels.tasks.types import RangeSplit, TaskGroup
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Op, Program, accesses
from tests.kernels.programs import decoder


def lowered(program: Program, op: Op, *splits: RangeSplit) -> list[list[Instruction]]:
    """Instructions of each task of one op."""
    layout = layout_segment(program)
    operands = [layout.operands[access.tensor] for access in accesses(op)]
    return lower_group(TaskGroup(op=op, splits=splits), operands, ("tp",), 0)


def test_a_linear_over_heads_is_one_flat_range_a_task():
    """Cuts inside a head do not matter: weight rows and outputs are neighbours."""
    p = ProgramBuilder("heads")
    x, w = p.input("x", (2, 16)), p.weight("w", (3, 2, 8, 16))
    program = p.build(p.linear(x, w, spec="m k, h g d k -> m h g d"))
    tasks = lowered(
        program, program.ops[0], RangeSplit(axes=("h", "g", "d"), bounds=(0, 5, 27, 48))
    )
    found = [
        (i.n, i.w.first, i.out.first, i.out_strides) for (i,) in tasks if isinstance(i, Linear)
    ]
    assert found == [(5, 0, 0, (48, 1)), (22, 80, 5, (48, 1)), (21, 432, 27, (48, 1))]


def test_sums_over_heads_merge():
    p = ProgramBuilder("heads")
    x, w = p.input("x", (2, 3, 2, 8)), p.weight("w", (16, 3, 2, 8))
    program = p.build(p.linear(x, w, spec="m h g d, k h g d -> m k"))
    ((linear,),) = lowered(program, program.ops[0])
    assert isinstance(linear, Linear)
    assert (linear.m, linear.n, linear.k) == (2, 16, 48)


def test_a_flat_range_that_is_no_box_becomes_several_parts():
    """Columns of a transposed copy: the range 3..9 of 4 by 4 is a piece of a row, a row, a
    piece.
    """
    p = ProgramBuilder("copy")
    program = p.build(p.transpose(p.input("x", (4, 4)), (1, 0)))
    (head, middle, tail), rest = lowered(
        program, program.ops[0], RangeSplit(axes=("i1", "i0"), bounds=(3, 9, 16))
    )
    assert all(isinstance(i, Copy) for i in (head, middle, tail))
    assert [i.extents for i in (head, middle, tail)] == [
        (1, 1, 1, 1, 1, 1), (1, 1, 1, 1, 1, 4), (1, 1, 1, 1, 1, 1)
    ]  # fmt: skip
    assert [i.dst.first for i in (head, middle, tail)] == [3, 4, 8]
    assert [i.src.first for i in (head, middle, tail)] == [12, 1, 2]
    assert len(rest) == 2


def test_broadcast_dims_beyond_two_are_walked():
    p = ProgramBuilder("walk")
    x, y = p.input("x", (3, 4, 5)), p.input("y", (4, 1))
    program = p.build(p.pointwise("a0 * a1", x, y))
    ((first, second, third),) = lowered(program, program.ops[0])
    assert isinstance(first, Pointwise)
    assert first.extents == (4, 5)
    assert [i.a0.first for i in (first, second, third) if i.a0] == [0, 20, 40]
    assert [i.a1.first for i in (first, second, third) if i.a1] == [0, 0, 0]


@pytest.mark.parametrize(
    ("shapes", "extents", "count"),
    [
        (((13, 1, 6, 2), (1, 31, 1, 1)), (31, 12), 13),
        (((40, 1, 12, 1), (1, 40, 1, 8)), (40, 8), 40 * 12),
        (((2, 1, 50), (1, 3, 1)), (3, 50), 2),
    ],
)
def test_the_shortest_dims_are_walked(
    shapes: tuple[tuple[int, ...], ...], extents: tuple[int, int], count: int
):
    """But for the innermost, whose elements lie side by side."""
    p = ProgramBuilder("walk")
    operands = (p.input(f"x{n}", shape) for n, shape in enumerate(shapes))
    program = p.build(p.pointwise("a0 * a1", *operands))
    (found,) = lowered(program, program.ops[0])
    assert {i.extents for i in found if isinstance(i, Pointwise)} == {extents}
    assert len(found) == count


def test_a_concat_task_copies_from_the_operands_it_meets():
    p = ProgramBuilder("join")
    program = p.build(p.concat([p.input("x", (2, 3)), p.input("y", (2, 5))], 1))
    left, right = lowered(program, program.ops[0], RangeSplit(axes=("i1",), bounds=(0, 4, 8)))
    assert [(i.extents[-2:], i.src.base, i.src.first, i.dst.first) for i in left] == [
        ((2, 3), 1, 0, 0), ((1, 2), 2, 0, 3)
    ]  # fmt: skip
    assert [(i.extents[-2:], i.src.base, i.src.first, i.dst.first) for i in right] == [
        ((2, 4), 2, 1, 4)
    ]  # fmt: skip


def test_views_need_no_instruction():
    p = ProgramBuilder("view")
    view = p.reshape(p.input("x", (4, 4)), (16,), view=True)
    program = p.build(p.set(view))
    assert lowered(program, program.ops[0]) == [[Nop()]]


@pytest.mark.parametrize(
    ("spec", "count"),
    [("b m k, b n k -> b m n", 2), ("m k, n k -> k n", 4), ("a b k, a b k -> a b", 6)],
)
def test_axes_of_all_operands_are_walked(spec: str, count: int):
    sizes = dict(zip("abmnk", (2, 3, 5, 3, 4), strict=True)) | ({"b": 2} if "m" in spec else {})
    shapes = [tuple(sizes[n] for n in part.split()) for part in spec.partition("->")[0].split(",")]
    p = ProgramBuilder("linear")
    x, w = (p.input(n, shape) for n, shape in zip("xw", shapes, strict=True))
    program = p.build(p.linear(x, w, spec=spec))
    ((*instructions,),) = lowered(program, program.ops[0])
    assert len(instructions) == count
    assert len({i.out.first for i in instructions}) == count


@pytest.mark.parametrize(
    ("spec", "sums"),
    [
        ("a m b k, n k a b -> m n", (2, 3, 6)),
        ("a m b, n b a -> m n", (1, 2, 3)),
        ("m k, n k, m -> m n", (1, 1, 6)),
    ],
)
def test_contractions_of_other_forms_take_strides_of_their_own(spec, sums):
    sizes = {name: 2 + i for i, name in enumerate("abmnk")}
    shapes = [tuple(sizes[n] for n in part.split()) for part in spec.partition("->")[0].split(",")]
    p = ProgramBuilder("linear")
    program = p.build(p.linear(*map(p.input, "xwb", shapes), spec=spec))
    ((contract,),) = lowered(program, program.ops[0])
    assert isinstance(contract, Contract)
    assert (contract.m, contract.n, contract.sums) == (4, 5, sums)


@pytest.mark.parametrize("spec", ["a b c d m, n d c b a -> m n"])
def test_contractions_of_many_sums_stay_library_ops(spec):
    sizes = {name: 2 + i for i, name in enumerate("abcdmn")}
    shapes = [tuple(sizes[n] for n in part.split()) for part in spec.partition("->")[0].split(",")]
    p = ProgramBuilder("linear")
    x, w = (p.input(n, shape) for n, shape in zip("xw", shapes, strict=True))
    program = p.build(p.linear(x, w, spec=spec))
    assert not is_encodable(program.ops[0], program.tensor_map())
    with pytest.raises(UnsupportedError, match="keep it outside megakernels"):
        lowered(program, program.ops[0])


def test_operands_of_a_pointwise_op_beyond_four_stand_before_it():
    p = ProgramBuilder("many")
    xs = [p.input(f"x{i}", (2, 1) if i == 5 else (2, 4)) for i in range(6)]
    program = p.build(p.pointwise("a0 + a1 + a2 + a3 + a4 + a5", *xs))
    ((*before, pointwise),) = lowered(program, program.ops[0])
    assert isinstance(pointwise, Pointwise)
    assert all(isinstance(one, ExtraOperand) for one in before)
    assert [one.strides[:2] for one in before] == [(4, 1), (1, 0)]


def test_ops_of_a_decoder_are_encodable():
    program = decoder(1, tp=2)
    assert all(is_encodable(op, program.tensor_map()) for op in program.ops)


def test_ops_of_equal_layers_are_asked_once(monkeypatch: pytest.MonkeyPatch):
    """Strides count: a view may have others."""
    asked: list[str] = []

    def why_not(op: Op, *given: object, most: int) -> None:
        asked.append(op.name)

    monkeypatch.setattr(lowering, "_encodable", {})
    monkeypatch.setattr(lowering, "why_not_encodable", why_not)
    p = ProgramBuilder("layers")
    x = p.input("x", (2, 4))
    for layer in range(3):
        x = p.linear(x, p.weight(f"w{layer}", (4, 4)), name=f"h{layer}")
    program = p.build(x)
    for strides in ({}, {}, {"h1": (1, 2)}):
        assert all(is_encodable(op, program.tensor_map(), strides) for op in program.ops)
    assert asked == ["h0", "h1", "h1", "h2"]
