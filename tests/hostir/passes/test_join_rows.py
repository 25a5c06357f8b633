"""Which norms and formulas of rows are one op, and that it gives what they give one by one."""

from collections.abc import Callable

import pytest

from distmega.hostir.ir.nodes import LibraryOp
from distmega.hostir.passes.fused_kinds import row_steps
from distmega.hostir.passes.row_ops import MAX_COLUMNS
from distmega.program.builder import Handle, ProgramBuilder
from distmega.program.types import Program
from tests.hostir.passes.test_fuse import check, lowered

EPS = 1e-5
NORMS: dict[str, Callable[[ProgramBuilder, Handle], Handle]] = {
    "rms": lambda p, x: p.rms_norm(x, p.weight("rms.w", x.shape[-1:]), EPS, name="n"),
    "layer": lambda p, x: p.layer_norm(
        x, p.weight("layer.w", x.shape[-1:]), p.weight("layer.b", x.shape[-1:]), EPS, name="n"
    ),
    "plain layer": lambda p, x: p.layer_norm(x, None, None, EPS, name="n"),
    "softmax": lambda p, x: p.softmax(x, name="n"),
}


@pytest.mark.parametrize("shape", [(5, 12), (2, 3, 12)])
@pytest.mark.parametrize("norm", NORMS)
def test_formulas_on_both_sides_of_a_norm_are_one_op_with_it(norm: str, shape: tuple[int, ...]):
    p = ProgramBuilder("around")
    x, gate = p.input("x", shape), p.input("gate", shape)
    y = NORMS[norm](p, x.map("silu(a0) * a1", gate, name="s"))
    program = p.build(y.map("gelu(a0) + a1", gate, name="y"))
    assert check(program) == ["fused_rows y"]
    assert {buffer.name for buffer in lowered(program).buffers if buffer.role == "temp"} == {"y"}


def test_a_norm_is_scaled_and_shifted_by_vectors_of_sequences():
    """As blocks do whose norms a condition modulates; one row of each, of any strides."""
    p = ProgramBuilder("modulated")
    x, both = p.input("x", (2, 3, 8)), p.input("both", (2, 1, 16))
    scale, shift = (p.slice(both, 2, n, n + 8, view=True, name=f"h{n}") for n in (0, 8))
    n = p.layer_norm(x, None, None, EPS)
    program = p.build(p.pointwise("a0 * (1.0 + a1) + a2", n, scale, shift, name="y"))
    assert check(program) == ["view h0", "view h8", "fused_rows y"]


def test_norms_of_norms_and_of_their_sums_are_one_op():
    p = ProgramBuilder("chain")
    x = p.input("x", (4, 16))
    for i in range(2):
        n = p.layer_norm(x, p.weight(f"{i}.w", (16,)), None, EPS)
        m = p.rms_norm(n.map("a0 + gelu(a0)"), p.weight(f"{i}.v", (16,)), EPS)
        x = m.map("a0 + a1", p.softmax(m), name=f"x{i}")
    program = p.build(x)
    assert check(program) == ["fused_rows x1"]
    (op,) = [node.op for node in lowered(program).body if isinstance(node, LibraryOp)]
    assert len(op.reads) == 5, "each operand once"
    assert sum(str(step).startswith("norm") for step in row_steps(op).steps) == 6


def test_sums_that_norms_keep_are_results_of_one_op():
    p = ProgramBuilder("residual")
    x, y = p.input("x", (4, 8)), p.input("y", (4, 8))
    total = x.map("a0 + a1", p.rms_norm(y, p.weight("w", (8,)), EPS), name="total")
    program = p.build(p.rms_norm(total, p.weight("v", (8,)), EPS, name="n"), total)
    assert check(program) == ["fused_rows n total"]


def test_results_that_others_read_stay_results():
    p = ProgramBuilder("read")
    n = p.rms_norm(p.input("x", (4, 8)), p.weight("w", (8,)), EPS, name="n")
    t = n.map("tanh(a0)", name="t")
    assert check(p.build(t, p.linear(n, p.weight("v", (5, 8)), name="z"))) == [
        "fused_rows n t",
        "linear z",
    ]


def turned(p: ProgramBuilder, x: Handle) -> Handle:
    """A norm along the other dim of the result of a norm."""
    n = p.rms_norm(x, p.weight("w", x.shape[-1:]), EPS, name="n")
    return p.softmax(p.transpose(n, (1, 0), view=True, name="v"), name="y")


def broadcast(p: ProgramBuilder, x: Handle) -> Handle:
    """A formula that takes the result of a norm for each of more rows."""
    n = p.rms_norm(x, p.weight("w", x.shape[-1:]), EPS, name="n")
    return p.input("z", (3, *x.shape)).map("a0 + a1", n, name="y")


def whole(p: ProgramBuilder, x: Handle) -> Handle:
    """With numbers that no kernel takes."""
    n = p.rms_norm(x, p.weight("w", x.shape[-1:]), EPS, name="n")
    return n.map("a0 * a1", p.input("z", x.shape, "f64"), name="y")


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (turned, ["rms_norm n", "view v", "softmax y"]),
        (broadcast, ["rms_norm n", "pointwise y"]),
        (whole, ["rms_norm n", "pointwise y"]),
    ],
)
def test_others_stay_apart(
    make: Callable[[ProgramBuilder, Handle], Handle], names: list[str]
) -> None:
    p = ProgramBuilder("apart")
    assert check(p.build(make(p, p.input("x", (4, 8))))) == names


def kinds(columns: int, operands: int) -> list[str]:
    """Of a norm and a formula of it and so many others, as they are lowered."""
    p = ProgramBuilder("long")
    x, *others = (p.input(f"x{i}", (2, columns), "bf16") for i in range(operands + 1))
    text = " + ".join(f"a{i}" for i in range(operands + 1))
    program: Program = p.build(p.pointwise(text, p.softmax(x), *others))
    return [node.op.kind for node in lowered(program).body if isinstance(node, LibraryOp)]


def test_rows_that_registers_do_not_hold_stay_apart():
    assert kinds(MAX_COLUMNS, 2) == ["fused_rows"]
    assert kinds(MAX_COLUMNS, 6) == ["softmax", "pointwise"]
    assert kinds(MAX_COLUMNS + 1, 2) == ["softmax", "pointwise"]
    assert kinds(1024, 8) == ["softmax", "pointwise"], "more operands than a kernel has"
