"""What the benchmarks' CUDA graphs keep, with torch's own replaced by a call."""

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from bench.decode import compiled_peer, parse_case
from bench.timing import captured


class Graph:
    """In place of a CUDA graph: counts replays."""

    def __init__(self) -> None:
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1


class Inputs:
    """What a call holds."""


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures without a GPU."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda one: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda one, capture_error_mode: nullcontext())


@pytest.mark.usefixtures("graphs")
def test_replays_keep_what_their_call_reads() -> None:
    inputs = Inputs()
    kept = weakref.ref(inputs)
    graph, result = captured(lambda inputs=inputs: id(inputs))
    assert result == id(inputs)
    replay = graph.replay
    del inputs, graph
    gc.collect()
    assert kept() is not None
    replay()
    del replay
    gc.collect()
    assert kept() is None


@pytest.mark.usefixtures("graphs")
def test_a_peer_by_layer_keeps_its_model_and_tokens() -> None:
    class Model:
        def compile_by_layer(self, mode: str) -> None:
            assert mode == "max-autotune-no-cudagraphs"

        def __call__(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
            return tokens + position

    model, tokens, position = Model(), torch.tensor([[1]]), torch.tensor([4])
    kept = [weakref.ref(one) for one in (model, tokens, position)]
    case = parse_case("llama-3.2-1b batch=1 ctx=512")
    step = compiled_peer(case, model, tokens, position, True)  # type: ignore[arg-type]
    del model, tokens, position
    gc.collect()
    assert all(one() is not None for one in kept)
    step()
