"""Formulas and norms over rows in torch, one after the other.

Comes in: an op of kind fused_rows. Goes out: a function of its operands, by torch here or by a
kernel that takes the same arguments. Used by ops.py.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from distmega.hostir.library.norms import normalise
from distmega.hostir.library.pointwise import OpFunction, pointwise
from distmega.hostir.library.torch_types import torch_dtype, widen
from distmega.hostir.passes.fused_kinds import NormStep, RowSteps, Step, row_steps
from distmega.program.ops.axis_views import access_axes, order_axes, unfold_axes
from distmega.program.types import Op

RunRows = Callable[
    [RowSteps, Sequence[Tensor], tuple[int, ...], Sequence[torch.dtype]], tuple[Tensor, ...]
]
"""As run_rows."""


def run_rows(
    plan: RowSteps, xs: Sequence[Tensor], shape: tuple[int, ...], dtypes: Sequence[torch.dtype]
) -> tuple[Tensor, ...]:
    """New tensors of `shape`, rows along the last dim, of the values that leave, of operands of as
    many dims that broadcast to it; in fp32 or wider.
    """
    values = [widen(x) for x in xs]
    for step in plan.steps:
        values.append(_value(step, values, shape))
    found = (values[n].expand(shape) for n in plan.outs)
    return tuple(y.to(to, copy=True).contiguous() for y, to in zip(found, dtypes, strict=True))


def _value(step: Step, values: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    if not isinstance(step, NormStep):
        wide = max((x.dtype for x in values), key=lambda dtype: dtype.itemsize)
        return pointwise(step, values, wide)
    x = values[step.x].expand(shape)
    weight, bias = (None if n < 0 else values[n] for n in (step.weight, step.bias))
    return normalise(step.norm, x, None, weight, bias, step.eps)[0]


def compile_rows(op: Op, run: RunRows) -> OpFunction:
    """The op bound to its access maps; `run` sees operands that broadcast."""
    plan, extents, names = row_steps(op), op.extents, access_axes(op.writes[0])
    shape = tuple(extents[name] for name in names)
    given = op.attr("dtypes")
    assert isinstance(given, tuple), "join_rows.py writes a tuple"
    dtypes = [torch_dtype(str(name)) for name in given]

    def compute(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        xs = [
            order_axes(unfold_axes(x, read, extents), access_axes(read), names)
            for x, read in zip(operands, op.reads, strict=True)
        ]
        return run(plan, xs, shape, dtypes)

    return compute
