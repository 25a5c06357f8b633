"""Queues and machine code of the batched decode kernel for ranks that share a model."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch

from distmega.engine.decode_plan import DecodePlan
from distmega.engine.decode_planner import lower_decode, plan_decode
from distmega.engine.requests import EngineOptions
from distmega.kernels.hopper.batch.runner import BatchRunner
from distmega.kernels.hopper.batch_plan.queues import build_batch_queues
from distmega.kernels.hopper.batch_plan.types import BatchQueues
from distmega.kernels.hopper.batch_plan.words import (
    BATCH,
    BEST_WORDS,
    FIELD_WORDS,
    BatchAttention,
    BatchEmbed,
    BatchInstruction,
    BatchLinear,
    BatchLogits,
    pack,
)
from distmega.kernels.hopper.diagnosis import explain_batch_hang
from distmega.kernels.hopper.plan.words import WORDS
from distmega.kernels.machines import H200
from distmega.kernels.runtime.report import Report
from distmega.sharding.layout.mesh import DeviceMesh
from tests.kernels.hopper.one_row.test_decode_code import SPILLED_BYTES, LoneTeam
from tests.kernels.offline import NUM_SMS, offline
from tests.kernels.ptx import bare_signals, plain_spins
from tests.kernels.short_models import NUM_LAYERS, short_model
from tests.kernels.sm90 import SHARED_BYTES, Machine

CASES = [("smollm2-135m", 2), ("llama-3.2-1b", 4), ("qwen3-8b", 2), ("llama-3-70b", 8)]
TEAMS = [*CASES[:-1], pytest.param(("llama-3-70b whole", 8), marks=pytest.mark.nightly)]
COMPILED = [
    ("llama-3.2-1b", 2),
    pytest.param("qwen3-8b", 4, marks=pytest.mark.nightly),  # test_batch_sampling_code.py by day
]


def decode_plan(name: str, tp: int, batch: int = BATCH, **more: object) -> DecodePlan:
    options = EngineOptions(max_context=256, batch=batch)
    plan = plan_decode(short_model(name), DeviceMesh(tp=tp), H200, options, **more)
    return lower_decode(short_model(name), plan, options, peer_memory=True, **more)


@cache
def team_queues(name: str, tp: int) -> list[BatchQueues]:
    lowered = decode_plan(name, tp)
    (segment,) = lowered.host.segments
    return [
        build_batch_queues(segment, lowered.weights, lowered.states, 132, team_rank)
        for team_rank in range(tp)
    ]


@pytest.fixture(scope="module", params=TEAMS, ids=lambda case: f"{case[0]} tp={case[1]}")
def team(request: pytest.FixtureRequest) -> list[BatchQueues]:
    """The queues of each rank."""
    return team_queues(*request.param)


def sums(queues: BatchQueues) -> list[list[BatchEmbed | BatchLinear]]:
    """What each SM sums over ranks, in the order in which it does."""
    return [
        [one for one in queue if isinstance(one, BatchEmbed | BatchLinear) and one.parts]
        for queue in queues.queues
    ]


def test_ranks_have_the_same_queues_but_for_their_parts(team: list[BatchQueues]):
    def common(one: BatchInstruction) -> BatchInstruction:
        match one:
            case BatchEmbed():
                return replace(
                    one, own_part=0, team_rank=0, first_table_row=0, first_column=0, first_id=0
                )
            case BatchLogits():
                return replace(one, num_rows=0, first_id=0, team_rank=0)
            case BatchLinear():
                return replace(one, own_part=0)
        return one

    first, *others = team
    for team_rank, queues in enumerate(others, start=1):
        assert (queues.attention, queues.epilogues) == (first.attention, first.epilogues)
        assert queues.buffers == first.buffers
        assert queues.first_id == team_rank * first.rank_logits
        for mine, theirs in zip(queues.queues, first.queues, strict=True):
            assert list(map(common, mine)) == list(map(common, theirs))


@pytest.mark.parametrize(("name", "tp"), CASES)
def test_the_vocabulary_is_shared_whole_and_once(name: str, tp: int):
    """Each rank has logits and embedding rows of its own, all columns of them."""
    team = team_queues(name, tp)
    embeds = [queues.queues[0][0] for queues in team]
    assert all(isinstance(one, BatchEmbed) for one in embeds)
    last = 0
    for queues, one in zip(team, embeds, strict=True):
        assert (queues.first_id, one.first_id, one.first_table_row) == (last, last, last)
        assert (one.first_column, one.num_columns) == (0, queues.entry_columns)
        assert queues.logit_rows == one.num_table_rows == queues.rank_logits
        last += queues.logit_rows
    assert last == short_model(name).vocab


def test_every_rank_pushes_each_word_of_a_sum_once(team: list[BatchQueues]):
    ranks, hidden = len(team), team[0].entry_columns
    for name, number in (("parts 0", 0), ("parts 1", 1), ("parts 0", 2)):
        buffer = next(one for one in team[0].buffers if one.name == name)
        pushed: list[int] = []
        for queues in team:
            for own in sums(queues):
                one = own[number]
                assert one.parts == buffer.first
                first = one.own_part + one.row0 * BATCH
                pushed += range(first, first + one.num_units * 8 * BATCH)
        assert sorted(pushed) == list(buffer.words)
        assert len(pushed) == ranks * hidden * BATCH


def test_sums_take_turns_and_give_an_sm_the_same_rows(team: list[BatchQueues]):
    """Without it a rank could overwrite what another has not read."""
    for queues in team:
        for own in sums(queues):
            assert len({(one.row0, one.num_units) for one in own}) == 1
            parts = [one.parts for one in own]
            assert all(a != b for a, b in pairwise(parts))
            layers = sum(isinstance(one, BatchAttention) for one in queues.queues[0])
            assert len(parts) == 1 + 2 * layers


def test_buffers_lie_behind_the_events(team: list[BatchQueues]):
    for queues in team:
        word = queues.first_word
        for buffer in queues.buffers:
            assert buffer.first == word
            assert word % 16 == 0
            word += buffer.num_words
        assert word < 2**24, "the words of a report"
        best = queues.buffers[0]
        assert best.name == "best", "awaited before the parts of x with the same tag"
        (embed,) = {one[0] for one in queues.queues if one[0].row0 == 0 and one[0].num_units}
        assert best.first == embed.best
        assert embed.team_rank == queues.first_id // queues.rank_logits
        assert 2 * len(team) * BEST_WORDS == best.num_words


def test_words_of_an_embedding():
    task = team_queues("llama-3.2-1b", 4)[3].queues[7][0]
    assert isinstance(task, BatchEmbed)
    words, ring = pack(task), FIELD_WORDS[BatchEmbed]
    assert len(words) == WORDS
    assert {n: words[at] for n, at in ring.items()} == {n: int(getattr(task, n)) for n in ring}
    assert len(set(ring.values())) == len(ring)


def open_batch_runner(lowered: DecodePlan) -> BatchRunner:
    """To be used within `offline`."""
    (segment,), tp = lowered.host.segments, lowered.ranks.num_ranks
    return BatchRunner(
        segment,
        build_batch_queues(segment, lowered.weights, lowered.states, NUM_SMS),
        weights=lowered.weights,
        weights_arena=torch.empty(lowered.weights.num_bytes, dtype=torch.uint8),
        state_arena=torch.empty(lowered.states.num_bytes, dtype=torch.uint8),
        team=LoneTeam(tp) if tp > 1 else None,
    )


@cache
def compiled(name: str, tp: int) -> Machine:
    with pytest.MonkeyPatch.context() as patch, offline(patch) as launched:
        open_batch_runner(decode_plan(name, tp)).run_steps(1)
    (machine,) = launched
    return machine


@pytest.mark.parametrize(("name", "tp"), COMPILED)
def test_the_kernel_of_several_ranks_fits_an_sm(name: str, tp: int):
    code = compiled(name, tp)
    assert code.stack_bytes <= SPILLED_BYTES
    assert code.registers <= 168
    assert code.shared_bytes <= SHARED_BYTES
    assert plain_spins(code.ptx) == []
    assert bare_signals(code.ptx) == []


@pytest.mark.parametrize(("name", "tp"), COMPILED)
def test_sums_travel_two_words_a_store_and_are_polled_at_scope_sys(name: str, tp: int):
    """To each rank of the embedding's part, and of that of o and down."""
    lines = [line.split("//")[0] for line in compiled(name, tp).ptx.splitlines()]
    assert sum("st.global.v2.b64" in line for line in lines) == 2 * tp
    polls = [line for line in lines if "ld.relaxed.sys.global.v2.b64" in line]
    assert len(polls) == 4 * tp


def explain(word: int, flag: int, last: int, rank: int = 0) -> str:
    queues = team_queues("llama-3.2-1b", 4)[rank]
    return str(explain_batch_hang(queues, Report(flag=flag, word=word, last=last), 60.0, rank))


def test_the_rank_and_the_sm_that_owe_a_part_are_named():
    queues = team_queues("llama-3.2-1b", 4)[0]
    number, sm = 5 * 3 + 3, 9
    task = queues.queues[sm][number]
    assert isinstance(task, BatchLinear)
    part = task.parts + 2 * queues.entry_columns * BATCH + task.row0 * BATCH
    text = explain(part + 17, 2 * len(queues.queues[0]) + number + 1, sm)
    assert f"rank 0, SM {sm} (instruction {number}, layers.3.attn_sum, rows {task.row0} to" in text
    assert "of 'parts 1'" in text
    assert f"(step 2, instruction {number})" in text
    assert f"owed by rank 2, SM {sm}, instruction {number}, layers.3.attn_sum, rows" in text


def test_who_owes_the_likeliest_tokens_is_named():
    queues = team_queues("llama-3.2-1b", 4)[1]
    best = queues.buffers[0].first
    text = explain(best + 3 * 2 * BATCH, 1, 4, rank=1)
    assert "rank 1, SM 4 (instruction 0, embedded" in text
    assert f"owed by rank 3, SM 0, behind instruction {5 * NUM_LAYERS + 1}, logits" in text


def test_an_event_of_one_of_several_ranks():
    number = 5 * 1 + 5
    text = explain(number - 1, (5 * NUM_LAYERS + 2) * 7 + number + 1, 2, rank=3)
    assert f"rank 3: instruction {number}, layers.1.ffn_sum waited 60 s for event" in text
    assert f"(instruction {number - 1}, layers.1.ffn_mixed)" in text
    assert "owed by rank 3, by 2 of 132 SMs" in text


def test_words_of_nobody():
    assert "nobody" in explain(2**23, 5, 0)
    assert "which has no queue" in explain(2**23, 5, 255)
