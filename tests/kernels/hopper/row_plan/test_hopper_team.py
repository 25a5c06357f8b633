"""Queues of ranks that share a model: alike on every rank, every part of the token's row pushed."""

from dataclasses import replace
from functools import cache

import pytest

from distmega.engine.decode_plan import DecodePlan
from distmega.engine.decode_planner import lower_decode, plan_decode
from distmega.engine.requests import EngineOptions
from distmega.kernels.hopper.plan.types import RowQueues
from distmega.kernels.hopper.plan.words import (
    CARRY_EMBEDDED,
    EMBEDDED,
    KEEP_X,
    X_PARTS,
    Instruction,
    RowEmbed,
    RowLinear,
)
from distmega.kernels.hopper.row_plan.deferred import MAX_PART_ROWS
from distmega.kernels.hopper.row_plan.queues import build_queues
from distmega.kernels.machines import H200
from distmega.kernels.tasks.fuse import (
    FusedChoice,
    FusedContraction,
    FusedEmbedding,
    fuse_segment,
)
from distmega.models.config import ModelConfig
from distmega.sharding.layout.mesh import DeviceMesh
from tests.kernels.kinds import kind_of, of_kind
from tests.kernels.short_models import short_model

CASES = [
    ("smollm2-135m", 2),
    ("llama-3.2-1b", 2),
    ("llama-3.2-1b", 4),
    ("qwen3-8b", 2),
    ("llama-3-70b", 8),
]
TEAMS = [*CASES[:-1], pytest.param(("llama-3-70b whole", 8), marks=pytest.mark.nightly)]


def decode_plan(name: str, tp: int, logits: str = "none") -> DecodePlan:
    options = EngineOptions(max_context=256)
    plan = plan_decode(short_model(name), DeviceMesh(tp=tp), H200, options, logits)
    return lower_decode(short_model(name), plan, options, peer_memory=True)


@cache
def team_queues(name: str, tp: int) -> list[RowQueues]:
    lowered = decode_plan(name, tp)
    (segment,) = lowered.host.segments
    return [
        build_queues(segment, lowered.weights, lowered.states, 132, team_rank)
        for team_rank in range(tp)
    ]


@pytest.fixture(scope="module", params=TEAMS, ids=lambda case: f"{case[0]} tp={case[1]}")
def team(request: pytest.FixtureRequest) -> tuple[ModelConfig, list[RowQueues]]:
    """A model and the queues of its ranks."""
    name, tp = request.param
    return short_model(name), team_queues(name, tp)


@pytest.mark.parametrize(
    ("name", "tp"), [*CASES, pytest.param("llama-3-70b whole", 8, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("logits", ["none", "last"])
def test_collectives_become_part_of_what_they_follow(name, tp, logits):
    lowered = decode_plan(name, tp, logits)
    (segment,) = lowered.host.segments
    first, *rest, head = fuse_segment(segment)
    config = short_model(name)
    sums = [op for op in rest if isinstance(op, FusedContraction) and op.operands]
    assert isinstance(first, FusedEmbedding)
    assert isinstance(head, FusedChoice)
    assert len(sums) == 2 * config.num_layers
    assert {op.num_ranks for op in (first, head, *sums)} == {tp}
    assert head.num_logits == config.vocab
    whole = logits == "last"
    assert segment.tensor_map()[head.logits].shape[1] == config.vocab // (1 if whole else tp)


def test_ranks_have_the_same_queues_but_for_their_vocabulary(team):
    """And, where readers add up, for where a rank's part lies and who carries what is added."""

    def common(one: Instruction) -> Instruction:
        if isinstance(one, RowEmbed):
            return replace(one, row0=0, dst=0)
        if isinstance(one, RowLinear) and first.epilogues[one.opcode].deferred:
            return replace(one, dst=0, carry=0, flags=one.flags & ~CARRY_EMBEDDED)
        if isinstance(one, RowLinear) and one.flags & X_PARTS:
            return replace(one, carry=0, flags=one.flags & ~KEEP_X)
        is_logits = isinstance(one, RowLinear) and first.epilogues[one.opcode].ranked
        return replace(one, num_rows=0, dst=0) if is_logits else one

    _, (first, *others) = team
    assert first.num_ranks == 1 + len(others)
    for team_rank, queues in enumerate(others, start=1):
        assert queues.attention == first.attention
        assert queues.epilogues == first.epilogues
        assert queues.num_words == first.num_words
        assert queues.first_id == team_rank * first.rank_logits
        for mine, theirs in zip(queues.queues, first.queues, strict=True):
            assert list(map(common, mine)) == list(map(common, theirs))


def test_every_token_has_its_row_pushed_whole_and_once(team):
    config, ranks = team
    for token in (0, config.vocab // 2 - 1, config.vocab // 2, config.vocab - 1):
        pushed: list[int] = []
        for queues in ranks:
            for one in of_kind(queues, "embed"):
                assert isinstance(one, RowEmbed)
                if 0 <= token - one.row0 < one.num_rows:
                    last = min(one.column + 256, one.num_words)
                    pushed += [one.dst + word for word in range(one.column, last)]
        assert sorted(pushed) == [EMBEDDED + word for word in range(config.hidden // 2)]


def test_both_sums_of_a_layer_give_an_sm_the_same_rows(team):
    """Without it an SM could be a layer ahead of its like on another rank."""
    config, (queues, *_) = team
    assert not of_kind(queues, "residual")
    for queue in queues.queues:
        sums = [one for one in queue if kind_of(queues, one) == "sum"]
        assert all(isinstance(one, RowLinear) for one in sums)
        assert len({(one.row0, one.num_units) for one in sums}) <= 1
        assert len(sums) in (0, 2 * config.num_layers)


def test_parts_of_sums_lie_right_before_their_results_or_are_these(team):
    config, (queues, *others) = team
    firsts = {buffer.name: buffer.first for buffer in queues.buffers}
    ends = {buffer.name: buffer.first + buffer.num_words for buffer in queues.buffers}
    results = ("layers.0.attn_sum", "layers.0.ffn_sum")
    if any(one.deferred for one in queues.epilogues):
        assert config.hidden * (1 + len(others)) <= MAX_PART_ROWS
        for rank, each in enumerate((queues, *others)):
            starts = {firsts[name] + rank * config.hidden // 2 for name in results}
            assert {one.dst for one in of_kind(each, "sum")} == starts
        return
    assert {one.dst for one in of_kind(queues, "sum")} == {firsts[name] for name in results}
    for name in results:
        parts = f"parts of {name}"
        assert ends[parts] == firsts[name]
        assert ends[parts] - firsts[parts] == (1 + len(others)) * config.hidden
