"""Bytes, flops and time follow from access maps."""

import pytest

from distmega.kernels.machines import CPU, H100, H200, MACHINES
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Op
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.planner import plan_program
from distmega.sharding.search.cost import op_bytes, op_flops, op_time_us, residency_prices_us
from tests.program.experts import moe_block
from tests.sharding.programs import decoder

DECODER = decoder(rows=2, hidden=12, heads=3, group=2, head=4, ffn=10, vocab=11, context=8)


def op_named(name: str) -> Op:
    return next(op for op in DECODER.ops if op.name == name)


@pytest.mark.parametrize(
    ("name", "elements", "flops"),
    [
        ("x", 2 * 12 + 2 * 12, 0),
        ("layers.0.gate", 2 * 12 + 10 * 12 + 2 * 10, 2 * 2 * 10 * 12),
        ("layers.0.act", 3 * 2 * 10, 2 * 2 * 10),
        ("layers.0.a", 2 * 12 + 12 + 2 * 12, 4 * 2 * 12),
        ("layers.0.q_rope", 2 * 48 + 2 * 4, 4 * 48),
        ("layers.0.k_append", 2 * 24, 0),
        ("layers.0.attn", 2 * 48 + 2 * 96, 12 * 8 * (8 + 8 + 4)),
        ("last", 12 + 12, 0),
    ],
)
def test_every_element_touched_is_counted_once(name, elements, flops):
    """f32 elements, and the i64 positions or tokens that an op reads."""
    op, tensors = op_named(name), DECODER.tensor_map()
    indices = sum(8 * 2 for a in op.reads if tensors[a.tensor].dtype == "i64")
    assert op_bytes(op, tensors) == 4 * elements + indices
    assert op_flops(op) == flops


def test_a_part_of_an_op_costs_its_part():
    op, tensors = op_named("layers.0.gate"), DECODER.tensor_map()
    assert op_bytes(op, tensors, {"n": 5}) == 4 * (2 * 12 + 5 * 12 + 2 * 5)
    assert op_flops(op, {"n": 5}) * 2 == op_flops(op)


def test_a_plan_counts_the_rows_that_experts_have():
    """6 rows of 2 experts each: 12 of 8 elements, a gate of 12 and a product with it."""
    program = moe_block(rows=6, hidden=8, num=2, ffn=12)
    plan = plan_program(program, DeviceMesh(), CPU)
    flops = {step.op.name: step.cost.flops for step in plan.decisions}
    assert flops["gate"] == flops["up"] == flops["down"] == 2 * 12 * 8 * 12
    assert flops["mixed"] == 2 * 12 * 12


def test_a_concat_reads_each_operand_once():
    p = ProgramBuilder("p")
    program = p.build(p.concat([p.input("a", (2, 3)), p.input("b", (2, 5))], 1))
    assert op_bytes(program.ops[0], program.tensor_map()) == 4 * 2 * (3 + 5 + 8)


def test_time_is_launch_and_the_longer_of_bytes_and_flops():
    p = ProgramBuilder("p")
    small = p.input("x", (1, 8192), "bf16")
    y = p.linear(small, p.weight("w", (8192, 8192), "bf16"), name="small")
    large = p.linear(p.input("big", (8192, 8192), "bf16"), p.weight("w", (8192, 8192), "bf16"))
    view = p.reshape(y, (64, 128), view=True)
    program = p.build(view, large)
    tensors, (op_small, op_large, op_view) = program.tensor_map(), program.ops
    assert op_time_us(op_small, tensors, H200) == pytest.approx(2 + 2 * 8192**2 / 4.12e6, rel=1e-2)
    assert op_time_us(op_large, tensors, H200) == pytest.approx(2 + 2 * 8192**3 / 6.8e8, rel=1e-6)
    assert op_time_us(op_view, tensors, H200) == 0.0


def test_matrices_and_states_have_a_price_for_each_use():
    prices = residency_prices_us(DECODER, CPU)
    assert "layers.0.attn_norm" not in prices
    assert prices["layers.0.wq"] == pytest.approx(3 * CPU.collective_us, rel=0.01)
    assert prices["embed"] == pytest.approx(6 * CPU.collective_us, rel=0.01)
    assert prices["layers.0.k_cache"] == pytest.approx(6 * CPU.collective_us, rel=0.01)


def test_machines_are_found_by_name():
    assert MACHINES == {"cpu": CPU, "h100": H100, "h200": H200}
    assert H200.flops_rate("bf16") == 6.8e8
    assert H200.flops_rate("i64") == 3.0e7
