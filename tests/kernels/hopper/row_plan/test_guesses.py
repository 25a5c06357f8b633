"""Guesses of experts: where they stand in queues, which tiles they ask for, and that results are
those without.
"""

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch

from distmega.engine.decode_plan import expert_layouts
from distmega.kernels.hopper.diagnosis import describe
from distmega.kernels.hopper.plan.experts import find_wrong_slot
from distmega.kernels.hopper.plan.types import RowQueues
from distmega.kernels.hopper.plan.words import (
    EXPERT_COLUMNS,
    EXPERT_ROWS,
    UNIT_ROWS,
    Instruction,
    RowGuess,
    RowLinear,
    RowRoute,
    pack,
)
from distmega.kernels.hopper.row_plan import guess as guess_module
from distmega.kernels.hopper.row_plan.guess import FusedGuess, add_guesses
from distmega.kernels.hopper.row_plan.proof import find_hazard
from distmega.kernels.hopper.row_plan.queues import build_queues
from distmega.kernels.tasks.fuse import FusedContraction, fuse_segment
from distmega.models.decoder import build_decoder
from distmega.models.presets import PRESETS
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import replicate
from tests.kernels.hopper.emulator.emulating import Case, case_of, with_queues
from tests.kernels.hopper.emulator.one_row.test_emulated_experts import random_values
from tests.kernels.hopper.row_plan.test_expert_queues import layers, rows_of_units


@cache
def decoder(family: str, tp: int) -> Program:
    config = replace(
        PRESETS[family], hidden=64, head_dim=32, expert_ffn=64 * tp, vocab=200, max_positions=64
    )
    return build_decoder(config, 1, 32, dtype="bf16")


def cases(family: str, tp: int) -> tuple[Case, Case]:
    """Without guesses and with them."""
    program = decoder(family, tp)
    config = replace(PRESETS[family], expert_ffn=64 * tp)
    marks = expert_layouts(config, program, DeviceMesh(tp=tp), "tensor")
    plain = case_of(program, tp, 5, {**marks, "rope_table": replicate()})
    queues = [
        build_queues(plain.local.program, plain.weights, plain.states, 5, rank, guess_experts=True)
        for rank in range(tp)
    ]
    return plain, with_queues(plain, queues)


def guesses(queues: RowQueues) -> list[RowGuess]:
    return [one for queue in queues.queues for one in queue if isinstance(one, RowGuess)]


@pytest.mark.parametrize(
    ("family", "tp"), [("tiny-qwen3-moe", 1), ("tiny-qwen3-moe", 2), ("tiny-mixtral", 1)]
)
def test_results_are_those_without_guesses(family: str, tp: int):
    """Bit by bit, in any order of SMs."""
    plain, guessing = cases(family, tp)
    assert not guesses(plain.queues[0])
    assert all(queues.experts and queues.experts.guessed for queues in guessing.queues)
    values = random_values(plain.program)
    inputs = [{"tokens": torch.tensor([11 * i]), "positions": torch.tensor([i])} for i in range(2)]
    expected = [[one.logits for one in found] for found in plain.emulate(values, inputs, 1)]
    for seed in (2, 3):
        for found, exact in zip(guessing.emulate(values, inputs, seed), expected, strict=True):
            assert all(torch.equal(a.logits, b) for a, b in zip(found, exact, strict=True))


def test_guesses_stand_behind_attention_and_are_proven():
    plain, guessing = cases("tiny-qwen3-moe", 1)
    fused = add_guesses(fuse_segment(plain.local.program))
    names = [type(op).__name__ for op in fused]
    assert names.count("FusedGuess") == names.count("FusedRouting") == 2
    for at, op in enumerate(fused):
        if isinstance(op, FusedGuess):
            assert [type(one).__name__ for one in fused[at - 2 : at]] == [
                "FusedContraction",
                "FusedAttention",
            ]
            sums, scores = fused[at + 1], fused[at - 2]
            assert isinstance(sums, FusedContraction)
            assert isinstance(scores, FusedContraction)
            assert sums.operands == (scores.x,)
            assert scores.outs == (op.scores,)
    (queues,) = guessing.queues
    assert find_hazard(queues) == find_wrong_slot(queues) == ""
    for one in guesses(queues):
        assert len(pack(one)) == 16
        assert describe(one).startswith("guess of experts")


def test_what_nothing_comes_between_is_not_guessed():
    """Of the first layer no op takes the row in front of its scores; in front of those of others
    stands the last product of experts, which still are the ones chosen before.
    """
    program = layers(2, 64)
    assert add_guesses(fuse_segment(program)) == fuse_segment(program)


def asked(one: RowGuess, queues: RowQueues, chosen: list[int]) -> tuple[Counter, Counter]:
    """First rows of units of first matrices, and rows of last ones, as one_row/route.py asks."""
    shape = queues.experts
    assert shape is not None
    linear = RowLinear(
        opcode=0, name="", generation=0, matrix=0, weight_row=one.weight_row,
        pair_row=one.pair_row, num_units=one.num_units, num_tiles_k=0, src=0, num_src_words=0,
        flag_delta=0, norm=0, bias=0, dst=0, row0=one.row0, num_rows=0,
        flags=EXPERT_ROWS | (guess_module.PAIRED if one.paired else 0), keep=0, carry=0,
    )  # fmt: skip
    first = Counter(rows_of_units(linear, queues, chosen))
    last = Counter(
        one.last_row + row + expert * one.num_rows
        for row in range(one.last_rows)
        for expert in chosen
    )
    return first, last


@pytest.mark.parametrize("size", [0, 20_000, 1 << 30])
@pytest.mark.parametrize("tp", [1, 2])
def test_tiles_that_are_asked_for_are_those_that_come(
    tp: int, size: int, monkeypatch: pytest.MonkeyPatch
):
    """Where the guess is right; fewer where an SM may not ask for all."""
    monkeypatch.setattr(guess_module, "GUESS_BYTES", size)
    queues = cases("tiny-qwen3-moe", tp)[1].queues[-1]
    shape, chosen = queues.experts, [4, 1]
    assert shape is not None
    for queue in queues.queues:
        wanted, brought = Counter[int](), Counter[int]()
        for one in queue:
            if isinstance(one, RowGuess):
                first, last = asked(one, queues, chosen)
                total = first.total() * UNIT_ROWS * one.columns + last.total() * one.last_columns
                assert 2 * total <= size
                wanted += first + last
            elif isinstance(one, RowLinear) and one.flags & EXPERT_ROWS:
                brought += Counter(rows_of_units(one, queues, chosen))
            elif isinstance(one, RowLinear) and one.flags & EXPERT_COLUMNS:
                rows = range(min(one.num_units * UNIT_ROWS, one.num_rows - one.row0))
                brought += Counter(
                    one.weight_row + row + expert * one.num_rows
                    for row in rows
                    for expert in chosen
                )
        assert wanted == brought if size > 1 << 20 else wanted <= brought


def without_routes(queue: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
    return tuple(one for one in queue if not isinstance(one, RowRoute))


def guess_again(queue: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
    """A guess right behind a choice, whose tiles the loader has yet to bring."""
    at = next(n for n, one in enumerate(queue) if isinstance(one, RowRoute))
    one = next(one for one in queue if isinstance(one, RowGuess))
    return (*queue[: at + 1], one, *queue[at + 1 :])


@pytest.mark.parametrize(
    ("change", "found"),
    [(without_routes, "that nobody chose"), (guess_again, "that nobody has read")],
)
def test_a_guess_is_no_choice(change, found: str):
    (queues,) = cases("tiny-qwen3-moe", 1)[1].queues
    first, *others = queues.queues
    assert found in find_wrong_slot(replace(queues, queues=(change(first), *others)))
