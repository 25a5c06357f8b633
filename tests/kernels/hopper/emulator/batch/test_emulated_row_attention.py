"""Attention of rows over each other, emulated: what torch computes, whatever the order of SMs."""

import pytest

from distmega.errors import UnsupportedError
from distmega.kernels.hopper.batch_plan.words import BATCH, MAX_ROWS, BatchRows
from distmega.kernels.hopper.emulator import BatchLaunch, emulate_batch
from distmega.program.types import Program
from tests.kernels.hopper.emulator.batch.test_batch_emulator import arenas_of, batch_case
from tests.kernels.hopper.emulator.emulating import case_of, error, expected
from tests.kernels.row_programs import (
    PROMPTS,
    SELF_ATTENTION,
    attending_rows,
    crossing,
    prompt,
    random_values,
    sequences,
)

MOST_ERROR = 0.02
"""Of what is rounded to bf16 between ops."""


def require_right(
    program: Program, seed: int, num_sms: int = 5, rows: int = BATCH, tp: int = 1
) -> None:
    """A call and another one at other positions; what each leaves is what torch has there, on all
    ranks.
    """
    case = batch_case(program, tp, num_sms, most_rows=rows)
    values = random_values(program, seed)
    first = {tensor.name: values[tensor.name] for tensor in program.with_role("input")}
    second = dict(first)
    if "positions" in first:
        at = first["positions"]
        second["positions"] = at + len(at) if program.with_role("state") else at.flip(0)
    launches = [[BatchLaunch(inputs=inputs)] * tp for inputs in (first, second)]
    found = emulate_batch(arenas_of(case, values), launches, seed)
    exact = expected(program, values, [first, second])
    assert any(isinstance(one, BatchRows) for one in case.queues[0].queues[0])
    for ranks, wanted in zip(found, exact, strict=True):
        for one in ranks:
            assert set(one.outputs) >= {*program.outputs} - {"logits", "next"}
            for name, out in one.outputs.items():
                assert error(out, wanted[name]) < MOST_ERROR


@pytest.mark.parametrize("name", SELF_ATTENTION)
def test_rows_see_each_other(name):
    require_right(attending_rows(5, **SELF_ATTENTION[name]), seed=len(name))


@pytest.mark.parametrize(("rows", "dim"), [(2, 16), (16, 64), (33, 24)])
def test_any_rows_on_any_sms(rows, dim):
    require_right(attending_rows(rows, sees="position", dim=dim), rows, num_sms=9, rows=MAX_ROWS)


@pytest.mark.parametrize(
    ("rows", "memory", "given"),
    [(3, 5, ""), (6, 2, ""), (3, 37, "input"), (3, 20, "weight"), (4, 9, "state")],
)
def test_rows_see_other_rows(rows, memory, given):
    require_right(crossing(rows, memory, given=given), seed=rows + memory)


@pytest.mark.parametrize(
    ("num", "rows", "mask"), [(2, 8, ()), (3, 7, (1, 4, 7, 7)), (5, 3, (5, 1, 1, 3))]
)
def test_sequences_see_nothing_of_each_other(num, rows, mask):
    require_right(sequences(num, rows, mask=mask), seed=num, rows=MAX_ROWS)


@pytest.mark.parametrize("name", PROMPTS)
def test_rows_see_one_cache(name):
    require_right(prompt(4, layers=1, **PROMPTS[name]), seed=len(name))


def test_many_rows_see_one_cache():
    require_right(prompt(20, layers=1, dim=16), seed=1, num_sms=9, rows=MAX_ROWS)


RANKS = {
    "rotated": lambda: attending_rows(5, turned="norm", sees="position", dim=32),
    "other rows": lambda: crossing(3, 5),
    "sequences": lambda: sequences(2, 5),
    "one cache": lambda: prompt(4, layers=1),
}


@pytest.mark.parametrize("name", RANKS)
def test_ranks_have_heads_each(name):
    require_right(RANKS[name](), seed=3, num_sms=4, tp=2)


def test_what_the_kernel_of_one_row_does_not_take_is_named():
    with pytest.raises(UnsupportedError, match="attention of one row over itself"):
        case_of(attending_rows(1))
