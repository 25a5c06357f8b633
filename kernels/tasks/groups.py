"""Ops over groups of rows, restated over rows alone.

In: a segment whose grouped ops run over (group, row of the group), positions that the data decide.
Out: the same segment with ops over all rows p of the buffers, whichever group each is of: an op
looks its rows' groups up, as an embedding looks up rows of a table. So tiles are known before the
data are: columns of a product, rows and columns of what is gathered or added up. Where ranks share
groups out, rows of other ranks' groups are zero. Next on the walk: expand.py.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from distmega.program.kinds import OpKind, define, kind_of
from distmega.program.types import (
    Access,
    Axis,
    Index,
    Op,
    Program,
    Tensor,
    accesses,
    grouped_index,
    verify_program,
)

ROW = "p"
"""Axis of the rows of all groups together."""

UNMASKED = ".unmasked"
"""Names of results of formulas in all rows, other ranks' too, end in this."""

define(OpKind(name="keep_rows", origin="internal"))


def expand_groups(segment: Program) -> Program:
    """Every grouped op restated; other ops as they are."""
    tensors = segment.tensor_map()
    more: list[Tensor] = []
    ops: list[Op] = []
    for op in segment.ops:
        for restated, made in restate_groups(op, tensors):
            ops.append(restated)
            more += made
    if tuple(ops) == segment.ops:
        return segment
    expanded = replace(segment, tensors=(*segment.tensors, *more), ops=tuple(ops))
    return verify_program(expanded, is_restated=True)


def restate_groups(
    op: Op, tensors: Mapping[str, Tensor]
) -> Iterator[tuple[Op, tuple[Tensor, ...]]]:
    """The ops over rows that an op is, and what temporaries each brings; itself where it has no
    groups.
    """
    index = grouped_index(op)
    if index is None:
        yield op, ()
        return
    buffers = [a for a in accesses(op) if any(dim.is_grouped for dim in a.dims)]
    num_rows = tensors[buffers[0].tensor].shape[0]
    plain = _by_rows(op, index, num_rows)
    if not kind_of(op).is_elementwise:
        yield plain, ()
        return
    starts = plain.reads[-1]
    formula = replace(plain, reads=plain.reads[:-1], axes=_used_axes(plain, plain.reads[:-1]))
    if not op.get("group_axis", ""):
        yield formula, ()
        return
    out = tensors[op.writes[0].tensor]
    between = Tensor(name=f"{out.name}{UNMASKED}", shape=out.shape, dtype=out.dtype)
    seen = replace(plain.writes[0], tensor=between.name)
    yield replace(formula, name=between.name, writes=(seen,)), (between,)
    reads = (seen, starts)
    yield (
        replace(plain, kind="keep_rows", reads=reads, axes=_used_axes(plain, reads)),
        (),
    )


def _by_rows(op: Op, index: Index, num_rows: int) -> Op:
    """The op with one axis of rows in place of groups and rows of these. What chose positions by
    the whole of them, as the order of rows does, is indexed by the row; a group that is still
    named, as the matrix of a group is, is looked up.
    """
    group, inner = index.axes
    written = any(dim.is_grouped for access in op.writes for dim in access.dims)
    kept = {name for a in accesses(op) for dim in a.dims if not dim.is_grouped for name in dim.axes}
    axes = [
        Axis(name=ROW, extent=num_rows)
        if written
        else Axis(name=ROW, extent=num_rows, role="reduce", lookup=True)
    ]
    for axis in op.axes:
        if axis.name == group and group in kept:
            axes.append(Axis(name=group, extent=axis.extent, role="reduce", lookup=True))
        elif axis.name not in (group, inner, ROW):
            axes.append(axis)

    def by_rows(access: Access) -> Access:
        dims = (Index(axes=(ROW,)) if dim.is_grouped else dim for dim in access.dims)
        return replace(access, dims=tuple(dims))

    return replace(
        op,
        axes=tuple(axes),
        reads=tuple(map(by_rows, op.reads)),
        writes=tuple(map(by_rows, op.writes)),
        attrs=tuple(sorted({**dict(op.attrs), "groups": op.axis(group).extent}.items())),
    )


def _used_axes(op: Op, reads: tuple[Access, ...]) -> tuple[Axis, ...]:
    used = {name for a in (*reads, *op.writes) for dim in a.dims for name in dim.axes}
    return tuple(axis for axis in op.axes if axis.name in used)
