"""Who may call an engine, and when: one thread, in its own process, one generator at a time; and
what a compiled program is made with, and where it is called.
"""

import copy
import gc
import pickle
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import distmega
from distmega.compiled import CompiledProgram
from distmega.engine.calls import RanksInStep
from distmega.engine.engine import Engine
from distmega.engine.requests import EngineOptions
from distmega.errors import HangError, MeshError, ProgramError, RequestError, UnsupportedError
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sources.load import open_model
from distmega.superopt.rules import shipped_rules
from distmega.torch_import import capture

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
import torch
from tests.e2e.test_callers import PROMPT, compile_sum, open_tiny

engine, step = open_tiny(), compile_sum()
x = torch.ones(4)
engine.prefill(PROMPT)
step({"x": x, "total": torch.zeros(4)})
if os.fork() == 0:
    for call in (
        lambda: engine.decode(1),
        lambda: step({"x": x}),
        lambda: step.bind({"total": x}),
        lambda: step.parts({"x": x}),
    ):
        try:
            call()
        except Exception as error:
            print(type(error).__name__, error)
    os._exit(3)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 3
(found,) = step({"x": x}).values()
print(engine.decode(1) >= 0, found.tolist())
"""


def compile_sum() -> CompiledProgram:
    """Adds x to its state, total."""
    p = distmega.ProgramBuilder("sum")
    total = p.state("total", (4,))
    p.set(p.pointwise("a0 + a1", total, p.input("x", (4,))), into=total)
    plan = distmega.plan_program(p.build(total), distmega.DeviceMesh(tp=1), distmega.CPU)
    return CompiledProgram(plan, SingleCommunicator(plan.mesh))


def test_a_fork_of_the_process_that_opened_or_compiled_is_refused():
    done = subprocess.run(
        [sys.executable, "-u", "-c", FORKING], capture_output=True, text=True, check=False
    )
    *refusals, alive = done.stdout.splitlines()
    assert alive == "True [2.0, 2.0, 2.0, 2.0]"
    for refusal, of_what in zip(refusals, ["an engine", *["program 'sum'"] * 3], strict=True):
        assert re.match(rf"RequestError a call in process \d+ of {of_what} of process ", refusal)
        assert 'the method "spawn"' in refusal


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_nothing_that_runs_is_copied_or_pickled(copied: Callable[[object], object]):
    step = compile_sum()
    module = capture(torch.nn.Linear(4, 4), (torch.ones(1, 4),)).compile()
    for made, remedy in (
        (step, "pickle its plan, and call compile_plan in the other process"),
        (module, "capture the module and compile it in the other process"),
        (open_tiny(), "call open_engine in the other process"),
    ):
        with pytest.raises(UnsupportedError, match=f"of a {type(made).__name__}; .*{remedy}"):
            copied(made)
    assert pickle.loads(pickle.dumps(step.plan)) == step.plan


@pytest.mark.parametrize("rules", [None, shipped_rules()], ids=["no rules", "rules"])
def test_a_compiled_program_goes_with_its_last_reference(rules):
    """And its weights with it, which fill a GPU: in no circle that waits for the collector."""
    plan = compile_sum().plan
    gc.collect()
    gc.disable()
    try:
        step = CompiledProgram(plan, SingleCommunicator(plan.mesh), rules=rules)
        step({"total": torch.zeros(4), "x": torch.ones(4)})
        known = weakref.ref(step)
        del step
        assert known() is None
    finally:
        gc.enable()


def test_what_is_no_communicator_is_refused():
    plan, mesh = compile_sum().plan, distmega.DeviceMesh(tp=1)
    source, options = open_model("tiny-llama"), EngineOptions()
    for comm in None, "gloo", SingleCommunicator:
        for make in (
            lambda comm: CompiledProgram(plan, comm),
            lambda comm: Engine(source, mesh, comm, options),
        ):
            with pytest.raises(ProgramError, match=r"in place of a communicator; .* compile_plan"):
                make(comm)
    two = distmega.plan_program(plan.program, distmega.DeviceMesh(tp=2), distmega.CPU)
    with pytest.raises(MeshError, match=r"a communicator of mesh\(tp=1\) for mesh\(tp=2\)"):
        CompiledProgram(two, SingleCommunicator(mesh))
    with pytest.raises(MeshError, match="None in place of a mesh"):
        Engine(source, None, SingleCommunicator(mesh), options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["replay", "warm"])
def test_a_switch_is_true_or_false(name: str):
    plan = compile_sum().plan
    for value in None, 1, "no", torch.tensor(True):
        with pytest.raises(ProgramError, match=rf"^{name} .*; expected True or False"):
            CompiledProgram(plan, SingleCommunicator(plan.mesh), **{name: value})


def test_ranks_that_parted_in_a_hang_run_nothing_more():
    hang = HangError("a wait", expected="none", remedy="look")
    alone, together = RanksInStep(1), RanksInStep(2)
    for in_step in (alone, together):
        for error in (ValueError("no hang"), hang):
            with pytest.raises(type(error)), in_step:
                raise error
    with alone:
        pass
    with pytest.raises(RequestError, match=r"a call after a hang \(a wait\)"), together:
        pytest.fail("ran")
