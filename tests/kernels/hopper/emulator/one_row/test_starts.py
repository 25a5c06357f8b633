"""SM 0 counts up a launch's state only when all SMs have read it, and ranks that wait for no token
are ordered by what they hand out of an input.
"""

from dataclasses import replace

import pytest
import torch

from bench.models import gated_mlp
from distmega.errors import CheckError, UnsupportedError
from distmega.kernels.hopper.plan.types import RowQueues
from distmega.kernels.hopper.plan.words import RowBarrier
from distmega.kernels.hopper.row_plan import accesses, deferred
from distmega.kernels.hopper.row_plan.proof import find_hazard
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Program
from distmega.sharding.layout.placements import replicate, shard
from tests.gpu.test_whole import program_of, random_values
from tests.kernels.hopper.emulator.emulating import Case, case_of, error, expected, with_queues

MOST_ERROR = 0.02
"""Of what is rounded to bf16 between ops."""


def without_starts(queues: RowQueues) -> RowQueues:
    return replace(
        queues,
        queues=tuple(
            tuple(one for one in queue if not isinstance(one, RowBarrier))
            for queue in queues.queues
        ),
    )


def parallel() -> Case:
    """A program in which SM 0 has nothing to do: 512 and 256 rows on 132 SMs."""
    return case_of(program_of("parallel", "bf16"), num_sms=132)


def test_sm_0_waits_for_all_to_have_begun():
    (queues,) = parallel().queues
    (last,) = queues.queues[0]
    assert isinstance(last, RowBarrier)
    assert last.num_words == 2 * 132
    others = [one for queue in queues.queues[1:] for one in queue if isinstance(one, RowBarrier)]
    assert [one.num_words for one in others] == [0] * 131
    assert queues.has_barriers
    assert find_hazard(queues) == ""


def test_the_proof_finds_an_sm_that_begins_too_late():
    bare = without_starts(parallel().queues[0])
    assert "SM 0 ends a launch before SM 2 must have begun it" in find_hazard(bare)


def test_the_emulator_finds_an_sm_that_begins_too_late():
    case = parallel()
    program = case.program
    values = random_values(program)
    inputs = [{"x": values["x"]}] * 2
    case.emulate(values, inputs, 0)
    bare = with_queues(case, [without_starts(case.queues[0])])
    with pytest.raises(CheckError, match=r"SM 0 \(compute\) writes the state's word .* can't know"):
        bare.emulate(values, inputs, 0)


def test_a_program_whose_sms_wait_for_each_other_has_no_such_barrier():
    """Every SM has work in the first ops, and SM 0 waits for the last."""
    (queues,) = case_of(program_of("silu", "bf16"), num_sms=132).queues
    assert not queues.has_barriers


def sums(num_layers: int, tp: int, num_sms: int) -> Case:
    """A sum over ranks a layer, of an input of one row, of which each rank hands a part to all."""
    model = gated_mlp(1, num_layers, hidden=128, inner=256)
    return case_of(model.program, tp, num_sms, model.marks)


def require_sums(case: Case, num_calls: int, seed: int) -> None:
    """Calls on end with inputs of their own give torch's results, the same on all ranks."""
    program = case.program
    values = random_values(program)
    x = values.pop("x")
    inputs = [{"x": x * (1.0 - 0.5 * number)} for number in range(num_calls)]
    exact = expected(program, values, inputs)
    (out,) = program.outputs
    for each, wanted in zip(case.emulate(values, inputs, seed), exact, strict=True):
        assert error(each[0].outputs[out], wanted[out]) < MOST_ERROR
        assert all(torch.equal(one.outputs[out], each[0].outputs[out]) for one in each)


@pytest.mark.parametrize(("num_layers", "num_buffers"), [(1, 1), (3, 2)])
def test_parts_of_an_input_order_the_sums_of_launches(
    num_layers: int, num_buffers: int, monkeypatch: pytest.MonkeyPatch
):
    """Who has read them knows that all ranks are done with the launch before."""
    monkeypatch.setattr(deferred, "MAX_PART_ROWS", 0)
    names = [buffer.name for buffer in sums(num_layers, 2, 16).queues[0].buffers]
    assert len([name for name in names if name.startswith("parts of")]) == num_buffers


@pytest.mark.parametrize(("tp", "num_layers", "num_sms"), [(2, 1, 4), (2, 3, 3), (4, 1, 4)])
def test_launches_of_ranks_that_wait_for_no_token(tp: int, num_layers: int, num_sms: int):
    require_sums(sums(num_layers, tp, num_sms), 3, seed=tp)


@pytest.mark.nightly
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_launches_of_ranks_in_many_orders(tp: int, num_layers: int):
    for seed in range(12):
        require_sums(sums(num_layers, tp, 3 + seed % 6), 4, seed)


def test_an_input_that_one_rank_hands_out_orders_nothing(monkeypatch: pytest.MonkeyPatch):
    """Of the other rank nothing would be heard between the only sum of a launch and the next."""
    (queues, _) = sums(1, 2, 4).queues
    assert find_hazard(queues) == ""
    monkeypatch.setattr(
        accesses, "input_columns", lambda hidden, rank, _: range(0, 0 if rank else hidden)
    )
    assert "has read it" in find_hazard(queues)


def gathered(*, looks_up: bool) -> Program:
    """Ranks have a part of the last product each, and all products before it."""
    p = ProgramBuilder("gathered")
    if looks_up:
        x = p.embedding(p.input("ids", (1,), "i64"), p.weight("table", (50, 64), "bf16"))
    else:
        x = p.input("x", (1, 64), "bf16")
    h = p.linear(x, p.weight("a", (16, 64), "bf16")).map("tanh(a0)")
    y = p.linear(h, p.weight("b", (64, 16), "bf16"))
    return p.build(p.linear(y, p.weight("c", (104, 64), "bf16")), y)


MARKS = {"a": replicate(), "b": replicate(), "c": shard(0, "tp")}


@pytest.mark.parametrize("num_sms", [8, 9])
def test_columns_of_one_rank_say_nothing_of_the_others(num_sms: int):
    """SM 0 of each rank ends with the first columns of a result, which are those of rank 0."""
    program = gathered(looks_up=False)
    case, values = case_of(program, 2, num_sms, MARKS), random_values(program)
    inputs = [{"x": torch.randn(1, 64).bfloat16()} for _ in range(3)]
    exact = expected(program, values, inputs)
    for ranks, wanted in zip(case.emulate(values, inputs, 0), exact, strict=True):
        for one in ranks:
            for name, out in one.outputs.items():
                assert error(out, wanted[name]) < MOST_ERROR


def test_a_row_of_a_token_says_nothing_of_ranks_that_lack_it():
    """A rank that has it hands it out and hears of nobody before it overwrites columns."""
    with pytest.raises(UnsupportedError, match="overwrites word"):
        case_of(gathered(looks_up=True), 2, 8, MARKS | {"table": shard(0, "tp")})
