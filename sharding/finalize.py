"""Fixes the allocation domain of every tensor and the loop domain of every op, once and for all.

Comes in: a Schedule. Goes out: allocations, loops, and the memory one rank needs. No later pass may
change an allocation: `verify_allocations` compares what a pass left with what stands here. Next:
localize.py.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from distmega.dtypes import item_bytes
from distmega.errors import VerifyError
from distmega.program import Program, Tensor
from distmega.sharding.allocation import AllocationDomain
from distmega.sharding.collectives import RANK_AXIS
from distmega.sharding.domains import Device, LoopDomain
from distmega.sharding.host_loops import HostLoop
from distmega.sharding.mesh import DeviceMesh
from distmega.sharding.resolve import PlacedOp, Reshard, Schedule
from distmega.sharding.signatures import OptionTable
from distmega.sharding.streams import Part, StreamSplit, is_sum, stream_axis


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
    program: Program, mesh: DeviceMesh, schedule: Schedule, chunks: Mapping[str, Part]
) -> dict[str, AllocationDomain]:
    """The allocation of every local tensor, by local name. Device axes shard it; order is kept.

    chunks: tensors of which one chunk at a time is allocated, in the loop that makes and uses it.
    """
    tensors = program.tensor_map()
    memo: dict[tuple[object, ...], AllocationDomain] = {}
    found: dict[str, AllocationDomain] = {}
    for name, (whole, layout) in schedule.locals.items():
        part = chunks.get(name)
        key = tensors[whole].shape, layout, part
        if key not in memo:
            domain = AllocationDomain.of(tensors[whole], layout, mesh)
            memo[key] = domain.chunked(part.dim, part.chunk) if part else domain
        found[name] = memo[key]
    return found


def finalize_loops(
    mesh: DeviceMesh,
    schedule: Schedule,
    table: OptionTable,
    host_loops: Sequence[HostLoop],
) -> dict[str, LoopDomain]:
    """The loop domain of every op: the stream axis in front, then device axes in mesh order."""
    memo: dict[tuple[object, ...], LoopDomain] = {}
    streams = {name: split for loop in host_loops for name, split in loop.splits}
    loops: dict[str, LoopDomain] = {}
    for step in schedule.steps:
        if isinstance(step, PlacedOp):
            split = streams.get(step.op.name)
            key = table.class_of(step.op), step.splits, split
            if key not in memo:
                memo[key] = loop_domain(step, mesh, split)
            loops[step.op.name] = memo[key]
    return loops


def loop_domain(step: PlacedOp, mesh: DeviceMesh, split: StreamSplit | None) -> LoopDomain:
    """One op's axes, each divided one split over its mesh axis, and what is left in chunks."""
    domain = LoopDomain.of([(axis.name, axis.extent) for axis in step.op.axes])
    for axis, option in reversed(step.splits):
        domain = domain.shard(option.axis, axis, mesh.size(axis))
    assert all(domain.axes[i].parallel == Device(a) for i, (a, _) in enumerate(step.splits))
    if split is not None:
        divided = any(option.axis == split.axis for _, option in step.splits)
        domain = stream_axis(domain, f"{split.axis}.i" if divided else split.axis, split)
    return domain


def measure_memory(
    program: Program,
    schedule: Schedule,
    allocations: Mapping[str, AllocationDomain],
    host_loops: Sequence[HostLoop],
) -> Memory:
    """Bytes of one rank; temporaries are freed after their last use, outputs are not.

    What is allocated by chunk lives within an iteration; all else that a loop touches lives until
    the loop has ended. What an iteration adds to a result lives while it is made, and what comes in
    around a scatter ring throughout the loop.
    """
    tensors = program.tensor_map()
    sizes = {
        name: math.prod(allocations[name].stored_shape) * item_bytes(tensors[whole].dtype)
        for name, (whole, _) in schedule.locals.items()
    }
    homes = {t.name: t.role for t in program.tensors if t.role != "temp"}
    by_role = dict.fromkeys(("input", "weight", "state"), 0)
    for name, role in homes.items():
        by_role[role] += sizes[name]
    loop_of = {name: loop.index for loop in host_loops for name, _ in loop.splits}
    chunked = {name for name in schedule.locals if allocations[name].chunk}
    views: dict[str, str] = {}
    for step in schedule.steps:
        if isinstance(step, PlacedOp) and step.op.kind == "view":
            views[step.writes[0]] = views.get(step.reads[0], step.reads[0])
    uses = list(_storage_uses(schedule, views))
    last: dict[str, int] = {}
    for place, (_, used) in enumerate(uses):
        last.update(dict.fromkeys(used, place))
    last.update({views.get(name, name): len(uses) for name in program.outputs})
    parts, incoming = _sums_bytes(schedule, host_loops, sizes)
    live, peak, seen = 0, 0, set(homes)
    for loop, group in groupby(enumerate(uses), key=lambda u: loop_of.get(u[1][0], str(u[0]))):
        members = list(group)
        touched = {name for _, (_, used) in members for name in used}
        live += sum(sizes[name] for name in touched - seen - chunked) + incoming.get(loop, 0)
        peak = max(peak, live)
        for place, (name, used) in members:
            live += sum(sizes[each] for each in (used & chunked) - seen)
            peak = max(peak, live + parts.get(name, 0))
            live -= sum(sizes[each] for each in used & chunked if last[each] == place)
            seen |= used
        end = members[-1][0]
        ended = {name for name in touched - chunked - set(homes) if last[name] <= end}
        live -= sum(sizes[name] for name in ended) + incoming.get(loop, 0)
    return Memory(
        input_bytes=by_role["input"],
        weight_bytes=by_role["weight"],
        state_bytes=by_role["state"],
        temp_peak_bytes=peak,
    )


def _sums_bytes(
    schedule: Schedule, host_loops: Sequence[HostLoop], sizes: Mapping[str, int]
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes beside a result that iterations add to, by op; and of parts that come in around a
    scatter ring, by loop.
    """
    splits = {name: (loop.index, split) for loop in host_loops for name, split in loop.splits}
    parts: dict[str, int] = {}
    incoming: dict[str, int] = {}
    for step in schedule.steps if splits else ():
        name = step.op.name if isinstance(step, PlacedOp) else step.name
        if name not in splits:
            continue
        loop, split = splits[name]
        if isinstance(step, PlacedOp) and is_sum(step.op, split):
            parts[name] = sizes[step.writes[0]]
        if isinstance(step, Reshard) and step.move.kind == "reduce_scatter":
            ring = sizes[step.writes[0]] * (split.axis == RANK_AXIS)
            incoming[loop] = incoming.get(loop, 0) + ring
    return parts, incoming


def _storage_uses(schedule: Schedule, views: Mapping[str, str]) -> Iterator[tuple[str, set[str]]]:
    """Each step but views: its name, and the storage it touches."""
    for step in schedule.steps:
        if isinstance(step, PlacedOp) and step.op.kind == "view":
            continue
        name = step.op.name if isinstance(step, PlacedOp) else step.name
        yield name, {views.get(each, each) for each in (*step.reads, *step.writes)}


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


def verify_storage(buffers: Sequence[Tensor], allocations: Mapping[str, AllocationDomain]) -> None:
    """Raises VerifyError if a buffer isn't as large as its final allocation."""
    for buffer in buffers:
        final = allocations.get(buffer.name)
        if final is not None and final.stored_shape != buffer.shape:
            raise VerifyError(
                f"buffer {buffer.name!r} of shape {buffer.shape}",
                expected=f"its final allocation {final} of shape {final.stored_shape}",
                remedy="leave allocations as finalize_allocations made them",
            )
