"""The ops of one rank: the steps of a schedule with local extents, collectives in access maps.

Comes in: a step and the shapes of local tensors. Goes out: an Op. streams/ looks at these ops to
find what can run in chunks, localize.py makes a program of them. Where an op's index space starts
elsewhere on each rank, attributes say so: global index = local index + coordinate along `base_axis`
* `base_stride`, valid below `extent`. A rank's groups of rows start at its coordinate along
`group_axis` times their number; there are `num_groups` in all.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from distmega.program.kinds import kind_of
from distmega.program.types import Access, Attr, Axis, Op, Tensor, grouped_index
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import REPLICATE, Layout, local_shape
from distmega.sharding.resolve.collectives import collective_op
from distmega.sharding.resolve.resolve import PlacedOp, Reshard, Splits


@dataclass(slots=True)
class LocalOps:
    """Makes local ops; axes of equal ones are shared.

    tensors: those of the whole program. locals: local tensor -> (tensor of the program, layout).
    """

    tensors: Mapping[str, Tensor]
    mesh: DeviceMesh
    locals: Mapping[str, tuple[str, Layout]]
    _axes: dict[tuple[tuple[Axis, ...], Splits], tuple[Axis, ...]] = field(default_factory=dict)
    _made: dict[int, tuple[PlacedOp | Reshard, Op]] = field(default_factory=dict)

    def shape(self, name: str) -> tuple[int, ...]:
        """Extents of a local tensor on one rank, padding included."""
        whole, layout = self.locals[name]
        return local_shape(self.tensors[whole].shape, layout)

    def op(self, step: PlacedOp | Reshard) -> Op:
        """What one rank does of a step; the same op for the same step."""
        if id(step) not in self._made:
            made = self._collective(step) if isinstance(step, Reshard) else self._placed(step)
            self._made[id(step)] = step, made
        return self._made[id(step)][1]

    def tensor(self, name: str) -> Tensor:
        """A local tensor, temporary where it is a form of another."""
        whole, _ = self.locals[name]
        given = self.tensors[whole]
        role = given.role if name == whole else "temp"
        return Tensor(name=name, shape=self.shape(name), dtype=given.dtype, role=role)

    def _placed(self, step: PlacedOp) -> Op:
        op, key = step.op, (step.op.axes, step.splits)
        if key not in self._axes:
            chunks = {option.axis: option.chunk for _, option in step.splits}
            self._axes[key] = tuple(
                replace(axis, extent=chunks.get(axis.name, axis.extent)) for axis in op.axes
            )
        reads = zip(op.reads, step.reads, strict=True)
        writes = zip(op.writes, step.writes, strict=True)
        return Op(
            name=op.name,
            kind=op.kind,
            axes=self._axes[key],
            reads=tuple(Access(tensor=name, dims=a.dims) for a, name in reads),
            writes=tuple(Access(tensor=name, dims=a.dims) for a, name in writes),
            attrs=_placed_attrs(step),
        )

    def _collective(self, step: Reshard) -> Op:
        whole, _ = self.locals[step.writes[0]]
        sides = (self.shape(name) for name in (step.reads + step.writes))
        local = tuple(min(extents) for extents in zip(*sides, strict=True))
        move, size = step.move, self.mesh.size(step.move.axis)
        shape = local_shape(self.tensors[whole].shape, move.source.moved(move.axis, REPLICATE))
        return collective_op(step, shape, local, size)


def _placed_attrs(step: PlacedOp) -> tuple[tuple[str, Attr], ...]:
    """Attributes of a local op, with where its index space starts if it asks for that."""
    attrs = _based(step) if kind_of(step.op).masks_padding else step.op.attrs
    index = grouped_index(step.op)
    groups = [(axis, o) for axis, o in step.splits if index and o.axis == index.axes[0]]
    if not groups:
        return attrs
    ((axis, option),) = groups
    more: dict[str, Attr] = {"group_axis": axis, "num_groups": step.op.axis(option.axis).extent}
    return tuple(sorted((dict(attrs) | more).items()))


def _based(step: PlacedOp) -> tuple[tuple[str, Attr], ...]:
    """Attributes of an op that compares indices, with where its index space starts."""
    attrs = dict(step.op.attrs)
    for axis, option in step.splits:
        if step.op.axis(option.axis).role == "reduce":
            attrs |= {
                "base_axis": axis,
                "base_stride": option.chunk,
                "extent": step.op.axis(option.axis).extent,
            }
    return tuple(sorted(attrs.items()))
