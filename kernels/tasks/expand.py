"""Collectives inside a segment, restated as ops of the task level.

In: a segment with all_reduce and all_gather ops. Out: a segment in which each became a `push`,
which copies tiles into a receive buffer of every rank, and an op that reads the buffer:

    all_reduce sum, max, min  push x; then sum_ranks: y = combine of recv[s], s in rank order
    all_reduce argmax         push value, push index; then argmax_ranks: the largest value's pair
    all_gather                push x; then concat: y(.., s.n, ..) = recv(s, .., n, ..), cut to fit

A receive buffer `<y>.recv` has one slot a rank: shape [ranks, *x.shape]. The instance of a push on
rank s writes slot s of every rank, itself included; as a rank's own buffer sees it, the instances
on all ranks together write all slots. So the access map says recv(src, i...), with `src` run whole,
and overlap gives the consumer its event: complete when the tile's push has signalled from every
rank. After this the segment is tiled; next on the walk: tile.py.

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

from collections.abc import Iterator
from dataclasses import replace

from distmega.errors import UnsupportedError, VerifyError
from distmega.kernels.runtime.arena import PEER_SUFFIX
from distmega.program.kinds import OpKind, define, kind_of
from distmega.program.types import Access, Axis, Index, Op, Program, Tensor, verify_program
from distmega.sharding.layout.mesh import DeviceMesh

SOURCE = "src"
"""Axis of receive buffers: the rank a slot belongs to, by its place in the team."""

define(OpKind(name="push", origin="internal", writes_peers=True))


def expand_collectives(segment: Program, mesh: DeviceMesh) -> Program:
    """Replaces every collective by pushes and a local op. One mesh axis a segment.

    Raises UnsupportedError for reduce_scatter and all_to_all, which send each rank something else,
    and for collectives over two mesh axes: the host IR does these.
    """
    tensors = list(segment.tensors)
    shapes = segment.tensor_map()
    ops: list[Op] = []
    axes_used: set[str] = set()
    for op in segment.ops:
        if not kind_of(op).communicates:
            ops.append(op)
            continue
        axis = _mesh_axis(op, mesh)
        if mesh.size(axis) == 1:
            ops += _as_copies(op)
            continue
        axes_used.add(axis)
        if len(axes_used) > 1:
            raise UnsupportedError(
                f"segment {segment.name!r} communicates over mesh axes {sorted(axes_used)}",
                expected="one mesh axis in a kernel",
                remedy="split the segment where the axis changes",
            )
        received = [_recv(op, access, shapes) for access in op.reads]
        tensors += received
        ops += _pushes(op, received, shapes)
        ops.append(_combine(op, received))
    expanded = replace(segment, tensors=tuple(tensors), ops=tuple(ops))
    return verify_program(expanded)


def team_size(segment: Program, mesh: DeviceMesh) -> int:
    """Ranks that run the segment together: the size of the mesh axis its collectives go over."""
    found = {
        mesh.size(str(op.attr("mesh_axis")))
        for op in segment.ops
        if kind_of(op).writes_peers or kind_of(op).communicates
    }
    assert len(found) <= 1, f"mesh axes of sizes {found} in one segment"
    return found.pop() if found else 1


def _mesh_axis(op: Op, mesh: DeviceMesh) -> str:
    if not kind_of(op).reaches_all:
        raise UnsupportedError(
            f"op {op.name!r} of kind {op.kind} is not in kernel",
            expected="all_reduce or all_gather",
            remedy="split the segment there, and leave it to the host IR",
        )
    axis = str(op.attr("mesh_axis"))
    if op.attr("num_ranks") != mesh.size(axis):
        raise VerifyError(
            f"op {op.name!r} over {op.attr('num_ranks')} ranks of mesh axis {axis!r}",
            expected=f"{mesh.size(axis)} ranks, as the mesh has",
            remedy="plan and compile with the same mesh",
        )
    return axis


def _recv(op: Op, read: Access, shapes: dict[str, Tensor]) -> Tensor:
    """The receive buffer of one operand; named after the result of the same place."""
    x = shapes[read.tensor]
    y = op.writes[op.reads.index(read)].tensor
    num_ranks = op.attr("num_ranks")
    assert isinstance(num_ranks, int)
    shape = (num_ranks, *x.shape)
    return Tensor(name=f"{y}{PEER_SUFFIX}", shape=shape, dtype=x.dtype, role="state")


def _pushes(op: Op, received: list[Tensor], shapes: dict[str, Tensor]) -> Iterator[Op]:
    for read, recv in zip(op.reads, received, strict=True):
        x = shapes[read.tensor]
        names = [f"i{dim}" for dim in range(len(x.shape))]
        axes = [Axis(name=n, extent=e) for n, e in zip(names, x.shape, strict=True)]
        source = Axis(name=SOURCE, extent=recv.shape[0], role="scatter", lookup=True)
        yield Op(
            name=recv.name.removesuffix(PEER_SUFFIX) + ".push",
            kind="push",
            axes=(*axes, source),
            reads=(_plain(x.name, *names),),
            writes=(_plain(recv.name, SOURCE, *names),),
            attrs=_kept(op, "mesh_axis", "num_ranks"),
        )


def _combine(op: Op, received: list[Tensor]) -> Op:
    if kind_of(op).gathers_all:
        gathered = {name for index in op.writes[0].dims for name in index.axes}
        gathered -= {name for index in op.reads[0].dims for name in index.axes}
        (source,) = gathered
        read = _slots(received[0], source, op.reads[0])
        return replace(op, kind="concat", reads=(read,), attrs=_kept(op, "dim"))
    combine = str(op.attr("combine"))
    kind = "argmax_ranks" if combine == "argmax" else "sum_ranks"
    source_axis = Axis(name=SOURCE, extent=received[0].shape[0], role="reduce", combine=combine)
    pairs = zip(received, op.reads, strict=True)
    return replace(
        op,
        kind=kind,
        axes=(*op.axes, source_axis),
        reads=tuple(_slots(recv, SOURCE, read) for recv, read in pairs),
        attrs=_kept(op, "combine", "mesh_axis", "num_ranks"),
    )


def _as_copies(op: Op) -> Iterator[Op]:
    """A collective over a mesh axis of one rank."""
    for position, (read, write) in enumerate(zip(op.reads, op.writes, strict=True)):
        name = op.name if position == 0 else f"{op.name}.{position}"
        yield replace(op, name=name, kind="set", reads=(read,), writes=(write,), attrs=())


def _slots(recv: Tensor, source: str, access: Access) -> Access:
    return Access(tensor=recv.name, dims=(Index(axes=(source,)), *access.dims))


def _plain(tensor: str, *axes: str) -> Access:
    return Access(tensor=tensor, dims=tuple(Index(axes=(axis,)) for axis in axes))


def _kept(op: Op, *names: str) -> tuple[tuple[str, str | int], ...]:
    kept = {name: op.attr(name) for name in names}
    return tuple(
        (name, value) for name, value in sorted(kept.items()) if isinstance(value, str | int)
    )
