"""A wait that nobody ends is reported in words within seconds; the kernel can be used again."""

import itertools
import time

import pytest

from distmega.engine.engine import Engine
from distmega.engine.requests import EngineOptions
from distmega.errors import HangError
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.kernels.hopper.batch_plan.words import EVENT_WORDS, EVENTS_AT
from distmega.kernels.hopper.plan.words import RowLinear
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sources.load import open_model

pytestmark = pytest.mark.gpu
pytest.importorskip("triton", reason="triton is not installed (pip install 'distmega[gpu]')")

LOST_LAYER, LOST_SM = 7, 5


def open_engine(batch: int) -> Engine:
    mesh = DeviceMesh(tp=1)
    options = EngineOptions(max_context=256, batch=batch)
    source = open_model("smollm2-135m")
    return Engine(source, mesh, SingleCommunicator(mesh), options, device="cuda:0")


def hang_of(engine: Engine, prompts: list[list[int]]) -> HangError:
    begin = time.perf_counter()
    with pytest.raises(HangError) as found:
        list(itertools.islice(engine.generate_all(prompts, ignore_eos=True), 20))
    took_s = time.perf_counter() - begin
    print(f"{took_s:.2f} s: {found.value}")
    assert took_s < 10
    return found.value


@pytest.mark.parametrize("name", ["q", "ffn_mixed", "logits"])
def test_an_instruction_missing_from_a_queue_is_named(name):
    engine = open_engine(1)
    prompts = [[1, 2, 3]]
    expected = list(itertools.islice(engine.generate_all(prompts, ignore_eos=True), 20))
    runner = engine.stepping
    queue, words, counts = runner.queues.queues[LOST_SM], runner._words, runner._counts
    lost_op = name if name == "logits" else f"layers.{LOST_LAYER}.{name}"
    removed = next(
        i for i, one in enumerate(queue) if isinstance(one, RowLinear) and one.name == lost_op
    )
    saved = words.clone(), counts.clone()
    words[LOST_SM, removed:-1] = saved[0][LOST_SM, removed + 1 :]
    counts[LOST_SM] -= 1
    error = hang_of(engine, prompts)
    expected_buffer = "best" if name == "logits" else f"layers.0.{name}"
    assert f"of {expected_buffer!r}" in error.found
    lost = f"SM {LOST_SM}, instruction {removed}, {lost_op}"
    assert lost in error.remedy
    words.copy_(saved[0])
    counts.copy_(saved[1])
    assert list(itertools.islice(engine.generate_all(prompts, ignore_eos=True), 20)) == expected


def test_a_lost_signal_of_the_batched_kernel_is_named():
    """The counter of an event loses one signal."""
    engine = open_engine(2)
    prompts = [[1, 2, 3], [4, 5]]
    expected = list(itertools.islice(engine.generate_all(prompts, ignore_eos=True), 20))
    lost = 12
    engine.stepping._report[2 * EVENTS_AT + lost * EVENT_WORDS] -= 1
    error = hang_of(engine, prompts)
    assert f"event {lost} (" in error.found
    assert "1 of " in error.remedy
    assert list(itertools.islice(engine.generate_all(prompts, ignore_eos=True), 20)) == expected
