"""Programs with groups of rows seen in coordinates (group, row), so that overlap is exact there.

Comes in: a Program whose ops index dims by groups of rows. Goes out: one in which each such dim is
two, group and row, wherever all ops index it by the same starts; a tensor that some op indexes
otherwise keeps its dim, and grouped accesses then touch all of it. Two accesses share a row in the
one exactly if they may share one in the other, whichever rows the groups have. Used by analyse.py.
"""

from dataclasses import replace

from distmega.program.types import (
    Access,
    Axis,
    Index,
    Op,
    Program,
    Tensor,
    accesses,
    grouped_index,
)

WHOLE = "all_rows"
"""Axis of a dim that is touched whole, since somebody knows nothing of its groups."""


def starts_of(op: Op, index: Index) -> str:
    """The vector of starts of a grouped index, by name."""
    return op.reads[index.starts].tensor


def ungroup(program: Program) -> Program:
    """The program in coordinates of groups and rows; the same program where there are none."""
    tensors = program.tensor_map()
    grouped = _grouped_dims(program)
    if not any(grouped_index(op) for op in program.ops):
        return program
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in tensors.items():
        dims = grouped.get(name, {})
        shapes[name] = tuple(
            extent
            for dim, whole in enumerate(tensor.shape)
            for extent in (dims[dim][1:] if dim in dims else (whole,))
        )
    return replace(
        program,
        tensors=tuple(replace(t, shape=shapes[t.name]) for t in program.tensors),
        ops=tuple(_ungroup_op(op, tensors, grouped) for op in program.ops),
    )


GroupedDims = dict[str, dict[int, tuple[str, int, int]]]
"""Tensor -> dim -> (starts, groups, rows), of dims that all ops index by the same groups."""


def _grouped_dims(program: Program) -> GroupedDims:
    seen: dict[tuple[str, int], set[tuple[str, int, int]]] = {}
    other = {tensor.name for tensor in program.tensors if tensor.role != "temp"}
    other |= {*program.outputs}
    views = {a.tensor for op in program.ops if op.is_view for a in accesses(op)}
    for op in program.ops:
        for access in accesses(op):
            for dim, index in enumerate(access.dims):
                key = access.tensor, dim
                found = seen.setdefault(key, set())
                if index.is_grouped:
                    group, row = (op.extents[name] for name in index.axes)
                    found.add((starts_of(op, index), group, row))
                else:
                    found.add(("", 0, 0))
    grouped: GroupedDims = {}
    for (name, dim), ways in seen.items():
        (way,) = ways if len(ways) == 1 else [("", 0, 0)]
        if way[0] and name not in other and name not in views:
            grouped.setdefault(name, {})[dim] = way
    return grouped


def _ungroup_op(op: Op, tensors: dict[str, Tensor], grouped: GroupedDims) -> Op:
    axes = list(op.axes)

    def ungrouped(access: Access) -> Access:
        dims: list[Index] = []
        for dim, index in enumerate(access.dims):
            if not index.is_grouped:
                dims.append(index)
            elif dim in grouped.get(access.tensor, {}):
                dims += [Index(axes=(name,)) for name in index.axes]
            else:
                extent = tensors[access.tensor].shape[dim]
                name = f"{WHOLE}{len(axes)}"
                axes.append(Axis(name=name, extent=extent, role="reduce"))
                dims.append(Index(axes=(name,)))
        return replace(access, dims=tuple(dims))

    reads, writes = tuple(map(ungrouped, op.reads)), tuple(map(ungrouped, op.writes))
    return replace(op, axes=tuple(axes), reads=reads, writes=writes)
