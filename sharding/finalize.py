"""Fixes the allocation domain of every tensor and the loop domain of every op, once and for all.

Comes in: a Schedule. Goes out: allocations, loops, and the memory one rank needs. No later pass may
change an allocation: `verify_allocations` compares what a pass left with what stands here. Next:
localize.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from distmega.dtypes import item_bytes
from distmega.errors import VerifyError
from distmega.program import Program
from distmega.sharding.allocation import AllocationDomain
from distmega.sharding.domains import Device, LoopDomain
from distmega.sharding.mesh import DeviceMesh
from distmega.sharding.placements import local_shape
from distmega.sharding.resolve import PlacedOp, Schedule, Splits
from distmega.sharding.signatures import OptionTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes one rank needs; `temp_peak_bytes` is the most that temporaries occupy at once."""

    input_bytes: int
    weight_bytes: int
    state_bytes: int
    temp_peak_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.input_bytes + self.weight_bytes + self.state_bytes + self.temp_peak_bytes


def finalize_allocations(
    program: Program, mesh: DeviceMesh, schedule: Schedule
) -> dict[str, AllocationDomain]:
    """The allocation of every local tensor, by local name. Device axes shard it; order is kept."""
    tensors = program.tensor_map()
    memo: dict[tuple[object, ...], AllocationDomain] = {}
    found: dict[str, AllocationDomain] = {}
    for name, (whole, layout) in schedule.locals.items():
        key = tensors[whole].shape, layout
        if key not in memo:
            memo[key] = AllocationDomain.of(tensors[whole], layout, mesh)
        found[name] = memo[key]
    return found


def finalize_loops(
    mesh: DeviceMesh, schedule: Schedule, table: OptionTable
) -> dict[str, LoopDomain]:
    """The loop domain of every op: its axes with device axes in front, in mesh order."""
    memo: dict[tuple[int, Splits], LoopDomain] = {}
    loops: dict[str, LoopDomain] = {}
    for step in schedule.steps:
        if isinstance(step, PlacedOp):
            key = table.class_of(step.op), step.splits
            if key not in memo:
                memo[key] = loop_domain(step, mesh)
            loops[step.op.name] = memo[key]
    return loops


def loop_domain(step: PlacedOp, mesh: DeviceMesh) -> LoopDomain:
    """One op's axes, each divided one split over its mesh axis."""
    domain = LoopDomain.of([(axis.name, axis.extent) for axis in step.op.axes])
    for axis, option in reversed(step.splits):
        domain = domain.shard(option.axis, axis, mesh.size(axis))
    assert all(domain.axes[i].parallel == Device(a) for i, (a, _) in enumerate(step.splits))
    return domain


def measure_memory(program: Program, schedule: Schedule) -> Memory:
    """Bytes of one rank; temporaries are freed after their last use, outputs are not."""
    tensors = program.tensor_map()
    sizes: dict[str, int] = {}
    for name, (whole, layout) in schedule.locals.items():
        size = item_bytes(tensors[whole].dtype)
        for extent in local_shape(tensors[whole].shape, layout):
            size *= extent
        sizes[name] = size
    homes = {t.name: t.role for t in program.tensors if t.role != "temp"}
    by_role = dict.fromkeys(("input", "weight", "state"), 0)
    for name, role in homes.items():
        by_role[role] += sizes[name]
    views: dict[str, str] = {}
    last: dict[str, int] = {}
    for place, step in enumerate(schedule.steps):
        if isinstance(step, PlacedOp) and step.op.kind == "view":
            views[step.writes[0]] = views.get(step.reads[0], step.reads[0])
        for name in (*step.reads, *step.writes):
            last[views.get(name, name)] = place
    last.update(dict.fromkeys(program.outputs, len(schedule.steps)))
    live, peak, seen = 0, 0, set(homes)
    for place, step in enumerate(schedule.steps):
        used = {views.get(name, name) for name in (*step.reads, *step.writes)}
        live += sum(sizes[name] for name in used - seen)
        seen |= used
        peak = max(peak, live)
        live -= sum(sizes[name] for name in used if last[name] == place and name not in homes)
    return Memory(
        input_bytes=by_role["input"],
        weight_bytes=by_role["weight"],
        state_bytes=by_role["state"],
        temp_peak_bytes=peak,
    )


def verify_allocations(program: Program, allocations: Mapping[str, AllocationDomain]) -> Program:
    """Raises VerifyError if a tensor of a rank's program isn't as it was allocated.

    Tensors that a later pass added under new names are its own business.
    """
    for tensor in program.tensors:
        final = allocations.get(tensor.name)
        if final is not None and final.local_shape != tensor.shape:
            raise VerifyError(
                f"tensor {tensor.name!r} of shape {tensor.shape}",
                expected=f"its final allocation {final} of shape {final.local_shape}",
                remedy="leave allocations as finalize_allocations made them",
            )
    return program
