"""No launcher that starts its ranks on one machine listens beyond loopback."""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from distmega.errors import LaunchError
from distmega.launch.contract import LauncherOptions, Result
from distmega.launch.host.sockets import LOOPBACK, interface_of, listen_at
from distmega.launch.host.stores import reach_store, serve_store
from distmega.launch.launchers import launch

ROOT = Path(__file__).resolve().parents[2]
GENERATE = ("generate", "tiny-llama", "The capital", "--tp", "2", "--max-new-tokens", "20")
LOOK_S = 0.1


def listening(process: psutil.Process) -> set[tuple[str, int]]:
    """Addresses and ports at which a process and those that it started listen now."""
    found: set[tuple[str, int]] = set()
    try:
        for each in (process, *process.children(recursive=True)):
            found |= {
                tuple(one.laddr)
                for one in each.net_connections(kind="inet")
                if one.status == psutil.CONN_LISTEN
            }
    except psutil.Error:  # it has just ended
        pass
    return found


@pytest.mark.parametrize("script", ["local.sh", "torchrun.sh"])
def test_a_command_listens_on_loopback_alone(script: str):
    arguments = ["2"] if script == "torchrun.sh" else []
    command = [shutil.which("bash"), str(ROOT / "launch" / script), *arguments, *GENERATE]
    found: set[tuple[str, int]] = set()
    environment = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as started:
        while started.poll() is None:
            found |= listening(psutil.Process(started.pid))
            time.sleep(LOOK_S)
        assert started.stderr is not None
        assert started.returncode == 0, started.stderr.read()
    assert len(found) >= 3  # the store, and gloo on two ranks
    assert {address for address, _ in found} == {LOOPBACK}


def test_a_rank_alone_opens_no_store():
    (*_, last) = launch("tests.launch.targets:listeners", None, LauncherOptions(device="cpu"))
    assert isinstance(last, Result)
    assert {address for address, _ in last.value} <= {LOOPBACK}
    assert len(last.value) <= 1  # gloo opens a socket even so


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_ranks_of_ray_on_one_node_listen_on_loopback_beside_ray_itself():
    import ray  # noqa: PLC0415  not where Ray is not installed

    plain = ray.get(ray.remote(own_listeners).remote())
    options = LauncherOptions(launcher="ray", num_ranks=2, device="cpu")
    *_, last = launch("tests.launch.targets:listeners", None, options)
    assert isinstance(last, Result)
    for_all = [address for address, _ in last.value if address != LOOPBACK]
    assert len(last.value) > len(for_all) == 2 * len(plain)


def own_listeners() -> list[Any]:
    """What Ray's own worker process listens at."""
    return [place for place in listening(psutil.Process()) if place[0] != LOOPBACK]


def own_address() -> str:
    """An address of this machine that others could reach, or skips the test."""
    for name, places in psutil.net_if_addrs().items():
        for place in places:
            if place.family == socket.AF_INET and not place.address.startswith("127."):
                assert interface_of(place.address) == name
                return place.address
    pytest.skip("this machine has no address but loopback")


def test_a_store_listens_at_its_host_alone():
    for host in (LOOPBACK, own_address()):
        before = listening(psutil.Process())
        store = serve_store(host, 5.0)
        assert listening(psutil.Process()) - before == {(host, store.port)}
        peer = reach_store(host, store.port, 5.0)
        peer.set("a", "b")
        assert store.get("a") == b"b"
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((LOOPBACK, store.port), timeout=5.0)


def test_a_store_elsewhere_or_at_a_taken_port_is_refused():
    with pytest.raises(LaunchError, match=r"no rendezvous store at 192\.0\.2\.199, port any"):
        serve_store("192.0.2.199", 5.0)
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"no rendezvous store at {LOOPBACK}, port {port}"):
            serve_store(LOOPBACK, 5.0, port=port)


def test_sockets_go_where_the_user_says_or_to_the_interface_of_an_address():
    environment: dict[str, str] = {}
    listen_at(LOOPBACK, environment)
    assert environment == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    environment = {"GLOO_SOCKET_IFNAME": "eth7"}
    listen_at(own_address(), environment)
    assert environment == {"GLOO_SOCKET_IFNAME": "eth7"}
    listen_at("192.0.2.199", environment)
    assert environment == {"GLOO_SOCKET_IFNAME": "eth7"}
