"""Sums over ranks that readers add up: which there are, who carries what, and that queues with them
give what torch does on every rank.
"""

from functools import cache

import pytest
import torch

from bench.llama import llama_1b
from bench.models import Model, gated_mlp
from distmega.errors import UnsupportedError
from distmega.kernels.hopper.plan.types import RowQueues
from distmega.kernels.hopper.plan.words import (
    CARRY_EMBEDDED,
    KEEP_X,
    NOTHING,
    X_PARTS,
    RowLinear,
    RowPointwise,
)
from distmega.kernels.hopper.row_plan import deferred
from distmega.kernels.hopper.row_plan.accesses import reads, writes
from distmega.program.builder import ProgramBuilder
from distmega.sharding.layout.placements import shard
from tests.gpu.test_whole import random_values
from tests.kernels.hopper.emulator.emulating import Case, case_of, error, expected

MOST_ERROR = 0.02
"""Of what is rounded to bf16 between ops."""


@cache
def layers(num: int, tp: int = 2) -> Case:
    model = gated_mlp(1, num, hidden=128, inner=256)
    return case_of(model.program, tp, num_sms=6, marks=model.marks)


def normed_sums(layers: int) -> Model:
    """x + norm(sum over ranks), layer after layer, each of which begins with a layer norm."""
    p = ProgramBuilder("normed_sums")
    x = p.input("x", (1, 128), "bf16")
    marks = {}
    for i in range(layers):
        scale, shift = (p.weight(f"{i}.{name}", (128,), "bf16") for name in ("scale", "shift.b"))
        up = p.weight(f"{i}.up", (256, 128), "bf16")
        down = p.weight(f"{i}.down", (128, 256), "bf16")
        inner = p.linear(p.layer_norm(x, scale, shift, 1e-5), up).map("silu(a0)")
        total = p.rms_norm(p.linear(inner, down), p.weight(f"{i}.norm", (128,), "bf16"), 1e-5)
        x = total.map("a0 + a1", x)
        marks |= {f"{i}.up": shard(0, "tp"), f"{i}.down": shard(1, "tp")}
    return Model(program=p.build(x), marks=marks, in_torch=lambda own, total: own["x"])


def branches() -> Model:
    """A sum over ranks that a layer norm begins with, and that is carried behind it."""
    p = ProgramBuilder("branches")
    x = p.input("x", (1, 128), "bf16")
    marks = {}
    for i in range(3):
        scale, shift = (p.weight(f"{i}.{name}", (128,), "bf16") for name in ("scale", "shift.b"))
        up = p.weight(f"{i}.up", (256, 128), "bf16")
        down = p.weight(f"{i}.down", (128, 256), "bf16")
        inner = p.linear(p.layer_norm(x, scale, shift, 1e-5), up).map("silu(a0)")
        x = p.linear(inner, down).map("a0 + a1", x)
        marks |= {f"{i}.up": shard(0, "tp"), f"{i}.down": shard(1, "tp")}
    return Model(program=p.build(x), marks=marks, in_torch=lambda own, total: own["x"])


def linears(queues: RowQueues, flag: int) -> list[RowLinear]:
    found = [one for queue in queues.queues for one in queue if isinstance(one, RowLinear)]
    return [one for one in found if one.flags & flag]


def sums(queues: RowQueues) -> dict[str, str]:
    """How each sum over ranks is added up, by the name of its op."""
    return {
        one.name: "by readers" if epilogue.deferred else "by owners"
        for queue in queues.queues
        for one in queue
        if isinstance(one, RowLinear)
        for epilogue in [queues.epilogues[one.opcode]]
        if epilogue.deferred or epilogue.summed
    }


def require_right(case: Case, seeds: int = 2) -> None:
    """Three calls give torch's results, the same bits on all ranks and under all seeds."""
    values = random_values(case.program)
    x = values.pop("x")
    inputs = [{"x": x}, {"x": -0.5 * x}, {"x": x}]
    exact = expected(case.program, values, inputs)
    (out,) = case.program.outputs
    for seed in range(seeds):
        found = case.emulate(values, inputs, seed)
        for each, wanted in zip(found, exact, strict=True):
            assert error(each[0].outputs[out], wanted[out]) < MOST_ERROR
            assert all(torch.equal(one.outputs[out], each[0].outputs[out]) for one in each)
        assert torch.equal(found[0][0].outputs[out], found[2][0].outputs[out])


def test_readers_add_up_all_sums_but_one_that_leaves():
    first, second = layers(3).queues
    assert [*sums(first).values()] == ["by readers", "by readers", "by owners"]
    assert sums(second) == sums(first)


def test_one_sum_of_many_is_added_up_by_its_owner():
    """Of 4 sums of rows that others normalise and keep, only the last one could be."""
    model = llama_1b("postnorm", 2, 128, (8, 4, 32), 192, 200, 130, with_state=True)
    case = case_of(model.program, 2, num_sms=6, marks=model.marks)
    assert {*sums(case.queues[0]).values()} == {"by owners"}


def test_the_first_rank_alone_carries():
    first, second = layers(3).queues
    assert linears(first, CARRY_EMBEDDED)
    assert linears(first, KEEP_X)
    assert not linears(second, CARRY_EMBEDDED | KEEP_X)
    assert linears(second, X_PARTS)
    every = [one for queue in second.queues for one in queue if isinstance(one, RowLinear)]
    assert {one.carry for one in every} == {NOTHING}


def test_readers_wait_for_the_parts_of_all_ranks():
    queues = layers(3).queues[0]
    (sm, writer) = next(
        (sm, one)
        for sm, queue in enumerate(queues.queues)
        for one in queue
        if isinstance(one, RowLinear) and queues.epilogues[one.opcode].deferred
    )
    parts = [write.words for write in writes(writer, queues, sm)]
    assert len(parts) == 2
    for reader in linears(queues, X_PARTS):
        if reader.generation - reader.flag_delta != writer.generation:
            continue
        (words,) = (read.words for read in reads(reader, queues) if read.words[0] == reader.src)
        assert len(words) == 2 * reader.num_src_words
    assert parts[1].start - parts[0].start == 64


@pytest.mark.parametrize("num", [2, 3])
def test_layers_of_a_gated_mlp(num: int):
    require_right(layers(num))


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_sums_that_norms_take(tp: int):
    """As a result, where rows are pointwise work on SMs, and as the next product's x."""
    model = normed_sums(3)
    case = case_of(model.program, tp, num_sms=5, marks=model.marks)
    formulas = case.queues[0].formulas
    assert {formula.norm for formula in formulas if formula.parts} == {"rms_norm"}
    assert {*sums(case.queues[0]).values()} == {"by readers"}
    polled = [
        len(read.words)
        for one in case.queues[1].queues[0]
        if isinstance(one, RowPointwise) and formulas[one.number].parts
        for read in reads(one, case.queues[1])
    ]
    assert polled == [tp * 64] * 3
    require_right(case)


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_sums_that_a_layer_norm_begins_with(tp: int):
    model = branches()
    case = case_of(model.program, tp, num_sms=5, marks=model.marks)
    assert [*sums(case.queues[0]).values()] == ["by readers", "by readers", "by owners"]
    require_right(case)


def test_more_rows_than_polls_pay_for_are_added_up_by_owners(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(deferred, "MAX_PART_ROWS", 255)
    model = gated_mlp(1, 3, hidden=128, inner=256)
    case = case_of(model.program, 2, num_sms=6, marks=model.marks)
    assert {*sums(case.queues[0]).values()} == {"by owners"}
    require_right(case, seeds=1)


def one_sum(rows: int, num_sms: int) -> Case:
    """Of so many rows, which leaves."""
    p = ProgramBuilder("one_sum")
    up, down = p.weight("up", (256, 128), "bf16"), p.weight("down", (rows, 256), "bf16")
    program = p.build(p.linear(p.linear(p.input("x", (1, 128), "bf16"), up), down))
    return case_of(program, 2, num_sms, {"up": shard(0, "tp"), "down": shard(1, "tp")})


@pytest.mark.parametrize(("rows", "num_sms"), [(101, 6), (1032, 2)])
def test_sums_that_an_sm_cannot_poll_are_refused(rows: int, num_sms: int):
    """It polls two rows of each rank's part a thread, and parts lie side by side."""
    with pytest.raises(UnsupportedError, match=f"over ranks of {rows} elements on {num_sms} SMs"):
        one_sum(rows, num_sms)
    require_right(one_sum(1024, 2), seeds=1)


def test_a_sum_that_others_take_too_is_added_up_by_owners():
    """A product of two rows takes it by its rows, which the first rank alone has in part."""
    p = ProgramBuilder("mixed")
    x = p.input("x", (1, 128), "bf16")
    total = p.linear(
        p.linear(x, p.weight("up", (256, 128), "bf16")), p.weight("down", (128, 256), "bf16")
    )
    mixed = p.linear(total, p.weight("mix", (128, 128), "bf16")).map("a0 * a1", total)
    marks = {"up": shard(0, "tp"), "down": shard(1, "tp")}
    case = case_of(p.build(mixed), 2, num_sms=6, marks=marks)
    assert [*sums(case.queues[0]).values()] == ["by owners"]
    require_right(case, seeds=1)
