"""Compiles a segment into a megakernel: tasks, events, queues, memory and device words, the same on
every rank.

In: a segment (a Program of ops for one rank) and the mesh. Out: a frozen `Megakernel`, made without
torch, so that plans of any size can be explained. `cpu/runner.py` runs it on CPUs; next on the
walk: launch/worker.py.
"""

import hashlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from distmega.errors import counted
from distmega.kernels.isa.encoder import encode
from distmega.kernels.isa.encoding import Encoded
from distmega.kernels.runtime.arena import PEER_BUFFERS, ArenaLayout, SegmentLayout, layout_segment
from distmega.kernels.tasks.check.schedule import check_schedule
from distmega.kernels.tasks.expand import expand_segment, team_size
from distmega.kernels.tasks.graph import build_task_graph
from distmega.kernels.tasks.mode import Mode
from distmega.kernels.tasks.schedule import schedule_graph
from distmega.kernels.tasks.tile import tile_segment, verify_groups
from distmega.kernels.tasks.types import Schedule
from distmega.program.kinds import collective_kinds
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Megakernel:
    """A compiled segment. `stages_us`: how long each stage of compilation took."""

    segment: Program
    mesh: DeviceMesh
    schedule: Schedule
    layout: SegmentLayout
    encoded: Encoded
    stages_us: tuple[tuple[str, float], ...]

    @property
    def name(self) -> str:
        return self.segment.name

    @property
    def team_axes(self) -> tuple[str, ...]:
        """The mesh axes whose ranks run this kernel together, in order; none if a rank runs it
        alone.
        """
        used = {group.mesh_axis for group in self.schedule.graph.groups}
        return tuple(axis for axis in self.mesh.names if axis in used)

    def team(self, rank: int) -> tuple[int, ...]:
        """Ranks that `rank` runs this kernel with, itself included, in order."""
        others = [axis for axis in self.mesh.names if axis not in self.team_axes]
        here = self.mesh.coordinate(rank)
        return tuple(
            one
            for one, at in zip(self.mesh.ranks, self.mesh.coordinates(), strict=True)
            if all(at[axis] == here[axis] for axis in others)
        )

    @property
    def peer_bytes(self) -> int:
        """Bytes that peers write on one rank, all copies."""
        return self.layout.peers.num_bytes * PEER_BUFFERS

    def fingerprint(self) -> str:
        """Stable hash of all that has to be equal on the ranks that run this kernel together."""
        sizes = [(arena.space.name, arena.num_bytes) for arena in self.layout.arenas]
        text = f"{self.encoded.fingerprint()} {self.mesh} {sizes}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def summary(self) -> str:
        """Ops, tasks, events, bytes and collectives, a line each."""
        graph = self.schedule.graph
        queues = [task for queue in self.schedule.queues for task in queue]
        kinds = Counter(op.kind for op in self.segment.ops)
        collectives = {kind: kinds[kind] for kind in collective_kinds() if kinds[kind]}
        arenas = {arena.space.name.lower(): arena.num_bytes for arena in self.layout.arenas}
        arenas["peer"] = self.peer_bytes
        num_waits, num_signals = (
            sum(map(len, rows))
            for rows in ([task.waits for task in queues], [task.signals for task in queues])
        )
        stages = ", ".join(f"{name} {us / 1000:.0f} ms" for name, us in self.stages_us)
        lines = [
            f"megakernel {self.name}: {counted(len(self.schedule.queues), 'SM')} on"
            f" {counted(graph.team_size, 'rank')}",
            f"  ops          {len(self.segment.ops)}: {_counts(kinds)}",
            f"  tasks        {len(queues)} in {counted(int(self.encoded.lengths.sum()), 'record')}",
            f"  events       {self.schedule.num_events}, {counted(num_waits, 'wait')},"
            f" {counted(num_signals, 'signal')}",
            f"  collectives  {_counts(collectives) or 'none'}",
            *(f"  {name:<12} {num_bytes} bytes a rank" for name, num_bytes in arenas.items()),
            f"  queues       {self.encoded.queues.nbytes} bytes",
            f"  compiled     {stages}",
        ]
        return "\n".join(lines) + "\n"


def compile_megakernel(
    segment: Program,
    mesh: DeviceMesh,
    *,
    num_sms: int,
    mode: Mode = "overlap",
    weights: ArenaLayout | None = None,
    states: ArenaLayout | None = None,
) -> Megakernel:
    """Compiles and checks a segment for `num_sms` SMs a rank.

    weights, states: layouts of arenas that the segment shares with other programs; without them it
    gets its own. Raises PlanError if these lack a tensor, VerifyError and CheckError if the segment
    can't be run safely, UnsupportedError for an op that is not encodable.
    """
    stages: list[tuple[str, float]] = []

    def timed(name: str, stage: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = stage()
        stages.append((name, (time.perf_counter() - start) * 1e6))
        return result

    expanded = timed("expansion", lambda: expand_segment(segment, mesh))
    groups = timed("tiling", lambda: tile_segment(expanded, num_sms))
    timed("tile check", lambda: verify_groups(expanded, groups))
    num_ranks = team_size(expanded, mesh)
    graph = timed("task graph", lambda: build_task_graph(expanded, groups, num_ranks, mode))
    schedule = timed("schedule", lambda: schedule_graph(graph, num_sms))
    timed("check", lambda: check_schedule(schedule))
    layout = timed("layout", lambda: layout_segment(expanded, weights=weights, states=states))
    encoded = timed("encode", lambda: encode(schedule, layout, mesh.axes))
    return Megakernel(
        segment=segment,
        mesh=mesh,
        schedule=schedule,
        layout=layout,
        encoded=encoded,
        stages_us=tuple(stages),
    )


def _counts(counts: Counter[str] | dict[str, int]) -> str:
    return ", ".join(f"{number} {kind}" for kind, number in counts.items())
