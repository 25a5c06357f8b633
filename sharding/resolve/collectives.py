"""Collectives as ops: what they read and write on one rank, in access maps like any other op.

Comes in: a Reshard. Goes out: an Op of a collective kind. `r` is the axis over ranks, `n` the dim
as one rank holds it; where a dim is uneven, r.n reaches past its extent, and positions past it read
as zero and are not written. Attributes: mesh_axis, num_ranks, combine, dim, dst_dim, extent.

  all_reduce      x(i..) -> y(i..)            combined over ranks; argmax: a pair, value and index
  all_gather      x(n) -> y(r.n)              dim: the gathered dim, extent: its true extent
  reduce_scatter  x(r.n) -> y(n)              dim: the scattered dim, extent: its true extent
  take_shard      x(r.n) -> y(n)              dim: the dim of which coordinate r keeps its part
  all_to_all      x(n, r.k) -> y(r.n, k)      dim: gathered (n), dst_dim: scattered (k);
                                              extent is dim's true extent, dst_extent dst_dim's
"""

from collections.abc import Sequence

from distmega.program.types import Access, Attr, Axis, Index, Op
from distmega.sharding.layout.placements import Shard
from distmega.sharding.resolve.resolve import Reshard

RANK_AXIS = "r"


def _plain(tensor: str, num_dims: int, joined: int = -1) -> Access:
    """tensor(i0, i1, ...), with dim `joined` indexed by r.i."""
    dims = (
        Index(axes=(RANK_AXIS, f"i{n}") if n == joined else (f"i{n}",)) for n in range(num_dims)
    )
    return Access(tensor=tensor, dims=tuple(dims))


def collective_op(step: Reshard, shape: Sequence[int], local: Sequence[int], num_ranks: int) -> Op:
    """The op of a Reshard. shape: extents as if whole along the move's mesh axis; local: the
    smaller side's extents.

    local is, dim by dim, the lesser of the two sides' extents on one rank.
    """
    move = step.move
    source, target = move.source.at(move.axis), move.target.at(move.axis)
    reads_at = target.dim if isinstance(target, Shard) else -1
    writes_at = source.dim if isinstance(source, Shard) else -1
    axes = [Axis(name=f"i{n}", extent=extent) for n, extent in enumerate(local)]
    attrs: dict[str, Attr] = {"mesh_axis": move.axis, "num_ranks": num_ranks}
    match move.kind:
        case "all_reduce":
            attrs["combine"] = step.combine
        case "all_gather":
            axes.insert(0, Axis(name=RANK_AXIS, extent=num_ranks))
            attrs |= {"dim": writes_at, "extent": shape[writes_at]}
        case "reduce_scatter":
            rank = Axis(name=RANK_AXIS, extent=num_ranks, role="reduce", combine=step.combine)
            axes.append(rank)
            attrs |= {"dim": reads_at, "extent": shape[reads_at], "combine": step.combine}
        case "take_shard":
            axes.append(Axis(name=RANK_AXIS, extent=num_ranks, role="reduce", lookup=True))
            attrs |= {"dim": reads_at, "extent": shape[reads_at]}
        case "all_to_all":
            axes.insert(0, Axis(name=RANK_AXIS, extent=num_ranks))
            attrs |= {"dim": writes_at, "extent": shape[writes_at]}
            attrs |= {"dst_dim": reads_at, "dst_extent": shape[reads_at]}
    return Op(
        name=step.name,
        kind=move.kind,
        axes=tuple(axes),
        reads=tuple(_plain(tensor, len(local), reads_at) for tensor in step.reads),
        writes=tuple(_plain(tensor, len(local), writes_at) for tensor in step.writes),
        attrs=tuple(sorted(attrs.items())),
    )
