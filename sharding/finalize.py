"""Fixes the allocation domain of every tensor and the loop domain of every op, once and for all.

Comes in: a RankSchedule. Goes out: allocations and loops; memory.py says what they take. No later
pass may change an allocation: `verify_allocations` compares what a pass left with what stands here.
Next: localize.py.
"""

from collections.abc import Mapping, Sequence

from distmega.errors import VerifyError
from distmega.program.types import Program, Tensor
from distmega.sharding.layout.allocation import AllocationDomain
from distmega.sharding.layout.domains import Device, LoopDomain
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.resolve.resolve import PlacedOp, RankSchedule
from distmega.sharding.search.signatures import OptionTable
from distmega.sharding.streams.host_loops import HostLoop
from distmega.sharding.streams.streams import ChunkPart, StreamSplit, stream_axis


def finalize_allocations(
    program: Program, mesh: DeviceMesh, schedule: RankSchedule, chunks: Mapping[str, ChunkPart]
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
    schedule: RankSchedule,
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
    left = {axis.name: axis.name for axis in step.op.axes}
    devices: list[str] = []
    for axis, option in step.splits:
        source = left[option.axis]
        domain = domain.split(source, mesh.size(axis), outer=True)
        domain = domain.parallelize(f"{source}.o", Device(axis))
        left[option.axis] = f"{source}.i"
        devices.append(f"{source}.o")
    domain = domain.reorder(devices)
    return domain if split is None else stream_axis(domain, left[split.axis], split)


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
