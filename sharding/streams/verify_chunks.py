"""That a chunk is enough wherever only a chunk is allocated, proved on index maps.

Comes in: a schedule, final allocations, host loops. Raises VerifyError, which would be a bug of
host_loops.py, unless every op that touches such a tensor runs in the loop that makes it, and each
iteration writes and reads the same positions of it (equality.py compares them, whatever the axes
are called).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from distmega.errors import VerifyError
from distmega.program.types import Access, Index, Op, Program, accesses
from distmega.sharding.layout.allocation import AllocationDomain
from distmega.sharding.layout.domains import LoopDomain, Stream
from distmega.sharding.layout.equality import shardings_differ
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.local_ops import LocalOps
from distmega.sharding.resolve.resolve import RankSchedule
from distmega.sharding.streams.host_loops import HostLoop
from distmega.sharding.streams.streams import StreamSplit, is_gather_ring

_Use = tuple[Op, Access, StreamSplit]


def verify_chunks(
    program: Program,
    local: LocalOps,
    schedule: RankSchedule,
    allocations: Mapping[str, AllocationDomain],
    host_loops: Sequence[HostLoop],
) -> None:
    """Checks every tensor that is allocated per iteration; equal ones once."""
    if not any(allocation.chunk for allocation in allocations.values()):
        return
    uses = _chunk_uses(local, schedule, allocations, host_loops)
    checked: set[object] = set()
    for name, each in uses.items():
        shape, chunk = local.shape(name), allocations[name].chunk
        assert chunk is not None, "collected above"
        for use in each:
            key = shape, chunk, _facts(*each[0]), _facts(*use)
            if key not in checked:
                checked.add(key)
                _verify_use(name, shape, chunk, each[0], use, local.mesh)
    partial = {name for name in program.outputs if allocations[name].chunk}
    if partial:
        raise _broken(f"outputs {sorted(partial)} are allocated per iteration")


def _chunk_uses(
    local: LocalOps,
    schedule: RankSchedule,
    allocations: Mapping[str, AllocationDomain],
    host_loops: Sequence[HostLoop],
) -> dict[str, list[_Use]]:
    """Who uses each tensor that is allocated per iteration, in order: ops of one host loop."""
    splits = {name: (loop, split) for loop in host_loops for name, split in loop.splits}
    homes: dict[str, HostLoop] = {}
    roots: dict[str, str] = {}
    uses: dict[str, list[_Use]] = {}
    for op in map(local.op, schedule.steps):
        if op.is_view:
            source = op.reads[0].tensor
            roots[op.writes[0].tensor] = roots.get(source, source)
            continue
        for access in accesses(op):
            chunk = allocations[access.tensor].chunk
            if chunk is None:
                continue
            if op.name not in splits:
                raise _broken(f"{op.name!r} uses {access.tensor!r}, outside of host loops")
            loop, split = splits[op.name]
            root = roots.get(access.tensor, access.tensor)
            if homes.setdefault(root, loop) != loop:
                found = f"{root!r} is used by loops {homes[root].index}"
                raise _broken(f"{found} and {loop.index}")
            uses.setdefault(access.tensor, []).append((op, access, split))
    return uses


def _facts(op: Op, access: Access, split: StreamSplit) -> object:
    return op.axes, access.dims, split


def _verify_use(
    name: str,
    shape: Sequence[int],
    chunk: tuple[int, int],
    first: _Use,
    use: _Use,
    mesh: DeviceMesh,
) -> None:
    sides = [_side(each) for each in (first, use)]
    stored: tuple[LoopDomain, Sequence[Index]] = _stored(shape, chunk, use[2])
    for side in sides:
        if shardings_differ(shape, stored, side, Stream(), mesh):
            raise _broken(f"{use[0].name!r} and {first[0].name!r} use other parts of {name!r}")
    op, access, split = use
    if is_gather_ring(op, split) and access in op.writes:
        raise _broken(f"{name!r} is gathered while the part before is used")


def _side(use: _Use) -> tuple[LoopDomain, Sequence[Index]]:
    op, access, split = use
    return split.domain(op), access.dims


def _stored(
    shape: Sequence[int], chunk: tuple[int, int], order: StreamSplit
) -> tuple[LoopDomain, Sequence[Index]]:
    """The allocation as a loop domain over the tensor itself, in the ring order of a use."""
    names = [f"d{dim}" for dim in range(len(shape))]
    dim, size = chunk
    split = replace(order, axis=names[dim], chunk=size, extent=shape[dim])
    domain = LoopDomain.of(list(zip(names, shape, strict=True)))
    return split.cut(domain), [Index(axes=(name,)) for name in names]


def _broken(found: str) -> VerifyError:
    return VerifyError(
        found,
        expected="chunks that are made and used in one iteration of one host loop",
        remedy="allocate the tensor in full",
    )
