"""Which products apply a formula, and that they give what product and formula give."""

import pytest

from distmega.program.builder import Handle, ProgramBuilder
from distmega.program.types import Program
from tests.hostir.passes.test_fuse import check, lowered


def shaped(formula: str, *, bias: bool = True, dims: int = 2, also: str = "") -> Program:
    """A product, a formula of it, another product. also: "product" or "half" is read too."""
    p = ProgramBuilder("shaped")
    x = p.input("x", (3,) * (dims - 1) + (8,))
    vectors = [p.weight("b", (6,))] if bias else []
    h = p.linear(x, p.weight("w", (6, 8)), *vectors, name="h")
    y = h.map(formula, name="y")
    out = p.linear(y, p.weight("v", (5, 6)), name="z")
    others: list[Handle] = [h] if also == "product" else []
    return p.build(out, *others)


@pytest.mark.parametrize("dims", [2, 4])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("formula", ["gelu(a0)", "0.5 * a0 * (1.0 + tanh(a0 + a0 * a0 * a0))"])
def test_a_product_applies_the_formula_behind_it(formula: str, bias: bool, dims: int):
    assert check(shaped(formula, bias=bias, dims=dims)) == ["fused_product y", "linear z"]
    host = lowered(shaped(formula, bias=bias))
    assert "h" not in host.buffer_map()


def test_a_chain_of_formulas_is_one_with_its_product():
    p = ProgramBuilder("chain")
    x = p.input("x", (3, 8))
    y = p.linear(x, p.weight("w", (6, 8)), name="h").map("a0 * 2", name="a").map("relu(a0)")
    assert [step.split()[0] for step in check(p.build(y))] == ["fused_product"]


def test_a_product_that_others_read_stays_apart():
    assert check(shaped("gelu(a0)", also="product")) == ["linear h", "pointwise y", "linear z"]


def test_a_formula_of_two_tensors_stays_apart():
    p = ProgramBuilder("two")
    x, r = p.input("x", (3, 8)), p.input("r", (3, 6))
    y = p.linear(x, p.weight("w", (6, 8)), name="h").map("a0 + a1", r, name="y")
    assert check(p.build(y)) == ["linear h", "pointwise y"]


def test_another_order_of_dims_stays_apart():
    p = ProgramBuilder("turned")
    x = p.input("x", (3, 8))
    h = p.linear(x, p.weight("w", (6, 8)), spec="m k, n k -> n m", name="h")
    assert check(p.build(h.map("gelu(a0)", name="y"))) == ["linear h", "pointwise y"]
