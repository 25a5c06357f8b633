"""SM 0 counts up a launch's state only when all SMs have read it."""

from dataclasses import replace

import pytest

from distmega.errors import CheckError
from distmega.kernels.hopper.plan.types import RowQueues
from distmega.kernels.hopper.plan.words import RowBarrier
from distmega.kernels.hopper.row_plan.proof import find_hazard
from tests.gpu.test_whole import program_of, random_values
from tests.kernels.hopper.emulator.emulating import Case, case_of, with_queues


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


def three_sums() -> Case:
    """Of an input of one row, which the first rank hands to all."""
    return case_of(program_of("silu", "bf16"), tp=2, num_sms=132)


def test_the_first_sum_of_a_launch_has_other_words_than_the_last_of_the_one_before():
    """A rank that has ended a launch can't know that its peers have read its last part."""
    names = [buffer.name for buffer in three_sums().queues[0].buffers]
    assert len([name for name in names if name.startswith("parts of")]) == 3


@pytest.mark.nightly
def test_launches_of_ranks_that_wait_for_no_token():
    case = three_sums()
    values = random_values(case.program)
    case.emulate(values, [{"x": values["x"]}] * 4, 0)
