"""Collectives inside a segment, restated as ops of the task level.

In: a segment with collectives. Out: a segment in which each became a `push`, which copies tiles
into a receive buffer of every rank, or a `push_parts`, which gives each rank its part of a dim, and
an op that reads the buffer:

    all_reduce sum, max, min  push x; then sum_ranks: y = combine of recv[s], s in rank order
    all_reduce argmax         push value, push index; then argmax_ranks: the largest value's pair
    all_gather                push x; then concat: y(.., s.n, ..) = recv(s, .., n, ..), cut to fit
    reduce_scatter            push_parts x; then sum_ranks
    all_to_all                push_parts x; then concat, cut to fit

A receive buffer `<y>.recv` has one slot a rank: shape [ranks, *x.shape], or of x's part. The
instance of a push on rank s writes slot s of every rank, itself included; as a rank's own buffer
sees it, the instances on all ranks together write all slots. So the access map says recv(src,
i...), with `src` run whole, and overlap gives the consumer its event: complete when the tile's push
has signalled from every rank. A task of push_parts reads its tile of all ranks' parts. After this
the segment is tiled; next on the walk: tile.py.

Why one launch can't disturb another. Two facts hold for any graph: a rank starts a launch after its
own previous launch has completed, and every push has a consumer on every rank that waits for all
ranks' instances of it. Say rank A pushes in launch e into a slot that rank B read in launch e - k.

- k = 1 is a race in general: A may finish launch e - 1 with B's pushes before B has read A's. It is
  excluded only where another exchange lies between B's read and A's next push. Since that depends
  on the graph, receive buffers have two copies (arena.PEER_BUFFERS), launch e using copy e % 2.
- k = 2 is safe: A finished launch e - 1, which waited for what B pushed in launch e - 1, which B
  started after its launch e - 2 had completed, reads and all.

Counters need the same care: a rank that is ahead may signal launch e before a slow rank's signal of
launch e - 1 has arrived, and one counter for both would pass too early. So an event that all ranks
trigger has one counter for each source rank, and a wait looks at all of them; triggers from one
rank come in launch order. check/schedule.py proves both for a given schedule.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from distmega.errors import UnsupportedError, VerifyError, counted
from distmega.kernels.runtime.arena import PEER_SUFFIX
from distmega.kernels.tasks.groups import expand_groups
from distmega.kernels.tasks.overwrites import expand_overwrites
from distmega.program.kinds import OpKind, define, kind_of
from distmega.program.ops.parts import access_named
from distmega.program.types import Access, Axis, Index, Op, Program, Tensor, verify_program
from distmega.sharding.layout.mesh import DeviceMesh

SOURCE = "src"
"""Axis of receive buffers: the rank a slot belongs to, by its place in the team."""

PART = "dst"
"""Axis of push_parts: the rank a part is for, likewise."""

define(OpKind(name="push", origin="internal", writes_peers=True))
define(OpKind(name="push_parts", origin="internal", writes_peers=True, is_clipped=True))


def expand_segment(segment: Program, mesh: DeviceMesh) -> Program:
    """Ops over groups of rows restated (groups.py), those that overwrite what they read
    (overwrites.py), then collectives.
    """
    return expand_collectives(expand_overwrites(expand_groups(segment)), mesh)


def expand_collectives(segment: Program, mesh: DeviceMesh) -> Program:
    """Replaces every collective by pushes and a local op.

    Raises UnsupportedError for collectives without a dim to share out or gather: the host IR does
    these.
    """
    tensors = list(segment.tensors)
    shapes = segment.tensor_map()
    ops: list[Op] = []
    for op in segment.ops:
        if not kind_of(op).communicates:
            ops.append(op)
            continue
        axis = _mesh_axis(op, mesh)
        if mesh.size(axis) == 1:
            ops += _as_copies(op)
            continue
        pairs = [_pushed(op, access, shapes) for access in op.reads]
        received = [recv for _, recv in pairs]
        tensors += received
        ops += [push for push, _ in pairs]
        ops.append(_combine(op, received))
    expanded = replace(segment, tensors=tuple(tensors), ops=tuple(ops))
    return verify_program(expanded, is_restated=True)


def team_size(segment: Program, mesh: DeviceMesh) -> int:
    """Ranks that run the segment together: those along the mesh axes its collectives go over."""
    axes = {
        str(op.attr("mesh_axis"))
        for op in segment.ops
        if kind_of(op).writes_peers or kind_of(op).communicates
    }
    return math.prod(map(mesh.size, axes))


def _mesh_axis(op: Op, mesh: DeviceMesh) -> str:
    if not kind_of(op).reaches_all and _shared_dim(op) is None:
        raise UnsupportedError(
            f"op {op.name!r} of kind {op.kind} is not in kernel",
            expected="one operand with a dim that is shared out over ranks",
            remedy="split the segment there, and leave it to the host IR",
        )
    axis = str(op.attr("mesh_axis"))
    if op.attr("num_ranks") != mesh.size(axis):
        raise VerifyError(
            f"op {op.name!r} over {op.attr('num_ranks')} ranks of mesh axis {axis!r}",
            expected=f"{counted(mesh.size(axis), 'rank')}, as the mesh has",
            remedy="plan and compile with the same mesh",
        )
    return axis


def _shared_dim(op: Op) -> int | None:
    """The dim of its operand of which each rank gets a part; None where there is none."""
    if len(op.reads) != 1:
        return None
    joined = (dim for dim, index in enumerate(op.reads[0].dims) if len(index.axes) == 2)
    return next(joined, None)


def _part(read: Access) -> Access:
    """What one rank gets of an operand: the dim that is shared out by the axis within a part."""
    dims = (Index(axes=index.axes[-1:]) for index in read.dims)
    return Access(tensor=read.tensor, dims=tuple(dims))


def _pushed(op: Op, read: Access, shapes: dict[str, Tensor]) -> tuple[Op, Tensor]:
    """What sends one operand, and its receive buffer, named after the result of the same place."""
    x, num_ranks = shapes[read.tensor], op.attr("num_ranks")
    assert isinstance(num_ranks, int)
    shared = None if kind_of(op).reaches_all else _shared_dim(op)
    extents = list(x.shape)
    names = [f"i{dim}" for dim in range(len(extents))]
    dims, axes = [Index(axes=(name,)) for name in names], []
    if shared is not None:
        extents[shared] = op.axis(read.dims[shared].axes[1]).extent
        dims[shared] = Index(axes=(PART, names[shared]))
        axes.append(Axis(name=PART, extent=num_ranks, role="reduce"))
    y = op.writes[op.reads.index(read)].tensor
    shape = (num_ranks, *extents)
    recv = Tensor(name=f"{y}{PEER_SUFFIX}", shape=shape, dtype=x.dtype, role="state")
    axes += [Axis(name=n, extent=e) for n, e in zip(names, extents, strict=True)]
    axes.append(Axis(name=SOURCE, extent=num_ranks, role="scatter", lookup=True))
    push = Op(
        name=f"{y}.push",
        kind="push" if shared is None else "push_parts",
        axes=tuple(axes),
        reads=(Access(tensor=x.name, dims=tuple(dims)),),
        writes=(access_named(recv.name, SOURCE, *names),),
        attrs=_kept(op, "mesh_axis", "num_ranks"),
    )
    return push, recv


def _combine(op: Op, received: list[Tensor]) -> Op:
    if not op.get("combine", ""):
        source = op.writes[0].dims[int(str(op.attr("dim")))].axes[0]
        read = _slots(received[0], source, _part(op.reads[0]))
        return replace(op, kind="concat", reads=(read,), attrs=_kept(op, "dim"))
    combine = str(op.attr("combine"))
    kind = "argmax_ranks" if combine == "argmax" else "sum_ranks"
    source_axis = Axis(name=SOURCE, extent=received[0].shape[0], role="reduce", combine=combine)
    pairs = zip(received, op.reads, strict=True)
    return replace(
        op,
        kind=kind,
        axes=(*(axis for axis in op.axes if axis.role == "parallel"), source_axis),
        reads=tuple(_slots(recv, SOURCE, _part(read)) for recv, read in pairs),
        attrs=_kept(op, "combine", "mesh_axis", "num_ranks"),
    )


def _as_copies(op: Op) -> Iterator[Op]:
    """A collective over a mesh axis of one rank."""
    for position, (read, write) in enumerate(zip(op.reads, op.writes, strict=True)):
        name = op.name if position == 0 else f"{op.name}.{position}"
        yield replace(op, name=name, kind="set", reads=(read,), writes=(write,), attrs=())


def _slots(recv: Tensor, source: str, access: Access) -> Access:
    return Access(tensor=recv.name, dims=(Index(axes=(source,)), *access.dims))


def _kept(op: Op, *names: str) -> tuple[tuple[str, str | int], ...]:
    kept = {name: op.attr(name) for name in names}
    return tuple(
        (name, value) for name, value in sorted(kept.items()) if isinstance(value, str | int)
    )
