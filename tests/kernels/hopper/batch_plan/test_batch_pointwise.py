"""Pointwise work on 2 to 16 rows: instructions of its own, proven; what it takes and gives."""

from dataclasses import replace

import pytest

from distmega.errors import UnsupportedError
from distmega.kernels.hopper.batch_plan.proof import find_batch_hazard
from distmega.kernels.hopper.batch_plan.queues import apart, build_batch_queues
from distmega.kernels.hopper.batch_plan.types import BatchQueues
from distmega.kernels.hopper.batch_plan.words import (
    BatchAttention,
    BatchLogits,
    BatchPointwise,
)
from distmega.kernels.hopper.diagnosis import describe_batch
from distmega.kernels.hopper.plan.weight_order import order_weights
from distmega.kernels.hopper.plan.words import NOTHING, VECTOR_MULTIPLE
from distmega.kernels.runtime.arena import Space, layout_arena
from distmega.kernels.tasks.fuse import fuse_segment
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Program
from tests.kernels.row_programs import (
    HEADS,
    HIDDEN,
    PROGRAMS,
    attending,
    attending_columns,
    matrix,
    rms,
)


def queues_of(program: Program, num_sms: int = 20) -> BatchQueues:
    weights = layout_arena(Space.WEIGHT, order_weights(program))
    states = layout_arena(Space.STATE, program.with_role("state"))
    return build_batch_queues(program, weights, states, num_sms)


def pointwise(queues: BatchQueues) -> list[BatchPointwise]:
    return [one for one in queues.queues[0] if isinstance(one, BatchPointwise)]


@pytest.mark.parametrize(("rows", "num_sms"), [(16, 132), (3, 2)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_are_proven(name: str, rows: int, num_sms: int):
    queues = queues_of(PROGRAMS[name](rows), num_sms)
    assert queues.batch == rows
    assert pointwise(queues)


def test_what_rows_are_made_of():
    """Where x comes from, what is carried, the table and the norm's vectors."""
    (one,) = pointwise(queues_of(PROGRAMS["two_tables"](4)))
    assert (one.src, one.carry2, one.by_position) == (NOTHING, NOTHING, True)
    assert min(one.carry, one.table) >= 0
    both = pointwise(queues_of(PROGRAMS["norm_at_the_end"](4)))
    assert [(one.weight >= 0, one.bias >= 0, one.eps) for one in both] == [
        (True, True, 1e-3), (True, False, 1e-2)
    ]  # fmt: skip
    assert len({one.src for one in both}) == 1
    queues = queues_of(PROGRAMS["post_norms"](4))
    assert not queues.wide_norms
    assert queues_of(PROGRAMS["wide_norms"](4)).wide_norms
    (head,) = (one for one in queues.queues[0] if isinstance(one, BatchLogits))
    assert head.bias >= 0
    assert [(one.scaled, one.publishes) for one in queues.formulas.each] == [
        (False, True), (True, True)
    ]  # fmt: skip


def test_a_report_names_the_op():
    queues = queues_of(PROGRAMS["post_norms"](4))
    number = next(i for i, one in enumerate(queues.queues[0]) if isinstance(one, BatchPointwise))
    assert describe_batch(queues, number, sm=1) == f"instruction {number}, x0"


def two_lookups(rows: int) -> Program:
    """Two tables of the same tokens."""
    p = ProgramBuilder("lookups")
    ids = p.input("ids", (rows,), "i64")
    x, y = (
        p.embedding(ids, p.weight(name, (330, HIDDEN), "bf16"), name=f"{name}.x") for name in "tu"
    )
    return p.build(matrix(p, p.pointwise("a0 - a1", x, y, name="d"), 64, "y"))


def test_a_table_of_tokens_needs_these():
    queues = queues_of(two_lookups(3))
    (one,) = pointwise(queues)
    assert queues.keeps_ids
    assert not one.by_position
    assert not queues_of(PROGRAMS["two_tables"](3)).keeps_ids


def heads_normed(rows: int) -> Program:
    """A norm of each head in front of a product over all heads."""
    p = ProgramBuilder("heads")
    x = matrix(p, p.input("x", (rows, HIDDEN), "bf16"), HIDDEN, "y")
    each = rms(p, p.reshape(x, (rows, 4, 64), view=True), "n")
    return p.build(matrix(p, p.reshape(each, (rows, HIDDEN), view=True), HIDDEN, "o"))


def test_norms_of_heads_are_normalised_apart():
    (one,) = pointwise(queues_of(heads_normed(3)))
    assert (one.num_rows, one.length) == (HIDDEN, 64)


def test_queries_keys_and_values_lie_apart():
    """Behind norms of all heads together; and wherever others take one of them, too."""
    queues = queues_of(attending(layers=3, rows=4))
    assert queues.attention is not None
    assert (queues.attention.apart, queues.attention.qk_norm) == (True, False)
    for one in queues.queues[0]:
        if isinstance(one, BatchAttention):
            assert len({one.src, one.k_src, one.v_src}) == 3
    program = attending(layers=1, rows=4)
    name = next(op.writes[0].tensor for op in program.ops if op.name == "v0")
    assert any(kept.tensor == name for kept in queues_of(with_output(program, name)).outputs)


def with_output(program: Program, name: str) -> Program:
    return replace(program, outputs=(*program.outputs, name))


def change(queues: BatchQueues, **fields: int) -> BatchQueues:
    """The queues with fields of pointwise work set."""
    return replace(
        queues,
        queues=tuple(
            tuple(replace(x, **fields) if isinstance(x, BatchPointwise) else x for x in queue)
            for queue in queues.queues
        ),
    )


def test_the_proof_knows_what_rows_read_and_write():
    program = PROGRAMS["post_norms"](3)
    fused, queues = tuple(apart(fuse_segment(program), program.outputs)), queues_of(program)
    assert find_batch_hazard(queues, fused) == ""
    first, *_ = pointwise(queues)
    for fields in ({"src": 1 << 20}, {"carry": first.src}, {"keep": 1 << 20}, {"dst": 1 << 20}):
        assert find_batch_hazard(change(queues, **fields), fused)
    assert find_batch_hazard(change(queues, next_norm=NOTHING), fused)


def test_what_rows_do_not_take_is_refused():
    p = ProgramBuilder("three")
    x = p.input("x", (3, HIDDEN), "bf16")
    parts = [matrix(p, x, HIDDEN, f"y{i}") for i in range(3)]
    kept = [part.map("relu(a0)", name=f"k{i}") for i, part in enumerate(parts)]
    n = p.layer_norm(x, None, None, 1e-5, name="n")
    program = p.build(p.pointwise("a0 + a1 + a2 + a3", n, *kept, name="s"), *kept)
    with pytest.raises(UnsupportedError, match="'s', which takes"):
        queues_of(program)


@pytest.mark.parametrize("name", HEADS)
def test_heads_of_any_width_are_taken(name: str):
    queues = queues_of(attending(rows=4, **HEADS[name]))
    assert queues.attention is not None
    assert queues.attention.head_dim == HEADS[name].get("dim", 64)


@pytest.mark.parametrize("turned", ["", "rope", "norm"])
def test_attention_takes_columns_of_one_product(turned: str):
    """As those of products whose weights lie side by side, instruction for instruction."""
    queues, others = (
        queues_of(attending_columns(4, turned=turned, joined=joined)) for joined in (True, False)
    )
    assert queues.attention == others.attention
    assert queues.attention is not None
    assert not queues.attention.apart
    for mine, theirs in zip(queues.queues, others.queues, strict=True):
        assert [replace(one, name="") for one in mine] == [replace(one, name="") for one in theirs]
    assert queues.matrices == others.matrices


@pytest.mark.parametrize("options", [{"order": "kqv"}, {"keeps": True}])
def test_columns_in_another_order_or_for_others_too_are_refused(options):
    with pytest.raises(UnsupportedError, match="which takes"):
        queues_of(attending_columns(4, **options))


def test_attention_finds_what_is_added_to_scores():
    program = attending(rows=2, biased=True)
    layout = layout_arena(Space.WEIGHT, order_weights(program))
    queues = queues_of(program)
    assert queues.attention is not None
    assert queues.attention.biased
    tables = {one.table for one in queues.queues[0] if isinstance(one, BatchAttention)}
    assert tables == {layout.offset("slopes") // (2 * VECTOR_MULTIPLE)}


def test_products_of_what_is_made_are_refused():
    p = ProgramBuilder("made")
    x = p.input("x", (2, 64), "bf16")
    with pytest.raises(UnsupportedError, match="'h', which is no weight"):
        queues_of(p.build(p.linear(x, x.map("tanh(a0)", name="h"))))
