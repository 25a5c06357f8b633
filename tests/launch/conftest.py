"""Launcher tests leave no child process and no shared memory behind; those of Ray share one Ray."""

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from tests.forked import forked_ranks, forking
from tests.leftovers import shared_names

GONE_S = 60.0

NODE = {"num_cpus": 2, "object_store_memory": 80_000_000, "include_dashboard": False}
QUICK_TO_NOTICE = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 3,
}


def children() -> set[int]:
    """Processes that this one started or had forked; what they started is ended with them, or is
    Ray's own.
    """
    _, server = forking()
    parents = (psutil.Process(), psutil.Process(server))
    return {child.pid for parent in parents for child in parent.children()}


def wait_until(condition: Callable[[], bool], limit_s: float = GONE_S) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def is_gone(pid: int) -> bool:
    """Whether the process has ended; a zombie has, its parent just has not looked yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    children_before, memory_before = children(), shared_names()
    yield
    assert wait_until(lambda: children() <= children_before), "a process is left"
    assert wait_until(lambda: shared_names() <= memory_before), "shared memory is left"


@pytest.fixture(autouse=True)
def _no_token_is_shown_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of Ray say so in the environment, where this machine's user has a token."""
    mode = os.environ.get("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_AUTH_MODE", mode)


@pytest.fixture
def forked() -> Iterator[None]:
    """Ranks are forked where a test is of what they do, not of how they start."""
    with forked_ranks():
        yield


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """A Ray cluster of one node, to which a test may add nodes for its own time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # before Ray is imported, which reads it then
        ray = pytest.importorskip(
            "ray", reason="ray is not installed (pip install 'distmega[ray]')"
        )
        from ray.cluster_utils import Cluster  # noqa: PLC0415  not where Ray is not installed

        head = NODE | {"_system_config": QUICK_TO_NOTICE}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
        yield cluster
        ray.shutdown()
        cluster.shutdown()
