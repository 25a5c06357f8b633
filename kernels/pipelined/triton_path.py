"""Plain Triton kernels, one tile a program, no TMA: quickest to start, so they take small tensors;
and what TMA can't take: other GPUs, operands that are not 16-byte aligned or contiguous along rows.

In: pointers and strides in elements, numbers that are specialised for 1 and multiples of 16. Out:
the results, contiguous. Launched by pointwise.py and norms.py. Next: norm_kernel.py.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

import triton
from triton import language as tl

from distmega.expr import Expr
from distmega.kernels.pipelined.exprs import Formula
from distmega.kernels.pipelined.formula import evaluate


@triton.constexpr_function
def _expr(formula: Formula, index: int) -> Expr:
    return formula.exprs[index]


@triton.constexpr_function
def _num_exprs(formula: Formula) -> int:
    return len(formula.exprs)


@triton.jit
def pointwise_plain(x0, x1, x2, x3, x4, x5, x6, x7, y0, y1, y2, y3, row_strides, column_strides,
                    num_columns, num_elements, formula: tl.constexpr, num_inputs: tl.constexpr,
                    flat: tl.constexpr, wide: tl.constexpr, block: tl.constexpr):  # fmt: skip
    """x*: any strides, local memory; y*: contiguous. strides: a tuple with one number an input.

    flat: there is one row. wide: places and offsets need 64 bits.
    """
    inputs = (x0, x1, x2, x3, x4, x5, x6, x7)
    outputs = (y0, y1, y2, y3)
    program = tl.program_id(0)
    if wide:
        program = program.to(tl.int64)
    places = program * block + tl.arange(0, block)
    inside = places < num_elements
    args = ()
    for i in tl.static_range(num_inputs):
        if flat:
            offsets = places * column_strides[i]
        else:
            offsets = places // num_columns * row_strides[i]
            offsets += places % num_columns * column_strides[i]
        args += (tl.load(inputs[i] + offsets, mask=inside).to(tl.float32),)
    for i in tl.static_range(_num_exprs(formula)):
        result = evaluate(_expr(formula, i), args) + tl.zeros([block], tl.float32)
        tl.store(outputs[i] + places, result.to(outputs[i].dtype.element_ty), mask=inside)


@triton.jit
def _normalise(value, inside, num_columns, eps, op: tl.constexpr):
    """Rows [rows, columns] without weight and bias; what lies outside comes as zeros."""
    if op == "rms":
        return value * tl.rsqrt(tl.sum(value * value, 1, keep_dims=True) / num_columns + eps)
    elif op == "layer":
        centred = tl.where(inside, value - tl.sum(value, 1, keep_dims=True) / num_columns, 0.0)
        squares = tl.sum(centred * centred, 1, keep_dims=True)
        return centred * tl.rsqrt(squares / num_columns + eps)
    else:
        value = tl.where(inside, value, float("-inf"))
        powers = tl.exp(value - tl.max(value, 1, keep_dims=True))
        return powers * (1.0 / tl.sum(powers, 1, keep_dims=True))


@triton.jit
def norm_plain(x, residual, weight, bias, y, total, x_row, x_step, residual_row, residual_step,
               num_rows, num_columns, eps, op: tl.constexpr, rows: tl.constexpr,
               padded: tl.constexpr, early: tl.constexpr):  # fmt: skip
    """Tiles of whole rows, `rows` of them with up to `padded` columns. x, residual: any strides;
    weight, bias: [num_columns]; y, total: contiguous; None where there is none; all local memory.

    early: weight and bias are loaded beside x, which takes registers and saves a wait.
    """
    first = tl.program_id(0) * rows
    lines = (first + tl.arange(0, rows))[:, None]
    columns = tl.arange(0, padded)[None, :]
    apart = columns.to(tl.int64)
    inside = (lines < num_rows) & (columns < num_columns)
    far = lines.to(tl.int64)
    value = tl.load(x + far * x_row + apart * x_step, mask=inside, other=0.0).to(tl.float32)
    if early and weight is not None:
        scale = tl.load(weight + columns, mask=columns < num_columns)
    if early and bias is not None:
        shift = tl.load(bias + columns, mask=columns < num_columns)
    if residual is not None:
        place = residual + far * residual_row + apart * residual_step
        value += tl.load(place, mask=inside, other=0.0).to(tl.float32)
        value = value.to(total.dtype.element_ty)
        tl.store(total + far * num_columns + columns, value, mask=inside)
        value = value.to(tl.float32)
    result = _normalise(value, inside, num_columns, eps, op)
    if weight is not None:
        if not early:
            scale = tl.load(weight + columns, mask=columns < num_columns)
        result *= scale.to(tl.float32)
    if bias is not None:
        if not early:
            shift = tl.load(bias + columns, mask=columns < num_columns)
        result += shift.to(tl.float32)
    tl.store(y + far * num_columns + columns, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _load_part(x, residual, columns, inside, x_step, residual_step):
    """Columns of a row of x in fp32, residual added and rounded as the sum is stored."""
    value = tl.load(x + columns.to(tl.int64) * x_step, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        place = residual + columns.to(tl.int64) * residual_step
        value += tl.load(place, mask=inside, other=0.0).to(tl.float32)
        value = value.to(x.dtype.element_ty).to(tl.float32)
    return value


@triton.jit
def long_norm_plain(x, residual, weight, bias, y, total, x_row, x_step, residual_row, residual_step,
                    num_columns, eps, op: tl.constexpr, block: tl.constexpr):  # fmt: skip
    """As norm_plain for rows of any length: one program a row, which it passes three times."""
    row = tl.program_id(0).to(tl.int64)
    x += row * x_row
    if residual is not None:
        residual += row * residual_row
    lanes = tl.arange(0, block)
    first = tl.zeros([block], tl.float32)
    if op == "softmax":
        first -= float("inf")
    for start in range(0, num_columns, block):
        columns = start + lanes
        inside = columns < num_columns
        value = _load_part(x, residual, columns, inside, x_step, residual_step)
        if residual is not None:
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
        apart = _load_part(x, residual, columns, inside, x_step, residual_step) - offset
        part = tl.exp(apart) if op == "softmax" else apart * apart
        second += tl.where(inside, part, 0.0)
    spread = tl.sum(second, 0)
    scale = 1.0 / spread if op == "softmax" else tl.rsqrt(spread / num_columns + eps)
    for start in range(0, num_columns, block):
        columns = start + lanes
        inside = columns < num_columns
        value = _load_part(x, residual, columns, inside, x_step, residual_step) - offset
        value = tl.exp(value) if op == "softmax" else value
        value *= scale
        if weight is not None:
            value *= tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            value += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + row * num_columns + columns, value.to(y.dtype.element_ty), mask=inside)
