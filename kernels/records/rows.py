"""Bodies of instructions that take rows as a whole: reductions, norms, scans, the largest elements.

In: a record and the arenas. Out: what the instruction of the same name writes (isa/opcodes.py). A
row passes through the SM a block at a time, as often as its statistics need; norms read those that
fit it once, several rows at a time. Next on the walk: products.py.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, no-any-return"

import triton
from triton import language as tl

from distmega.kernels.isa.opcodes import SCANS
from distmega.kernels.records.points import combined, coordinate
from distmega.kernels.records.specs import NORM_UNITS, RecordSpec
from distmega.kernels.records.words import (
    by_strides,
    has,
    multiple,
    number,
    operand,
    read,
    real,
    way_of,
    wide_type,
    write,
)

COLUMNS: tl.constexpr = tl.constexpr(1024)
"""Elements of a row that an SM has at a time."""
POINTS: tl.constexpr = tl.constexpr(64)
"""Results of a reduction that it makes together, and elements of each that it has at a time."""
DEPTH: tl.constexpr = tl.constexpr(16)
OF_PRODUCTS = SCANS[1]
"""The scan that multiplies."""
UNITS = {name: n for n, name in enumerate(NORM_UNITS)}
STEPS = {"x": 0, "out": 2, "weight": 4, "bias": 5}
"""Where the spec of a norm of whole rows has the strides of an operand."""
NO_INDEX: tl.constexpr = tl.constexpr(2**62)


@triton.constexpr_function
def start_of(way, dtype):
    """What changes nothing."""
    whole = dtype == tl.int64
    if way == "sum":
        return 0
    least = -(2**63) if whole else float("-inf")
    most = 2**63 - 1 if whole else float("inf")
    return least if way == "max" else most


@triton.constexpr_function
def is_scan_of_products(spec: RecordSpec):
    return spec.way == OF_PRODUCTS


@triton.jit
def plus(x, y):
    return x + y


@triton.jit
def times(x, y):
    return x * y


@triton.jit
def larger(x, y):
    return combined(x, y, "max")


@triton.jit
def smaller(x, y):
    return combined(x, y, "min")


@triton.jit
def over(x, axis: tl.constexpr, way: tl.constexpr):
    """Combines a dim of a block."""
    if way == "sum":
        return tl.reduce(x, axis, plus)
    elif way == "max":
        return tl.reduce(x, axis, larger)
    else:
        return tl.reduce(x, axis, smaller)


@triton.jit
def reduce(record, arenas, spec: tl.constexpr):
    x, out = operand(record, arenas, spec, "x"), operand(record, arenas, spec, "out")
    rows, depth = number(record, spec, "extents", 0), number(record, spec, "extents", 1)
    columns, step = number(record, spec, "extents", 2), number(record, spec, "x_strides", 1)
    least: tl.constexpr = start_of(way_of(spec), wide_type(spec, "x"))
    for start in range(0, rows * columns, POINTS):
        point = start + tl.arange(0, POINTS)
        mask = point < rows * columns
        i, j = point // columns, point % columns
        near = x + i * number(record, spec, "x_strides", 0)
        near += j * number(record, spec, "x_strides", 2)
        found = tl.full([POINTS], least, wide_type(spec, "x"))
        for first in range(0, depth, DEPTH):
            r = first + tl.arange(0, DEPTH)
            there = mask[:, None] & (r < depth)[None, :]
            part = read(near[:, None] + (r * step)[None, :], there, spec, "x")
            part = tl.where(there, part, least)
            found = combined(found, over(part, 1, way_of(spec)), way_of(spec))
        to = out + i * number(record, spec, "out_strides", 0)
        write(to + j * number(record, spec, "out_strides", 1), found, mask, spec, "out")


@triton.constexpr_function
def rows_at_once(spec: RecordSpec):
    return spec.widths[0]


@triton.constexpr_function
def row_width(spec: RecordSpec):
    return spec.widths[1]


@triton.constexpr_function
def unit_of(spec: RecordSpec, name):
    """What divides one of NORM_UNITS."""
    return spec.units[UNITS[name]]


@triton.constexpr_function
def step_of(spec: RecordSpec, name, dim):
    """Of x and out along rows and columns, of weight and bias along columns alone."""
    return spec.steps[STEPS[name] + dim]


@triton.jit
def norm(record, arenas, spec: tl.constexpr):
    if by_strides(spec):
        norm_of_rows(record, arenas, spec)
    else:
        norm_by_blocks(record, arenas, spec)


@triton.jit
def vector(record, arenas, spec: tl.constexpr, name: tl.constexpr, i, mask):
    """Elements i of a weight or bias, one row."""
    start = operand(record, arenas, spec, name, unit_of(spec, name))
    return read(start + i * step_of(spec, name, 0), mask, spec, name)[None, :]


@triton.jit
def norm_of_rows(record, arenas, spec: tl.constexpr):
    """Of rows that are read once, several together."""
    x = operand(record, arenas, spec, "x", unit_of(spec, "x"))
    out = operand(record, arenas, spec, "out", unit_of(spec, "out"))
    rows, dim = number(record, spec, "rows"), multiple(record, spec, "dim", unit_of(spec, "dim"))
    first = multiple(record, spec, "start", unit_of(spec, "start"))
    count = multiple(record, spec, "count", unit_of(spec, "count"))
    i = tl.arange(0, row_width(spec))
    inside, written = i < dim, (i >= first) & (i < first + count)
    for m0 in range(0, rows, rows_at_once(spec)):
        m = m0 + tl.arange(0, rows_at_once(spec))
        there = (m < rows)[:, None]
        near = (m * step_of(spec, "x", 0))[:, None] + (i * step_of(spec, "x", 1))[None, :]
        found = read(x + near, there & inside[None, :], spec, "x")
        found = normalised(found, inside[None, :], dim, real(record, spec, "eps"), spec)
        if has(spec, "weight"):
            found = found * vector(record, arenas, spec, "weight", i, inside)
        if has(spec, "bias"):
            found = found + vector(record, arenas, spec, "bias", i, inside)
        to = (m * step_of(spec, "out", 0))[:, None] + ((i - first) * step_of(spec, "out", 1))[
            None, :
        ]
        write(out + to, found, there & written[None, :], spec, "out")


@triton.jit
def normalised(found, inside, dim, eps, spec: tl.constexpr):
    """Rows, zero behind their ends."""
    if way_of(spec) == "softmax":
        found = tl.where(inside, found, float("-inf"))
        found = tl.exp(found - tl.max(found, 1, keep_dims=True))
        return found * (1.0 / tl.sum(found, 1, keep_dims=True))
    else:
        if way_of(spec) == "layer_norm":
            found = tl.where(inside, found - tl.sum(found, 1, keep_dims=True) / dim, 0.0)
        mean = tl.sum(found * found, 1, keep_dims=True) / dim
        return found * (1.0 / tl.sqrt(mean + eps.to(found.dtype)))


@triton.jit
def norm_by_blocks(record, arenas, spec: tl.constexpr):
    """Of rows that pass block by block."""
    x, out = operand(record, arenas, spec, "x"), operand(record, arenas, spec, "out")
    rows, dim = number(record, spec, "rows"), number(record, spec, "dim")
    first, count = number(record, spec, "start"), number(record, spec, "count")
    step, out_step = number(record, spec, "x_strides", 1), number(record, spec, "out_strides", 1)
    wide: tl.constexpr = wide_type(spec, "x")
    for m in range(rows):
        row = x + m * number(record, spec, "x_strides", 0)
        shift, factor = statistics(row, step, dim, real(record, spec, "eps"), spec, wide)
        to = out + m * number(record, spec, "out_strides", 0)
        for start in range(0, count, COLUMNS):
            at = start + tl.arange(0, COLUMNS)
            mask = at < count
            i = at + first
            found = read(row + i * step, mask, spec, "x") - shift
            if way_of(spec) == "softmax":
                found = tl.exp(found)
            found = found * factor
            if has(spec, "weight"):
                weight = operand(record, arenas, spec, "weight")
                stride = number(record, spec, "vector_strides", 0)
                found = found * read(weight + i * stride, mask, spec, "weight")
            if has(spec, "bias"):
                bias = operand(record, arenas, spec, "bias")
                stride = number(record, spec, "vector_strides", 1)
                found = found + read(bias + i * stride, mask, spec, "bias")
            write(to + at * out_step, found, mask, spec, "out")


@triton.jit
def statistics(row, step, dim, eps, spec: tl.constexpr, wide: tl.constexpr):
    """What is taken from each element of a row, and the factor behind: of a softmax in between is
    the exponential.
    """
    if way_of(spec) == "rms_norm":
        shift = tl.full([1], 0.0, wide)
    elif way_of(spec) == "layer_norm":
        shift = sum_of(row, step, dim, tl.full([1], 0.0, wide), spec, wide, "plain") / dim
    else:
        shift = largest_of(row, step, dim, spec, wide)
    if way_of(spec) == "softmax":
        return shift, 1.0 / sum_of(row, step, dim, shift, spec, wide, "exp")
    else:
        mean = sum_of(row, step, dim, shift, spec, wide, "square") / dim
        return shift, 1.0 / tl.sqrt(mean + eps.to(wide))


@triton.jit
def sum_of(row, step, dim, shift, spec: tl.constexpr, wide: tl.constexpr, how: tl.constexpr):
    """Of a row's elements less `shift`, their squares or exponentials."""
    total = tl.full([COLUMNS], 0.0, wide)
    for start in range(0, dim, COLUMNS):
        i = start + tl.arange(0, COLUMNS)
        mask = i < dim
        found = read(row + i * step, mask, spec, "x") - shift
        if how == "square":
            found = found * found
        elif how == "exp":
            found = tl.exp(found)
        total += tl.where(mask, found, 0.0)
    return tl.sum(total, 0, keep_dims=True)


@triton.jit
def largest_of(row, step, dim, spec: tl.constexpr, wide: tl.constexpr):
    """Of a row."""
    found = tl.full([COLUMNS], float("-inf"), wide)
    for start in range(0, dim, COLUMNS):
        i = start + tl.arange(0, COLUMNS)
        part = read(row + i * step, i < dim, spec, "x")
        found = tl.where((i < dim) & (part > found), part, found)
    return tl.max(found, 0, keep_dims=True)


@triton.jit
def scan(record, arenas, spec: tl.constexpr):
    x, out = operand(record, arenas, spec, "x"), operand(record, arenas, spec, "out")
    rows, first = number(record, spec, "rows"), number(record, spec, "start")
    count = number(record, spec, "count")
    wide: tl.constexpr = wide_type(spec, "x")
    step, out_step = number(record, spec, "x_strides", 1), number(record, spec, "out_strides", 1)
    for m in range(rows):
        row = x + m * number(record, spec, "x_strides", 0)
        to = out + m * number(record, spec, "out_strides", 0)
        neutral: tl.constexpr = 1 if is_scan_of_products(spec) else 0
        carried = tl.full([1], neutral, wide)
        for start in range(0, first + count, COLUMNS):
            i = start + tl.arange(0, COLUMNS)
            mask = i < first + count
            part = tl.where(mask, read(row + i * step, mask, spec, "x"), neutral)
            if is_scan_of_products(spec):
                found = tl.associative_scan(part, 0, times) * carried
                carried = tl.reduce(part, 0, times, keep_dims=True) * carried
            else:
                found = tl.associative_scan(part, 0, plus) + carried
                carried = tl.reduce(part, 0, plus, keep_dims=True) + carried
            write(to + (i - first) * out_step, found, mask & (i >= first), spec, "out")


@triton.constexpr_function
def most_of(dtype):
    """No element is before it in the order of falling values."""
    return 2**63 - 1 if dtype == tl.int64 else float("nan")


@triton.jit
def above(x, y):
    """Whether x is larger than y; what is no number is the largest."""
    return (x > y) | ((x != x) & (y == y))


@triton.jit
def best_below(row, step, extent, last, last_at, spec: tl.constexpr):
    """The largest element of a row behind (last, last_at) in the order of falling values, of which
    those that are no numbers come first, the lowest index first where values tie; and its index.
    """
    wide: tl.constexpr = wide_type(spec, "x")
    least: tl.constexpr = start_of("max", wide)
    best = tl.full([COLUMNS], least, wide)
    where = tl.full([COLUMNS], NO_INDEX, tl.int64)
    for start in range(0, extent, COLUMNS):
        i = (start + tl.arange(0, COLUMNS)).to(tl.int64)
        mask = i < extent
        part = read(row + i * step, mask, spec, "x")
        ties = (part == last) | ((part != part) & (last != last))
        behind = above(last, part) | (ties & (i > last_at))
        better = mask & behind & (above(part, best) | (where == NO_INDEX))
        best, where = tl.where(better, part, best), tl.where(better, i, where)
    best = tl.where(where == NO_INDEX, least, best)
    found = tl.max(best, 0, keep_dims=True)
    if wide != tl.int64:
        is_none = tl.max((best != best).to(tl.int32), 0, keep_dims=True) > 0
        found = tl.where(is_none, float("nan"), found)
    same = (best == found) | ((best != best) & (found != found))
    return found, tl.min(tl.where(same, where, NO_INDEX), 0, keep_dims=True)


@triton.jit
def argmax(record, arenas, spec: tl.constexpr, team):
    x = operand(record, arenas, spec, "x")
    value, index = operand(record, arenas, spec, "value"), operand(record, arenas, spec, "index")
    rows, step = number(record, spec, "rows"), number(record, spec, "step")
    base = coordinate(team, record, spec) * number(record, spec, "stride")
    left = number(record, spec, "extent") - base
    extent = tl.maximum(0, tl.minimum(number(record, spec, "columns"), left))
    wide: tl.constexpr = wide_type(spec, "x")
    always = tl.full([1], True, tl.int1)
    for m in range(rows):
        row = x + m * number(record, spec, "row_strides", 0)
        first = tl.full([1], most_of(wide), wide)
        found, at = best_below(row, step, extent, first, tl.full([1], -1, tl.int64), spec)
        at = tl.where(at == NO_INDEX, 0, at)
        zero = tl.arange(0, 1)
        to = value + m * number(record, spec, "row_strides", 1) + zero
        write(to, found, always, spec, "value")
        to = index + m * number(record, spec, "row_strides", 2) + zero
        write(to, at + base, always, spec, "index")


@triton.jit
def top(record, arenas, spec: tl.constexpr):
    x, values = operand(record, arenas, spec, "x"), operand(record, arenas, spec, "values")
    rows, extent = number(record, spec, "rows"), number(record, spec, "extent")
    step = number(record, spec, "x_strides", 1)
    wide: tl.constexpr = wide_type(spec, "x")
    always, zero = tl.full([1], True, tl.int1), tl.arange(0, 1)
    for m in range(rows):
        row = x + m * number(record, spec, "x_strides", 0)
        last = tl.full([1], most_of(wide), wide)
        at = tl.full([1], -1, tl.int64)
        for nth in range(number(record, spec, "num_top")):
            last, at = best_below(row, step, extent, last, at, spec)
            to = values + m * number(record, spec, "value_strides", 0) + zero
            write(to + nth * number(record, spec, "value_strides", 1), last, always, spec, "values")
            if has(spec, "index"):
                index = operand(record, arenas, spec, "index")
                to = index + m * number(record, spec, "index_strides", 0) + zero
                to += nth * number(record, spec, "index_strides", 1)
                write(to, at, always, spec, "index")
