"""Ops on groups of rows: what they state, print, and refuse."""

import pytest

from distmega.errors import ProgramError
from distmega.program.ops import experts
from distmega.program.text import parse_program, print_program
from distmega.program.types import Access, Index, Op, Program, verify_program
from tests.program.experts import OFFSETS, ORDER, SLOTS, i, moe_block, t


def test_a_program_prints_and_parses():
    program = moe_block()
    assert parse_program(print_program(program)) == program
    assert [tensor.shape for tensor in program.tensors if tensor.name.startswith("routing")] == [
        (6,), (7,), (8,), (4, 2)
    ]  # fmt: skip


BAD = {
    "more of a row than it has": (
        lambda: experts.top_k("y", t("x", 3, 4), 5),
        r"the 5 largest of rows of shape \(3, 4\).*at most as many experts per token",
    ),
    "half a choice": (lambda: experts.top_k("y", t("x", 3, 4), 1.5), "num 1.5; expected a whole"),
    "a choice in words": (lambda: experts.top_k("y", t("x", 3, 4), "2"), "num '2'; expected"),
    "scores of whole numbers": (lambda: experts.top_k("y", i("x", 3, 4), 2), "scores of dtype i32"),
    "groups in words": (lambda: experts.route("y", i("ids", 3, 2), "4"), "num_groups '4'"),
    "unknown weights": (lambda: experts.top_k("y", t("x", 3, 4), 2, "sum"), "weights 'sum'"),
    "more choices than groups": (lambda: experts.route("y", i("ids", 3, 5), 4), "of 4 groups"),
    "ids of floats": (lambda: experts.route("y", t("ids", 3, 2), 4), "dtype i32 or i64"),
    "order of other rows": (
        lambda: experts.gather_rows("y", t("x", 4, 8), ORDER, OFFSETS, (3, 2)),
        r"x \(4, 8\), order \(6,\)",
    ),
    "weights of other groups": (
        lambda: experts.grouped_linear("y", t("x", 6, 8), t("w", 3, 5, 8), OFFSETS, 3),
        r"w \(3, 5, 8\), offsets \(5,\)",
    ),
    "unequal shapes": (
        lambda: experts.grouped_pointwise("y", "a0 + a1", [t("a", 6, 8), t("b", 6, 1)], OFFSETS, 3),
        "equal shapes",
    ),
    "too few operands": (
        lambda: experts.grouped_pointwise("y", "a0 + a1", [t("a", 6, 8)], OFFSETS, 3),
        "over 1 operand",
    ),
    "weights of other rows": (
        lambda: experts.scatter_add("y", t("x", 6, 8), t("w", 2, 3), SLOTS, OFFSETS),
        r"weights \(2, 3\), slots \(3, 2\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_misuse(case: str):
    build, message = BAD[case]
    with pytest.raises(ProgramError, match=message):
        build()


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (Index(axes=("e", "r"), starts=9), "an operand of integer starts"),
        (Index(axes=("e", "r"), starts=0), "an operand of integer starts"),
        (Index(axes=("r",), starts=2), "a group and a row axis"),
        (Index(axes=("e", "n"), starts=2), "has groups of 7 rows"),
    ],
)
def test_verify_finds_a_broken_group(index: Index, message: str):
    op, outs = experts.grouped_linear("y", t("x", 6, 8), t("w", 4, 7, 8), OFFSETS, 3)
    broken = Op(
        name="y",
        kind=op.kind,
        axes=op.axes,
        reads=(Access(tensor="x", dims=(index, Index(axes=("k",)))), *op.reads[1:]),
        writes=op.writes,
    )
    given = (t("x", 6, 8), t("w", 4, 7, 8), OFFSETS)
    program = Program(name="p", tensors=(*given, *outs), ops=(broken,), outputs=("y",))
    with pytest.raises(ProgramError, match=message):
        verify_program(program)
