"""Runs the ranks as Ray actors: a Job in, Emitted values and the Result out.

Every rank is one actor in a placement group; ranks are numbered by node and device, whatever order
the bundles came in. Rank 0's actor opens the rendezvous store and keeps it. The job is one
streaming call to each actor, whose items are reports of the rank; heartbeats run beside it in a
concurrency group of their own. What concerns the cluster is in launch/on_ray/cluster.py, the only
other file that imports Ray. Next: launch/worker.py.
"""

import os
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from distmega.engine.ranks.context import DeviceKind, RankContext
from distmega.errors import LaunchError
from distmega.launch.contract import Event, Job, rank_environment
from distmega.launch.host.reports import Died, Failed, Position, Report
from distmega.launch.host.sockets import LOOPBACK, listen_at
from distmega.launch.host.stores import TCPStore, reach_store, serve_store
from distmega.launch.on_ray.cluster import cluster_address, connect, is_node_up, reserve_ranks
from distmega.launch.supervise import supervise
from distmega.launch.worker import (
    RankRun,
    close_group,
    make_context,
    start_logging,
    supervised_timeout_s,
)

HEARTBEAT_S = 1.0
HEARTBEAT_LIMIT_S = 30.0
"""A rank that doesn't answer for this long is as good as dead, though its process may exist."""

NEVER_RAN = "The actor never ran"
"""How Ray says that it gave up an actor before starting it. So it does with all where this process
wants a token shown and the cluster, which shows none, asks it whether the actor is still wanted.
"""

FINISH_S = 5.0
POSITION_S = 2.0
HEARTBEAT_GROUP = "heartbeat"
NICENESS = "RAY_worker_niceness"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Seat:
    """Where Ray put an actor. Seats sort by node, then device; `index` is the actor's place in the
    group.
    """

    address: str
    node: str
    device: int
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A question to an actor that it hasn't answered when last looked at."""

    answer: Any
    asked_s: float


class RankActor:
    """One rank. Its methods run one at a time, but for `position`, which is also the heartbeat."""

    def __init__(self) -> None:
        self._store: TCPStore | None = None
        self._run: RankRun | None = None

    def take_seat(self, index: int) -> Seat:
        devices = [int(name) for name in ray.get_runtime_context().get_accelerator_ids()["GPU"]]
        return Seat(
            address=ray.util.get_node_ip_address(),  # type: ignore[no-untyped-call]
            node=ray.get_runtime_context().get_node_id(),
            device=devices[0] if devices else 0,
            index=index,
        )

    def open_store(self, host: str, timeout_s: float) -> int:
        self._store = serve_store(host, timeout_s)
        port: int = self._store.port
        return port

    def run(
        self, context: RankContext, job: Job, host: str, address: tuple[str, int]
    ) -> Iterator[list[Report]]:
        """host: where this rank's sockets listen. address: of the store."""
        start_logging(context.rank)
        listen_at(host)
        self._run = RankRun(
            context,
            job,
            join=lambda: self._store or reach_store(*address, job.start_timeout_s),
            collective_timeout_s=supervised_timeout_s(job),
        )
        yield from self._run.stream()

    def position(self) -> str:
        return self._run.position() if self._run else "not in the target"

    def finish(self) -> None:
        close_group()


def run_ray(job: Job) -> Generator[Event]:
    """Run `job` on Ray actors; see launchers.launch for what is yielded and raised.

    Uses the Ray that this process is connected to, else the cluster at RAY_ADDRESS, else a Ray of
    its own for as long as the job lasts.
    """
    return supervise(RayTeam(job), job)


@dataclass(slots=True)
class RayTeam:
    """The actors of one job by rank, their report streams, and their unanswered heartbeats."""

    job: Job
    owns_ray: bool = False
    group: PlacementGroup | None = None
    actors: list[Any] = field(default_factory=list)
    seats: list[Seat] = field(default_factory=list)
    streams: dict[Any, int] = field(default_factory=dict)
    heartbeats: dict[int, Heartbeat] = field(default_factory=dict)
    next_check_s: float = 0.0

    def start(self) -> float:
        """The time to reserve room for them is not that of their start."""
        self.owns_ray = connect()
        self.group = reserve_ranks(self.job, waits=not self.owns_ray or bool(cluster_address()))
        started_s = time.monotonic()
        try:
            self._start_ranks(self.group, started_s + self.job.start_timeout_s)
        except ray.exceptions.RayError as error:
            remedy = "install distmega on every node; if it is only slow, raise start_timeout_s"
            if NEVER_RAN in str(error) and os.environ.get("RAY_AUTH_MODE") == "token":
                remedy = f"set RAY_AUTH_MODE=disabled if the cluster takes no tokens; {remedy}"
            raise LaunchError(
                f"of {self.job.num_ranks} Ray actors, not all started: {_first_line(error)}",
                expected=f"all of them to answer within {self.job.start_timeout_s:g} s",
                remedy=remedy,
            ) from error
        return started_s

    def poll(self, timeout_s: float) -> Sequence[Report]:
        deadline = time.monotonic() + timeout_s
        while self.streams:
            left_s = max(0.0, deadline - time.monotonic())
            ready, _ = ray.wait([*self.streams], num_returns=1, timeout=min(left_s, HEARTBEAT_S))
            reports = [report for stream in ready for report in self._take(stream)]
            if any(isinstance(report, Failed) and report.lost_peer for report in reports):
                reports += self._find_lost_nodes()
            reports += self._check_heartbeats()
            if reports or left_s == 0:
                return reports
        return []

    def ask_positions(self) -> Sequence[Report]:
        asked = {
            actor.position.options(concurrency_group=HEARTBEAT_GROUP).remote(): rank
            for rank, actor in enumerate(self.actors)
        }
        ready, _ = ray.wait([*asked], num_returns=len(asked), timeout=POSITION_S)
        answers = {asked[answer]: _try_get(answer) for answer in ready}
        positions = [Position(rank=rank, where=where) for rank, where in answers.items() if where]
        return [*positions, *self.poll(0.0)]

    def find_stopped(self) -> Sequence[int]:
        return ()  # heartbeats tell

    def finish(self) -> None:
        ray.wait(
            [actor.finish.remote() for actor in self.actors],
            num_returns=len(self.actors),
            timeout=FINISH_S,
        )

    def kill(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
        if self.group is not None:
            remove_placement_group(self.group)
        if self.owns_ray:
            ray.shutdown()
        self.actors, self.group, self.owns_ray = [], None, False

    def _start_ranks(self, group: PlacementGroup, deadline_s: float) -> None:
        groups = {HEARTBEAT_GROUP: 1}
        actor_class = ray.remote(concurrency_groups=groups)(RankActor)  # type: ignore[call-overload]
        for index in range(self.job.num_ranks):
            options = _actor_options(self.job, group, index)
            self.actors.append(actor_class.options(**options).remote())

        def get(asked: Any) -> Any:
            return ray.get(asked, timeout=max(0.0, deadline_s - time.monotonic()))

        asked = [actor.take_seat.remote(index) for index, actor in enumerate(self.actors)]
        seats = self.seats = sorted(get(asked))
        self.actors = [self.actors[seat.index] for seat in seats]
        is_one_node = len({seat.node for seat in seats}) == 1
        hosts = [LOOPBACK if is_one_node else seat.address for seat in seats]
        opened = self.actors[0].open_store.remote(hosts[0], self.job.start_timeout_s)
        address = (hosts[0], get(opened))
        contexts = make_contexts(seats, self.job.device, self.job.timeout_s)
        for rank, (actor, context) in enumerate(zip(self.actors, contexts, strict=True)):
            run = actor.run.options(num_returns="streaming")
            self.streams[run.remote(context, self.job, hosts[rank], address)] = rank

    def _take(self, stream: Any) -> list[Report]:
        """The next reports of a stream that has some; nothing if the stream has ended."""
        rank = self.streams[stream]
        try:
            reports: list[Report] = ray.get(next(stream))
            return reports
        except StopIteration:
            del self.streams[stream]
            return []
        except ray.exceptions.RayError as error:
            del self.streams[stream]
            how = f"lost its actor: {_first_line(error)}"
            return self._find_lost_nodes() or [Died(rank=rank, how=how)]

    def _find_lost_nodes(self) -> list[Report]:
        """The first rank on each node that is down."""
        first = {seat.node: rank for rank, seat in reversed([*enumerate(self.seats)])}
        names = name_nodes(self.seats)
        return [
            Died(rank=rank, how=f"was lost with its node {names[node]}, which is down")
            for node, rank in first.items()
            if not is_node_up(node)
        ]

    def _check_heartbeats(self) -> list[Report]:
        """Report ranks that stopped answering; take the answers that came, and ask again."""
        now_s = time.monotonic()
        if now_s < self.next_check_s:
            return []
        self.next_check_s = now_s + HEARTBEAT_S
        pending = {beat.answer: rank for rank, beat in self.heartbeats.items()}
        answered, _ = (
            ray.wait([*pending], num_returns=len(pending), timeout=0) if pending else ([], [])
        )
        for answer in answered:
            del self.heartbeats[pending[answer]]
        for rank, actor in enumerate(self.actors):
            if rank not in self.heartbeats:
                answer = actor.position.options(concurrency_group=HEARTBEAT_GROUP).remote()
                self.heartbeats[rank] = Heartbeat(answer=answer, asked_s=now_s)
        how = f"has not answered a heartbeat for {HEARTBEAT_LIMIT_S:g} s"
        return [
            Died(rank=rank, how=how)
            for rank, beat in self.heartbeats.items()
            if now_s - beat.asked_s > HEARTBEAT_LIMIT_S
        ]


def _actor_options(job: Job, group: PlacementGroup, index: int) -> dict[str, Any]:
    variables = rank_environment(dict(os.environ))
    # every rank must see all GPUs of its node, or peer memory can't tell them apart
    variables["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
    # Ray's 15 leaves a rank 3% of a core that another process wants
    variables[NICENESS] = os.environ.get(NICENESS, "0")
    return {
        "num_cpus": job.ray.cpus_per_rank,
        "num_gpus": 1 if job.device == "cuda" else 0,
        "runtime_env": {"env_vars": variables},
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            placement_group=group,
            placement_group_bundle_index=index // job.ray.ranks_per_bundle,
        ),
    }


def make_contexts(seats: Sequence[Seat], kind: DeviceKind, timeout_s: float) -> list[RankContext]:
    """The ranks of the seats, in their order."""
    nodes, names = [seat.node for seat in seats], name_nodes(seats)
    return [
        make_context(
            rank=rank,
            world_size=len(seats),
            local=(nodes[:rank].count(seat.node), nodes.count(seat.node)),
            node=names[seat.node],
            kind=kind,
            index=seat.device,
            timeout_s=timeout_s,
        )
        for rank, seat in enumerate(seats)
    ]


def name_nodes(seats: Sequence[Seat]) -> dict[str, str]:
    """Node id -> its address, with the id where several nodes share an address."""
    addresses = {seat.node: seat.address for seat in seats}
    shared = Counter(addresses.values())
    return {
        node: address if shared[address] == 1 else f"{address} ({node[:8]})"
        for node, address in addresses.items()
    }


def _try_get(answer: Any) -> str | None:
    try:
        where: str = ray.get(answer)
    except ray.exceptions.RayError:
        return None
    return where


def _first_line(error: Exception) -> str:
    """The telling line of Ray's long message: why the actor is dead, if it says so."""
    lines = str(error).splitlines()
    telling = next((line for line in lines if line.startswith("The actor is dead")), lines[0])
    return telling.partition(" Some common causes")[0].strip()
