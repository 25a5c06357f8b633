"""Runs a job inside the ranks that torchrun has started: a Job in, values and result out on rank 0.

Every rank calls this with the same job. Rendezvous is the store that torchrun's agent serves, or
one of rank 0 where the agent has none. A rank that fails claims the right to explain before its
peers can notice, so the job ends with one message, of the rank that knows most; the agent then ends
the other ranks and names the failed one in its summary as well. Next: launch/worker.py.
"""

import functools
import logging
import os
import socket
import time
from collections.abc import Generator, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain

from distmega.engine.ranks.context import RankContext
from distmega.errors import DistmegaError, LaunchError, RankFailure, RequestError, counted
from distmega.launch.contract import MULTICAST_OFF, Emitted, Event, Job, Result
from distmega.launch.host.processes import end_with_parent, process_state
from distmega.launch.host.reports import Done, Failed, Value
from distmega.launch.host.sockets import LOOPBACK, listen_at
from distmega.launch.host.stores import (
    DistError,
    DistNetworkError,
    PrefixStore,
    Store,
    reach_store,
    serve_store,
)
from distmega.launch.supervise import describe_failure, read_value
from distmega.launch.worker import RankRun, close_group, make_context, start_logging

logger = logging.getLogger(__name__)

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
REACH_S = 60.0
"""How long to try to reach the store that torchrun's agent serves."""

DEATH_S = 0.5
"""How long a peer may take from closing its connections to being seen dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchrunRank:
    """What torchrun's environment says of this process."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    port: int
    restart: str
    has_agent_store: bool


def read_rank() -> TorchrunRank:
    """Read torchrun's variables; RequestError if this process wasn't started by torchrun."""
    environment = os.environ
    if missing := [name for name in VARIABLES if name not in environment]:
        raise RequestError(
            f"launcher torchrun in a process without {', '.join(missing)}",
            expected=f"a process that torchrun started, which has {', '.join(VARIABLES)}",
            remedy="start with: torchrun --nproc-per-node N -m distmega ...",
        )
    try:
        return TorchrunRank(
            rank=int(environment["RANK"]),
            world_size=int(environment["WORLD_SIZE"]),
            local_rank=int(environment["LOCAL_RANK"]),
            local_world_size=int(environment["LOCAL_WORLD_SIZE"]),
            address=environment["MASTER_ADDR"],
            port=int(environment["MASTER_PORT"]),
            restart=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
            has_agent_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )
    except ValueError as error:
        given = " ".join(f"{name}={environment[name][:40]!r}" for name in VARIABLES)
        raise RequestError(
            f"environment variables {given}",
            expected="what torchrun sets: all but MASTER_ADDR whole numbers",
            remedy="start with: torchrun --nproc-per-node N -m distmega ...",
        ) from error


def run_torchrun(job: Job) -> Generator[Event]:
    """Run this rank's part of `job`; see launchers.launch for what is yielded and raised."""
    here = read_rank()
    context = _make_context(here, job)
    if here.world_size != job.num_ranks:
        raise LaunchError(
            f"a request for {counted(job.num_ranks, 'rank')}, torchrun started {here.world_size}",
            expected="both to be the same",
            remedy=f"give torchrun {counted(job.num_ranks, 'process')}, or ask for"
            f" {counted(here.world_size, 'rank')}",
        )
    for name, off in MULTICAST_OFF.items():
        os.environ.setdefault(name, off)
    start_logging(here.rank)
    end_with_parent(_end_with_agent)
    if here.local_world_size == here.world_size:
        listen_at(LOOPBACK)
    store = _reach_store()
    run = RankRun(
        context,
        job,
        join=lambda: _sign_in(store, here),
        collective_timeout_s=job.timeout_s,
    )
    for report in chain.from_iterable(run.stream()):
        match report:
            case Value(data=data):
                yield Emitted(value=read_value(data, "a value"))
            case Failed():
                claim_report()
                raise _explain_failure(report, store, here)
            case Done(data=data):
                _leave_together(store, here, job.timeout_s)
                if here.rank == 0:
                    yield Result(value=read_value(data, "a result"))


@functools.cache
def claim_report() -> bool:
    """Whether this rank is the first of its job to ask, and so the one to explain the failure."""
    try:
        num_reporters: int = _reach_store().add("reporters", 1)
    except (DistError, LaunchError):
        return True
    return num_reporters == 1


def _reach_store() -> Store:
    """The store of this job's ranks. LaunchError, at once the second time, where there is none."""
    found = _find_store()
    if isinstance(found, LaunchError):
        raise found
    return found


@functools.cache
def _find_store() -> Store | LaunchError:
    """See _reach_store; what was in vain once is not tried again, for each try may take long."""
    here = read_rank()
    try:
        if here.rank == 0 and not here.has_agent_store:
            store = serve_store(here.address, REACH_S, port=here.port)
        else:
            store = reach_store(here.address, here.port, REACH_S)
    except LaunchError as error:
        return error
    except DistError as error:
        return LaunchError(
            f"rank {here.rank} of {here.world_size} finds no store at {here.address}, port"
            f" {here.port} ({str(error).partition(chr(10))[0]})",
            expected="torchrun's agent, or rank 0, to serve one there",
            remedy="look for what ended it, correct MASTER_ADDR and MASTER_PORT, or start again",
        )
    return PrefixStore(f"distmega/{here.restart}", store)


def _sign_in(store: Store, here: TorchrunRank) -> Store:
    """Leave word which process this rank is, for peers that lose it."""
    store.set(f"process/{here.rank}", f"{os.getpid()} {socket.gethostname()}")
    return store


def _make_context(here: TorchrunRank, job: Job) -> RankContext:
    return make_context(
        rank=here.rank,
        world_size=here.world_size,
        local=(here.local_rank, here.local_world_size),
        node=socket.gethostname(),
        kind=job.device,
        index=here.local_rank,
        timeout_s=job.timeout_s,
    )


def _leave_together(store: Store, here: TorchrunRank, timeout_s: float) -> None:
    """Close the process group once every rank is through."""
    keys = {f"done/{rank}": rank for rank in range(here.world_size)}
    owner = "torchrun" if here.has_agent_store else "rank 0"
    try:
        store.set(f"done/{here.rank}", "")
        store.wait(list(keys), timedelta(seconds=timeout_s))
    except DistNetworkError as error:
        raise LaunchError(
            f"rank {here.rank} of {here.world_size} lost the store of {owner} ({error})",
            expected=f"{owner} to stay until every rank has ended",
            remedy=f"look for what ended {owner}, and start again",
        ) from error
    except DistError as error:
        late = [rank for key, rank in keys.items() if not store.check([key])]
        claim_report()
        raise RankFailure(
            f"no news for {timeout_s:g} s from rank {_join(late)}",
            expected="every rank to return from its target within that time of the first",
            remedy="look for what holds them up; if only slow, raise DISTMEGA_TIMEOUT_S",
        ) from error
    _leave_store(store, here, timeout_s)
    close_group()


def _leave_store(store: Store, here: TorchrunRank, timeout_s: float) -> None:
    """Keeps rank 0, where it serves the store, until the others need it no longer."""
    if here.has_agent_store:
        return
    left = [f"left/{rank}" for rank in range(1, here.world_size)]
    with suppress(DistError):  # every target has returned: whoever ends now has done its part
        if here.rank:
            store.set(f"left/{here.rank}", "")
        elif left:
            store.wait(left, timedelta(seconds=timeout_s))


def _explain_failure(report: Failed, store: Store, here: TorchrunRank) -> DistmegaError:
    if not report.lost_peer:
        return describe_failure(report, here.world_size)
    name = f"rank {here.rank} of {here.world_size}"
    try:
        dead = _find_dead_peers(store, here)
    except DistError:  # the store went with who served it
        dead = [] if here.has_agent_store else [0]
    if dead:
        found = f"rank {_join(dead)} of {here.world_size} died, as {name} noticed"
    else:
        peers = [rank for rank in range(here.world_size) if rank != here.rank]
        found = f"{name} lost contact with rank {_join(peers)}, and saw no process of them dead"
    return RankFailure(
        f"{found} ({report.summary.partition('. ')[0]})",
        expected="every rank to run until its target returns",
        remedy="see torchrun's summary for the first rank that failed, and that rank's output",
    )


def _join(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


def _find_dead_peers(store: Store, here: TorchrunRank) -> list[int]:
    """Ranks of this node whose process is gone; none if it is another node's."""
    pids = {}
    for rank in range(here.world_size):
        if rank != here.rank and store.check([f"process/{rank}"]):
            pid, node = store.get(f"process/{rank}").decode().split(" ", 1)
            if node == socket.gethostname():
                pids[rank] = int(pid)
    deadline = time.monotonic() + DEATH_S
    while time.monotonic() < deadline:
        if dead := [rank for rank, pid in pids.items() if not _is_running(pid)]:
            return dead
        time.sleep(0.01)
    return []


def _is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie, as a killed rank is until the agent looks."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return process_state(pid) != "Z"


def _end_with_agent() -> None:
    """Nobody is left who would end this rank, should it wait for another."""
    logger.error("the process that started this rank is gone, so the rank ends")
    os._exit(1)
