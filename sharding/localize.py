"""One rank's program: local shapes, collectives as ops, the rank itself left symbolic.

Comes in: a Plan. Goes out: a LocalProgram, a Program like any other, which hostir/lower.py cuts
into segments. Where an op's index space starts elsewhere on each rank, attributes say so: global
index = local index + coordinate along `base_axis` * `base_stride`, valid below `extent`. Next:
hostir/lower.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from distmega.program import Access, Attr, Axis, Op, Program, Tensor, verify_program
from distmega.sharding.allocation import AllocationDomain
from distmega.sharding.collectives import collective_op
from distmega.sharding.finalize import verify_allocations
from distmega.sharding.mesh import DeviceMesh
from distmega.sharding.padding import MASKED
from distmega.sharding.planner import Plan
from distmega.sharding.resolve import PlacedOp, Reshard, Splits


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalProgram:
    """What every rank of a mesh runs, and how its tensors are allocated, by local name."""

    program: Program
    mesh: DeviceMesh
    allocations: Mapping[str, AllocationDomain]


class _Localizer:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.whole = plan.program.tensor_map()
        self.axes: dict[tuple[tuple[Axis, ...], Splits], tuple[Axis, ...]] = {}
        self.op_names = {op.name for op in plan.program.ops}

    def run(self) -> LocalProgram:
        plan = self.plan
        program = Program(
            name=plan.program.name,
            tensors=tuple(self.tensors()),
            ops=tuple(
                self.local_op(step) if isinstance(step, PlacedOp) else self.collective(step)
                for step in plan.steps
            ),
            outputs=plan.program.outputs,
        )
        verify_program(program)
        verify_allocations(program, plan.allocations)
        return LocalProgram(program=program, mesh=plan.mesh, allocations=plan.allocations)

    def tensors(self) -> list[Tensor]:
        """Tensors of the whole program in its order, each followed by its other forms."""
        forms: dict[str, list[Tensor]] = {name: [] for name in self.whole}
        for name, (whole, _) in self.plan.locals.items():
            tensor = self.whole[whole]
            local = Tensor(
                name=name,
                shape=self.plan.allocations[name].local_shape,
                dtype=tensor.dtype,
                role=tensor.role if name == whole else "temp",
            )
            forms[whole].append(local)
        return [tensor for group in forms.values() for tensor in group]

    def local_op(self, step: PlacedOp) -> Op:
        op, key = step.op, (step.op.axes, step.splits)
        if key not in self.axes:
            chunks = {option.axis: option.chunk for _, option in step.splits}
            self.axes[key] = tuple(
                replace(axis, extent=chunks.get(axis.name, axis.extent)) for axis in op.axes
            )
        reads = zip(op.reads, step.reads, strict=True)
        writes = zip(op.writes, step.writes, strict=True)
        return Op(
            name=op.name,
            kind=op.kind,
            axes=self.axes[key],
            reads=tuple(Access(tensor=name, dims=a.dims) for a, name in reads),
            writes=tuple(Access(tensor=name, dims=a.dims) for a, name in writes),
            attrs=_based(step) if op.kind in MASKED else op.attrs,
        )

    def collective(self, step: Reshard) -> Op:
        size = self.plan.mesh.size(step.move.axis)
        whole, _ = self.plan.locals[step.writes[0]]
        sides = (self.plan.allocations[name].local_shape for name in (step.reads + step.writes))
        local = tuple(min(extents) for extents in zip(*sides, strict=True))
        name = f"{step.writes[0]}.{step.move.kind}"
        while name in self.op_names:
            name += "_"
        self.op_names.add(name)
        return collective_op(name, step, self.whole[whole].shape, local, size)


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


def localize(plan: Plan) -> LocalProgram:
    """The program every rank runs. VerifyError or ProgramError would be a bug of the planner."""
    return _Localizer(plan).run()
