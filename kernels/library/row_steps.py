"""Formulas and norms over rows on a GPU, one after the other, in one pass over memory: a program
has whole rows in registers.

In: operands of float types that broadcast to [.., columns], any strides, on one device, and
RowSteps. Out: new contiguous tensors. What the kernel does not take, torch does. It may start while
the one before it ends, and waits for it before it reads. Used by device_ops.py.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

import math
from collections.abc import Sequence

import torch
import triton
from torch import Tensor
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from distmega.hostir.library.rows import run_rows as run_by_torch
from distmega.hostir.passes.fused_kinds import MAX_READS, MAX_WRITES, NormStep, RowSteps
from distmega.kernels.pipelined.pointwise.formula import evaluate
from distmega.kernels.pipelined.triton_path import normalise_tile
from distmega.kernels.runtime.ahead import launch
from distmega.kernels.runtime.gpus import is_hopper, num_sms
from distmega.program.expr import Expr

TILE = 1024
"""Elements of a program that has several rows."""
FLOATS = frozenset({torch.bfloat16, torch.float16, torch.float32})


@triton.constexpr_function
def _num_steps(plan: RowSteps) -> int:
    return len(plan.steps)


@triton.constexpr_function
def _is_norm(plan: RowSteps, step: int) -> bool:
    return isinstance(plan.steps[step], NormStep)


@triton.constexpr_function
def _formula(plan: RowSteps, step: int) -> Expr:
    found = plan.steps[step]
    assert not isinstance(found, NormStep)
    return found


@triton.constexpr_function
def _field(plan: RowSteps, step: int, name: str) -> str | int | float:
    """Of a norm."""
    found: str | int | float = getattr(plan.steps[step], name)
    return found


@triton.constexpr_function
def _num_outs(plan: RowSteps) -> int:
    return len(plan.outs)


@triton.constexpr_function
def _out(plan: RowSteps, number: int) -> int:
    return plan.outs[number]


@triton.jit
def _normalised(values, inside, num_columns, plan: tl.constexpr, step: tl.constexpr):
    """A norm of rows; weight and bias are values too. Elements outside of rows count as zeros."""
    x: tl.constexpr = _field(plan, step, "x")
    weight: tl.constexpr = _field(plan, step, "weight")
    bias: tl.constexpr = _field(plan, step, "bias")
    value = tl.where(inside, values[x], 0.0)
    eps: tl.constexpr = _field(plan, step, "eps")
    norm: tl.constexpr = _field(plan, step, "norm")
    result = normalise_tile(value, inside, num_columns, eps, norm)
    if weight >= 0:
        result *= values[weight]
    if bias >= 0:
        result += values[bias]
    return result


@triton.jit
def run_steps(x0, x1, x2, x3, x4, x5, x6, x7, y0, y1, y2, y3, outer_strides, inner_strides,
              column_strides, num_rows, num_inner, num_columns, plan: tl.constexpr,
              num_inputs: tl.constexpr, rows: tl.constexpr, padded: tl.constexpr,
              early: tl.constexpr):  # fmt: skip
    """Rows program_id(0) * rows and on, of num_rows of num_columns.

    x0 to x7: operands, of any float type, read: row r begins r // num_inner outer steps and r %
    num_inner inner steps behind the first, in elements, its columns lie column steps apart; 0 where
    an operand is broadcast. y0 to y3: results, contiguous, written. All in local memory; None
    behind the num_inputs operands and the results of `plan`, a RowSteps. padded: columns of a
    program, at least num_columns. early: the launch may begin before what came before it ends.
    """
    inputs = (x0, x1, x2, x3, x4, x5, x6, x7)
    outputs = (y0, y1, y2, y3)
    if early:
        gdc_launch_dependents()
        gdc_wait()
    columns = tl.arange(0, padded)[None, :]
    line = tl.program_id(0) * rows + tl.arange(0, rows)[:, None]
    inside = (line < num_rows) & (columns < num_columns)
    outer = (line // num_inner).to(tl.int64)
    inner = (line % num_inner).to(tl.int64)
    values = ()
    for i in tl.static_range(num_inputs):
        start = inputs[i] + (outer * outer_strides[i] + inner * inner_strides[i])
        value = tl.load(start + columns.to(tl.int64) * column_strides[i], mask=inside, other=0.0)
        values += (value.to(tl.float32),)
    for i in tl.static_range(_num_steps(plan)):
        if _is_norm(plan, i):
            values += (_normalised(values, inside, num_columns, plan, i),)
        else:
            zeros = tl.zeros([rows, padded], tl.float32)
            values += (evaluate(_formula(plan, i), values) + zeros,)
    to = line.to(tl.int64) * num_columns + columns
    for i in tl.static_range(_num_outs(plan)):
        dtype = outputs[i].dtype.element_ty
        tl.store(outputs[i] + to, values[_out(plan, i)].to(dtype), mask=inside)


def run_rows(
    plan: RowSteps, xs: Sequence[Tensor], shape: tuple[int, ...], dtypes: Sequence[torch.dtype]
) -> tuple[Tensor, ...]:
    """As run_rows of hostir/library/rows.py."""
    if not _takes(xs):
        return run_by_torch(plan, xs, shape, dtypes)
    ys = tuple([xs[0].new_empty(shape, dtype=dtype) for dtype in dtypes])
    if not ys[0].numel():
        return ys
    num_rows, columns = math.prod(shape[:-1]), shape[-1]
    given = [x.expand(shape) for x in xs]
    steps = [row_strides(x) for x in given]
    for at, found in enumerate(steps):
        if found is None:
            given[at] = given[at].contiguous()
            steps[at] = row_strides(given[at])
    outer, inner, column = zip(*[found for found in steps if found], strict=True)
    rows, padded, warps = tile_of(num_rows, columns, num_sms(xs[0].device.index))
    early = is_hopper(xs[0].device.index)
    launch(
        run_steps, (triton.cdiv(num_rows, rows),),
        *given, *[None] * (MAX_READS - len(xs)), *ys, *[None] * (MAX_WRITES - len(ys)),
        outer, inner, column, num_rows, shape[-2], columns,
        plan=plan, num_inputs=len(xs), rows=rows, padded=padded, early=early,
        num_warps=warps, launch_pdl=early,
    )  # fmt: skip
    return ys


def _takes(xs: Sequence[Tensor]) -> bool:
    """Whether the kernel takes operands of these kinds."""
    return xs[0].is_cuda and FLOATS.issuperset([x.dtype for x in xs])


def tile_of(num_rows: int, columns: int, sms: int) -> tuple[int, int, int]:
    """Rows and padded columns of a program, and its warps: short rows several at a time, where
    there are more of them than SMs.
    """
    padded = triton.next_power_of_2(columns)
    wanted = triton.next_power_of_2(triton.cdiv(num_rows, sms))
    rows = max(1, min(TILE // padded, wanted))
    return rows, padded, min(16, max(4, rows * padded // 512))


def row_strides(x: Tensor) -> tuple[int, int, int] | None:
    """Steps of x [.., inner, columns] along all dims before these together, along the inner dim,
    and along columns; None where the dims before these have no one step.
    """
    *front, inner, column = x.stride()
    step, span = 0, 1
    for extent, stride in reversed(list(zip(x.shape[:-2], front, strict=True))):
        if extent == 1:
            continue
        if span == 1:
            step = stride
        elif stride != step * span:
            return None
        span *= extent
    return step, inner, column
