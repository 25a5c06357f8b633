"""Ops over rows, norms and formulas of each element, as steps that one kernel does in turn.

Comes in: ops of a body of lower.py. Goes out: RowOps, which can be put one behind the other, and
ops of kind fused_rows. Used by join_rows.py and split_sums.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from distmega.hostir.passes.fused_kinds import (
    MAX_FLOPS,
    MAX_READS,
    MAX_WRITES,
    NormStep,
    Step,
    op_exprs,
    row_steps,
)
from distmega.program import expr
from distmega.program.dtypes import FLOATS_TO_F32
from distmega.program.kinds import kind_of
from distmega.program.ops.axis_views import access_axes, is_plain
from distmega.program.ops.parts import make_op, rename_axes
from distmega.program.types import Access, Axis, Op, Tensor, accesses, grouped_index

MAX_COLUMNS = 8192
MAX_HELD = 40960
"""What one kernel holds in registers: elements of a row, and those of all whole operands and
results together.
"""
_SUM = expr.parse("a0 + a1")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOp:
    """An op over rows of the last of `axes`: values as of RowSteps, and which of them is written
    where.
    """

    axes: tuple[Axis, ...]
    operands: tuple[Access, ...]
    steps: tuple[Step, ...]
    results: Mapping[Access, int]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes)


def is_of_rows(op: Op) -> bool:
    """Whether an op is a norm, a formula of each element, or both."""
    kind = kind_of(op)
    is_one = op.kind == "fused_rows" or kind.is_norm or kind.is_elementwise
    return is_one and grouped_index(op) is None


def rows_of(op: Op, buffers: Mapping[str, Tensor]) -> RowOp | None:
    """The op as steps; None where its results are no rows of one extent, an axis a dim, or of types
    that kernels do not take.
    """
    types = {buffers[access.tensor].dtype for access in accesses(op)}
    outs = {access_axes(access) for access in op.writes}
    if not types.issubset(FLOATS_TO_F32) or len(outs) > 1 or not all(map(is_plain, op.writes)):
        return None
    (names,) = outs
    axes = tuple(op.axis(name) for name in names)
    if len(axes) < 2 or {axis.name for axis in op.axes} - {*names} - _reduced(op):
        return None
    operands, steps, values = _steps_of(op)
    if any(not {*access_axes(access)} <= {*names} for access in operands):
        return None
    results = dict(zip(op.writes, values, strict=True))
    return RowOp(axes=axes, operands=operands, steps=steps, results=results)


def _reduced(op: Op) -> set[str]:
    """The axis along which a norm reads whole rows."""
    reduced = {axis.name for axis in op.axes if axis.role == "reduce"}
    return reduced if kind_of(op).is_norm else set()


def _steps_of(op: Op) -> tuple[tuple[Access, ...], tuple[Step, ...], tuple[int, ...]]:
    """Operands, steps, and the value of each result."""
    if op.kind == "fused_rows":
        found = row_steps(op)
        return op.reads, found.steps, found.outs
    if kind_of(op).is_elementwise:
        trees, first = op_exprs(op), len(op.reads)
        return op.reads, trees, tuple(range(first, first + len(trees)))
    eps = op.get("eps", 0.0)
    assert isinstance(eps, float | int), "of a verified norm"
    norm, num_rows = str(op.get("norm", "")), 1
    if norm:  # of a sum
        num_rows = 2
    vectors = op.reads[2 * num_rows :]
    operands = (*op.reads[: 2 * num_rows : 2], *vectors)
    numbers = [*range(num_rows, num_rows + len(vectors)), -1, -1][:2]
    step = NormStep(
        norm=norm or op.kind,
        x=len(operands) if norm else 0,
        weight=numbers[0],
        bias=numbers[1],
        eps=float(eps),
    )
    if norm:
        return operands, (_SUM, step), (len(operands) + 1, len(operands))
    return operands, (step,), (len(operands),)


def both_rows(first: RowOp | None, then: RowOp | None) -> RowOp | None:
    """Both as one, whose results are those of both; None where `then` takes results of the first in
    another order, or none of them is a norm.
    """
    if first is None or then is None:
        return None
    if not any(isinstance(step, NormStep) for step in (*first.steps, *then.steps)):
        return None
    if [a.extent for a in first.axes] != [a.extent for a in then.axes]:
        return None
    first = _renamed(first, then)
    made = {access.tensor for access in first.results}
    given = [access for access in then.operands if access not in first.results]
    if any(access.tensor in made for access in given):
        return None
    operands = tuple(dict.fromkeys((*first.operands, *given)))
    own = {access: n for n, access in enumerate(operands)}
    num, behind = len(operands), len(operands) + len(first.steps)
    numbers = [own[access] for access in first.operands]
    earlier = _moved(first, numbers, num)
    held = {access: _number(n, numbers, num) for access, n in first.results.items()}
    taken = [held[access] if access in held else own[access] for access in then.operands]
    later = _moved(then, taken, behind)
    results = held | {access: _number(n, taken, behind) for access, n in then.results.items()}
    return RowOp(axes=then.axes, operands=operands, steps=(*earlier, *later), results=results)


def with_sum(rows: RowOp, operand: Access, terms: Sequence[Access]) -> RowOp:
    """The same of the sum of `terms`, from the first on, in place of an operand."""
    operands = tuple(dict.fromkeys((*terms, *(a for a in rows.operands if a != operand))))
    own = {access: n for n, access in enumerate(operands)}
    behind = len(operands) + 1
    numbers = [len(operands) if a == operand else own[a] for a in rows.operands]
    total = expr.parse(" + ".join(f"a{own[term]}" for term in terms))
    results = {access: _number(n, numbers, behind) for access, n in rows.results.items()}
    steps = (total, *_moved(rows, numbers, behind))
    return replace(rows, operands=operands, steps=steps, results=results)


def _renamed(rows: RowOp, like: RowOp) -> RowOp:
    """With the axis names of another, in their order."""
    names = dict(zip(rows.names, like.names, strict=True))
    return replace(
        rows,
        axes=like.axes,
        operands=tuple(rename_axes(operand, names) for operand in rows.operands),
        results={rename_axes(access, names): n for access, n in rows.results.items()},
    )


def _number(value: int, operands: Sequence[int], first_step: int) -> int:
    """The number of a value where operands have other ones, and steps begin at `first_step`."""
    behind = value - len(operands)
    return operands[value] if behind < 0 else first_step + behind


def _moved(rows: RowOp, operands: Sequence[int], first_step: int) -> tuple[Step, ...]:
    """The steps where values have other numbers; see _number."""

    def number(value: int) -> int:
        return value if value < 0 else _number(value, operands, first_step)

    def moved(step: Step) -> Step:
        match step:
            case NormStep():
                return replace(
                    step, x=number(step.x), weight=number(step.weight), bias=number(step.bias)
                )
            case expr.Arg(index):
                return expr.Arg(number(index))
            case expr.Call(fn, parts):
                return expr.Call(fn, tuple(map(moved, parts)))  # type: ignore[arg-type]
        return step

    return tuple(map(moved, rows.steps))


def fits_kernel(rows: RowOp) -> bool:
    """Whether one kernel does it."""
    columns = rows.axes[-1].extent
    whole = sum(len(access_axes(access)) == len(rows.axes) for access in rows.operands)
    padded = 1 << (columns - 1).bit_length()
    flops = sum(expr.num_flops(s) for s in rows.steps if not isinstance(s, NormStep))
    return (
        len(rows.operands) <= MAX_READS
        and len(rows.results) <= MAX_WRITES
        and flops <= MAX_FLOPS
        and columns <= MAX_COLUMNS
        and padded * (whole + len(rows.results)) <= MAX_HELD
    )


def state_rows(name: str, rows: RowOp, buffers: Mapping[str, Tensor]) -> Op:
    """The op of kind fused_rows."""
    writes = tuple(rows.results)
    return make_op(
        name, "fused_rows", rows.axes, rows.operands, writes,
        steps=tuple(map(str, rows.steps)), outs=tuple(rows.results.values()),
        dtypes=tuple(buffers[access.tensor].dtype for access in writes),
    )  # fmt: skip
