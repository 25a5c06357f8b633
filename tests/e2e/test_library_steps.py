"""Decode steps of more sequences than the decode kernel takes: library ops that feed themselves."""

import gc
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from distmega.engine import library_steps
from distmega.engine.decode_plan import DecodePlan
from distmega.engine.decode_planner import lower_decode, lower_library_decode, plan_decode
from distmega.engine.library_steps import LibrarySteps
from distmega.engine.requests import EngineOptions
from distmega.errors import RequestError
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.hostir.ir.nodes import LibraryOp
from distmega.hostir.lower.joined_weights import first_covered
from distmega.hostir.run.early_reads import reads_states_early
from distmega.hostir.run.evaluator import Evaluator
from distmega.kernels.library.device_ops import KernelOps
from distmega.kernels.machines import H200
from distmega.kernels.runtime.compilations import has_triton
from distmega.kernels.runtime.memory import allocate_arena, arena_views, spanning_view
from distmega.models.presets import PRESETS
from distmega.sharding.layout.mesh import DeviceMesh

BATCH = 20


@cache
def decode_plan_of(model: str, num_layers: int, batch: int = BATCH) -> DecodePlan:
    config = replace(PRESETS[model], num_layers=num_layers)
    if num_layers == 1:
        config = replace(config, hidden=64, ffn=96, vocab=64, num_heads=4, num_kv_heads=2)
    options = EngineOptions(max_context=16, batch=batch)
    staged = plan_decode(config, DeviceMesh(tp=1), H200, options)
    return lower_decode(config, staged, options, peer_memory=False)


@pytest.mark.parametrize(("model", "sums"), [("qwen3-8b", "whole"), ("llama-3.2-1b", "parts")])
def test_a_layer_is_seven_launches(model: str, sums: str):
    """sums: of both products with few columns, which norms behind add up where they are parts."""
    host = lower_library_decode(decode_plan_of(model, 3, 64))
    ops = [node.op for node in host.body if isinstance(node, LibraryOp) and not node.op.is_view]
    of_parts = sums == "parts"
    product, norm = ("split_linear", "fused_rows") if of_parts else ("linear", "fused_norm")
    assert [op.kind for op in ops if op.name.startswith("layers.1.")] == [
        norm, "linear", "fused_attention", product, norm, "fused_linear", product,
    ]  # fmt: skip
    assert len(ops) == 7 * 3 + 4, "and embedding, last norm, logits, argmax"


def opened() -> tuple[Evaluator, dict[str, Tensor]]:
    """A model of a layer with random weights, as an engine opens it."""
    plan = decode_plan_of("llama-3.2-1b", 1)
    torch.manual_seed(0)
    weights = allocate_arena(plan.weights, device="cpu")
    states = allocate_arena(plan.states, device="cpu")
    given = arena_views(plan.weights, weights) | arena_views(plan.states, states)
    for name in plan.weights.tensors:
        given[name].copy_(torch.randn(given[name].shape) * 0.2)
    host = lower_library_decode(plan)
    for buffer in host.buffers:
        if buffer.role == "weight" and buffer.name not in given:
            first = first_covered(buffer.name, plan.weights.tensors)
            given[buffer.name] = spanning_view(plan.weights, weights, buffer, first)
    comm = SingleCommunicator(host.mesh)
    ops = KernelOps(masked=True, rules=lambda: plan.rules)
    return Evaluator(host, comm, {}, ops=ops), given


def test_steps_feed_themselves_and_rows_that_do_not_count_stay():
    evaluator, given = opened()
    tokens, at = torch.arange(BATCH) % 7, torch.arange(BATCH) % 5
    expected = []
    for step in range(4):
        here = torch.where(torch.arange(BATCH) < 18, at + step, 0)
        found = evaluator.run({**given, "tokens": tokens, "positions": here})
        tokens = found["next"]
        expected.append(tokens[:18].clone())
    assert len({tuple(row.tolist()) for row in expected}) > 1
    evaluator, given = opened()
    steps = LibrarySteps(evaluator, given, BATCH, limit_s=10.0)
    steps.start([n % 7 for n in range(18)], [n % 5 for n in range(18)])
    rows = torch.cat([steps.run_steps(1), steps.run_steps(3)])
    assert torch.equal(rows, torch.stack(expected))
    assert steps.logits.shape == (BATCH, 1)
    assert steps.logits.isfinite().all()


def test_numbers_that_are_none_are_seen_in_what_tokens_were_chosen_for():
    evaluator, given = opened()
    steps = LibrarySteps(evaluator, given, BATCH, limit_s=10.0)
    given["norm"].fill_(float("nan"))
    steps.start([1] * BATCH, [0] * BATCH)
    steps.run_steps(1)
    assert not steps.logits.isfinite().any()


class Graph:
    """Stands for a GPU's, and counts what is captured and replayed."""

    calls: ClassVar[list[str]] = []

    def __init__(
        self,
        evaluator: Evaluator,
        given: dict[str, Tensor],
        *,
        copy_states: bool,
        after: Callable[[Mapping[str, Tensor]], None],
    ) -> None:
        self.calls.append("capture of copies" if copy_states else "capture")
        self.evaluator, self.given, self.after = evaluator, given, after

    def run(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        self.calls.append("replay")
        outputs = self.evaluator.run(self.given)
        self.after(outputs)
        return outputs


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of the graphs that stand for a GPU's from here on."""
    monkeypatch.setattr(library_steps, "CapturedHost", Graph)
    monkeypatch.setattr(Evaluator, "graph_breaks", ())
    monkeypatch.setattr(Evaluator, "rehearse", lambda *given: None)
    monkeypatch.setattr(Graph, "calls", [])
    return Graph.calls


@pytest.mark.parametrize("copies", [False, True])
def test_a_step_is_one_replay_of_a_graph(
    copies: bool, calls: list[str], monkeypatch: pytest.MonkeyPatch
):
    """copies: a capture runs on copies of states."""
    evaluator, given = opened()
    rehearsed: list[bool] = []
    monkeypatch.setattr(
        Evaluator, "rehearse", lambda *given: rehearsed.append(reads_states_early())
    )
    steps = LibrarySteps(evaluator, given, BATCH, limit_s=10.0, copy_states=copies)
    steps._captures = True
    steps.start([1] * BATCH, [0] * BATCH)
    tokens = steps.run_steps(3)
    zeros = torch.zeros(BATCH, dtype=torch.int64)
    found = steps.run({"tokens": zeros, "positions": zeros})
    assert calls == ["capture of copies" if copies else "capture", *["replay"] * 4]
    assert found["next"].shape == (BATCH,)
    assert rehearsed == [True] * (not copies and has_triton()), "as the capture launches kernels"
    assert not reads_states_early()
    with pytest.raises(RequestError, match="a trace of 3 steps by library ops"):
        steps.trace(3)
    monkeypatch.setattr(library_steps, "MOST_KEPT", 2)
    plain = LibrarySteps(evaluator, given, BATCH, limit_s=10.0)
    plain.start([1] * BATCH, [0] * BATCH)
    assert torch.equal(plain.run_steps(3), tokens), "also where tokens are copied between steps"
    assert plain.run_steps(0).shape == (0, BATCH)


def test_steps_that_nobody_has_end_without_the_garbage_collector(calls: list[str]):
    """A graph that knew its steps would keep weights and caches until the collector comes."""
    evaluator, given = opened()
    steps = LibrarySteps(evaluator, given, BATCH, limit_s=10.0)
    steps._captures = True
    steps.start([1] * BATCH, [0] * BATCH)
    gc.collect()
    gc.disable()
    try:
        steps.run_steps(1)
        assert calls == ["capture", "replay"]
        assert steps._graph is not None
        left = weakref.ref(steps), weakref.ref(steps._graph), weakref.ref(evaluator)
        del steps, evaluator, given
        assert [ref() for ref in left] == [None] * 3
    finally:
        gc.enable()
