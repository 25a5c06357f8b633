"""Ranks that torchrun starts: the same values, and one message whoever fails."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from threading import Thread

import psutil
import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException

from distmega.errors import RequestError
from distmega.launch import agent
from distmega.launch import torchrun as torchrun_module
from distmega.launch.contract import LauncherOptions
from distmega.launch.host.reports import Failed
from distmega.launch.host.sockets import LOOPBACK
from distmega.launch.host.stores import HashStore, reach_store, serve_store
from distmega.launch.launchers import choose_launcher, choose_num_ranks, launch
from distmega.launch.torchrun import TorchrunRank
from tests.forked import run_module
from tests.interrupts import interruptible
from tests.launch.conftest import is_gone, wait_until

ROOT = Path(__file__).resolve().parents[2]


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def torchrun(*arguments: object) -> subprocess.CompletedProcess[str]:
    """What it says with two ranks, forked with torch loaded; it starts its ranks anew."""
    options = ("--standalone", "--nproc-per-node", "2", "-m", "tests.launch.command")
    return run_module("torch.distributed.run", *options, *map(str, arguments))


def errors(done: subprocess.CompletedProcess[str]) -> list[str]:
    return re.findall("error by rank .*", done.stderr)


def test_rank_0_alone_yields_values_and_the_result():
    done = torchrun("sum_ranks", 2, 0, 60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["rank 0: Emitted(value=0)", "rank 0: Emitted(value=1)"]
    assert len(lines) == 3
    assert lines[2].startswith(
        "rank 0: Result(value=[Seen(context=RankContext(rank=0, world_size=2"
    )
    assert lines[2].count("total=3") == 2
    assert lines[2].count("multicast=('0', '1', '1')") == 2


def test_a_world_size_that_disagrees_is_reported_once():
    done = torchrun("sum_ranks", 2, 4, 60)
    assert done.returncode != 0
    (message,) = errors(done)
    assert "RequestError: 4 ranks are asked for, and WORLD_SIZE=2; expected both" in message


def test_a_killed_rank_is_named_and_ends_the_others():
    done = torchrun("kill_last", 9, 2, 10_000)  # which a lost rank would take
    assert done.returncode != 0
    # torchrun may end rank 0 before it can speak; its summary names the rank in any case
    assert all("rank 1 of 2 died, as rank 0 of 2 noticed" in message for message in errors(done))
    # the first, or behind rank 0, which it took along
    assert re.search(r"rank +: 1 \(local_rank: 1\)\n *exitcode +: -9", done.stderr)


def test_a_rank_that_raises_explains_itself_and_nobody_else_does():
    done = torchrun("stumble", 5, 2, 60)
    assert done.returncode != 0
    (message,) = errors(done)
    assert message.startswith("error by rank 1: RankFailure: rank 1 of 2 raised KeyError: 5")


def test_a_rank_that_hangs_is_named_after_the_timeout():
    done = torchrun("hang", 0, 2, 10)  # which a busy machine needs to start both
    assert done.returncode != 0
    (message,) = errors(done)
    assert "rank 0 of 2 lost contact with rank 1" in message
    assert "Timed out" in message


def test_a_rank_that_hangs_while_an_engine_opens_is_named_after_the_timeout():
    done = torchrun("hang_opening", 0, 2, 10)
    assert done.returncode != 0
    (message,) = errors(done)
    assert "rank 0 of 2 lost contact with rank 1" in message
    assert "exchange of values of [0, 1] failed on rank 0" in message


def test_a_rank_that_waits_for_a_store_ends_on_an_interrupt():
    """The agent sends one, and after 30 s a SIGKILL. Nobody answers the rank here."""
    with socket.create_server(("127.0.0.1", 0)) as server, interruptible():
        place = {
            "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1]),
            "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True",
        }  # fmt: skip
        with subprocess.Popen(
            [sys.executable, "-m", "distmega", "generate", "tiny-llama", "hi", "--tp", "2"],
            env={**os.environ, **place}, cwd=ROOT, stderr=subprocess.PIPE, text=True,
        ) as rank:  # fmt: skip
            server.settimeout(120)
            connection, _ = server.accept()
            with connection:
                rank.send_signal(signal.SIGINT)
                try:
                    _, stderr = rank.communicate(timeout=20)
                finally:
                    rank.kill()
    assert (rank.returncode, stderr) == (-signal.SIGINT, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_agent_that_a_signal_ends_has_its_exit_code(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
):
    def interrupted() -> None:
        raise SignalException("a signal", number)

    monkeypatch.setattr(agent, "main", interrupted)
    assert agent.run() == 128 + number


def test_ranks_end_with_the_agent_that_started_them():
    with subprocess.Popen(
        [*TORCHRUN, "2", "-m", "tests.launch.command", "hang", "0", "2", "60"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as agent:
        assert agent.stdout is not None
        assert agent.stdout.readline().startswith("rank 0: Emitted(value=")
        ranks = [child.pid for child in psutil.Process(agent.pid).children()]
        assert len(ranks) == 2
        agent.kill()
        assert wait_until(lambda: all(map(is_gone, ranks)))


def test_outside_of_torchrun_the_launcher_says_how_to_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RequestError, match=r"without RANK,.*start with: torchrun --nproc-per-node"):
        list(launch("m:f", None, LauncherOptions(launcher="torchrun")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"MASTER_PORT": "any"}, "MASTER_PORT='any'; expected what torchrun sets"),
        ({"RANK": "1"}, "a rank's context with rank 1 of 1"),
    ],
)
def test_variables_that_contradict_each_other_are_named_before_any_wait(
    changes: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
):
    one = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1")
    ranks = dict.fromkeys(("RANK", "LOCAL_RANK"), "0")
    there = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, text in {**one, **ranks, **there, **changes}.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr("distmega.launch.torchrun.start_logging", lambda _rank: None)
    with pytest.raises(RequestError, match=message):
        list(launch("m:f", None, LauncherOptions(launcher="torchrun")))


WITHOUT_A_STORE = """
import sys
from distmega.cli.main import main
from distmega.launch import torchrun

torchrun.REACH_S = 0.5
sys.exit(main(["generate", "tiny-llama", "x", "--tp", "2", "--device", "cpu"]))
"""


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (0, "no rendezvous store at localhost, port "),
        (1, "rank 1 of 2 finds no store at localhost"),
    ],
)
def test_a_store_that_can_not_be_is_told_in_one_line(rank: int, message: str):
    """Rank 0 is to serve it where another process listens; rank 1 reaches nobody, as where the
    agent was killed.
    """
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        if rank == 0:
            taken.listen()
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2,
                   "MASTER_PORT": taken.getsockname()[1]}  # fmt: skip
        given = {"MASTER_ADDR": "localhost", "TORCHELASTIC_RUN_ID": "x"}
        given |= {name: str(number) for name, number in numbers.items()}
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_A_STORE],
            env=os.environ | given,
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
    assert done.returncode == 1, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("distmega: error: ")]
    assert line.startswith(f"distmega: error: {message}")
    assert "Traceback" not in done.stderr


def without_an_agent(rank: int) -> TorchrunRank:
    """A rank of two that share no store but that of rank 0."""
    return TorchrunRank(
        rank=rank,
        world_size=2,
        local_rank=rank,
        local_world_size=2,
        address=LOOPBACK,
        port=1,
        restart="0",
        has_agent_store=False,
    )


def test_a_rank_that_died_with_the_store_that_it_served_is_named():
    served = serve_store(LOOPBACK, 10.0)
    store = reach_store(LOOPBACK, served.port, 10.0)
    del served
    lost = Failed(rank=1, error=None, summary="RuntimeError: reset", traceback="", lost_peer=True)
    error = torchrun_module._explain_failure(lost, store, without_an_agent(1))
    assert error.found == "rank 0 of 2 died, as rank 1 of 2 noticed (RuntimeError: reset)"


def test_a_rank_that_serves_the_store_stays_until_the_others_have_left_it():
    store = HashStore()
    leaving = Thread(
        target=torchrun_module._leave_together, args=(store, without_an_agent(0), 60.0)
    )
    leaving.start()
    store.set("done/1", "")
    leaving.join(0.2)
    assert leaving.is_alive(), "rank 1 is still to ask whether all are done"
    torchrun_module._leave_together(store, without_an_agent(1), 60.0)
    leaving.join(60.0)
    assert not leaving.is_alive()


def test_auto_means_torchrun_inside_of_it_and_local_outside(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert choose_launcher("auto") == "local"
    assert choose_num_ranks("local", 0) == 1
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert choose_launcher("auto") == "torchrun"
    assert choose_num_ranks("torchrun", 0) == choose_num_ranks("torchrun", 4) == 4
    with pytest.raises(RequestError, match=r"^launcher ray in a process that torchrun started"):
        choose_launcher("ray")


@pytest.mark.parametrize(
    ("launcher", "requested", "text"),
    [("torchrun", 3, "4"), ("local", 2, "4"), ("local", 0, "2"), ("torchrun", 0, "two")],
)
def test_a_world_size_set_by_hand_must_agree(
    launcher: str, requested: int, text: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WORLD_SIZE", text)
    asked = f"{requested} ranks are" if requested else "1 rank is"
    message = f"{asked} asked for, and WORLD_SIZE={text}; expected both"
    with pytest.raises(RequestError, match=message):
        choose_num_ranks(launcher, requested)
