"""Two nodes of a Ray cluster: a stage of a pipeline on each, and a node that dies on the way."""

import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from distmega.engine.requests import EngineOptions, GenerateRequest, GenerateResult, Token
from distmega.launch.contract import Emitted, Event, LauncherOptions, RayOptions, Result
from distmega.launch.launchers import launch
from tests.launch.conftest import NODE, wait_until
from tests.launch.targets import Seen

pytestmark = pytest.mark.ray

TWO_STAGES = RayOptions(cpus_per_rank=1, ranks_per_bundle=2)
"""Two ranks fill a node of two cores."""

NUM_TOKENS = 250
AWAY_S = 2.0
LIMIT_S = 240.0


@contextmanager
def second_node(cluster: Any) -> Iterator[Any]:
    """One more node; a test may remove it itself."""
    node = cluster.add_node(**NODE)
    try:
        yield node
    finally:
        if node in cluster.list_all_nodes():
            cluster.remove_node(node)


def options(**changes: Any) -> LauncherOptions:
    return LauncherOptions(
        launcher="ray",
        num_ranks=4,
        ray=TWO_STAGES,
        timeout_s=LIMIT_S,
        start_timeout_s=LIMIT_S,
        **changes,
        device="cpu",
    )


def request(**changes: Any) -> GenerateRequest:
    return GenerateRequest(
        model="tiny-llama",
        prompts=("The capital of France is",),
        max_new_tokens=NUM_TOKENS,
        options=EngineOptions(max_context=512),
        **changes,
    )


@pytest.mark.nightly
def test_the_ranks_of_a_stage_share_a_node(ray_cluster: Any) -> None:
    with second_node(ray_cluster):
        *_, last = launch("tests.launch.targets:sum_ranks", 1, options())
        assert isinstance(last, Result)
        seen: list[Seen] = last.value
        nodes = [one.context.node for one in seen]
        assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
        assert [one.context.local_rank for one in seen] == [0, 1, 0, 1]


def test_a_request_outlives_a_node(ray_cluster: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The same tokens as one rank gives, each once, though the second stage's node dies after the
    third and another takes its place a little later.
    """
    *_, alone = launch(
        "distmega.engine.ranks.jobs:generate", request(), LauncherOptions(device="cpu")
    )
    assert isinstance(alone.value, GenerateResult)
    found: list[Event] = []

    def tokens() -> list[int]:
        """Ids of those that came; how far loading is comes too where it takes long."""
        values = [event.value for event in found if isinstance(event, Emitted)]
        return [value.id for value in values if isinstance(value, Token)]

    def generate() -> None:
        asked = launch(
            "distmega.engine.ranks.jobs:generate", request(tp=2, pp=2), options(max_restarts=1)
        )
        for event in asked:
            found.append(event)

    with ThreadPoolExecutor(1) as pool, caplog.at_level(logging.WARNING):
        with second_node(ray_cluster) as node:
            done = pool.submit(generate)
            assert wait_until(lambda: len(tokens()) >= 3 or done.done(), LIMIT_S)
            ray_cluster.remove_node(node, allow_graceful=False)
            time.sleep(AWAY_S)
        with second_node(ray_cluster):
            done.result(LIMIT_S)
    last = found[-1]
    assert isinstance(last, Result)
    assert tuple(tokens()) == last.value.answers[0].ids == alone.value.answers[0].ids
    (warning,) = [record.getMessage() for record in caplog.records if "restart" in record.msg]
    assert warning.startswith("restart 1 of 1 of all ranks: rank ")
    assert "was lost with its node" in warning
    assert f"({node.node_id[:8]}), which is down" in warning
