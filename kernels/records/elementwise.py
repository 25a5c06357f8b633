"""Bodies of formulas and copies: by boxes of two dims where elements lie side by side, else element
by element.

In: a record and the arenas. Out: what the instruction of the same name writes (isa/opcodes.py).
Boxes are compiled for their very strides, so that a load or store moves up to 16 bytes a thread.
Next on the walk: points.py.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201, RUF005
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, no-any-return"

import triton
from triton import language as tl

from distmega.kernels.records.formulas import evaluate
from distmega.kernels.records.points import BLOCK, num_points, offset_of
from distmega.kernels.records.specs import RecordSpec
from distmega.kernels.records.words import (
    INTEGERS,
    by_strides,
    extra_operand,
    extra_stride,
    multiple,
    number,
    operand,
    read,
    write,
)


@triton.constexpr_function
def formula_of(spec: RecordSpec):
    return spec.formula


@triton.constexpr_function
def num_own(spec: RecordSpec):
    """Operands of a Pointwise that are its own fields."""
    return sum(one is not None for one in spec.operands) - 1


@triton.constexpr_function
def num_args(spec: RecordSpec):
    return num_own(spec) + len(spec.extra)


@triton.constexpr_function
def name_of(spec: RecordSpec, nth):
    """Of an operand of a Pointwise its field, or its number among those before the record."""
    present = [n for n in range(4) if spec.operands[1 + n] is not None]
    return f"a{present[nth]}" if nth < len(present) else nth - len(present)


@triton.constexpr_function
def is_own(spec: RecordSpec, nth):
    return nth < num_own(spec)


@triton.constexpr_function
def strides_of(name):
    return f"{name}_strides"


@triton.constexpr_function
def formula_type(spec: RecordSpec):
    """In which constants of a formula meet its operands."""
    dtypes = [one.dtype for one in (*spec.operands[1:], *spec.extra) if one is not None]
    if all(dtype in INTEGERS for dtype in dtypes):
        return tl.int64
    return tl.float64 if "f64" in dtypes else tl.float32


@triton.constexpr_function
def width_of(spec: RecordSpec, dim):
    """Rows (0) or columns (1) of a box."""
    return spec.widths[dim]


@triton.constexpr_function
def dim_of(spec: RecordSpec, dim):
    """Which dim of a copy has the rows or the columns of a box."""
    return spec.widths[3 + dim]


@triton.constexpr_function
def step_of(spec: RecordSpec, nth, dim):
    """Of operand number nth, the written one first, along rows or columns."""
    return spec.steps[2 * nth + dim]


@triton.constexpr_function
def unit_of_extent(spec: RecordSpec, dim):
    return spec.units[dim]


@triton.constexpr_function
def unit_of_first(spec: RecordSpec, nth):
    """What divides the first element of operand number nth, the written one first."""
    return spec.units[2 + nth]


@triton.constexpr_function
def num_stages(spec: RecordSpec):
    """Boxes whose operands are on their way, and the one that is made."""
    return spec.widths[2]


@triton.jit
def argument(record, arenas, spec: tl.constexpr, nth: tl.constexpr, unit: tl.constexpr = 1):
    """Pointer to the first element of an operand of a Pointwise."""
    if is_own(spec, nth):
        return operand(record, arenas, spec, name_of(spec, nth), unit)
    else:
        return extra_operand(record, arenas, spec, name_of(spec, nth), unit)


@triton.jit
def argument_stride(record, spec: tl.constexpr, nth: tl.constexpr, dim: tl.constexpr):
    if is_own(spec, nth):
        return number(record, spec, strides_of(name_of(spec, nth)), dim)
    else:
        return extra_stride(record, spec, name_of(spec, nth), dim)


@triton.jit
def arguments(record, arenas, spec: tl.constexpr, i, j, mask, count: tl.constexpr):
    """The first `count` operands of points [i, j], a block each."""
    if count == 0:
        return ()
    else:
        nth: tl.constexpr = count - 1
        offsets = i * argument_stride(record, spec, nth, 0)
        offsets += j * argument_stride(record, spec, nth, 1)
        x = argument(record, arenas, spec, nth)
        found = read(x + offsets, mask, spec, name_of(spec, nth))
        return arguments(record, arenas, spec, i, j, mask, nth) + (found,)


@triton.jit
def box_arguments(record, arenas, spec: tl.constexpr, i, j, rows, columns, count: tl.constexpr):
    """The first `count` operands of a box, of one row or column where all are alike."""
    if count == 0:
        return ()
    else:
        nth: tl.constexpr = count - 1
        x = argument(record, arenas, spec, nth, unit_of_first(spec, count))
        if step_of(spec, count, 0) == 0:
            found = read(x + j * step_of(spec, count, 1), columns, spec, name_of(spec, nth))
        elif step_of(spec, count, 1) == 0:
            found = read(x + i * step_of(spec, count, 0), rows, spec, name_of(spec, nth))
        else:
            near = x + i * step_of(spec, count, 0) + j * step_of(spec, count, 1)
            found = read(near, rows & columns, spec, name_of(spec, nth))
        return box_arguments(record, arenas, spec, i, j, rows, columns, nth) + (found,)


@triton.jit
def pointwise(record, arenas, spec: tl.constexpr):
    if by_strides(spec):
        boxes_of_formula(record, arenas, spec)
    else:
        elements_of_formula(record, arenas, spec)


@triton.jit
def boxes_of_formula(record, arenas, spec: tl.constexpr):
    num_rows = multiple(record, spec, "extents", unit_of_extent(spec, 0), 0)
    num_columns = multiple(record, spec, "extents", unit_of_extent(spec, 1), 1)
    out = operand(record, arenas, spec, "out", unit_of_first(spec, 0))
    across = tl.cdiv(num_columns, width_of(spec, 1))
    for box in tl.range(
        0, tl.cdiv(num_rows, width_of(spec, 0)) * across, num_stages=num_stages(spec)
    ):
        i = box // across * width_of(spec, 0) + tl.arange(0, width_of(spec, 0))[:, None]
        j = box % across * width_of(spec, 1) + tl.arange(0, width_of(spec, 1))[None, :]
        rows, columns = i < num_rows, j < num_columns
        args = box_arguments(record, arenas, spec, i, j, rows, columns, num_args(spec))
        found = evaluate(formula_of(spec), args, formula_type(spec))
        found = tl.broadcast_to(found, (width_of(spec, 0), width_of(spec, 1)))
        to = out + i * step_of(spec, 0, 0) + j * step_of(spec, 0, 1)
        write(to, found, rows & columns, spec, "out")


@triton.jit
def elements_of_formula(record, arenas, spec: tl.constexpr):
    rows, columns = number(record, spec, "extents", 0), number(record, spec, "extents", 1)
    out = operand(record, arenas, spec, "out")
    step_i, step_j = number(record, spec, "out_strides", 0), number(record, spec, "out_strides", 1)
    for start in range(0, rows * columns, BLOCK):
        point = start + tl.arange(0, BLOCK)
        mask = point < rows * columns
        i, j = point // columns, point % columns
        args = arguments(record, arenas, spec, i, j, mask, num_args(spec))
        found = evaluate(formula_of(spec), args, formula_type(spec))
        write(out + i * step_i + j * step_j, found, mask, spec, "out")


@triton.jit
def copy(record, arenas, spec: tl.constexpr):
    if by_strides(spec):
        boxes_of_copy(record, arenas, spec)
    else:
        elements_of_copy(record, arenas, spec)


@triton.constexpr_function
def is_outer(spec: RecordSpec, dim):
    """Whether boxes lie apart along a dim of a copy."""
    return dim not in spec.widths[3:]


@triton.jit
def outer_offset(record, spec: tl.constexpr, strides: tl.constexpr, point, unit: tl.constexpr):
    """Element of a point of the dims that are not a box's; `unit` divides it."""
    offset, rest = point * 0, point
    for back in tl.static_range(6):
        if is_outer(spec, 5 - back):
            extent = number(record, spec, "extents", 5 - back)
            offset += rest % extent * number(record, spec, strides, 5 - back)
            rest = rest // extent
    return offset // unit * unit


@triton.jit
def boxes_of_copy(record, arenas, spec: tl.constexpr):
    num_rows = multiple(record, spec, "extents", unit_of_extent(spec, 0), dim_of(spec, 0))
    num_columns = multiple(record, spec, "extents", unit_of_extent(spec, 1), dim_of(spec, 1))
    dst = operand(record, arenas, spec, "dst", unit_of_first(spec, 0))
    src = operand(record, arenas, spec, "src", unit_of_first(spec, 1))
    for outer in range(num_points(record, spec, 6) // (num_rows * num_columns)):
        to = dst + outer_offset(record, spec, "dst_strides", outer, unit_of_first(spec, 0))
        near = src + outer_offset(record, spec, "src_strides", outer, unit_of_first(spec, 1))
        for row in range(0, num_rows, width_of(spec, 0)):
            i = row + tl.arange(0, width_of(spec, 0))[:, None]
            for column in range(0, num_columns, width_of(spec, 1)):
                j = column + tl.arange(0, width_of(spec, 1))[None, :]
                mask = (i < num_rows) & (j < num_columns)
                at = near + i * step_of(spec, 1, 0) + j * step_of(spec, 1, 1)
                found = read(at, mask, spec, "src")
                at = to + i * step_of(spec, 0, 0) + j * step_of(spec, 0, 1)
                write(at, found, mask, spec, "dst")


@triton.jit
def elements_of_copy(record, arenas, spec: tl.constexpr):
    src, dst = operand(record, arenas, spec, "src"), operand(record, arenas, spec, "dst")
    total = num_points(record, spec, 6)
    for start in range(0, total, BLOCK):
        point = start + tl.arange(0, BLOCK)
        mask = point < total
        found = read(src + offset_of(record, spec, "src_strides", point, 6), mask, spec, "src")
        write(dst + offset_of(record, spec, "dst_strides", point, 6), found, mask, spec, "dst")
