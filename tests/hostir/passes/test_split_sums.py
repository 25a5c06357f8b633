"""Which products leave parts of their sums to the op behind them, and that it gives their sum."""

from collections.abc import Callable

import pytest
import torch

from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.hostir.ir.nodes import ForLoop, LibraryOp
from distmega.hostir.library.matmuls import split_product
from distmega.hostir.passes.fused_kinds import row_steps
from distmega.hostir.passes.split_sums import SumParts
from distmega.hostir.run.evaluator import Evaluator
from distmega.program.builder import Handle, ProgramBuilder
from distmega.program.types import Program
from distmega.sharding.layout.placements import stream
from tests.hostir.passes.test_fuse import check, lowered
from tests.hostir.programs import random_tensors, run_program
from tests.hostir.streams import ONE
from tests.hostir.streams import lowered as streamed

EPS = 1e-5
DTYPE = "f16"
ERROR = 4e-3
"""Of numbers that are rounded to eleven bits in other places."""


def split(program: Program, sum_parts: SumParts) -> list[str]:
    return check(program, sum_parts, error=ERROR)


def two(rows: int, columns: int, terms: int) -> int:
    return 2


def rms(p: ProgramBuilder, x: Handle, y: Handle) -> Handle:
    return p.rms_norm(x.map("a0 + a1", y), p.weight("scale", x.shape[-1:], DTYPE), EPS, name="n")


def layer(p: ProgramBuilder, x: Handle, y: Handle) -> Handle:
    vectors = [p.weight(name, x.shape[-1:], DTYPE) for name in ("scale", "shift")]
    return p.layer_norm(y.map("a0 + a1", x), *vectors, EPS, name="n")


def alone(p: ProgramBuilder, x: Handle, y: Handle) -> Handle:
    return p.layer_norm(y, None, None, EPS, name="n")


def after(p: ProgramBuilder, x: Handle, y: Handle) -> Handle:
    return p.pointwise("a0 + a1", x, p.layer_norm(y, None, None, EPS), name="n")


def gate(p: ProgramBuilder, x: Handle, y: Handle) -> Handle:
    return p.pointwise("a0 * sigmoid(a1) * a1", x, y, name="n")


def block(
    behind: Callable[[ProgramBuilder, Handle, Handle], Handle],
    *,
    shape: tuple[int, ...] = (5, 16),
    bias: bool = False,
    dtype: str = DTYPE,
) -> Program:
    p = ProgramBuilder("block")
    x, h = p.input("x", shape, dtype), p.input("h", (*shape[:-1], 3, 8), dtype)
    shift = p.weight("b", shape[-1:], dtype) if bias else None
    rows = "m " if len(shape) == 2 else "b m "
    spec = f"{rows}h d, n h d{', n' * bias} -> {rows}n"
    y = p.linear(h, p.weight("w", (shape[-1], 3, 8), dtype), shift, spec, name="y")
    return p.build(behind(p, x, y))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(5, 16), (2, 3, 16)])
@pytest.mark.parametrize("behind", [rms, layer, alone, after, gate])
def test_the_op_behind_a_product_adds_up_its_parts(behind, shape, bias):
    program = block(behind, shape=shape, bias=bias)
    product, rows = split(program, two)
    assert product == "split_linear y.part0 y.part1"
    assert rows.startswith("fused_rows n")
    host = lowered(program, sum_parts=two)
    made = {buffer.name: buffer for buffer in host.buffers}
    assert "y" not in made
    assert all(made[f"y.part{n}"].dtype == "f32" for n in range(2))
    assert all(made[f"y.part{n}"].shape == shape for n in range(2))
    (op,) = [n.op for n in host.body if isinstance(n, LibraryOp) and n.op.kind == "fused_rows"]
    assert str(row_steps(op).steps[0]) == ("((a0 + a1) + a2)" if bias else "(a0 + a1)")


def test_the_choice_sees_rows_columns_and_terms():
    asked = []
    split(block(rms, shape=(2, 3, 16)), lambda *extents: asked.append(extents) or 1)
    assert asked == [(6, 16, 24)]


def test_a_chain_of_blocks_is_split_at_each():
    p = ProgramBuilder("chain")
    x = p.input("x", (4, 16), DTYPE)
    for i in range(3):
        y = p.linear(x, p.weight(f"{i}.w", (16, 16), DTYPE), name=f"{i}.y")
        x = x.map("a0 + a1", p.layer_norm(y, None, None, EPS), name=f"x{i}")
    assert [each.split()[0] for each in split(p.build(x), two)] == [
        "split_linear",
        "fused_rows",
    ] * 3


def seen(p: ProgramBuilder, x: Handle, y: Handle) -> Handle:
    """The product is an operand of a product as well."""
    return p.linear(rms(p, x, y), p.linear(y, p.weight("v", (16, 16), DTYPE)))


def turned(p: ProgramBuilder, x: Handle, y: Handle) -> Handle:
    """Behind the product stands a formula of its transposed."""
    z = p.input("z", y.shape[::-1], DTYPE)
    return z.map("a0 + a1", p.transpose(y, (1, 0), view=True))


def broadcast(p: ProgramBuilder, x: Handle, y: Handle) -> Handle:
    """Each result is read for several rows."""
    return p.input("z", (3, *y.shape), DTYPE).map("a0 + a1", y)


def shaped(p: ProgramBuilder, x: Handle, y: Handle) -> Handle:
    """The product's own kernel applies the formula."""
    return y.map("gelu(a0)")


@pytest.mark.parametrize("behind", [seen, turned, broadcast, shaped])
def test_other_products_stay_whole(behind):
    assert not [each for each in split(block(behind), two) if each.startswith("split")]


def test_products_in_f32_stay_whole():
    p = ProgramBuilder("wide")
    x = p.input("x", (5, 16))
    y = p.linear(x, p.weight("w", (16, 16)), name="y")
    program = p.build(p.rms_norm(x.map("a0 + a1", y), p.weight("scale", (16,)), EPS, name="n"))
    assert split(program, two)[0] == "linear y"


def test_sums_of_more_parts_than_a_kernel_reads_stay_whole():
    assert split(block(layer), lambda *extents: 4)[0].startswith("split_linear")
    assert split(block(layer), lambda *extents: 6)[0] == "linear y"


def test_parts_take_no_name_of_another_tensor():
    p = ProgramBuilder("named")
    x = p.input("y.part1", (4, 16), DTYPE)
    y = p.linear(x, p.weight("w", (16, 16), DTYPE), name="y")
    program = p.build(x.map("a0 + a1", p.layer_norm(y, None, None, EPS), name="n"))
    assert split(program, two) == ["split_linear y.part_0 y.part_1", "fused_rows n"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_parts_are_sums_of_neighbouring_terms(dtype):
    torch.manual_seed(0)
    x, w = (torch.randint(-4, 5, (rows, 12)).to(dtype) for rows in (3, 5))
    parts = split_product(x, w, 3)
    assert parts.dtype == torch.float32
    for n in range(3):
        terms = slice(4 * n, 4 * n + 4)
        assert torch.equal(parts[n], x[:, terms].float() @ w[:, terms].float().T)


def test_products_in_host_loops_are_split():
    """Each iteration has parts of its own rows."""
    p = ProgramBuilder("loop")
    x = p.input("x", (8, 16), DTYPE)
    y = p.linear(x, p.weight("w", (16, 16), DTYPE), name="y")
    total = x.map("a0 + a1", p.layer_norm(y, None, None, EPS), name="total")
    program = p.build(p.linear(total, p.weight("v", (16, 16), DTYPE), name="z"))
    marks = {"total": stream(0, 4)}
    _, _, host = streamed(program, ONE, marks, fuse=True, sum_parts=two)
    (loop,) = [node for node in host.body if isinstance(node, ForLoop)]
    kinds = [node.op.kind for node in loop.body if isinstance(node, LibraryOp)]
    assert kinds[:2] == ["split_linear", "fused_rows"]
    assert {b.shape for b in host.buffers if b.name.startswith("y.part")} == {(2, 16)}
    tensors = random_tensors(host)
    expected = run_program(program, {name: x.clone() for name, x in tensors.items()})
    found = Evaluator(host, SingleCommunicator(host.mesh), {}).run(tensors)
    torch.testing.assert_close(found["z"], expected["z"], rtol=ERROR, atol=4 * ERROR)
