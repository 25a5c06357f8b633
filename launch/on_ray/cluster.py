"""Ray's cluster: connect to it, reserve room for ranks, see which nodes are up.

Comes in: a Job and the environment. Goes out: a placement group, or a LaunchError that says what is
missing. Used by launch/on_ray/actors.py.
"""

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from distmega.env import read_settings
from distmega.errors import LaunchError, counted
from distmega.launch.contract import Job

logger = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 80_000_000
PROBE_S = 5.0
PLACEMENT_POLL_S = 1.0
NODE_PROBE_S = 2.0


def cluster_address() -> str | None:
    """Of the cluster that RAY_ADDRESS names; None where this process is to start its own Ray."""
    address = os.environ.get("RAY_ADDRESS")
    return None if address in ("", "local") else address


def connect() -> bool:
    """Make sure that this process is connected to Ray; whether that was done here."""
    if ray.is_initialized():
        return False
    address = cluster_address()
    try:
        if address and address != "auto":
            _probe(address)
        _init(address)
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise LaunchError(
            f"can't connect to Ray at RAY_ADDRESS={address or 'local'} ({error})",
            expected="host:port of a running cluster of the versions of Ray and Python here, and "
            "its token if it demands one",
            remedy="correct RAY_ADDRESS, unset it to start Ray on this machine, or set "
            "RAY_AUTH_MODE=token where `ray start` said that token authentication is enabled",
        ) from error
    return True


def _init(address: str | None) -> None:
    """Connects to a cluster, or starts a Ray. After an error, of versions that differ too, this
    process is not connected.
    """
    on_terminate = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address=address or "local",
            object_store_memory=None if address else OBJECT_STORE_BYTES,
            include_dashboard=None if address else False,
            logging_level=logging.WARNING,
            log_to_driver=shows_output(),
        )
        _log_daemons()
    except BaseException:
        ray.shutdown()
        raise
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_terminate)  # Ray has put its own, which aborts


def shows_output() -> bool:
    """Whether what ranks print and log is shown here: where this process or DISTMEGA_LOG asks for
    messages below warnings.
    """
    return logger.isEnabledFor(logging.INFO) or read_settings().log in ("debug", "info")


def _probe(address: str) -> None:
    """Fail within seconds if nothing listens there; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=PROBE_S).close()


def reserve_ranks(job: Job, *, waits: bool = True) -> PlacementGroup:
    """Reserve a bundle for each group of ranks; raises LaunchError saying what is missing.

    waits: for nodes that may still join; not so of a Ray that this process started for itself.
    """
    size = job.ray.ranks_per_bundle
    bundle = {"CPU": size * job.ray.cpus_per_rank}
    bundle |= {"GPU": float(size)} if job.device == "cuda" else {}
    num_bundles = job.num_ranks // size
    total = ray.cluster_resources()  # type: ignore[no-untyped-call]
    if not waits and any(total.get(name, 0) < num_bundles * x for name, x in bundle.items()):
        raise _describe_shortage(job, bundle, 0)
    group: PlacementGroup = placement_group([bundle] * num_bundles, strategy=job.ray.strategy)
    deadline = time.monotonic() + job.ray.placement_timeout_s
    try:
        while not group.wait(timeout_seconds=PLACEMENT_POLL_S):
            logger.info("waiting for Ray to place %d ranks of %s", job.num_ranks, bundle)
            if time.monotonic() > deadline:
                raise _describe_shortage(job, bundle, job.ray.placement_timeout_s)
    except BaseException:
        remove_placement_group(group)
        raise
    return group


def _describe_shortage(job: Job, bundle: Mapping[str, float], waited_s: float) -> LaunchError:
    free = ray.available_resources()  # type: ignore[no-untyped-call]
    total = ray.cluster_resources()  # type: ignore[no-untyped-call]
    num_bundles = job.num_ranks // job.ray.ranks_per_bundle
    needs = ", ".join(
        f"{amount * num_bundles:g} {name} ({free.get(name, 0):g} of {total.get(name, 0):g} free)"
        for name, amount in bundle.items()
    )
    num_nodes = sum(node["Alive"] for node in ray.nodes())  # type: ignore[no-untyped-call]
    return LaunchError(
        f"Ray could not place {counted(job.num_ranks, 'rank')} ({job.ray.strategy},"
        f" {counted(num_nodes, 'node')}){f' within {waited_s:g} s' if waited_s else ''}: they"
        f" need {needs}",
        expected="that much to be free, on one node under STRICT_PACK",
        remedy="ask for fewer ranks, free the cluster, or add nodes to it",
    )


def is_node_up(node: str) -> bool:
    """Whether a node's daemon answers; Ray may take half a minute to notice that it is gone."""
    known = {each["NodeID"]: each for each in ray.nodes()}  # type: ignore[no-untyped-call]
    if node not in known or not known[node]["Alive"]:
        return False
    endpoint = known[node]["NodeManagerAddress"], known[node]["NodeManagerPort"]
    try:
        socket.create_connection(endpoint, timeout=NODE_PROBE_S).close()
    except OSError:
        return False
    return True


def _log_daemons() -> None:
    """What Ray's daemons say goes to the log, not between the answers on standard output."""
    worker = ray._private.worker
    if hasattr(worker, "print_to_stdstream"):
        setattr(worker, "print_to_stdstream", _log_lines)  # noqa: B010


def _log_lines(data: Mapping[str, Any], ignore_prefix: bool = False) -> None:
    del ignore_prefix  # of no use in a log
    logger.info("Ray's %s: %s", data.get("pid"), " ".join(data.get("lines", ())))
