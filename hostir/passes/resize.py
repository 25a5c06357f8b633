"""The same host program for inputs of other extents: one plan serves a range of sizes.

In: a host program as passes left it, the shapes that some of its inputs shall have. Out: the
program in which these extents run through every op, collective and buffer; nodes, their order and
what they are called stay. Which dims change follows from access maps. Next: run/evaluator.py.
"""

import math
from collections.abc import Container, Mapping
from dataclasses import replace

from distmega.collecting import gc_paused
from distmega.errors import UnsupportedError, counted
from distmega.hostir.ir.matmul_nodes import (
    FusedMatmul,
    largest_symmetric_buffers,
    needed_symmetric_buffers,
)
from distmega.hostir.ir.nodes import (
    Allocate,
    Collective,
    Deallocate,
    HostProgram,
    LibraryOp,
    Node,
    Wait,
)
from distmega.program.kinds import FUSED_GRAPH
from distmega.program.types import Access, Attr, Index, Op, Program, accesses

Shape = tuple[int, ...]

ROW_COUNTS = ("packed", "in_order")
"""Attributes that are the extent of an op's axis m."""

FOLLOWING = {"route": {"i": "m", "p": "m"}, "gather_rows": {"r": "p"}}
"""By kind of op, axes that only results have, and the axis of an operand that each grows with."""


@gc_paused
def resize_inputs(host: HostProgram, shapes: Mapping[str, Shape], name: str) -> HostProgram:
    """`host` under another name, with inputs of these shapes. Symmetric buffers never shrink.

    UnsupportedError where extents do not divide as they did, or where a node is of a kind that is
    not known here (loops, slices and what goes between stages).
    """
    return _Resizing(host, shapes).run(name)


def resized_ops(program: Program, inputs: Container[str]) -> set[str]:
    """Names of the ops that have other extents where all dims of these inputs do."""
    names = [t.name for t in program.tensors if t.name in inputs]
    dims = {(name, dim) for name in names for dim in range(len(program.tensor_map()[name].shape))}
    found: set[str] = set()
    for op in program.ops:
        changed = {
            axis
            for access in op.reads
            for dim, index in enumerate(access.dims)
            if (access.tensor, dim) in dims
            for axis in index.axes
        }
        changed |= {a for a, b in FOLLOWING.get(op.kind, {}).items() if b in changed}
        dims |= {
            (access.tensor, dim)
            for access in op.writes
            for dim, index in enumerate(access.dims)
            if changed & {*index.axes}
        }
        found |= {op.name} if changed else set()
    return found


class _Resizing:
    """Shapes by buffer, as far as nodes have been seen."""

    def __init__(self, host: HostProgram, shapes: Mapping[str, Shape]) -> None:
        self.host = host
        self.old = {buffer.name: buffer.shape for buffer in host.buffers}
        self.new = {b.name: b.shape for b in host.buffers if b.role != "temp"} | dict(shapes)

    def run(self, name: str) -> HostProgram:
        host = self.host
        body = tuple(map(self.node, host.body))
        buffers = tuple(replace(b, shape=self.new.get(b.name, b.shape)) for b in host.buffers)
        resized = replace(host, name=name, body=body, buffers=buffers)
        needed = needed_symmetric_buffers(body, resized.buffer_map(), dict(host.mesh.axes))
        return replace(
            resized, symmetric_buffers=largest_symmetric_buffers((*host.symmetric_buffers, *needed))
        )

    def node(self, node: Node) -> Node:
        match node:
            case Allocate() | Deallocate() | Wait():
                return node
            case LibraryOp(op=op):
                return LibraryOp(op=self.op(op))
            case Collective():
                return self.collective(node)
            case FusedMatmul():
                return self.matmul(node)
            case _:
                raise UnsupportedError(
                    f"{type(node).__name__} in a program to resize",
                    expected="ops, collectives and their waits",
                    remedy="lower the program of this size",
                )

    def op(self, op: Op) -> Op:
        changed: dict[str, int] = {}
        for access in op.reads:
            for index, old, new in zip(
                access.dims, self.old[access.tensor], self.new[access.tensor], strict=True
            ):
                if old != new:
                    axis, extent = self.axis(op, index, old, new)
                    if changed.setdefault(axis, extent) != extent:
                        raise _uneven(op.name, f"{axis} of {changed[axis]} and {extent}")
        for axis, leading in FOLLOWING.get(op.kind, {}).items():
            if leading in changed:
                changed[axis] = _scaled(op, axis, op.axis(leading).extent, changed[leading])
        if not changed:
            self.new |= {a.tensor: self.old[a.tensor] for a in op.writes}
            return op
        if op.kind == FUSED_GRAPH:
            raise _uneven(op.name, f"other sizes of rule {op.attr('rule')!r}")
        axes = tuple(replace(a, extent=changed.get(a.name, a.extent)) for a in op.axes)
        made = replace(op, axes=axes, attrs=self.attrs(op, changed))
        for access in op.writes:
            self.new.setdefault(access.tensor, self.written(op, made, access))
        self.verify(op, made)
        return made

    def attrs(self, op: Op, changed: Mapping[str, int]) -> tuple[tuple[str, Attr], ...]:
        """An op's attributes where axes have changed."""
        found = dict(op.attrs)
        found |= {key: changed["m"] for key in ROW_COUNTS if key in found and "m" in changed}
        if op.kind == "take_shard":
            source, dim = op.reads[0].tensor, _number(found, "dim")
            if found["extent"] == self.old[source][dim]:
                found["extent"] = self.new[source][dim]
        looked = [axis for axis in op.axes if axis.lookup and axis.name in changed]
        if looked and "base_stride" in found:
            (axis,) = looked
            whole = axis.extent * self.host.mesh.size(str(found["base_axis"]))
            if (found["base_stride"], found["extent"]) != (axis.extent, whole):
                raise _uneven(op.name, f"{axis.name} with padding")
            found["base_stride"] = changed[axis.name]
            found["extent"] = whole // axis.extent * changed[axis.name]
        return tuple(found.items())

    def axis(self, op: Op, index: Index, old: int, new: int) -> tuple[str, int]:
        """The axis of a dim that changes, the outermost but for that of ranks, and its extent; of
        rows sorted by group, that of a group's rows, of which there are as many as there may be.
        """
        if index.is_grouped:
            rows = index.axes[1]
            return rows, _scaled(op, rows, old, new)
        names = [n for n in index.axes if op.kind != "take_shard" or not op.axis(n).lookup]
        rest = math.prod(op.axis(name).extent for name in index.axes if name not in names[:1])
        whole = names and rest * op.axis(names[0]).extent == old
        if not whole or new % rest or index.offset or index.stride != 1:
            raise _uneven(op.name, f"a dim of {old} that becomes {new}")
        return names[0], new // rest

    def written(self, op: Op, made: Op, access: Access) -> Shape:
        """The shape of a result."""
        shape = []
        for index, old in zip(access.dims, self.old[access.tensor], strict=True):
            before, after = _extent(op, index), _extent(made, index)
            if index.is_grouped:
                shape.append(old * after // before)
                continue
            if before != after and (before != old or index.offset or index.stride != 1):
                raise _uneven(op.name, f"{access.tensor} of {old}, of which it covers a part")
            shape.append(after if before != after else old)
        return tuple(shape)

    def verify(self, op: Op, made: Op) -> None:
        """Every operand that an axis covered as a whole is still covered so."""
        for access in accesses(op):
            dims = zip(access.dims, self.old[access.tensor], self.new[access.tensor], strict=True)
            for index, old, new in dims:
                before, after = (
                    math.prod(o.axis(n).extent for n in index.axes) for o in (op, made)
                )
                if index.axes and not index.is_grouped and (before - old) != (after - new):
                    raise _uneven(op.name, f"{access.tensor} of {new} where it has {after}")

    def collective(self, node: Collective) -> Collective:
        changed: dict[int, int] = {}
        for given, made in zip(node.ins, node.outs, strict=True):
            shape = []
            dims = zip(self.old[given], self.new[given], self.old[made], strict=True)
            for dim, (before, after, out) in enumerate(dims):
                if after * out % before:
                    raise _uneven(node.handle, f"{given} of {after} where it was {before}")
                shape.append(after * out // before)
                if before != after:
                    changed[dim] = max(after, shape[-1])
                    padded = node.get("extent", 0) not in (0, max(before, out))
                    if padded and dim == node.get("dim", 0):
                        raise _uneven(node.handle, f"{given} with padding")
            self.new[made] = tuple(shape)
        if node.kind == "all_to_all" and changed:
            raise _uneven(node.handle, "an all-to-all of other rows")
        attrs = dict(node.attrs)
        if "extent" in attrs:
            attrs["extent"] = changed.get(_number(attrs, "dim"), _number(attrs, "extent"))
        return replace(node, attrs=tuple(attrs.items()))

    def matmul(self, node: FusedMatmul) -> FusedMatmul:
        size = self.host.mesh.size(node.mesh_axis)
        gathered, scattered = {
            "all_gather_matmul": (size, 1),
            "matmul_reduce_scatter": (1, size),
        }.get(node.kind, (1, 1))
        rows = self.new[node.x][0] * gathered
        if rows % scattered:
            raise _uneven(node.out, f"{counted(rows, 'row')} over {counted(scattered, 'rank')}")
        rest = self.new[node.x][1 : node.num_rows]
        for name in node.writes:
            self.new[name] = (rows // scattered, *rest, *self.old[name][node.num_rows :])
        return node


def _extent(op: Op, index: Index) -> int:
    return math.prod(op.axis(name).extent for name in index.axes)


def _scaled(op: Op, axis: str, old: int, new: int) -> int:
    """The extent of an axis that grows as another one does, from old to new."""
    extent = op.axis(axis).extent
    if extent * new % old:
        raise _uneven(op.name, f"{axis} of {extent} where {old} become {new}")
    return extent * new // old


def _number(attrs: Mapping[str, Attr], key: str) -> int:
    value = attrs[key]
    assert isinstance(value, int), f"{key}={value!r} of a verified op"
    return value


def _uneven(what: str, found: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what}: {found}",
        expected="extents that divide as those of the program do",
        remedy="lower the program of this size",
    )
