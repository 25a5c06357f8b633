"""Where GPUs share a model, their kernel ends with the logits and library ops draw from them: one
segment, what comes behind it, and the hand-over.
"""

import pytest
import torch

from distmega.blueprint import DecodeBlueprint, draw_decode, model_mesh, plan_decode
from distmega.hostir.nodes import Collective, HostProgram, LaunchMegakernel, LibraryOp, Send
from distmega.kernels.hopper.batch_queues import BatchQueues, build_batch_queues
from distmega.kernels.hopper.plan import DecodeQueues
from distmega.kernels.hopper.queues import build_queues
from distmega.models.decoder import Logits
from distmega.models.presets import PRESETS
from distmega.models.sampling import Method
from distmega.requests import EngineOptions
from distmega.sharding.cost import H200
from tests.kernels.offline import offline
from tests.kernels.test_batch_team import open_batch_runner
from tests.kernels.test_decode_code import open_runner

PLAIN, SEARCHED = Method(kind="plain"), Method(kind="limited")
LIMITED = Method(kind="limited", num_candidates=64)
MODEL = "smollm2-135m"
VOCAB = PRESETS[MODEL].vocab
BEHIND = {
    PLAIN: ["sample", "all_reduce argmax"],
    SEARCHED: ["cutoff", "sample"],
    LIMITED: ["top", "cutoff", "sample"],
}
"""What comes behind the kernel."""
BATCHES = [1, 3]


def blueprint(
    method: Method, batch: int = 1, *, tp: int = 2, pp: int = 1, index: int = 0,
    logits: Logits = "none",
) -> DecodeBlueprint:  # fmt: skip
    options, config = EngineOptions(max_context=256, batch=batch), PRESETS[MODEL]
    mesh = model_mesh(tp, pp)
    plan = plan_decode(config, mesh, H200, options, logits, method=method, index=index)
    return draw_decode(config, plan, options, peer_memory=True, method=method)


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


def queues_of(drawn: DecodeBlueprint, place: int) -> DecodeQueues | BatchQueues:
    build = build_batch_queues if drawn.options.batch > 1 else build_queues
    (segment,) = drawn.host.segments
    return build(segment, drawn.weights, drawn.states, 132, place)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("method", BEHIND)
def test_one_kernel_then_library_ops(method: Method, batch: int):
    assert steps(blueprint(method, batch).host) == ["kernel", *BEHIND[method]]


@pytest.mark.parametrize("batch", BATCHES)
def test_one_rank_draws_in_its_kernel(batch: int):
    assert steps(blueprint(PLAIN, batch, tp=1).host) == ["kernel"]


@pytest.mark.parametrize("method", BEHIND)
def test_the_last_stage_of_a_pipeline_draws(method: Method):
    first, last = (blueprint(method, pp=2, index=index) for index in range(2))
    assert steps(first.host)[0] == "kernel"
    assert not set(steps(first.host)) & {"sample", "cutoff", "top", "all_reduce argmax"}
    assert steps(last.host) == ["kernel", *BEHIND[method], "send next"]
    for place in range(2):
        assert queues_of(last, place).draw is None
        assert queues_of(last, place).logits


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("method", "logits"), [(PLAIN, "last"), (SEARCHED, "none")])
def test_a_kernel_gives_all_logits_to_who_asks(method: Method, logits: Logits, batch: int):
    drawn = blueprint(method, batch, logits=logits)
    for place in range(2):
        queues = queues_of(drawn, place)
        assert (queues.token, queues.draw) == ("", None)
        assert drawn.host.segments[0].tensor_map()[queues.logits].shape == (batch, VOCAB)


@pytest.mark.parametrize("batch", BATCHES)
def test_a_kernel_gives_the_logits_of_its_rank(batch: int):
    drawn = blueprint(PLAIN, batch)
    for place in range(2):
        queues = queues_of(drawn, place)
        assert (queues.token, queues.draw) == ("", None)
        assert queues.first_id == place * VOCAB // 2
        assert drawn.host.segments[0].tensor_map()[queues.logits].shape == (batch, VOCAB // 2)
        heads = [queue[-1] for queue in queues.queues]
        assert {head.num_rows for head in heads} == {VOCAB // 2}, "all of them count"
        rows = sorted((head.row0, head.row0 + 8 * head.num_units) for head in heads)
        assert [first for first, _ in rows] == [0, *(last for _, last in rows[:-1])]
        assert rows[-1][1] == VOCAB // 2


@pytest.mark.parametrize("batch", BATCHES)
def test_logits_are_handed_over_rounded_to_bf16(batch: int, monkeypatch: pytest.MonkeyPatch):
    with offline(monkeypatch):
        runner = (
            open_batch_runner(blueprint(PLAIN, batch))
            if batch > 1
            else open_runner(MODEL, 2, PLAIN)
        )
    generator = torch.Generator().manual_seed(1)
    runner.logits.copy_(torch.randn(runner.logits.shape, generator=generator))
    out = torch.full((batch, VOCAB // 2), 7.0, dtype=torch.bfloat16)
    runner._write_logits(out)
    assert torch.equal(out, runner.logits.view(-1, VOCAB // 2)[:batch].bfloat16())
