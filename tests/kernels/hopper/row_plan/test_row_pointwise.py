"""Pointwise work on rows: fused by structure, given to SMs, proven; equal to torch."""

from dataclasses import replace

import pytest
import torch

from distmega.errors import UnsupportedError
from distmega.kernels.hopper.plan.types import RowQueues
from distmega.kernels.hopper.plan.weight_order import order_weights
from distmega.kernels.hopper.plan.words import (
    AT_POSITION,
    BIASED,
    CARRY_EMBEDDED,
    FROM_EMBEDDING,
    NOTHING,
    UNIT_ROWS,
    RowAttention,
    RowPointwise,
)
from distmega.kernels.hopper.row_plan.proof import find_hazard
from distmega.kernels.hopper.row_plan.queues import build_queues
from distmega.kernels.runtime.arena import Space, layout_arena
from distmega.kernels.tasks.fuse import FusedContraction, FusedPointwise, fuse_segment
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Program
from tests.hostir.programs import run_program_in
from tests.kernels.fused_reference import run_fused
from tests.kernels.row_programs import HIDDEN, PROGRAMS, attending, matrix, random_values, rms

NUM_SMS = 20


def queues_of(program: Program, num_sms: int = NUM_SMS) -> RowQueues:
    weights = layout_arena(Space.WEIGHT, order_weights(program))
    return build_queues(program, weights, layout_arena(Space.STATE, []), num_sms)


def pointwise(queues: RowQueues) -> list[RowPointwise]:
    return [one for queue in queues.queues for one in queue if isinstance(one, RowPointwise)]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", PROGRAMS)
def test_fused_ops_compute_the_program(name, rows):
    program = PROGRAMS[name](rows)
    values = random_values(program)
    expected = run_program_in(torch.float64, program, values)
    for out, found in run_fused(program, values).items():
        torch.testing.assert_close(found.double(), expected[out].double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_row_has_one_sm(name):
    queues = queues_of(PROGRAMS[name](1))
    found: dict[str, list[int]] = {}
    for one in pointwise(queues):
        own = range(one.row0, min(one.row0 + one.num_units * UNIT_ROWS, one.num_rows))
        found.setdefault(one.name, []).extend(own)
    assert found
    for op, rows in found.items():
        assert sorted(rows) == list(range(queues_rows(queues, op)))


def queues_rows(queues: RowQueues, op: str) -> int:
    (num,) = {one.num_rows for one in pointwise(queues) if one.name == op}
    return num


def test_what_rows_are_made_of():
    """Where x comes from, what is carried, the table and the norm's bias."""
    flags = {
        name: {one.flags for one in pointwise(queues_of(PROGRAMS[name](1)))}
        for name in ("two_tables", "norm_of_input", "scaled_table", "norm_at_the_end")
    }
    assert flags == {
        "two_tables": {CARRY_EMBEDDED | AT_POSITION},
        "norm_of_input": {FROM_EMBEDDING},
        "scaled_table": {CARRY_EMBEDDED},
        "norm_at_the_end": {BIASED, 0},
    }
    queues = queues_of(PROGRAMS["two_tables"](1))
    assert (queues.ids, queues.positions) == ("ids", "positions")
    assert {one.table == NOTHING for one in pointwise(queues)} == {False}
    assert [one.norm for one in queues.formulas] == [""]
    (formula,) = queues_of(PROGRAMS["classifier"](1)).formulas
    assert (formula.norm, formula.numbers, formula.publishes) == ("softmax", False, "nothing")
    (formula,) = queues_of(small_classifier()).formulas
    assert formula.numbers


def small_classifier() -> Program:
    """Of 10 classes, which are no whole polls of pairs."""
    p = ProgramBuilder("ten")
    x = p.input("x", (1, HIDDEN), "bf16")
    return p.build(p.softmax(matrix(p, x, 10, "logits"), name="out"))


def test_norms_of_queries_and_keys_lie_apart():
    """A norm of all heads together is work of its own, and attention reads three buffers."""
    program = attending(layers=3)
    weights = layout_arena(Space.WEIGHT, order_weights(program))
    states = layout_arena(Space.STATE, program.with_role("state"))
    queues = build_queues(program, weights, states, NUM_SMS)
    assert queues.attention is not None
    assert (queues.attention.apart, queues.attention.qk_norm) == (True, False)
    assert sorted(one.publishes for one in queues.formulas) == ["numbers", "pairs"]
    names = {buffer.first: buffer.name for buffer in queues.buffers}
    sources = {
        (names[one.src], names[one.k_src], names[one.v_src])
        for queue in queues.queues
        for one in queue
        if isinstance(one, RowAttention)
    }
    assert sources == {("qn0", "kn0", "q0")}


def change(queues: RowQueues, **fields: int) -> RowQueues:
    """The queues with fields of pointwise work set."""
    return replace(
        queues,
        queues=tuple(
            tuple(replace(x, **fields) if isinstance(x, RowPointwise) else x for x in queue)
            for queue in queues.queues
        ),
    )


def test_the_proof_knows_what_rows_read_and_write():
    queues = queues_of(PROGRAMS["post_norms"](1))
    assert find_hazard(queues) == ""
    assert "waits for ever" in find_hazard(change(queues, flag_delta=7))
    first = next(one for one in pointwise(queues))
    assert find_hazard(change(queues, dst=first.src))
    assert "waits for ever" in find_hazard(change(queues, num_src_words=first.num_src_words + 2))


def test_norms_of_heads_are_no_norms_of_a_row():
    """A norm of each head in front of a product over all heads is not its prologue."""
    p = ProgramBuilder("heads")
    x = matrix(p, p.input("x", (1, HIDDEN), "bf16"), HIDDEN, "y")
    each = rms(p, p.reshape(x, (1, 4, 64), view=True), "n")
    program = p.build(matrix(p, p.reshape(each, (1, HIDDEN), view=True), HIDDEN, "o"))
    *_, rows, last = fuse_segment(program)
    assert isinstance(rows, FusedPointwise)
    assert rows.length == 64
    assert isinstance(last, FusedContraction)
    assert last.norm is None
    with pytest.raises(UnsupportedError, match="normalises 64 of 256 elements together"):
        queues_of(program)


def test_weights_of_other_types_are_refused():
    p = ProgramBuilder("f32")
    x = p.input("x", (1, 64), "bf16")
    program = p.build(p.linear(x, p.weight("w", (64, 64), "f32"), name="y"))
    with pytest.raises(UnsupportedError, match="'w' of f32, not bf16"):
        queues_of(program)
    p = ProgramBuilder("mixed")
    x = p.input("x", (1, 64), "bf16")
    program = p.build(rms(p, matrix(p, rms(p, x, "a"), 64, "y"), "b", "f32"))
    with pytest.raises(UnsupportedError, match=r"'b\.w' of f32, not bf16"):
        queues_of(program)


@pytest.mark.parametrize(("dtype", "elements"), [("bf16", 256), ("f32", 256), ("bf16", 4160)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_layer_norms_that_a_product_can_not_do_are_apart(dtype, elements, has_bias):
    """Without a bias, of other weights than bf16, or of more than a product stages at once."""
    p = ProgramBuilder("norm")
    vectors = [p.weight(name, (elements,), dtype) for name in "ab"[: 1 + has_bias]]
    x = p.layer_norm(p.input("x", (1, elements), "bf16"), *vectors, *[None] * (not has_bias), 1e-5)
    queues = queues_of(p.build(matrix(p, x, 64, "y")))
    apart = [one for one in queues.queues[0] if isinstance(one, RowPointwise)]
    assert bool(apart) == (not has_bias or dtype == "f32" or elements > 4096)
