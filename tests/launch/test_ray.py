"""Ranks as Ray actors, on one Ray that these tests share."""

import os
import signal
from importlib import import_module
from pathlib import Path

import pytest

from distmega.errors import LaunchError, RankFailure, RequestError
from distmega.launch.contract import Emitted, Job, LauncherOptions, RayOptions, Result
from distmega.launch.launchers import launch
from tests.launch.conftest import is_gone, wait_until
from tests.launch.targets import Begun

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def start(target: str, payload: object, *, num_ranks: int = 2, **options):
    chosen = LauncherOptions(launcher="ray", num_ranks=num_ranks, device="cpu", **options)
    return launch(f"tests.launch.targets:{target}", payload, chosen)


def test_values_come_in_order_and_the_result_last():
    *values, result = start("sum_ranks", 3, num_ranks=4)
    assert values == [Emitted(value=step) for step in range(3)]
    assert isinstance(result, Result)
    assert [seen.context.rank for seen in result.value] == [0, 1, 2, 3]
    assert [seen.context.local_rank for seen in result.value] == [0, 1, 2, 3]
    assert {seen.total for seen in result.value} == {10}
    assert {seen.multicast for seen in result.value} == {("0", "1", "1")}
    assert {seen.niceness for seen in result.value} == {os.nice(0)}
    assert wait_until(lambda: all(is_gone(seen.pid) for seen in result.value))


@pytest.mark.parametrize("mode", ["token", "disabled"])
def test_an_actor_that_never_ran_may_be_of_a_cluster_without_tokens(monkeypatch, mode):
    import ray  # noqa: PLC0415  not where Ray is not installed

    remote = ray.actor.ActorClass._remote  # what .options(...).remote() calls

    def give_up(self, *arguments, **keywords):
        actor = remote(self, *arguments, **keywords)
        ray.kill(actor)
        return actor

    monkeypatch.setattr(ray.actor.ActorClass, "_remote", give_up)
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    with pytest.raises(LaunchError, match="2 Ray actors, not all started: The actor") as refusal:
        list(start("sum_ranks", 1))
    assert ("set RAY_AUTH_MODE=disabled if" in str(refusal.value)) == (mode == "token")


def test_a_killed_actor_is_named_and_ends_the_others():
    events = start("kill_last", signal.SIGKILL)
    survivor = next(events).value
    with pytest.raises(RankFailure, match="rank 1 of 2 lost its actor: The actor is dead"):
        next(events)
    assert wait_until(lambda: is_gone(survivor))


def test_a_frozen_actor_misses_its_heartbeat(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("distmega.launch.on_ray.actors.HEARTBEAT_LIMIT_S", 2.0)
    with pytest.raises(RankFailure, match="rank 1 of 2 has not answered a heartbeat for 2 s"):
        list(start("kill_last", signal.SIGSTOP))


def test_a_restart_repeats_the_job_but_no_value(tmp_path: Path):
    events = list(start("kill_last_once", tmp_path / "died", max_restarts=1))
    events.remove(Emitted(value=Begun()))  # of the second run alone
    assert events == [*(Emitted(value=step) for step in range(5)), Result(value="survived")]


def test_an_error_of_ours_comes_back_as_it_was_raised():
    with pytest.raises(RequestError, match="payload bad; expected a better one; send that"):
        list(start("refuse", "bad"))


def test_what_the_cluster_lacks_is_said():
    options = RayOptions(cpus_per_rank=3, strategy="STRICT_PACK", placement_timeout_s=0.5)
    with pytest.raises(LaunchError, match=r"could not place 2 ranks.*6 CPU \(2 of 2 free\)"):
        list(start("sum_ranks", 1, ray=options))


def test_a_ray_of_ones_own_is_not_waited_for():
    """No node will join it."""
    pytest.importorskip("ray")
    cluster = import_module("distmega.launch.on_ray.cluster")
    job = Job(
        target="",
        payload=b"",
        num_ranks=2,
        device="cuda",
        timeout_s=1.0,
        start_timeout_s=1.0,
        ray=RayOptions(placement_timeout_s=1e6),
    )
    with pytest.raises(LaunchError, match=r"1 node\): they need .*2 GPU \(0 of 0 free\)"):
        cluster.reserve_ranks(job, waits=False)


def test_an_address_where_no_cluster_listens_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    for address in ("127.0.0.1:9", "nonsense"):
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(LaunchError, match=f"can't connect to Ray at RAY_ADDRESS={address}"):
            list(start("sum_ranks", 1))


def test_a_cluster_of_other_versions_is_refused_and_left(monkeypatch: pytest.MonkeyPatch):
    """Ray is connected when it finds out that it does not fit, and has its own end on SIGTERM."""
    ray = pytest.importorskip("ray")
    cluster = import_module("distmega.launch.on_ray.cluster")
    before, calls = signal.getsignal(signal.SIGTERM), []

    def init(**_options: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise RuntimeError("Version mismatch: the cluster was started with Ray 2.50")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("shutdown"))
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(LaunchError, match=r"RAY_ADDRESS=auto \(Version mismatch: the"):
        cluster.connect()
    assert calls == ["shutdown"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_ranks_are_numbered_by_node_then_device():
    pytest.importorskip("ray")
    launcher = import_module("distmega.launch.on_ray.actors")
    places = [
        ("10.0.0.2", "b", 1),
        ("10.0.0.1", "a", 1),
        ("10.0.0.2", "b", 0),
        ("10.0.0.1", "a", 0),
    ]
    seats = sorted(
        launcher.Seat(address=address, node=node, device=device, index=index)
        for index, (address, node, device) in enumerate(places)
    )
    assert [seat.index for seat in seats] == [3, 1, 2, 0]
    contexts = launcher.make_contexts(seats, "cuda", 60.0)
    assert [context.local_rank for context in contexts] == [0, 1, 0, 1]
    assert [context.device for context in contexts] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert {context.local_world_size for context in contexts} == {2}


def test_the_output_of_ranks_is_shown_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("ray")
    cluster = import_module("distmega.launch.on_ray.cluster")
    for log, shown in (("debug", True), ("info", True), ("warning", False), ("error", False)):
        monkeypatch.setenv("DISTMEGA_LOG", log)
        assert cluster.shows_output() == shown
