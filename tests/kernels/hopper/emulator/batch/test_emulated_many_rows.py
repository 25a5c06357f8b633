"""Queues of 17 to 64 rows, emulated: products in parts, added up in the order of the SMs."""

from dataclasses import replace

import pytest
import torch

from bench.models import gated_mlp
from distmega.errors import UnsupportedError
from distmega.kernels.hopper.batch_plan.proof import find_batch_hazard
from distmega.kernels.hopper.batch_plan.queues import apart
from distmega.kernels.hopper.batch_plan.types import BatchQueues
from distmega.kernels.hopper.batch_plan.words import (
    MAX_ROWS,
    PRODUCT_TILE,
    STEP_K,
    BatchLogits,
    BatchProduct,
    has_whole_tiles,
    steps_of_sm,
)
from distmega.kernels.hopper.diagnosis import describe_batch
from distmega.kernels.hopper.emulator import BatchLaunch, emulate_batch
from distmega.kernels.tasks.fuse import fuse_segment
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Program
from tests.kernels.hopper.batch_plan.test_batch_programs import PROGRAMS, program_of
from tests.kernels.hopper.emulator.batch.test_batch_emulator import (
    arenas_of,
    batch_case,
    random_values,
    require_right,
)
from tests.kernels.hopper.emulator.emulating import expected

NAMES = [name for name in PROGRAMS if name != "attention"]


@pytest.mark.parametrize("name", NAMES)
def test_programs_of_many_rows_give_what_torch_does(name: str):
    rows = 17 + 11 * NAMES.index(name) % 48
    require_right(batch_case(program_of(name, rows), most_rows=MAX_ROWS), seed=NAMES.index(name))


@pytest.mark.parametrize(("rows", "num_sms"), [(17, 3), (32, 11), (33, 7), (64, 40)])
def test_a_gated_mlp_on_few_and_many_sms(rows: int, num_sms: int):
    """With fewer SMs than tiles, and with more than all steps of a matrix."""
    program = gated_mlp(rows, 2, hidden=192, inner=320).program
    require_right(batch_case(program, num_sms=num_sms, most_rows=MAX_ROWS), seed=rows)


def of_tokens(rows: int) -> Program:
    p = ProgramBuilder("next")
    x = p.embedding(p.input("tokens", (rows,), "i64"), p.weight("table", (200, 128), "bf16"))
    n = p.rms_norm(x, p.weight("n", (128,), "bf16"), 1e-5)
    x = p.pointwise("a0 + tanh(a1)", x, p.linear(n, p.weight("w", (128, 128), "bf16")))
    return p.build(p.argmax(p.linear(x, p.weight("head", (200, 128), "bf16"))))


def test_tokens_of_many_rows_choose_the_next_ones():
    program = of_tokens(40)
    case, values = batch_case(program, most_rows=MAX_ROWS), random_values(program)
    given = {"tokens": torch.arange(40) * 4 % 200}
    wanted = []
    for _ in range(2):
        (env,) = expected(program, values, [given if not wanted else {"tokens": wanted[-1]}])
        wanted.append(env[program.outputs[0]])
    (arenas,) = arenas_of(case, values)
    found = emulate_batch([arenas], [[BatchLaunch(inputs=given, num_steps=2)]], seed=7)
    assert [row for each in found for row in each[0].ids] == [tuple(one.tolist()) for one in wanted]


def test_more_rows_than_asked_for_are_refused():
    for rows, most in ((17, 16), (65, MAX_ROWS)):
        with pytest.raises(UnsupportedError, match=f"{rows}"):
            batch_case(of_tokens(rows), most_rows=most)


def changed(queues: BatchQueues, number: int, **fields: object) -> BatchQueues:
    """With other fields of an instruction of every SM."""
    each = [(*q[:number], replace(q[number], **fields), *q[number + 1 :]) for q in queues.queues]
    return replace(queues, queues=tuple(each))


@pytest.mark.parametrize(
    ("behind", "fields", "reason"),
    [
        (0, {"first_step": 1}, "are no SM's"),
        (0, {"num_units": 0}, "no SM's"),
        (0, {"num_rows": 512}, "steps of"),
        (0, {"src": 3}, "reads"),
        (0, {"most_parts": 0}, "parts of a tile"),
        (1, {"num_tiles_k": 5}, "adds its parts up"),
        (1, {"src": 0}, "parts of a tile"),
        (1, {"flags": 0}, "reads"),
    ],
)
def test_a_product_that_is_not_done_once_is_not_proven(
    behind: int, fields: dict[str, int], reason: str
):
    case = batch_case(of_tokens(40), most_rows=MAX_ROWS)
    (queues,) = case.queues
    number = next(i for i, one in enumerate(queues.queues[0]) if isinstance(one, BatchProduct))
    fused = tuple(apart(fuse_segment(case.local.program), case.local.program.outputs))
    assert find_batch_hazard(queues, fused) == ""
    assert reason in find_batch_hazard(changed(queues, number + behind, **fields), fused)


def test_whole_tiles_are_not_added_up_before_others_have_multiplied_them():
    case = batch_case(of_tokens(40), most_rows=MAX_ROWS)
    (queues,) = case.queues
    fused = tuple(apart(fuse_segment(case.local.program), case.local.program.outputs))
    number = next(i for i, one in enumerate(queues.queues[0]) if isinstance(one, BatchLogits))
    head = queues.queues[0][number]
    assert isinstance(head, BatchLogits)
    assert (head.num_rows, head.num_units, head.src) == (200, 16, 1), "a tile each of two SMs"
    first, *others = changed(queues, number, row0=200, num_units=0).queues
    own = replace(head, row0=0, num_units=25)
    queues = replace(queues, queues=((*first[:number], own, *first[number + 1 :]), *others))
    assert "before others have multiplied" in find_batch_hazard(queues, fused)


@pytest.mark.parametrize(
    ("rows", "columns", "num_sms", "whole"),
    [
        (16384, 2048, 132, True),  # 128 tiles
        (3072, 2048, 132, False),
        (24576, 4096, 132, False),  # 192: some SMs would have two
        (151936, 4096, 132, True),  # 1187, 9 each
        (2048, 128, 132, True),  # of one step
    ],
)
def test_tiles_are_whole_where_they_share_out(rows: int, columns: int, num_sms: int, whole: bool):
    steps = -(-columns // STEP_K)
    assert has_whole_tiles(rows, steps, num_sms) == whole
    shares = [steps_of_sm(rows, steps, sm, num_sms) for sm in range(num_sms)]
    assert [step for own in shares for step in own] == list(range(-(-rows // PRODUCT_TILE) * steps))
    if whole:
        assert all(own.start % steps == own.stop % steps == 0 for own in shares)


def test_a_report_names_products_and_the_rows_of_what_adds_them_up():
    (queues,) = batch_case(of_tokens(40), most_rows=MAX_ROWS).queues
    number = next(i for i, one in enumerate(queues.queues[0]) if isinstance(one, BatchProduct))
    name = queues.queues[0][number].name
    assert describe_batch(queues, number, 0) == f"instruction {number}, product of {name}"
    assert describe_batch(queues, number + 1, 0).startswith(
        f"instruction {number + 1}, {name}, rows 0"
    )
