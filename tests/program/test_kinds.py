"""Op kinds: one definition each, and an op that one file states: cumprod."""

import math

import pytest
import torch

from distmega.hostir.library.ops import compile_op, run_op
from distmega.program.builder import ProgramBuilder
from distmega.program.kinds import kind_of, kinds
from distmega.program.ops import norms
from distmega.program.text import parse_program, print_program
from distmega.program.types import Tensor
from distmega.sharding.resolve.padding import Pad, inexact_reason, result_pads
from distmega.sharding.search.cost import op_flops
from distmega.sharding.search.options import split_options
from distmega.torch_import import capture
from tests.torch_import.running import open_ranks

X = Tensor(name="x", shape=(6, 8), dtype="f32")
OP, (Y,) = norms.cumprod("y", X)


def test_only_sharding_makes_kinds_that_ranks_do_together():
    together = {kind.name for kind in kinds() if kind.communicates}
    assert together == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
    assert all(kind.origin == "sharding" for kind in kinds() if kind.communicates)


def test_a_kind_of_a_pass_is_a_plain_one():
    p = ProgramBuilder("plain")
    op = p.build(p.softmax(p.input("x", (2, 3)))).ops[0]
    assert kind_of(op).name == "softmax"
    made = type(op)(name="f", kind="made_here", axes=(), reads=(), writes=(), attrs=())
    assert kind_of(made).origin == "internal"
    assert not kind_of(made).zero_where(made, {0}, {0})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_reference_runs_in_fp32_and_gives_the_type_of_its_operand(dtype: torch.dtype):
    x = torch.linspace(0.5, 1.5, 48).reshape(6, 8).to(dtype)
    found = run_op(OP, {"x": x}, {})["y"]
    assert found.dtype == dtype
    assert torch.equal(found, x.float().cumprod(-1).to(dtype))
    (again,) = compile_op(OP, {})([x, x])
    assert torch.equal(found, again)


def test_its_cost_is_that_of_its_results():
    assert op_flops(OP) == 48
    assert op_flops(OP, {"m0": 3}) == 24


def test_rows_are_divided_and_products_are_not():
    found = split_options(OP, {"x": X, "y": Y}, 2)
    assert [option.axis for option in found.options] == ["", "m0"]
    assert dict(found.rejected)["r"] == "the op needs all of it at once"


def test_padding_of_its_rows_is_finite_and_never_said_to_be_zero():
    pads = [{"m0": Pad.ZERO}, {"m0": Pad.ZERO}]
    assert result_pads(OP, ["m0"], pads) == {"m0": Pad.FINITE}
    assert inexact_reason(OP, ["m0"], pads, ()) == ""


def test_it_prints_and_parses():
    p = ProgramBuilder("products")
    program = p.build(p.op(norms.cumprod, p.input("x", (2, 3)), name="y"))
    assert parse_program(print_program(program)) == program


def test_torch_modules_have_it_along_any_dim():
    class Products(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.cumprod(0) + x.cumprod(1)

    x = torch.linspace(0.5, 1.5, 12).reshape(3, 4)
    module = Products()
    captured = capture(module, (x,))
    ops = [op.kind for op in captured.program.ops]
    assert ops.count("cumprod") == 2
    assert "opaque" not in ops
    (rank,) = open_ranks(captured, 1)
    torch.testing.assert_close(rank(x), module(x))


def test_flops_of_attention_are_those_of_scores_and_values():
    p = ProgramBuilder("attend")
    q = p.input("q", (1, 4, 3, 8))
    kv = p.input("k", (1, 2, 5, 8)), p.input("v", (1, 2, 5, 6))
    op = p.build(p.attend(q, *kv, None, scale=1 / math.sqrt(8))).ops[0]
    assert op_flops(op) == 1 * 4 * 3 * 5 * (2 * 8 + 2 * 6 + 4)
