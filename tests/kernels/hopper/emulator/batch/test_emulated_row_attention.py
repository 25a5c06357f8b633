"""Attention of rows over each other, emulated: what torch computes, whatever the order of SMs."""

import pytest

from distmega.errors import CheckError, UnsupportedError
from distmega.kernels.hopper.batch_plan.words import BATCH, MAX_ROWS, BatchRows
from distmega.kernels.hopper.emulator import BatchLaunch, emulate_batch
from distmega.kernels.hopper.emulator.batch.sm import BatchSm
from distmega.kernels.hopper.emulator.interleaving import RAN
from distmega.program.types import Program
from tests.kernels.hopper.emulator.batch.test_batch_emulator import arenas_of, batch_case
from tests.kernels.hopper.emulator.emulating import case_of, error, expected
from tests.kernels.row_programs import (
    FIRST,
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
    program: Program,
    seed: int,
    num_sms: int = 5,
    rows: int = BATCH,
    tp: int = 1,
    first: int = FIRST,
) -> None:
    """A call and another one at other positions; what each leaves is what torch has there, on all
    ranks. first: position of the first row, of rows over one cache.
    """
    case = batch_case(program, tp, num_sms, most_rows=rows)
    values = random_values(program, seed, first)
    given = {tensor.name: values[tensor.name] for tensor in program.with_role("input")}
    second = dict(given)
    if "positions" in given:
        at = given["positions"]
        second["positions"] = at + len(at) if program.with_role("state") else at.flip(0)
    launches = [[BatchLaunch(inputs=inputs)] * tp for inputs in (given, second)]
    found = emulate_batch(arenas_of(case, values), launches, seed)
    exact = expected(program, values, [given, second])
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


SHARED_KEYS = {
    "3 parts": {"first": 490}, "of 20 rows": {"rows": 20, "first": 460, "kv_heads": 1},
    "fewer parts than SMs": {"first": 200},
    "window": {"first": 500, "window": 300, "dim": 24}, "nothing shared": {"first": 40},
    "wide": {"first": 470, "dim": 136, "kv_heads": 1, "group": 3},
}  # fmt: skip
"""Of 4 rows, the first at `first`, over a cache of 512 positions on 13 SMs."""


@pytest.mark.parametrize("name", SHARED_KEYS)
def test_sms_share_the_keys_of_a_head(name):
    given = {"rows": 4, **SHARED_KEYS[name]}
    rows, first = given.pop("rows"), given.pop("first")
    program = prompt(rows, layers=1, context=512, **given)
    require_right(program, len(name), num_sms=13, rows=MAX_ROWS, first=first)


def test_each_part_of_the_keys_is_waited_for():
    """A sum that does not wait for the parts of others reads what nobody has stored."""
    program = prompt(4, layers=1, context=512)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchSm, "arrive_last", arrive_first)
        with pytest.raises(CheckError, match="partial"):
            require_right(program, 1, num_sms=13, first=490)


def arrive_first(sm, number, num):
    """Takes the first for the last."""
    yield RAN
    return sm.sm < sm.gpu.num_sms // num


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
