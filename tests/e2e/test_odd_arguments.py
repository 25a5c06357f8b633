"""Every argument of what users make: refused by an error of ours unless it is what the annotation
says, in a short message, before anything is started.
"""

from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch

import distmega
from distmega.engine.requests import ExplainRequest, ScoreRequest, TraceRequest
from distmega.hostir import SingleCommunicator
from distmega.launch import LauncherOptions, launch
from distmega.launch.contract import RayOptions, Result
from distmega.superopt.rules import read_rules
from distmega.torch_import.backend import compile_graph
from tests.odd_values import wrongly_taken

MADE: dict[type, dict[str, Any]] = {
    distmega.EngineOptions: {},
    distmega.Sampling: {"temperature": 1.0},
    distmega.GenerateRequest: {"model": "tiny-llama", "prompts": ("a",)},
    ScoreRequest: {"model": "tiny-llama", "text": "a"},
    TraceRequest: {"model": "tiny-llama", "path": "a"},
    ExplainRequest: {},
    LauncherOptions: {},
    RayOptions: {},
    distmega.RankContext: {
        "rank": 0, "world_size": 1, "local_rank": 0, "local_world_size": 1, "node": "here",
        "backend": "gloo", "device": "cpu",
    },
    distmega.Overlap: {},
}  # fmt: skip


@pytest.mark.parametrize("kind", MADE, ids=lambda kind: kind.__name__)
def test_fields_are_of_their_types(kind: type) -> None:
    defaults = {f.name: f.default for f in fields(kind) if f.default is not MISSING}
    assert not [*wrongly_taken(kind, defaults | MADE[kind], get_type_hints(kind))]


def program() -> distmega.Program:
    p = distmega.ProgramBuilder("p")
    return p.build(p.linear(p.input("x", (8, 8)), p.weight("w", (8, 8)), name="y"))


def one_rank() -> distmega.Plan:
    return distmega.plan_program(program(), distmega.DeviceMesh(tp=1), distmega.CPU)


def compiled() -> distmega.CompiledProgram:
    plan = one_rank()
    return distmega.CompiledProgram(plan, SingleCommunicator(plan.mesh))


def check(make: Callable[..., object], given: dict[str, Any], **hints: Any) -> None:
    """hints: of arguments that are not annotated, or with more than is meant here."""
    known = {**get_type_hints(make), **hints}
    assert not [*wrongly_taken(make, given, known)]


def test_meshes_and_layouts_are_made_of_numbers_and_names() -> None:
    mesh = distmega.DeviceMesh(dp=2, tp=2)
    check(lambda tp: distmega.DeviceMesh(tp=tp), {"tp": 1}, tp=int)
    ranks = {"ranks": [0, 1], "names": ["tp"]}
    check(distmega.DeviceMesh.from_ranks, ranks, ranks=list[int] | torch.Size | range)
    check(distmega.DeviceMesh.parse, {"text": "mesh(tp=2)"})
    check(mesh.size, {"axis": "tp"})
    check(mesh.coordinate, {"rank": 0})
    check(mesh.part, {"axis": "tp", "index": 0})
    check(distmega.shard, {"dim": 0, "axis": "tp"})
    check(distmega.stream, {"dim": 0, "num": 2, "ring": ""})


def test_plans_are_asked_for_by_their_types() -> None:
    given = {
        "program": program(), "mesh": distmega.DeviceMesh(tp=2), "machine": distmega.CPU,
        "annotations": None, "memory_limit_bytes": None, "overlap": distmega.Overlap(),
        "spreads": True,
    }  # fmt: skip
    check(distmega.plan_program, given, overlap=distmega.Overlap | str | dict)
    check(lambda layout: distmega.plan_program(
        program(), distmega.DeviceMesh(tp=2), distmega.CPU, {"w": layout}
    ), {"layout": distmega.replicate()}, layout=())  # fmt: skip


def test_programs_are_compiled_and_called_with_their_types() -> None:
    plan, step = one_rank(), compiled()
    given = {
        "plan": plan, "comm": SingleCommunicator(plan.mesh), "device": "cpu", "replay": False,
        "warm": False, "megakernel": "auto", "rules": None,
    }  # fmt: skip
    hints = get_type_hints(distmega.CompiledProgram.__init__)
    check(distmega.CompiledProgram, given, **hints | {"rules": None | list | tuple})
    x = torch.ones(8, 8)
    check(lambda tensors: step(tensors), {"tensors": {"x": x, "w": x}}, tensors=())
    check(lambda x: compiled()({"x": x, "w": torch.ones(8, 8)}), {"x": x}, x=())
    for take in step.bind, step.load, step.parts:
        (name,) = {*get_type_hints(take)} - {"return", "copy"}
        check(take, {name: {"x": x}})
        check(lambda x, take=take: take({"x": x}), {"x": x}, x=())
    check(step.part, {"name": "x", "whole": x, "copy": True}, whole=())
    check(step.slices, {"name": "x"})


def test_jobs_and_models_are_asked_for_by_their_types(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = distmega.GenerateResult(
        answers=(), load_s=0.0, first_token_s=0.0, second_token_s=0.0, decode_s=0.0
    )
    events = [Result(value=answered)]
    monkeypatch.setattr("distmega.launch.launchers._run_with_restarts", lambda *_: iter(events))
    options = LauncherOptions(device="cpu")
    given = {"target": "m:f", "payload": None, "options": options}
    check(launch, given, target=str | Callable, payload=object)
    wanted = distmega.GenerateRequest(model="tiny-llama", prompts=("a",))
    check(distmega.generate, {"request": wanted, "launcher": options})
    check(distmega.open_model, {"name": "tiny-llama", "seed": 0})


def test_modules_are_captured_and_compiled_with_their_types() -> None:
    module, x = torch.nn.Linear(8, 8), torch.ones(1, 8)
    given = {"module": module, "args": (x,), "kwargs": None, "dynamic": False}
    check(distmega.capture, given)
    captured = distmega.capture(module, (x,))
    check(captured.plan, {"mesh": None, "annotations": None, "memory_limit_bytes": None})
    check(captured.compile, {"context": None, "mesh": None, "annotations": None})
    step = captured.compile()
    check(lambda x: step(x), {"x": x}, x=())
    check(lambda options: compile_graph(torch.fx.symbolic_trace(module), (x,), options), {
        "options": None
    }, options=dict | None)  # fmt: skip
    check(lambda path: read_rules(path), {"path": "none.json"}, path=())


def test_engines_are_opened_and_called_with_their_types() -> None:
    context = distmega.RankContext(
        rank=0, world_size=1, local_rank=0, local_world_size=1, node="", backend="gloo",
        device="cpu",
    )  # fmt: skip
    given = {
        "context": context, "source": distmega.open_model("tiny-llama"), "tp": 1,
        "options": distmega.EngineOptions(max_context=16), "logits": "none",
        "sampling": distmega.Sampling(), "pp": 1,
    }  # fmt: skip
    check(distmega.open_engine, given, sampling=distmega.Sampling | tuple | list)
    engine, ids = distmega.open_engine(**given), np.ndarray | list | tuple | range | torch.Tensor
    check(engine.prefill, {"ids": [1, 2], "slot": 0}, ids=ids)
    check(engine.logits, {"ids": [1, 2]}, ids=ids)
    check(engine.prefill_all, {"prompts": [[1, 2]]}, prompts=list | tuple)
    check(lambda prompt: engine.prefill_all([prompt]), {"prompt": [1]}, prompt=ids)
    numbers = int | np.integer | torch.Tensor
    check(lambda token: (engine.prefill([1]), engine.decode(token)), {"token": 1}, token=numbers)
    check(lambda all: (engine.prefill([1]), engine.decode_step(all)), {"all": [1]}, all=ids)
    given = {"prompts": [[1]], "limit": 2, "sampling": None, "ignore_eos": False}
    hints = get_type_hints(engine.generate_all) | {"prompts": list | tuple}
    check(lambda **given: [*engine.generate_all(**given)], given, **hints)
    check(engine.reseed, {"seed": 0})
