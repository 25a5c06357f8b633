"""Bodies of instructions that make each element for itself: what is looked up, rotated, appended,
sent, of which ranks have parts.

In: a record and the arenas. Out: what the instruction of the same name writes (isa/opcodes.py).
Indices are bounded, so that nothing outside an operand is touched. Next on the walk: rows.py.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, no-any-return"

import triton
from triton import language as tl

from distmega.kernels.records.words import (
    element_type,
    has,
    number,
    opcode_of,
    operand,
    read,
    typed,
    way_of,
    word_of,
    write,
)

BLOCK: tl.constexpr = tl.constexpr(1024)
"""Elements that an SM works on together."""
COORDINATES, PEERS, NUM_RANKS = (tl.constexpr(n) for n in range(3))
"""What bodies are told of the team: this rank's int32 coordinates along mesh axes, the int64
addresses of the memory of each rank that peers write in this launch, how many ranks there are.
"""


@triton.jit
def offset_of(record, spec: tl.constexpr, strides: tl.constexpr, point, dims: tl.constexpr = 4):
    """Element of a point of an iteration space."""
    offset, rest = point * 0, point
    for back in tl.static_range(dims):
        extent = number(record, spec, "extents", dims - 1 - back)
        offset += rest % extent * number(record, spec, strides, dims - 1 - back)
        rest = rest // extent
    return offset


@triton.jit
def num_points(record, spec: tl.constexpr, dims: tl.constexpr):
    """Points of an iteration space."""
    total = 1
    for dim in tl.static_range(dims):
        total *= number(record, spec, "extents", dim)
    return total


@triton.jit
def coordinate(team, record, spec: tl.constexpr):
    """This rank's along the mesh axis that a record names, 0 where it names none."""
    axis = number(record, spec, "axis")
    return tl.load(team[COORDINATES] + tl.maximum(axis, 0)) * (axis >= 0)


@triton.jit
def outer_rows(record, spec: tl.constexpr):
    """Points of an index of the first of four dims."""
    total = 1
    for dim in tl.static_range(1, 4):
        total *= number(record, spec, "extents", dim)
    return total


@triton.jit
def take_shard(record, arenas, spec: tl.constexpr, team):
    src, dst = operand(record, arenas, spec, "src"), operand(record, arenas, spec, "dst")
    first = coordinate(team, record, spec) * number(record, spec, "shard")
    bound, total = number(record, spec, "bound"), num_points(record, spec, 4)
    a_row, step = outer_rows(record, spec), number(record, spec, "src_strides", 0)
    for start in range(0, total, BLOCK):
        point = start + tl.arange(0, BLOCK)
        mask = point < total
        there = mask & (first + point // a_row < bound)
        near = offset_of(record, spec, "src_strides", point) + first * step
        found = read(src + near, there, spec, "src")
        write(dst + offset_of(record, spec, "dst_strides", point), found, mask, spec, "dst")


@triton.jit
def gather(record, arenas, spec: tl.constexpr):
    x, ids = operand(record, arenas, spec, "x"), operand(record, arenas, spec, "ids")
    out = operand(record, arenas, spec, "out")
    total, num = num_points(record, spec, 4), number(record, spec, "num")
    stride = number(record, spec, "stride")
    for start in range(0, total, BLOCK):
        point = start + tl.arange(0, BLOCK)
        mask = point < total
        chosen = read(ids + offset_of(record, spec, "ids_strides", point), mask, spec, "ids")
        there = mask & (chosen >= 0) & (chosen < num)
        found = read(
            x + offset_of(record, spec, "x_strides", point) + chosen * stride, there, spec, "x"
        )
        write(out + offset_of(record, spec, "out_strides", point), found, mask, spec, "out")


@triton.jit
def embedding(record, arenas, spec: tl.constexpr, team):
    ids, table = operand(record, arenas, spec, "ids"), operand(record, arenas, spec, "table")
    out = operand(record, arenas, spec, "out")
    rows, dim = number(record, spec, "rows"), number(record, spec, "dim")
    base = coordinate(team, record, spec) * number(record, spec, "stride")
    table_rows, id_stride = number(record, spec, "table_rows"), number(record, spec, "id_stride")
    table_m = number(record, spec, "table_strides", 0)
    table_d = number(record, spec, "table_strides", 1)
    out_m, out_d = number(record, spec, "out_strides", 0), number(record, spec, "out_strides", 1)
    for start in range(0, rows * dim, BLOCK):
        point = start + tl.arange(0, BLOCK)
        mask = point < rows * dim
        m, d = point // dim, point % dim
        row = read(ids + m * id_stride, mask, spec, "ids") - base
        there = mask & (row >= 0) & (row < table_rows)
        found = read(table + row * table_m + d * table_d, there, spec, "table")
        write(out + m * out_m + d * out_d, found, mask, spec, "out")


@triton.jit
def rope(record, arenas, spec: tl.constexpr):
    x, table = operand(record, arenas, spec, "x"), operand(record, arenas, spec, "table")
    positions = operand(record, arenas, spec, "positions")
    out = operand(record, arenas, spec, "out")
    rows, heads = number(record, spec, "rows"), number(record, spec, "heads")
    count, half = number(record, spec, "count"), number(record, spec, "dim") // 2
    first, table_rows = number(record, spec, "start"), number(record, spec, "table_rows")
    step, x_d = number(record, spec, "position_stride"), number(record, spec, "x_strides", 2)
    table_t = number(record, spec, "table_strides", 0)
    table_d = number(record, spec, "table_strides", 1)
    total = rows * heads * count
    for start in range(0, total, BLOCK):
        point = start + tl.arange(0, BLOCK)
        mask = point < total
        at, h, m = point % count, point // count % heads, point // (count * heads)
        i = at + first
        near = (
            x + m * number(record, spec, "x_strides", 0) + h * number(record, spec, "x_strides", 1)
        )
        position = read(positions + m * step, mask, spec, "positions")
        there = mask & (position >= 0) & (position < table_rows)
        angle = i % half
        turns = table + position * table_t
        cos = read(turns + angle * table_d, there, spec, "table")
        sin = read(turns + (angle + half) * table_d, there, spec, "table")
        own = read(near + i * x_d, mask, spec, "x")
        other = read(near + tl.where(i < half, i + half, i - half) * x_d, mask, spec, "x")
        found = own * cos + tl.where(i < half, -other, other) * sin
        to = out + m * number(record, spec, "out_strides", 0)
        to += h * number(record, spec, "out_strides", 1)
        write(to + at * number(record, spec, "out_strides", 2), found, mask, spec, "out")


@triton.jit
def kv_append(record, arenas, spec: tl.constexpr):
    x, cache = operand(record, arenas, spec, "x"), operand(record, arenas, spec, "cache")
    positions = operand(record, arenas, spec, "positions")
    rows, heads = number(record, spec, "rows"), number(record, spec, "heads")
    dim, slots = number(record, spec, "dim"), number(record, spec, "slots")
    num_caches, total = number(record, spec, "num_caches"), rows * heads * dim
    own = number(record, spec, "cache_strides", 0)
    for start in range(0, total, BLOCK):
        point = start + tl.arange(0, BLOCK)
        mask = point < total
        d, h, m = point % dim, point // dim % heads, point // (dim * heads)
        step = number(record, spec, "vector_strides", 0)
        position = read(positions + m * step, mask, spec, "positions")
        there = mask & (position >= 0) & (position < slots)
        which = m.to(tl.int64)
        if has(spec, "sequences"):
            sequences = operand(record, arenas, spec, "sequences")
            step = number(record, spec, "vector_strides", 1)
            which = read(sequences + m * step, mask, spec, "sequences")
            there &= (which >= 0) & (which < num_caches)
        near = x + m * number(record, spec, "x_strides", 0)
        near += h * number(record, spec, "x_strides", 1)
        found = read(near + d * number(record, spec, "x_strides", 2), mask, spec, "x")
        to = cache + which * own + h * number(record, spec, "cache_strides", 1)
        to += position * number(record, spec, "cache_strides", 2)
        write(to + d * number(record, spec, "cache_strides", 3), found, there, spec, "cache")


@triton.jit
def combined(x, y, way: tl.constexpr):
    """Two elements by the way of a reduction."""
    if way == "sum":
        return x + y
    elif way == "max":
        return tl.where((x != x) | (x > y), x, y)
    else:
        return tl.where((x != x) | (x < y), x, y)


@triton.jit
def sum_ranks(record, arenas, spec: tl.constexpr):
    recv, out = operand(record, arenas, spec, "recv"), operand(record, arenas, spec, "out")
    total, slot = num_points(record, spec, 4), number(record, spec, "slot_stride")
    num_ranks = number(record, spec, "num_ranks")
    for start in range(0, total, BLOCK):
        point = start + tl.arange(0, BLOCK)
        mask = point < total
        offset = offset_of(record, spec, "recv_strides", point)
        found = read(recv + offset, mask, spec, "recv")
        for rank in range(1, num_ranks):
            other = read(recv + offset + rank * slot, mask, spec, "recv")
            found = combined(found, other, way_of(spec))
        write(out + offset_of(record, spec, "out_strides", point), found, mask, spec, "out")


@triton.jit
def argmax_ranks(record, arenas, spec: tl.constexpr):
    values, indices = (
        operand(record, arenas, spec, "values"),
        operand(record, arenas, spec, "indices"),
    )
    value, index = operand(record, arenas, spec, "value"), operand(record, arenas, spec, "index")
    rows, num_ranks = number(record, spec, "rows"), number(record, spec, "num_ranks")
    value_slot = number(record, spec, "slot_strides", 0)
    index_slot = number(record, spec, "slot_strides", 1)
    for start in range(0, rows, BLOCK):
        m = start + tl.arange(0, BLOCK)
        mask = m < rows
        value_at = values + m * number(record, spec, "row_strides", 0)
        index_at = indices + m * number(record, spec, "row_strides", 1)
        best = read(value_at, mask, spec, "values")
        where = read(index_at, mask, spec, "indices")
        for rank in range(1, num_ranks):
            other = read(value_at + rank * value_slot, mask, spec, "values")
            there = read(index_at + rank * index_slot, mask, spec, "indices")
            better = (other > best) | ((other != other) & (best == best))
            best, where = tl.where(better, other, best), tl.where(better, there, where)
        to = value + m * number(record, spec, "row_strides", 2)
        write(to, best, mask, spec, "value")
        write(index + m * number(record, spec, "row_strides", 3), where, mask, spec, "index")


@triton.jit
def received(word, team, rank, dtype: tl.constexpr):
    """The first element of an operand in the memory that peers write, on a rank of the team."""
    arena = tl.load(team[PEERS] + rank).to(tl.pointer_type(tl.uint8))
    return typed(arena, word, dtype)


@triton.jit
def push(record, arenas, spec: tl.constexpr, team):
    x, total = operand(record, arenas, spec, "x"), num_points(record, spec, 4)
    slot = coordinate(team, record, spec) * number(record, spec, "slot_stride")
    word = record + word_of(opcode_of(spec), "recv")
    for start in range(0, total, BLOCK):
        point = start + tl.arange(0, BLOCK)
        mask = point < total
        found = read(x + offset_of(record, spec, "x_strides", point), mask, spec, "x")
        at = offset_of(record, spec, "recv_strides", point) + slot
        for rank in range(team[NUM_RANKS]):
            to = received(word, team, rank, element_type(spec, "recv"))
            write(to + at, found, mask, spec, "recv")


@triton.jit
def push_parts(record, arenas, spec: tl.constexpr, team):
    x, total = operand(record, arenas, spec, "x"), num_points(record, spec, 4)
    slot = coordinate(team, record, spec) * number(record, spec, "slot_stride")
    word = record + word_of(opcode_of(spec), "recv")
    shard, bound = number(record, spec, "shard"), number(record, spec, "bound")
    a_row, step = outer_rows(record, spec), number(record, spec, "x_strides", 0)
    for start in range(0, total, BLOCK):
        point = start + tl.arange(0, BLOCK)
        mask = point < total
        near = offset_of(record, spec, "x_strides", point)
        at = offset_of(record, spec, "recv_strides", point) + slot
        for rank in range(team[NUM_RANKS]):
            there = mask & (rank * shard + point // a_row < bound)
            found = read(x + near + rank * shard * step, there, spec, "x")
            to = received(word, team, rank, element_type(spec, "recv"))
            write(to + at, found, mask, spec, "recv")
