"""The ways to divide one op over one mesh axis, read off its access maps and nothing else.

Comes in: an op's axes and accesses, the extents of its tensors, a number of ranks. Goes out: one
SplitOption per iteration axis that can be divided exactly, with the placement that this implies for
every operand, and the reason for each axis that can't. Next: propagate.py.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from distmega.program.kinds import kind_of
from distmega.program.types import Axis, Index, Op, Tensor, accesses, grouped_index
from distmega.sharding.layout.placements import (
    REPLICATE,
    ROWS,
    Partial,
    Placement,
    Shard,
    fits,
)
from distmega.sharding.resolve.padding import additive_reads
from distmega.sharding.search.cost import is_index


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitOption:
    """One iteration axis divided over a mesh axis; axis "" is the op run whole on every rank, on
    whole operands or, where it is linear in one, on a part of a sum.

    extent: of the axis before; chunk: on one rank after. uneven: the last ranks hold padding.
    """

    axis: str = ""
    extent: int = 0
    chunk: int = 0
    reads: tuple[Placement, ...]
    writes: tuple[Placement, ...]
    uneven: bool = False

    def __str__(self) -> str:
        return f"{self.axis}:{self.chunk}" if self.axis else "whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All options of an op over one mesh axis; `rejected` holds (axis, why) for the others.

    index_reads: operands that hold positions to look up.
    """

    options: tuple[SplitOption, ...]
    rejected: tuple[tuple[str, str], ...]
    index_reads: tuple[int, ...]

    def by_axis(self, axis: str) -> SplitOption | None:
        """The option that divides an iteration axis."""
        return next((option for option in self.options if option.axis == axis), None)


def op_signature(op: Op, tensors: Mapping[str, Tensor]) -> Hashable:
    """What an op is apart from names of itself and its tensors; equal ones get equal plans.

    Operands that are the same tensor are marked, since demands on them must agree.
    """
    names = [access.tensor for access in accesses(op)]
    operands = tuple(
        (names.index(a.tensor), tensors[a.tensor].shape, tensors[a.tensor].dtype, a.dims)
        for a in accesses(op)
    )
    return op.kind, op.axes, operands, len(op.reads), op.attrs


SUM = Partial("sum")


def summed_read(op: Op) -> int | None:
    """The operand in which an op is linear, its others being what they are on every rank, so that
    parts of a sum may be summed after it: there is less to sum there.
    """
    return kind_of(op).linear_read


def split_options(
    op: Op,
    tensors: Mapping[str, Tensor],
    num_ranks: int,
    taken: Mapping[str, int] | None = None,
    *,
    whole_groups: bool = False,
) -> Options:
    """Every exact way to divide `op` over `num_ranks`, the whole op first.

    taken: what mesh axes before have left of iteration axes; dividing those again divides that.
    whole_groups: groups are not divided, since a rank's rows would be those of other groups.
    """
    whole = SplitOption(reads=(REPLICATE,) * len(op.reads), writes=(REPLICATE,) * len(op.writes))
    options, rejected = [whole], []
    if num_ranks > 1 and (position := summed_read(op)) is not None:
        reads: list[Placement] = [REPLICATE if i != position else SUM for i in range(len(op.reads))]
        options.append(SplitOption(reads=tuple(reads), writes=(SUM,) * len(op.writes)))
    groups = grouped_index(op) if whole_groups else None
    for axis in op.axes:
        found: SplitOption | str = "its rows were sorted by other groups"
        if groups is None or axis.name != groups.axes[0]:
            found = _split(op, axis, tensors, num_ranks, (taken or {}).get(axis.name))
        if isinstance(found, SplitOption):
            options.append(found)
        else:
            rejected.append((axis.name, found))
    index_reads = tuple(i for i, a in enumerate(op.reads) if is_index(op, a, tensors))
    return Options(options=tuple(options), rejected=tuple(rejected), index_reads=index_reads)


def _split(
    op: Op, axis: Axis, tensors: Mapping[str, Tensor], num_ranks: int, left: int | None
) -> SplitOption | str:
    """The option that divides `axis`, or what is left of it, or why there is none."""
    extent = left or axis.extent
    if refused := _why_whole(op, axis, extent, num_ranks, again=left is not None):
        return refused
    chunk = -(-extent // num_ranks)
    placed = _chunk_layouts(op, axis, tensors, chunk)
    if isinstance(placed, str):
        return placed
    reads, writes = placed
    seen: dict[str, Placement] = {}
    for position, (access, placement) in enumerate(zip(op.reads, reads, strict=True)):
        if seen.setdefault(access.tensor, placement) != placement and not kind_of(op).reads_apart:
            return f"operand {position} is read twice, divided and otherwise"
    return SplitOption(
        axis=axis.name,
        extent=extent,
        chunk=chunk,
        reads=tuple(reads),
        writes=tuple(writes),
        uneven=extent % num_ranks != 0,
    )


def _why_whole(op: Op, axis: Axis, extent: int, num_ranks: int, *, again: bool) -> str:
    """Why so many ranks can't divide an axis, whatever its operands; "" if they can. again: whether
    a mesh axis before has divided it.
    """
    if axis.role == "scatter":
        return "its positions are known only at run time"
    if axis.role == "reduce" and not axis.combine:
        return "the op needs all of it at once"
    if num_ranks == 1:
        return "the mesh axis has one rank"
    if again and axis.role == "reduce" and kind_of(op).masks_padding:
        return "its positions are counted along one mesh axis"
    if not fits(extent, num_ranks):
        return f"{extent} over {num_ranks} ranks would be half padding or more"
    if extent % num_ranks and axis.combine in ("max", "min"):
        return f"{extent} is uneven, and a {axis.combine} over padding isn't exact"
    return ""


def _chunk_layouts(
    op: Op, axis: Axis, tensors: Mapping[str, Tensor], chunk: int
) -> tuple[list[Placement], list[Placement]] | str:
    """Layouts of what the op reads and writes where each rank has a chunk of an axis, or why there
    are none.
    """
    placed: list[Placement] = []
    for position, access in enumerate(accesses(op)):
        if any(index.is_grouped and index.axes[0] == axis.name for index in access.dims):
            placed.append(ROWS)
            continue
        found = axis_dim(op, access.dims, tensors[access.tensor].shape, axis.name)
        if isinstance(found, str):
            return f"operand {position}: {found}"
        placed.append(Shard(found[0], chunk * found[1]) if found else REPLICATE)
    reads, writes = placed[: len(op.reads)], placed[len(op.reads) :]
    if axis.role == "reduce":
        for i in additive_reads(op):
            reads[i] = Partial(axis.combine)
        if any(write != REPLICATE for write in writes):
            return "it is combined, yet indexes a result"
        writes = [Partial(axis.combine)] * len(writes)
    elif REPLICATE in writes:
        return "it doesn't index every result"
    return reads, writes


def axis_dim(
    op: Op, dims: Sequence[Index], shape: Sequence[int], axis: str
) -> tuple[int, int] | str | None:
    """The dim of an operand that an axis of the op runs over, and how far it steps there; None
    without one, or why a chunk of the axis is no chunk of a dim.
    """
    found: tuple[int, int] | None = None
    for dim, (index, extent) in enumerate(zip(dims, shape, strict=True)):
        if axis not in index.axes:
            continue
        if found is not None:
            return "it indexes two dims"
        if index.is_grouped:
            return "the data decide which positions it covers"
        if index.axes[0] != axis:
            return f"it is an inner part of dim {dim}"
        if index.stride != 1 or index.offset != 0:
            return f"it indexes dim {dim} with a stride or an offset"
        step = math.prod(op.axis(name).extent for name in index.axes[1:])
        if op.axis(axis).extent * step != extent:
            return f"it covers only part of dim {dim}"
        found = dim, step
    return found
