"""Ranks that share a model draw tokens for several sequences in its kernel: who writes what where,
and what a hang report says of it.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch

from distmega.engine.decode_plan import DecodePlan, model_mesh
from distmega.engine.decode_planner import lower_decode, plan_decode
from distmega.engine.requests import EngineOptions
from distmega.kernels.hopper.batch_plan.queues import build_batch_queues
from distmega.kernels.hopper.batch_plan.types import BatchQueues
from distmega.kernels.hopper.batch_plan.words import (
    BATCH,
    FIELD_WORDS,
    READY_WORDS,
    BatchLogits,
    BatchSample,
    pack,
)
from distmega.kernels.hopper.diagnosis import explain_batch_hang
from distmega.kernels.hopper.plan.words import MAX_SMS
from distmega.kernels.machines import H200
from distmega.kernels.runtime.report import Report
from distmega.models.presets import PRESETS
from distmega.models.sampling import Method
from tests.kernels.hopper.batch_plan.test_batch_team import open_batch_runner
from tests.kernels.offline import offline

PLAIN, SEARCHED = Method(kind="plain"), Method(kind="limited")
LIMITED = Method(kind="limited", num_candidates=64)
VOCAB, NUM_SMS = 1003, 100
"""Ranks get rows that are no whole units, the last one fewer than the others."""


def decode_plan(method: Method, tp: int) -> DecodePlan:
    config = replace(PRESETS["llama-3.2-1b"], num_layers=1, vocab=VOCAB)
    options = EngineOptions(max_context=256, batch=3)
    plan = plan_decode(config, model_mesh(tp, 1), H200, options, "last", method=method)
    return lower_decode(config, plan, options, peer_memory=True, method=method)


@cache
def team_of(method: Method, tp: int) -> list[BatchQueues]:
    lowered = decode_plan(method, tp)
    (segment,) = lowered.host.segments
    arenas = lowered.weights, lowered.states
    return [build_batch_queues(segment, *arenas, NUM_SMS, team_rank) for team_rank in range(tp)]


def heads(queues: BatchQueues) -> list[BatchLogits]:
    """Of every SM."""
    found = [one for queue in queues.queues for one in queue if isinstance(one, BatchLogits)]
    assert len(found) == NUM_SMS
    return found


def tokens_of(one: BatchLogits) -> range:
    """Whose logits an SM has, which it also draws with the noise of."""
    last = min(one.row0 + 8 * one.num_units, one.num_rows)
    return range(one.first_id + one.row0, one.first_id + max(one.row0, last))


@pytest.mark.parametrize("method", [PLAIN, LIMITED, SEARCHED])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_each_token_is_of_one_sm_of_one_rank(method: Method, tp: int):
    found = [
        token for queues in team_of(method, tp) for one in heads(queues) for token in tokens_of(one)
    ]
    assert found == list(range(VOCAB))


@pytest.mark.parametrize("method", [LIMITED, SEARCHED])
@pytest.mark.parametrize("tp", [2, 4])
def test_within_limits_each_rank_has_what_all_have(method: Method, tp: int):
    """In the same places on every rank, which nothing else has."""
    team = team_of(method, tp)
    for queues in team:
        assert queues.gathers
        buffers = {buffer.name: buffer for buffer in queues.buffers}
        assert list(buffers) == ["parts 0", "parts 1", "ready_flags", "row_maxima", "logits"]
        sample_inputs = {queue[-1] for queue in queues.queues}
        assert {
            (one.logits, one.row_maxima, one.ready_flags, one.num_rows) for one in sample_inputs
        } == {(*(buffers[name].first for name in ("logits", "row_maxima", "ready_flags")), VOCAB)}
        assert all(isinstance(one, BatchSample) for one in sample_inputs)
        assert buffers["logits"].num_words * 2 >= BATCH * VOCAB
        assert buffers["row_maxima"].num_words * 2 == BATCH * tp * MAX_SMS
        assert buffers["ready_flags"].num_words == tp * READY_WORDS
        word = queues.first_word
        for buffer in queues.buffers:
            assert (buffer.first, buffer.first % 16) == (word, 0)
            word += buffer.num_words
        assert queues.first_list == word
    ring = [
        {(one.team_rank, one.logits, one.row_maxima, one.ready_flags) for one in heads(q)}
        for q in team
    ]
    assert all(len(each) == 1 for each in ring)
    assert [team_rank for each in ring for team_rank, *_ in each] == list(range(tp))
    assert len({tuple(shared) for each in ring for _, *shared in each}) == 1


@pytest.mark.parametrize("tp", [2, 4])
def test_at_a_temperature_ranks_compare_their_best(tp: int):
    for queues in team_of(PLAIN, tp):
        assert not queues.gathers
        assert queues.buffers[0].name == "best"
        assert isinstance(queues.queues[0][-1], BatchLogits)


def test_one_rank_exchanges_nothing():
    for method in (PLAIN, LIMITED):
        (queues,) = team_of(method, 1)
        assert not queues.buffers
        assert queues.first_list == queues.first_word


def test_words_of_a_head_and_a_draw():
    head, draw = team_of(LIMITED, 4)[3].queues[7][-2:]
    for task in (head, draw):
        words, ring = pack(task), FIELD_WORDS[type(task)]
        assert {n: words[at] for n, at in ring.items()} == {n: int(getattr(task, n)) for n in ring}
        assert len(set(ring.values())) == len(ring)
    assert all(
        FIELD_WORDS[BatchLogits][name] == at for name, at in FIELD_WORDS[BatchSample].items()
    )
    assert pack(draw)[FIELD_WORDS[BatchLogits]["num_units"]] == 0, "nothing to load"


@pytest.mark.parametrize("owes", [0, 1])
def test_the_rank_and_the_sm_whose_logits_are_missing_are_named(owes: int):
    queues = team_of(LIMITED, 2)[1]
    ready_flags = next(one for one in queues.buffers if one.name == "ready_flags")
    number = len(queues.queues[0]) - 1
    for more in range(2):
        word = ready_flags.first + owes * READY_WORDS + 2 * 31 + more
        report = Report(flag=3 * (number + 1) + number + 1, word=word, last=4)
        error = explain_batch_hang(queues, report, 60.0, 1)
        assert f"rank 1, SM 4 (instruction {number}, next) waited 60 s for word" in error.found
        assert "of 'ready_flags'" in error.found
        assert f"step 3, instruction {number}" in error.expected
        assert f"owed by rank {owes}, SM 31, instruction {number - 1}, logits" in error.remedy


def test_an_event_of_the_draw_is_named():
    queues = team_of(LIMITED, 2)[0]
    number = len(queues.queues[0]) - 1
    report = Report(flag=2 * (number + 1) + 1, word=number, last=2)
    error = explain_batch_hang(queues, report, 60.0, 0)
    waited = f"instruction 0, embedded waited 60 s for event {number} "
    assert f"{waited}(instruction {number}, next)" in error.found


def test_the_host_sees_the_logits_of_all_ranks(monkeypatch: pytest.MonkeyPatch):
    """Where the kernel of each rank gets them; rounded when they are handed over."""
    with offline(monkeypatch):
        runner = open_batch_runner(decode_plan(LIMITED, 2))
    assert runner.logits.shape == (BATCH, VOCAB)
    first = next(one.first for one in runner.queues.buffers if one.name == "logits")
    at = 8 * first + runner._report.data_ptr()
    assert runner.logits.data_ptr() == at
    runner.logits.copy_(torch.arange(BATCH * VOCAB).view(BATCH, VOCAB) / 7)
    out = torch.zeros(3, VOCAB, dtype=torch.bfloat16)
    runner._write_logits(out)
    assert torch.equal(out, runner.logits[:3].bfloat16())
