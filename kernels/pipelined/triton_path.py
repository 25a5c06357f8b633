"""Plain Triton kernels for what TMA can't take: other GPUs, operands that are not 16-byte aligned
or not contiguous along rows.

In: pointers and strides in elements. Out: the results, contiguous. Launched by pointwise.py and
norms.py. Next: norm_kernel.py.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from dataclasses import dataclass

import triton
from triton import language as tl

from distmega.expr import Expr
from distmega.kernels.pipelined.formula import evaluate

BLOCK = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Exprs:
    """The expressions of a kernel, one an output; Triton would take a plain tuple apart."""

    exprs: tuple[Expr, ...]


@triton.constexpr_function
def _expr(spec: Exprs, index: int) -> Expr:
    return spec.exprs[index]


@triton.constexpr_function
def _num_exprs(spec: Exprs) -> int:
    return len(spec.exprs)


@triton.jit(do_not_specialize=["num_columns", "num_elements"])
def pointwise_any(x0, x1, x2, x3, x4, x5, x6, x7, y0, y1, y2, y3, row_strides, column_strides,
                  num_columns, num_elements, spec: tl.constexpr, num_inputs: tl.constexpr,
                  block: tl.constexpr):  # fmt: skip
    """x*: any strides, local memory; y*: contiguous. strides: a tuple with one number an input."""
    inputs = (x0, x1, x2, x3, x4, x5, x6, x7)
    outputs = (y0, y1, y2, y3)
    places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = places < num_elements
    rows = places // num_columns
    columns = places % num_columns
    args = ()
    for i in tl.static_range(num_inputs):
        offsets = rows * row_strides[i] + columns * column_strides[i]
        args += (tl.load(inputs[i] + offsets, mask=inside).to(tl.float32),)
    for i in tl.static_range(_num_exprs(spec)):
        result = evaluate(_expr(spec, i), args) + tl.zeros([block], tl.float32)
        tl.store(outputs[i] + places, result.to(outputs[i].dtype.element_ty), mask=inside)


@triton.jit
def _load_row(x, residual, columns, inside, x_step, residual_step, has_residual: tl.constexpr):
    """Columns of a row of x in fp32, residual added and rounded as the sum is stored."""
    value = tl.load(x + columns.to(tl.int64) * x_step, mask=inside, other=0.0).to(tl.float32)
    if has_residual:
        place = residual + columns.to(tl.int64) * residual_step
        value += tl.load(place, mask=inside, other=0.0).to(tl.float32)
        value = value.to(x.dtype.element_ty).to(tl.float32)
    return value


@triton.jit(do_not_specialize=["num_columns"])
def norm_any(x, residual, weight, bias, y, total, x_row, x_step, residual_row, residual_step,
             num_columns, eps, op: tl.constexpr, has_residual: tl.constexpr,
             has_weight: tl.constexpr, has_bias: tl.constexpr, block: tl.constexpr):  # fmt: skip
    """One program a row, which it passes three times in blocks. x, residual: [rows, num_columns] of
    any strides; weight, bias: [num_columns]; y, total: contiguous; all local memory.
    """
    row = tl.program_id(0).to(tl.int64)
    x += row * x_row
    if has_residual:
        residual += row * residual_row
    lanes = tl.arange(0, block)
    first = tl.zeros([block], tl.float32)
    if op == "softmax":
        first -= float("inf")
    for start in range(0, num_columns, block):
        columns = start + lanes
        inside = columns < num_columns
        value = _load_row(x, residual, columns, inside, x_step, residual_step, has_residual)
        if has_residual:
            tl.store(total + row * num_columns + columns, value.to(total.dtype.element_ty),
                     mask=inside)  # fmt: skip
        if op == "softmax":
            first = tl.where(inside, tl.maximum(first, value), first)
        else:
            first += value
    offset = 0.0
    if op == "softmax":
        offset = tl.max(first, 0)
    elif op == "layer":
        offset = tl.sum(first, 0) / num_columns
    second = tl.zeros([block], tl.float32)
    for start in range(0, num_columns, block):
        columns = start + lanes
        inside = columns < num_columns
        value = _load_row(x, residual, columns, inside, x_step, residual_step, has_residual)
        apart = value - offset
        part = tl.exp(apart) if op == "softmax" else apart * apart
        second += tl.where(inside, part, 0.0)
    spread = tl.sum(second, 0)
    scale = 1.0 / spread if op == "softmax" else tl.rsqrt(spread / num_columns + eps)
    for start in range(0, num_columns, block):
        columns = start + lanes
        inside = columns < num_columns
        value = _load_row(x, residual, columns, inside, x_step, residual_step, has_residual)
        value -= offset
        value = tl.exp(value) if op == "softmax" else value
        value *= scale
        if has_weight:
            value *= tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        if has_bias:
            value += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + row * num_columns + columns, value.to(y.dtype.element_ty), mask=inside)
