"""Attention of rows over rows: its instructions, proven, and each wrong place of theirs noticed."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from distmega.errors import UnsupportedError
from distmega.kernels.hopper.batch_plan.proof import CHUNK, find_batch_hazard
from distmega.kernels.hopper.batch_plan.queues import apart
from distmega.kernels.hopper.batch_plan.types import BatchQueues
from distmega.kernels.hopper.batch_plan.words import (
    BATCH,
    NUMBERS,
    BatchHeads,
    BatchInstruction,
    BatchRows,
)
from distmega.kernels.hopper.plan.words import NOTHING
from distmega.kernels.tasks.fuse import fuse_segment
from distmega.program.types import Program
from tests.kernels.hopper.batch_plan.test_batch_pointwise import queues_of
from tests.kernels.row_programs import attending_rows, crossing, prompt

BLOCK = BATCH * NUMBERS


def changed(
    queues: BatchQueues, kind: type, change: Callable[[Any], BatchInstruction | None]
) -> BatchQueues:
    """The queues with other instructions of a kind on all SMs, or without them."""
    found = [
        tuple(
            other
            for one in queue
            if (other := change(one) if isinstance(one, kind) else one) is not None
        )
        for queue in queues.queues
    ]
    return replace(queues, queues=tuple(found))


def moved(fields: dict[str, int]) -> Callable[[Any], BatchInstruction]:
    """An instruction with so much added to fields."""
    return lambda one: replace(one, **{n: getattr(one, n) + by for n, by in fields.items()})


def hazard(queues: BatchQueues, program: Program) -> str:
    return find_batch_hazard(queues, tuple(apart(fuse_segment(program), program.outputs)))


ROTATED = attending_rows(5, turned="norm", sees="position", dim=64)
CACHED = prompt(4, layers=1)


@pytest.mark.parametrize(
    ("program", "kind", "fields"),
    [
        (ROTATED, BatchHeads, {"src": 64 * BLOCK}),
        (ROTATED, BatchHeads, {"k_src": BLOCK}),
        (ROTATED, BatchHeads, {"dst": BLOCK}),
        (ROTATED, BatchHeads, {"k_dst": -BLOCK}),
        (ROTATED, BatchRows, {"src": BLOCK}),
        (ROTATED, BatchRows, {"k_src": BLOCK}),
        (ROTATED, BatchRows, {"v_src": BLOCK}),
        (ROTATED, BatchRows, {"dst": CHUNK}),
        (CACHED, BatchHeads, {"v_src": BLOCK}),
        (CACHED, BatchHeads, {"k_dst": 1}),
        (CACHED, BatchRows, {"v_src": 1}),
        (CACHED, BatchRows, {"src": BLOCK}),
    ],
)
def test_wrong_places_are_noticed(program: Program, kind: type, fields: dict[str, int]):
    queues = queues_of(program)
    assert hazard(queues, program) == ""
    assert hazard(changed(queues, kind, moved(fields)), program)


@pytest.mark.parametrize("program", [ROTATED, CACHED])
def test_rows_that_nobody_prepared_are_noticed(program: Program):
    queues = queues_of(program)
    assert hazard(queues, program) == ""
    assert hazard(changed(queues, BatchHeads, lambda one: None), program)


def test_what_is_given_is_kept():
    """Inputs besides the one that comes in lie where no result is put."""
    program = crossing(3, 5)
    queues = queues_of(program)
    assert sorted(one.tensor for one in queues.given) == ["mask", "x"]
    assert queues.embed == "memory"
    rows = [one for one in queues.given if one.is_rows]
    assert [one.extents[0] for one in rows] == [3]
    assert queues.batch == 5
    attended = [one for one in queues.queues[0] if isinstance(one, BatchRows)]
    assert [one.num_keys for one in attended] == [3, 5]
    assert [one.mask == NOTHING for one in attended] == [False, True]
    wrong = changed(queues, BatchRows, lambda one: replace(one, keep=rows[0].first))
    assert hazard(wrong, program)


def test_rows_of_other_extents_are_refused():
    with pytest.raises(UnsupportedError, match="heads of 12"):
        queues_of(attending_rows(5, dim=12))
