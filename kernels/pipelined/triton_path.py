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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from distmega.kernels.pipelined.pointwise.exprs import Formula
from distmega.kernels.pipelined.pointwise.formula import evaluate
from distmega.program.expr import Expr


@triton.constexpr_function
def _expr(formula: Formula, index: int) -> Expr:
    return formula.exprs[index]


@triton.constexpr_function
def _num_exprs(formula: Formula) -> int:
    return len(formula.exprs)


@triton.jit
def pointwise_plain(x0, x1, x2, x3, x4, x5, x6, x7, y0, y1, y2, y3, row_strides, column_strides,
                    num_columns, num_elements, formula: tl.constexpr, num_inputs: tl.constexpr,
                    flat: tl.constexpr, wide: tl.constexpr, block: tl.constexpr,
                    exact: tl.constexpr, once: tl.constexpr):  # fmt: skip
    """x0 to x7: inputs in local memory, of any float type, read; y0 to y3: results, contiguous, of
    num_elements, written. None behind the num_inputs inputs and the results of `formula`.

    row_strides, column_strides: a tuple each, of every input's steps in elements, 0 where it is
    broadcast. num_columns: of a row. flat: there is one row. block: elements of a program. wide:
    places and offsets need 64 bits. exact: blocks end where the elements do. once: inputs leave the
    cache first.
    """
    inputs = (x0, x1, x2, x3, x4, x5, x6, x7)
    outputs = (y0, y1, y2, y3)
    policy: tl.constexpr = "evict_first" if once else ""
    program = tl.program_id(0)
    if wide:
        program = program.to(tl.int64)
    positions = program * block + tl.arange(0, block)
    inside = tl.full([block], True, tl.int1) if exact else positions < num_elements
    args = ()
    for i in tl.static_range(num_inputs):
        if flat:
            offsets = positions * column_strides[i]
        else:
            offsets = positions // num_columns * row_strides[i]
            offsets += positions % num_columns * column_strides[i]
        value = tl.load(inputs[i] + offsets, mask=inside, eviction_policy=policy)
        args += (value.to(tl.float32),)
    for i in tl.static_range(_num_exprs(formula)):
        result = evaluate(_expr(formula, i), args) + tl.zeros([block], tl.float32)
        tl.store(outputs[i] + positions, result.to(outputs[i].dtype.element_ty), mask=inside)


@triton.jit
def normalise_tile(value, inside, num_columns, eps, op: tl.constexpr):
    """Rows [rows, columns] without weight and bias; what lies outside comes as zeros."""
    if op == "rms_norm":
        return value * tl.rsqrt(tl.sum(value * value, 1, keep_dims=True) / num_columns + eps)
    elif op == "layer_norm":
        centred = tl.where(inside, value - tl.sum(value, 1, keep_dims=True) / num_columns, 0.0)
        squares = tl.sum(centred * centred, 1, keep_dims=True)
        return centred * tl.rsqrt(squares / num_columns + eps)
    else:
        value = tl.where(inside, value, float("-inf"))
        powers = tl.exp(value - tl.max(value, 1, keep_dims=True))
        return powers * (1.0 / tl.sum(powers, 1, keep_dims=True))


@triton.jit
def _load_vector(vector, columns, valid):
    """Weight or bias; a zero where there is none."""
    if vector is None:
        return tl.zeros([1, 1], tl.float32)
    else:
        return tl.load(vector + columns, mask=valid)


@triton.jit
def norm_plain(x, residual, weight, bias, y, total, x_row, x_step, residual_row, residual_step,
               num_rows, num_columns, eps, op: tl.constexpr, rows: tl.constexpr,
               padded: tl.constexpr, vectors: tl.constexpr, exact: tl.constexpr,
               early: tl.constexpr):  # fmt: skip
    """Tiles of whole rows, `rows` of them with up to `padded` columns, of num_rows by num_columns.
    x, residual: read, elements of a row x_step and residual_step apart, rows x_row, residual_row;
    weight, bias: [num_columns], read; y, total: contiguous, written, the result and the sum of x
    and residual; None where there is none; all local memory, any float type.

    eps: of the norm; op: rms_norm, layer_norm or softmax. vectors: when weight and bias are loaded,
    see KernelChoice. exact: x and residual are contiguous, and tiles end where they do. early: the
    launch may begin before what came before it ends.
    """
    if early:
        gdc_launch_dependents()
        gdc_wait()
    columns = tl.arange(0, padded)[None, :]
    first = tl.program_id(0).to(tl.int64) * rows
    lines = tl.arange(0, rows)[:, None]
    if exact:
        inside = tl.full([rows, padded], True, tl.int1)
        valid = tl.full([1, padded], True, tl.int1)
        positions = lines * padded + columns
        x_positions = positions
        residual_positions = positions
        x += first * padded
        start = first * padded
        length = padded
        if residual is not None:
            residual += first * padded
    else:
        valid = columns < num_columns
        inside = (first + lines < num_rows) & valid
        far = first + lines
        apart = columns.to(tl.int64)
        x_positions = far * x_row + apart * x_step
        residual_positions = far * residual_row + apart * residual_step
        positions = far * num_columns + columns
        start = 0
        length = num_columns
    value = tl.load(x + x_positions, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        more = tl.load(residual + residual_positions, mask=inside, other=0.0)
    if vectors == "beside":
        scale = _load_vector(weight, columns, valid)
        shift = _load_vector(bias, columns, valid)
    if residual is not None:
        value += more.to(tl.float32)
        value = value.to(total.dtype.element_ty)
        tl.store(total + start + positions, value, mask=inside)
        value = value.to(tl.float32)
    if vectors == "before":
        scale = _load_vector(weight, columns, valid)
        shift = _load_vector(bias, columns, valid)
    result = normalise_tile(value, inside, length, eps, op)
    if vectors == "after":
        scale = _load_vector(weight, columns, valid)
        shift = _load_vector(bias, columns, valid)
    if weight is not None:
        result *= scale.to(tl.float32)
    if bias is not None:
        result += shift.to(tl.float32)
    tl.store(y + start + positions, result.to(y.dtype.element_ty), mask=inside)
