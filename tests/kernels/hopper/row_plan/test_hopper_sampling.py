"""Where GPUs share a model, their kernel draws: segments, and the queues of one sequence. Several
have test_batch_sampling.py.
"""

from dataclasses import replace
from functools import cache

import pytest

from distmega.engine.decode_plan import DecodePlan, model_mesh
from distmega.engine.decode_planner import lower_decode, plan_decode
from distmega.engine.requests import EngineOptions
from distmega.hostir.ir.nodes import Collective, HostProgram, LaunchMegakernel, LibraryOp, Send
from distmega.kernels.hopper.batch_plan.queues import build_batch_queues
from distmega.kernels.hopper.batch_plan.types import BatchQueues
from distmega.kernels.hopper.plan.types import RowQueues
from distmega.kernels.hopper.plan.words import RowSample
from distmega.kernels.hopper.row_plan.queues import build_queues
from distmega.kernels.machines import H200
from distmega.models.decoder import Logits
from distmega.models.presets import PRESETS
from distmega.models.sampling import Method

PLAIN, SEARCHED = Method(kind="plain"), Method(kind="limited")
LIMITED = Method(kind="limited", num_candidates=64)
MODEL = "smollm2-135m"
VOCAB = PRESETS[MODEL].vocab
LOOKED_FOR = {PLAIN: "given", SEARCHED: "all", LIMITED: "candidates"}
"""Limits of the draw in the kernel."""


def decode_plan(
    method: Method, batch: int = 1, *, tp: int = 2, pp: int = 1, index: int = 0,
    logits: Logits = "none",
) -> DecodePlan:  # fmt: skip
    options = EngineOptions(max_context=256, batch=batch)
    config = replace(PRESETS[MODEL], num_layers=2)
    mesh = model_mesh(tp, pp)
    plan = plan_decode(config, mesh, H200, options, logits, method=method, index=index)
    return lower_decode(config, plan, options, peer_memory=True, method=method)


def steps(host: HostProgram) -> list[str]:
    """Launches, library ops, collectives and sends."""
    found = []
    for node in host.body:
        match node:
            case LaunchMegakernel():
                found.append("kernel")
            case LibraryOp():
                found.append(node.op.kind)
            case Collective():
                found.append(f"{node.kind} {dict(node.attrs)['combine']}")
            case Send():
                found.append(f"send {node.buffer}")
    return found


def queues_of(lowered: DecodePlan, team_rank: int) -> RowQueues | BatchQueues:
    build = build_batch_queues if lowered.options.batch > 1 else build_queues
    (segment,) = lowered.host.segments
    return build(segment, lowered.weights, lowered.states, 132, team_rank)


@pytest.mark.parametrize(
    ("tp", "logits"),
    [
        (1, "last"),
        (2, "none"),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in ((1, "none"), (2, "last"))),
    ],
)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("method", LOOKED_FOR)
def test_tokens_are_drawn_in_the_kernel(method: Method, batch: int, tp: int, logits: Logits):
    lowered = decode_plan(method, batch, tp=tp, logits=logits)
    assert steps(lowered.host) == ["kernel"]
    queues = queues_of(lowered, tp - 1)
    assert queues.chosen == "next"
    assert queues.sampler is not None
    assert queues.sampler.limits == LOOKED_FOR[method]
    assert (queues.logits in lowered.host.segments[0].outputs) == (logits == "last")


@pytest.mark.parametrize("method", LOOKED_FOR)
def test_the_last_stage_of_a_pipeline_draws(method: Method):
    first, last = (decode_plan(method, pp=2, index=index) for index in range(2))
    assert steps(first.host)[0] == "kernel"
    assert not set(steps(first.host)) & {"sample", "cutoff", "top", "all_reduce argmax"}
    assert steps(last.host) == ["kernel", "send next"]
    for team_rank in range(2):
        assert queues_of(last, team_rank).chosen == "next"


def words_of(queues: RowQueues, name: str) -> range:
    return next((b.words for b in queues.buffers if b.name == name), range(0))


def samples(queues: RowQueues) -> list[RowSample]:
    """The last instruction of every SM."""
    found = [queue[-1] for queue in queues.queues]
    assert all(isinstance(one, RowSample) for one in found)
    return [one for one in found if isinstance(one, RowSample)]


@cache
def odd_queues(method: Method, tp: int) -> tuple[RowQueues, ...]:
    """Of ranks whose rows are no whole units, the last of which has padding."""
    config = replace(PRESETS["llama-3.2-1b"], num_layers=1, vocab=1003)
    options, mesh = EngineOptions(max_context=256), model_mesh(tp, 1)
    plan = plan_decode(config, mesh, H200, options, method=method)
    lowered = lower_decode(config, plan, options, peer_memory=True, method=method)
    (segment,) = lowered.host.segments
    return tuple(
        build_queues(segment, lowered.weights, lowered.states, 100, team_rank)
        for team_rank in range(tp)
    )


@pytest.mark.parametrize("tp", [2, 4])
def test_at_a_temperature_each_rank_draws_from_its_logits(tp: int):
    rows = -(-1003 // tp)
    for team_rank, queues in enumerate(odd_queues(PLAIN, tp)):
        assert queues.first_id == team_rank * rows
        valid = min(rows, 1003 - queues.first_id)
        drawn = [row for one in samples(queues) for row in range(one.row0, one.num_rows)]
        assert drawn == list(range(valid))
        assert not words_of(queues, "logits")
        assert not words_of(queues, "sample")
        assert len(words_of(queues, "best")) == 2 * tp * len(queues.queues)


@pytest.mark.parametrize("method", [LIMITED, SEARCHED])
@pytest.mark.parametrize("tp", [2, 4])
def test_within_limits_each_rank_draws_from_all_logits(method: Method, tp: int):
    """Every word that one polls is pushed by one SM of one rank, to all ranks."""
    team, rows = odd_queues(method, tp), -(-1003 // tp)
    slots = -(-rows // 8) * 8
    pushed = [
        head.dst + row
        for queues in team
        for *_, head, _ in queues.queues
        for row in range(head.row0, head.row0 + 8 * head.num_units)
    ]
    assert len(set(pushed)) == len(pushed)
    for queues in team:
        polled = [
            one.src + slot for one in samples(queues) for slot in range(one.row0, one.num_rows)
        ]
        assert polled == sorted(pushed) == list(words_of(queues, "logits"))
        assert len(polled) == tp * slots
        assert {one.rank_logits for one in samples(queues)} == {rows}
        assert max(one.num_rows - one.row0 for one in samples(queues)) <= queues.sm_logits
        assert all(one.row0 % 2 == one.num_rows % 2 == 0 for one in samples(queues))
        assert len(words_of(queues, "best")) == 2 * len(queues.queues)
        assert words_of(queues, "sample")
