"""Whole decoders with experts by queues of virtual SMs: static and drained, prefill and decode, any
interleaving gives what transformers gives.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from distmega.kernels.events import (
    EventGraph,
    analyse_events,
    check_queues,
    choose_tilings,
    make_queues,
    run_queues,
)
from distmega.kernels.events.queues import Dynamic
from distmega.models.decoder import build_decoder
from tests.e2e.running import relative_error
from tests.models.files import SPARSE_FAMILIES
from tests.models.test_experts import (
    CONTEXT,
    NUM_PREFILLED,
    TOLERANCE,
    saved,
    token_ids,
    weights_of,
)

SEEDS = range(20)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experts")


def graph_of(name: str, root: Path, num_tokens: int) -> tuple[EventGraph, dict[str, Tensor]]:
    """Tasks of one forward step, and its weights."""
    _, source, _ = saved(name, root)
    program = build_decoder(source.config, num_tokens, CONTEXT, logits="all")
    tilings = choose_tilings(program, 3, rows=2)
    return analyse_events(program, tilings), weights_of(source, program)


@pytest.mark.parametrize("dynamic", ["never", "always"])
@pytest.mark.parametrize("name", SPARSE_FAMILIES)
def test_logits_equal_transformers(name: str, dynamic: Dynamic, root: Path):
    expected = saved(name, root)[2].numpy()
    ids = token_ids()
    states: dict[str, Tensor] = {}
    for start, stop in ((0, NUM_PREFILLED), (NUM_PREFILLED, NUM_PREFILLED + 1)):
        graph, weights = graph_of(name, root, stop - start)
        queues = make_queues(graph, 3, dynamic)
        check_queues(queues)
        assert len(queues.regions) == (0 if dynamic == "never" else 2)
        fresh = {t.name: torch.zeros(t.shape) for t in graph.program.with_role("state")}
        given = weights | fresh | states
        given["tokens"] = torch.tensor(ids[start:stop])
        given["positions"] = torch.arange(start, stop)
        found = []
        for seed in SEEDS[:2] if stop - start > 1 else SEEDS:
            copied = given | {name: given[name].clone() for name in fresh}
            launch = run_queues(queues, copied, seed=seed)
            found.append(launch.tensors["logits"])
            assert relative_error(found[-1].numpy(), expected[start:stop]) < TOLERANCE
            assert torch.equal(found[-1], found[0])
        states = {name: launch.tensors[name] for name in fresh}
