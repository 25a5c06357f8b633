"""The rules that a finished plan obeys, checked on index maps.

Comes in: schedule, loops, allocations. Raises VerifyError, which would be a bug of the planner,
if a loop isn't in order, if an allocation isn't divided exactly where the loops that touch
it are, or if an op works on a tensor of which parts are still to be combined.
"""

from collections.abc import Mapping

from distmega.errors import VerifyError
from distmega.program.types import Access, accesses
from distmega.sharding.layout.allocation import AllocationDomain
from distmega.sharding.layout.domains import Device, LoopDomain, Parallel, Stream, dim_positions
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.resolve.resolve import PlacedOp, RankSchedule, Reshard
from distmega.sharding.search.signatures import OptionTable


def verify_plan_parts(
    schedule: RankSchedule,
    loops: Mapping[str, LoopDomain],
    allocations: Mapping[str, AllocationDomain],
    mesh: DeviceMesh,
    table: OptionTable,
) -> None:
    """Checks every step; ops of one class on equal allocations are checked once."""
    for name, (whole, _) in schedule.locals.items():
        shape = table.tensors[whole].shape
        if name not in allocations or allocations[name].shape != shape:
            raise _broken(f"allocation {allocations.get(name)} of {name!r}", f"one of {shape}")
    checked: set[tuple[object, ...]] = set()
    for step in schedule.steps:
        if isinstance(step, Reshard):
            continue
        operands = tuple(allocations[name] for name in (*step.reads, *step.writes))
        loop = loops[step.op.name]
        key = table.class_of(step.op), step.splits, operands, loop.extent_of(Stream())
        if key not in checked:
            checked.add(key)
            _verify_op(step, loop, operands, mesh)


def _verify_op(
    step: PlacedOp, loop: LoopDomain, operands: tuple[AllocationDomain, ...], mesh: DeviceMesh
) -> None:
    kinds = [_depth(axis.parallel) for axis in loop.axes]
    if kinds != sorted(kinds):
        raise _broken(f"loop {loop} of {step.op.name!r}", "the stream axis, then device axes")
    for access, allocation in zip(accesses(step.op), operands, strict=True):
        for coordinate in mesh.coordinates():
            _verify_access(step, loop, access, allocation, coordinate)


def _depth(parallel: Parallel) -> int:
    """Host loops are outermost, then ranks, then what runs on one of them."""
    return 0 if isinstance(parallel, Stream) else 1 if isinstance(parallel, Device) else 2


def _verify_access(
    step: PlacedOp,
    loop: LoopDomain,
    access: Access,
    allocation: AllocationDomain,
    coordinate: Mapping[str, int],
) -> None:
    """What a rank touches of a divided dim must be exactly what it stores of it."""
    here: dict[Parallel, int] = {Device(axis): c for axis, c in coordinate.items()}
    divided = {axis for axis, option in step.splits}
    for index, dim in zip(access.dims, sorted(allocation.dims, key=lambda d: d.dim), strict=True):
        touched = dim_positions(loop, index, dim.extent, here)
        begin, end = allocation.stored_range(dim.dim, coordinate)
        stored = ((begin, end),) if begin < end else ()
        if dim.axes and (not divided.issuperset(dict(dim.axes)) or touched != stored):
            raise _broken(
                f"{step.op.name!r} touches {touched} of dim {dim.dim} of {access.tensor!r}"
                f" at {dict(coordinate)}",
                f"{stored}, which that rank stores",
            )
        if any(a < begin or b > end for a, b in touched):
            raise _broken(f"{step.op.name!r} reaches past {stored} of {access.tensor!r}", "less")


def _broken(found: str, expected: str) -> VerifyError:
    return VerifyError(found, expected=expected, remedy="this is a bug of the planner; report it")
