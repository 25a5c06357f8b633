"""Who may call an engine, and when: one thread, in its own process, one generator at a time."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from distmega.engine.engine import Engine
from distmega.engine.requests import EngineOptions
from distmega.errors import RequestError
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sources.load import open_model

PROMPT, OTHER = [5, 6, 7], [9, 8]
VOCAB = 288


def open_tiny(batch: int = 1) -> Engine:
    mesh = DeviceMesh(tp=1)
    options = EngineOptions(max_context=32, batch=batch)
    return Engine(open_model("tiny-llama"), mesh, SingleCommunicator(mesh), options)


def test_a_generator_notices_other_calls():
    engine = open_tiny(2)
    expected = list(engine.generate(PROMPT, 8))
    for call in (
        lambda: next(engine.generate(OTHER)),
        lambda: engine.prefill(OTHER, 1),
        lambda: engine.decode(7),
        lambda: engine.decode_step([7]),
        lambda: engine.logits(OTHER),
    ):
        tokens = engine.generate(PROMPT, 8)
        assert next(tokens) == expected[0]
        call()
        with pytest.raises(RequestError, match="a generator resumed after another call"):
            next(tokens)
        assert list(engine.generate(PROMPT, 8)) == expected
    used_up, left = engine.generate(PROMPT, 2), engine.generate(PROMPT)
    assert list(used_up) == expected[:2]
    assert next(left) == expected[0]
    left.close()
    assert list(engine.generate(PROMPT, 8)) == expected


def test_a_generator_that_nobody_began_starts_when_it_is_its_turn():
    engine = open_tiny()
    expected = list(engine.generate(PROMPT, 4))
    later = engine.generate(PROMPT, 4)
    assert list(engine.generate(OTHER, 4))
    assert list(later) == expected


def test_a_call_beside_another_thread_s_is_refused(monkeypatch: pytest.MonkeyPatch):
    engine = open_tiny()
    expected = list(engine.generate(PROMPT, 4))
    inside, leave = threading.Event(), threading.Event()
    run = engine._decode.runner.run

    def slow(tensors):
        inside.set()
        assert leave.wait(60)
        return run(tensors)

    monkeypatch.setattr(engine._decode.runner, "run", slow)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(list, engine.generate(PROMPT, 4))
        assert inside.wait(60)
        for call in (
            lambda: engine.decode(1),
            lambda: engine.decode_step([1]),
            lambda: engine.prefill(OTHER),
            lambda: engine.logits(OTHER),
            lambda: next(engine.generate(OTHER)),
        ):
            with pytest.raises(RequestError, match="while another thread's call of this engine"):
                call()
        leave.set()
        assert found.result() == expected


def test_threads_get_their_own_tokens_or_a_refusal():
    engine = open_tiny()
    prompts = [PROMPT, OTHER, [3], [250, 1, 1, 4]]
    expected = [list(engine.generate(prompt, 6)) for prompt in prompts]

    def generate(number: int) -> list[int] | None:
        try:
            return list(engine.generate(prompts[number], 6))
        except RequestError:
            return None

    with ThreadPoolExecutor(len(prompts)) as pool:
        found = list(pool.map(generate, [*range(len(prompts))] * 5))
    assert all(
        tokens in (None, expected[number % len(prompts)]) for number, tokens in enumerate(found)
    )


def test_a_step_without_a_sequence_or_tokens_is_refused():
    engine = open_tiny(2)
    for call, message in (
        (lambda: engine.decode(1), "slot 0, in which no sequence has started; expected a prefill"),
        (lambda: engine.decode_step([]), "a decode step of 0 tokens; expected one for each of 1"),
        (lambda: engine.decode_step([1] * 3), "a decode step of 3 tokens; .*or raise batch$"),
        (lambda: engine.decode(VOCAB), f"token {VOCAB}; expected tokens of 0 to {VOCAB - 1}"),
        (lambda: engine.decode(-1), "token -1; expected tokens of 0 to"),
        (lambda: engine.decode(1.5), r"tokens \[1.5\]; expected whole numbers"),
        (lambda: engine.prefill(["a"]), r"tokens \['a'\]; expected whole numbers"),
        (lambda: engine.prefill(None), "tokens None; expected whole numbers"),
    ):
        with pytest.raises(RequestError, match=message):
            call()
    engine.prefill(PROMPT)
    assert engine.decode(1) >= 0
    with pytest.raises(RequestError, match="slot 1, in which no sequence"):
        engine.decode_step([1, 1])


FORKING = """
import os
from tests.e2e.test_callers import PROMPT, open_tiny

engine = open_tiny()
engine.prefill(PROMPT)
if os.fork() == 0:
    try:
        engine.decode(1)
    except Exception as error:
        print(type(error).__name__, error)
        os._exit(3)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 3
print(engine.decode(1) >= 0)
"""


def test_a_fork_of_the_engine_s_process_is_refused():
    done = subprocess.run(
        [sys.executable, "-u", "-c", FORKING], capture_output=True, text=True, check=False
    )
    refusal, alive = done.stdout.splitlines()
    assert refusal.startswith("RequestError a call in process ")
    assert 'the method "spawn"' in refusal
    assert alive == "True"
