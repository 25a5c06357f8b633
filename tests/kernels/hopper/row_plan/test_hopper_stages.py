"""Queues of a pipeline's stages: together those of the whole model, joined by x."""

from dataclasses import replace
from functools import cache

import pytest

from distmega.engine.decode_plan import model_mesh
from distmega.engine.decode_planner import lower_decode, plan_decode
from distmega.engine.requests import EngineOptions
from distmega.kernels.hopper.plan.matrices import input_columns
from distmega.kernels.hopper.plan.types import RowQueues
from distmega.kernels.hopper.plan.words import FROM_EMBEDDING, RowEmbed, RowLinear
from distmega.kernels.hopper.row_plan.queues import build_queues
from distmega.kernels.machines import H200
from tests.kernels.kinds import of_kind
from tests.kernels.short_models import short_model

CASES = [
    ("smollm2-135m", 1, 2),
    ("llama-3.2-1b", 1, 4),
    ("qwen3-8b", 2, 2),
    pytest.param("qwen3-8b whole", 2, 2, marks=pytest.mark.nightly),
]


@cache
def stage_queues(name: str, tp: int, pp: int, team_rank: int = 0) -> list[RowQueues]:
    options, config = EngineOptions(max_context=256), short_model(name)
    found = []
    for index in range(pp):
        plan = plan_decode(config, model_mesh(tp, pp), H200, options, index=index)
        lowered = lower_decode(config, plan, options, peer_memory=True)
        (segment,) = lowered.host.segments
        found.append(build_queues(segment, lowered.weights, lowered.states, 132, team_rank))
    return found


def work(queues: RowQueues, kind: str) -> list[tuple[str, int, int]]:
    """Op, first row and units of the linears of one kind, SM by SM."""
    return [
        (one.name, one.row0, one.num_units)
        for one in of_kind(queues, kind)
        if isinstance(one, RowLinear)
    ]


@pytest.mark.parametrize(("name", "tp", "pp"), CASES)
def test_stages_share_the_layers_of_the_model(name: str, tp: int, pp: int) -> None:
    (whole,), stages = stage_queues(name, tp, 1), stage_queues(name, tp, pp)
    for kind in ("qkv", "gated", "sum" if tp > 1 else "residual"):
        found = [one for stage in stages for one in work(stage, kind)]
        assert found
        assert sorted(found) == sorted(work(whole, kind))
    assert [bool(work(stage, "head")) for stage in stages] == [False] * (pp - 1) + [True]


@pytest.mark.parametrize(("name", "tp", "pp"), CASES)
def test_a_stage_enters_and_leaves_by_x(name: str, tp: int, pp: int) -> None:
    stages = stage_queues(name, tp, pp)
    assert [bool(stage.ids) for stage in stages] == [True] + [False] * (pp - 1)
    assert [bool(stage.chosen) for stage in stages] == [False] * (pp - 1) + [True]
    leaving = [[kept.tensor for kept in stage.outputs] for stage in stages]
    assert leaving[:-1] == [[stage.embed] for stage in stages[1:]]
    assert leaving[-1] == []
    for stage in stages:
        given = {
            one.generation
            for queue in stage.queues
            for one in queue
            if isinstance(one, RowLinear) and one.flags & FROM_EMBEDDING
        }
        assert given == (set() if tp > 1 else {0})
        assert all(kept.first + kept.num <= stage.num_kept for kept in stage.outputs)


def test_each_rank_of_a_stage_gives_all_of_them_its_part_of_x() -> None:
    """As columns of the only row, number 0, of an embedding matrix."""
    pushes = []
    for team_rank in range(2):
        later = stage_queues("qwen3-8b", 2, 2, team_rank)[1]
        pushes.append([one for queue in later.queues for one in queue if isinstance(one, RowEmbed)])
    mine, theirs = pushes
    assert {(one.row0, one.num_rows) for one in pushes[0] + pushes[1]} == {(0, 1)}
    assert [
        replace(one, column=one.column - 1024, start=0, num_words=1024) for one in theirs
    ] == mine
    columns = sorted(one.column for one in mine)
    assert columns == list(range(0, 1024, 256))


@pytest.mark.parametrize("hidden", [2048, 136, 24, 8])
@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_columns_of_an_input_are_shared_once(hidden: int, num_ranks: int) -> None:
    parts = [input_columns(hidden, rank, num_ranks) for rank in range(num_ranks)]
    assert [column for part in parts for column in part] == list(range(hidden))
    assert all(part.start % 8 == 0 for part in parts)
