"""What a plan states: divisions, layouts, collectives, allocations, loops, memory and time.

Comes in: what resolve.py, finalize.py and memory.py made. Goes out: PlanFacts, read by explain.py
and localize.py; planner.py gives it out as a Plan.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

from distmega.program.kinds import communicates
from distmega.program.types import Program
from distmega.sharding.layout.allocation import AllocationDomain
from distmega.sharding.layout.domains import LoopDomain
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import Chunks, Layout
from distmega.sharding.memory import Memory
from distmega.sharding.overlap.pairs import OverlapChoice
from distmega.sharding.resolve.resolve import PlacedOp, Reshard
from distmega.sharding.search.cost import Machine
from distmega.sharding.streams.host_loops import HostLoop


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFacts:
    """How a program runs on a mesh.

    steps: ops and collectives in execution order, on local tensors. locals: local tensor -> (tensor
    of the program, layout). layouts: tensor -> the layout it has under its own name. allocations:
    by local tensor, final. loops: by op. host_loops: which steps run together in chunks.
    annotations: what the user fixed; streams: the chunks that the user asked for; refused_chunks:
    (local tensor, op) -> why the op does not run in those it comes in. prices_us: what holding a
    weight or state whole was priced at. overlaps: how matmuls and collectives run together.
    """

    program: Program
    mesh: DeviceMesh
    machine: Machine
    steps: tuple[PlacedOp | Reshard, ...]
    locals: Mapping[str, tuple[str, Layout]]
    layouts: Mapping[str, Layout]
    allocations: Mapping[str, AllocationDomain]
    loops: Mapping[str, LoopDomain]
    host_loops: tuple[HostLoop, ...]
    memory: Memory
    annotations: Mapping[str, Layout]
    streams: Mapping[str, Chunks]
    refused_chunks: Mapping[tuple[str, str], str]
    prices_us: Mapping[str, float]
    overlaps: tuple[OverlapChoice, ...] = ()

    @property
    def decisions(self) -> tuple[PlacedOp, ...]:
        """The ops with their divisions, operands and costs."""
        return tuple(step for step in self.steps if isinstance(step, PlacedOp))

    @property
    def reshards(self) -> tuple[Reshard, ...]:
        """The collectives and local slices that change a layout, in execution order."""
        return tuple(step for step in self.steps if isinstance(step, Reshard))

    @property
    def time_us(self) -> float:
        """Predicted time of one run on each rank, nothing overlapped."""
        ops = math.fsum(step.cost.time_us for step in self.decisions)
        return ops + math.fsum(step.move.time_us for step in self.reshards)

    @property
    def num_sent_bytes(self) -> int:
        """Bytes each rank sends in one run."""
        return sum(step.move.num_bytes for step in self.reshards)

    @property
    def num_collectives(self) -> int:
        """Collectives of one run; a local slice isn't one."""
        return sum(communicates(step.move.kind) for step in self.reshards)

    def persistent_layouts(self) -> dict[str, Layout]:
        """Layouts of weights and states: annotations for another program that shares them."""
        kept = ("weight", "state")
        return {t.name: self.layouts[t.name] for t in self.program.tensors if t.role in kept}

    def fingerprint(self) -> str:
        """A stable hash of everything ranks must agree on."""
        digest = hashlib.sha256(f"{self.program.name} {self.mesh}".encode())
        for name, allocation in self.allocations.items():
            digest.update(f"{name} {allocation}\n".encode())
        for step in self.steps:
            if isinstance(step, PlacedOp):
                splits = [(axis, str(option)) for axis, option in step.splits]
                text = f"{step.op.name} {step.op.kind} {step.op.attrs} {splits}"
            else:
                text = f"{step.move.kind} {step.move.axis} {step.combine}"
            digest.update(f"{text} {step.reads} {step.writes}\n".encode())
        for loop in self.host_loops:
            digest.update(f"{loop}\n".encode())
        for choice in self.overlaps:
            digest.update(f"{choice.pair.second} {choice.way} {choice.num_chunks}\n".encode())
        digest.update(" ".join(self.program.outputs).encode())
        return digest.hexdigest()
