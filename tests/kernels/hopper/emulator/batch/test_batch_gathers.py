"""Columns that ranks gather inside the kernel of several rows: they give what torch does in any
order, whoever takes them.
"""

from dataclasses import replace

import pytest
import torch

from distmega.errors import CheckError, UnsupportedError
from distmega.kernels.hopper.batch_plan.proof import find_batch_hazard
from distmega.kernels.hopper.batch_plan.queues import apart
from distmega.kernels.hopper.batch_plan.types import BatchQueues
from distmega.kernels.hopper.batch_plan.words import BatchGather
from distmega.kernels.tasks.fuse import fuse_segment
from distmega.program.builder import ProgramBuilder
from distmega.sharding.layout.placements import shard
from tests.kernels import row_programs
from tests.kernels.hopper.emulator.batch.test_batch_emulator import (
    MOST_ERROR,
    batch_case,
    emulate,
    random_values,
    require_right,
)
from tests.kernels.hopper.emulator.emulating import Case, error, expected
from tests.kernels.hopper.emulator.one_row.test_gathers import PROGRAMS, build, columns_of


def gathering(name: str, rows: int, tp: int, num_sms: int) -> Case:
    program = build(name, rows)
    marks = columns_of(program) if name in (*PROGRAMS, "chain") else {}
    case = batch_case(program, tp, num_sms, marks)
    assert any(isinstance(one, BatchGather) for one in case.queues[0].queues[0])
    return case


@pytest.mark.parametrize(
    ("name", "rows", "tp"),
    [("leaving", 16, 4), ("gates", 2, 2), ("added", 3, 4), ("normed", 5, 2), ("chain", 4, 2)],
)
def test_columns_of_all_ranks(name: str, rows: int, tp: int):
    require_right(gathering(name, rows, tp, 3), seed=tp)


@pytest.mark.nightly
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", [*PROGRAMS, "chain", "post norms", "post layer norms"])
def test_columns_in_many_orders(name: str, tp: int):
    for seed in range(4):
        require_right(gathering(name, (2, 16, 7, 3)[seed], tp, 2 + seed % 4), seed)


@pytest.mark.parametrize("name", ["two_tables", "scaled_table"])
def test_rows_of_tables_that_ranks_have_columns_of(name: str):
    """Each looks its own up, and they gather what a formula makes of them."""
    program = row_programs.PROGRAMS[name](4)
    values = row_programs.random_values(program)
    inputs = [{one.name: values[one.name] for one in program.with_role("input")}]
    (exact,) = expected(program, values, inputs)
    (found,) = emulate(batch_case(program, 2, 3), values, inputs, 1)
    for one in found:
        for out, x in one.outputs.items():
            assert error(x, exact[out]) < MOST_ERROR


def test_an_input_in_parts_is_no_sum_of_one_rank():
    """Each rank has other columns of it: nothing that the first could hand out."""
    p = ProgramBuilder("parts")
    x = p.input("x", (4, 256), "bf16")
    program = p.build(p.linear(x, p.weight("w", (256, 256), "bf16")))
    marks = {"x": shard(1, "tp"), "w": shard(1, "tp")}
    with pytest.raises(UnsupportedError, match="that they have parts of"):
        batch_case(program, 2, 3, marks)


def changed(queues: BatchQueues, **fields: int) -> BatchQueues:
    """With another first gather, on every SM."""
    first = next(one for one in queues.queues[0] if isinstance(one, BatchGather))

    def other(one: object) -> object:
        is_first = isinstance(one, BatchGather) and one.name == first.name
        return replace(one, **fields) if is_first else one

    return replace(queues, queues=tuple(tuple(map(other, queue)) for queue in queues.queues))


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"src": 16 * 1024}, "reads"),
        ({"num_columns": 192}, "reads"),
        ({"num_units": 0}, "no SM's"),
    ],
)
def test_a_changed_gather_is_not_proven(fields: dict[str, int], found: str):
    case = gathering("added", 3, 2, 3)
    fused = tuple(apart(fuse_segment(case.local.program)))
    assert find_batch_hazard(case.queues[0], fused) == ""
    assert found in find_batch_hazard(changed(case.queues[0], **fields), fused)


def test_parts_over_words_that_peers_still_read_are_noticed():
    """The second gather of a step, or the first of the next, where the first lies."""
    case = gathering("added", 3, 2, 3)
    (second, *_) = {
        one.parts: one for one in reversed(case.queues[0].queues[0]) if isinstance(one, BatchGather)
    }.values()
    bad = [
        changed(queues, parts=second.parts, own_part=second.parts + rank * one_part(queues))
        for rank, queues in enumerate(case.queues)
    ]
    fused = tuple(apart(fuse_segment(case.local.program)))
    assert "before other ranks have read it" in find_batch_hazard(bad[0], fused)
    values = random_values(case.program)
    x = torch.ones(3, 128).bfloat16()
    found = ""
    for seed in range(8):
        try:
            emulate(replace(case, queues=tuple(bad)), values, [{"x": x}] * 3, seed)
        except CheckError as error:
            found = str(error)
    assert found


def one_part(queues: BatchQueues) -> int:
    """Words of a rank's part of the first gather."""
    first = next(one for one in queues.queues[0] if isinstance(one, BatchGather))
    return 16 * first.num_rows
