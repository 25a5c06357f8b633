"""Experts of 2 to 16 rows, emulated: what torch gives, whichever experts rows go to."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from distmega.errors import CheckError
from distmega.kernels.hopper.batch_plan.types import BatchQueues
from distmega.kernels.hopper.batch_plan.words import BatchExperts, BatchInstruction
from distmega.program.types import Program
from tests.kernels.hopper.emulator.batch.test_batch_emulator import batch_case, emulate
from tests.kernels.hopper.emulator.emulating import Case, error, expected
from tests.kernels.hopper.emulator.one_row.test_emulated_experts import MOST_ERROR, random_values
from tests.kernels.hopper.row_plan.test_expert_queues import (
    HIDDEN,
    NUM_CHOSEN,
    NUM_EXPERTS,
    WHOLE,
    expert_marks,
    layers,
)

ROUNDING = 0.005
"""Of a row's highest score: where two are nearer, rounding may choose either expert."""
MOST_CHOSEN_BY_ROUNDING = 2
"""Experts of a run."""


def clear_rows(program: Program, env: dict[str, Tensor]) -> Tensor:
    """Rows for which rounding chooses no expert."""
    found = torch.tensor(True)
    for op in program.ops:
        if op.kind == "top_k":
            num = env[op.writes[1].tensor].shape[1]
            scores = env[op.reads[0].tensor].float().sort(dim=1, descending=True).values
            if num < scores.shape[1]:
                gap = (scores[:, num - 1] - scores[:, num]) / scores.abs().amax(dim=1)
                found = found & (gap > ROUNDING)
    return found.expand(len(env[program.outputs[0]]))


def random_rows(num_rows: int, num: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        {"x": torch.randn(num_rows, HIDDEN, generator=generator).bfloat16()} for _ in range(num)
    ]


def hits_of(program: Program, env: dict[str, Tensor]) -> int:
    """Experts that rows choose in all layers of a call."""
    chosen = [op.writes[1].tensor for op in program.ops if op.kind == "top_k"]
    return sum(len(set(env[name].flatten().tolist())) for name in chosen)


@pytest.mark.parametrize(
    ("rows", "width", "tp", "kinds"),
    [
        (3, 192, 1, {}),
        (8, 72, 1, {"gated": False}),
        (16, 128, 2, {}),
        (2, 1088, 1, {"weighing": "softmax", "num": 1}),
        (5, 64, 1, {"chosen": NUM_EXPERTS, "weighing": "values"}),
    ],
)
def test_rows_of_any_experts_give_what_torch_does(rows, width, tp, kinds):
    """In any order of SMs, bit by bit the same; and the experts that are hit are counted."""
    kinds = {"num": 2, **kinds}
    program = layers(width=width, rows=rows, **kinds)
    values, inputs = random_values(program), random_rows(rows, 2)
    case = batch_case(program, tp, 5, expert_marks(program) if tp > 1 else None)
    exact = expected(program, values, inputs)
    (out,) = program.outputs
    firsts = []
    for seed in range(2):
        found = emulate(case, values, inputs, seed)
        firsts.append(torch.cat([each[0].outputs[out] for each in found]))
        hits = 0
        for each, wanted in zip(found, exact, strict=True):
            hits += hits_of(program, wanted)
            (counted,) = {one.num_hits for one in each}
            assert abs(counted - hits) <= MOST_CHOSEN_BY_ROUNDING
            assert all(torch.equal(one.outputs[out], each[0].outputs[out]) for one in each)
            clear = clear_rows(program, wanted)
            assert 2 * int(clear.sum()) >= rows
            assert error(each[0].outputs[out][clear], wanted[out][clear]) < MOST_ERROR
    assert torch.equal(*firsts)


@pytest.mark.parametrize(("rows", "tp"), [(1, 2), (2, 2), (4, 5)])
def test_ranks_with_whole_experts_give_what_torch_does(rows, tp):
    """On each rank the same bits, in any order of SMs; each hit is some rank's, though the last
    of five ranks has none of twelve experts but of zeros.
    """
    program = layers(2, 64, rows=rows)
    values, inputs = random_values(program), random_rows(rows, 3 if rows == 1 else 2)
    case = batch_case(program, tp, 4, expert_marks(program, WHOLE))
    exact = expected(program, values, inputs)
    assert 2 * sum(int(clear_rows(program, one).sum()) for one in exact) >= len(exact) * rows
    firsts = []
    for seed in range(2):
        found = emulate(case, values, inputs, seed)
        firsts.append(torch.cat([each[0].outputs["x1"] for each in found]))
        hits = 0
        for each, wanted in zip(found, exact, strict=True):
            hits += hits_of(program, wanted)
            assert abs(sum(one.num_hits for one in each) - hits) <= MOST_CHOSEN_BY_ROUNDING
            assert all(torch.equal(one.outputs["x1"], each[0].outputs["x1"]) for one in each)
            clear = clear_rows(program, wanted)
            assert error(each[0].outputs["x1"][clear], wanted["x1"][clear]) < MOST_ERROR
    assert torch.equal(*firsts)


@pytest.mark.parametrize("first", [0, NUM_EXPERTS - NUM_CHOSEN])
def test_all_experts_that_are_hit_may_be_one_ranks(first: int):
    """The other one reads no weights of experts, and adds zeros."""
    program = layers(1, 64, rows=4)
    values = random_values(program)
    values["l0n"] = torch.ones(HIDDEN).bfloat16()
    values["l0r"] = torch.zeros(NUM_EXPERTS, HIDDEN).bfloat16()
    values["l0r"][first : first + NUM_CHOSEN, 0] = 1.0
    (given,) = random_rows(4, 1)
    given["x"][:, 0] = 2.0
    case = batch_case(program, 2, 5, expert_marks(program, WHOLE))
    (wanted,) = expected(program, values, [given])
    (found,) = emulate(case, values, [given], 3)
    hits = [one.num_hits for one in found]
    assert hits == ([NUM_CHOSEN, 0] if first == 0 else [0, NUM_CHOSEN])
    assert all(error(one.outputs["x0"], wanted["x0"]) < MOST_ERROR for one in found)


def one_router(values: dict[str, Tensor], kind: str) -> Tensor:
    """Rows of a router by which scores are of a kind, whatever x is."""
    router = values["l0r"].clone()
    if kind == "ties":
        router[:] = 0.0
    elif kind == "none":
        router[4] = torch.nan
    return router


@pytest.mark.parametrize(
    ("kind", "num_hits"), [("ties", NUM_CHOSEN), ("same", NUM_CHOSEN), ("apart", NUM_EXPERTS)]
)
def test_rows_may_go_where_they_like(kind: str, num_hits: int):
    """All to the same experts, by equal scores or since they are alike, and each to its own."""
    program = layers(1, 64, rows=4)
    values = random_values(program)
    values["l0r"] = one_router(values, kind)
    (given,) = random_rows(4, 1)
    if kind == "same":
        given["x"] = given["x"][:1].repeat(4, 1)
    elif kind == "apart":
        values["l0r"] = torch.zeros(NUM_EXPERTS, HIDDEN).bfloat16()
        values["l0n"] = torch.ones(HIDDEN).bfloat16()
        given["x"] = 0.01 * given["x"]
        for row in range(4):
            given["x"][row, row] = 4.0
            values["l0r"][row * NUM_CHOSEN : (row + 1) * NUM_CHOSEN, row] = 1.0
    (found,) = emulate(batch_case(program), values, [given], 5)
    (wanted,) = expected(program, values, [given])
    assert found[0].num_hits == num_hits == hits_of(program, wanted)
    assert error(found[0].outputs["x0"], wanted["x0"]) < MOST_ERROR


def test_scores_that_are_none_spoil_their_row_alone():
    """And the launch after it has nothing of them."""
    program = layers(1, 64, rows=4)
    values, (given, other) = random_values(program), random_rows(4, 2)
    bad = {"x": given["x"].clone()}
    bad["x"][2, 7] = torch.nan
    case = batch_case(program)
    (first, second) = emulate(case, values, [bad, other], 4)
    (wanted,) = expected(program, values, [given])
    is_none = first[0].outputs["x0"].isnan()
    assert is_none.any(dim=1).tolist() == is_none.all(dim=1).tolist() == [False, False, True, False]
    for row in (0, 1, 3):
        assert error(first[0].outputs["x0"][row], wanted["x0"][row]) < MOST_ERROR
    assert bool(second[0].outputs["x0"].isfinite().all())


def changed(case: Case, change: Callable[[list[BatchInstruction]], list[BatchInstruction]]) -> Case:
    """The first SM's queue changed, which nothing has proven."""
    queues: BatchQueues = case.queues[0]
    first, *others = queues.queues
    return replace(case, queues=(replace(queues, queues=(tuple(change(list(first))), *others)),))


def scores_of_another(queue: list[BatchInstruction]) -> list[BatchInstruction]:
    """The last choice from numbers that are not its own."""
    at = max(i for i, one in enumerate(queue) if isinstance(one, BatchExperts))
    queue[at] = replace(queue[at], scores=0)
    return queue


def test_an_sm_that_chooses_otherwise_is_seen():
    program = layers(2, 64, rows=4)
    values, (given,) = random_values(program), random_rows(4, 1)
    case = batch_case(program)
    (wanted,) = expected(program, values, [given])
    try:
        (found,) = emulate(changed(case, scores_of_another), values, [given], 0)
    except CheckError:
        return
    assert not error(found[0].outputs["x1"], wanted["x1"]) < MOST_ERROR


@pytest.mark.nightly
@pytest.mark.parametrize("rows", [2, 3, 7, 16])
def test_many_orders_give_the_same_bits(rows: int):
    program = layers(2, 128, rows=rows)
    values, inputs = random_values(program), random_rows(rows, 2)
    case = batch_case(program, num_sms=7)
    firsts = [
        torch.cat([each[0].outputs["x1"] for each in emulate(case, values, inputs, seed)])
        for seed in range(20)
    ]
    assert all(torch.equal(one, firsts[0]) for one in firsts)
