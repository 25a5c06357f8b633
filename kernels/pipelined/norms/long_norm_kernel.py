"""Norms and softmax of rows longer than shared memory takes: each row passes twice, in chunks.

The first pass gathers statistics by place (and writes the sums with a residual), the second writes
the results; it finds the row in the L2 cache. Loads run ahead through both passes and into the next
row. In and out as in norm_kernel.py; descriptors have block [1, groups, width]. Next: norms.py.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from distmega.kernels.gluon_compat import tma_store, tma_store_wait
from distmega.kernels.pipelined.layouts import TileLoads, row_layout
from distmega.kernels.pipelined.norms.norm_kernel import (
    allocate_tiles,
    num_inputs,
    row_max,
    row_sum,
    start_loads,
    take_tile,
    tile_columns,
)
from distmega.kernels.runtime.mbarriers import make_barriers


@gluon.jit
def _load_ahead(item, num_items, num_chunks, loads, spec: gl.constexpr):
    """Starts the loads of an item: pass and chunk of a row, counted over this program's rows.
    loads: TileLoads.
    """
    row = gl.program_id(0) + item // (2 * num_chunks) * gl.num_programs(0)
    corner = (row, item % num_chunks * spec.groups, 0)
    start_loads(corner, item % spec.stages, item < num_items, loads, spec)


@gluon.jit
def _gather(value, inside, first, second, seen, spec: gl.constexpr):
    """Statistics by place after one more chunk.

    rms: sum of squares. layer: mean and sum of squared differences (Welford), of `seen` elements.
    softmax: maximum and sum of exponentials below it.
    """
    if spec.op == "rms":
        return first + value * value, second
    elif spec.op == "layer":
        gap = value - first
        mean = first + gap / seen
        squares = second + gap * (value - mean)
        return gl.where(inside, mean, first), gl.where(inside, squares, second)
    else:
        value = gl.where(inside, value, float("-inf"))
        most = gl.maximum(first, value)
        safe = gl.where(most == float("-inf"), 0.0, most)
        return most, second * gl.exp(first - safe) + gl.exp(value - safe)


@gluon.jit
def _finish(first, second, counts, num_columns, eps, spec: gl.constexpr, layout: gl.constexpr):
    """Offset and scale of a row, [1, 1, 1] each: results are f(value - offset) * scale."""
    if spec.op == "rms":
        total = row_sum(first, spec, layout)
        return total * 0.0, gl.rsqrt(total / num_columns + eps)
    elif spec.op == "layer":
        mean = row_sum(first * counts, spec, layout) / num_columns
        apart = first - mean
        squares = row_sum(second + counts * apart * apart, spec, layout)
        return mean, gl.rsqrt(squares / num_columns + eps)
    else:
        most = row_max(first, spec, layout)
        return most, 1.0 / row_sum(second * gl.exp(first - most), spec, layout)


@gluon.jit(do_not_specialize=["num_columns", "num_chunks", "num_rows"])
def long_norm_kernel(x, residual, weight, bias, y, total, num_columns, num_chunks, num_rows, eps,
                     spec: gl.constexpr):  # fmt: skip
    """As norm_kernel; num_chunks tiles of groups * width columns make a row, of num_rows."""
    layout: gl.constexpr = row_layout(1, spec.groups, spec.width, gl.num_warps())
    chunk: gl.constexpr = spec.groups * spec.width
    num_stages: gl.constexpr = spec.stages
    stages = (allocate_tiles(x, num_stages, spec),)
    results = allocate_tiles(y, spec.buffers, spec)
    if spec.has_residual:
        stages += (allocate_tiles(residual, num_stages, spec),)
        sums = allocate_tiles(total, spec.buffers, spec)
    landed = make_barriers(num_stages * num_inputs(spec))
    loads = TileLoads((x, residual), stages, landed)

    program = gl.program_id(0)
    step = gl.num_programs(0)
    num_items = (num_rows - program + step - 1) // step * (2 * num_chunks)
    if num_stages > 1:
        for ahead in gl.static_range(num_stages):
            _load_ahead(ahead, num_items, num_chunks, loads, spec)
    positions = tile_columns(spec, layout)
    zeros = gl.full([1, spec.groups, spec.width], 0.0, gl.float32, layout)
    counts = ((num_columns - positions + chunk - 1) // chunk).to(gl.float32)
    item = 0
    for row in range(program, num_rows, step):
        first = zeros
        second = zeros
        if spec.op == "softmax":
            first = zeros + float("-inf")
        for part in range(num_chunks):
            if num_stages == 1:
                _load_ahead(item, num_items, num_chunks, loads, spec)
            value = take_tile(item, loads, spec, layout)
            if num_stages > 1:
                _load_ahead(item + num_stages, num_items, num_chunks, loads, spec)
            inside = part * chunk + positions < num_columns
            first, second = _gather(value, inside, first, second, part + 1.0, spec)
            if spec.has_residual:
                tma_store_wait(spec.buffers - 1)
                sums.index(item % spec.buffers).store(value.to(total.dtype))
                fence_async_shared()
                tma_store(total, (row, part * spec.groups, 0), sums.index(item % spec.buffers))
            item += 1
        offset, scale = _finish(first, second, counts, num_columns, eps, spec, layout)
        for part in range(num_chunks):
            if num_stages == 1:
                _load_ahead(item, num_items, num_chunks, loads, spec)
            value = take_tile(item, loads, spec, layout) - offset
            if num_stages > 1:
                _load_ahead(item + num_stages, num_items, num_chunks, loads, spec)
            if spec.op == "softmax":
                value = gl.exp(value)
            value *= scale
            columns = part * chunk + positions
            if spec.has_weight:
                value *= gl.load(weight + columns, mask=columns < num_columns, other=0.0).to(
                    gl.float32
                )
            if spec.has_bias:
                value += gl.load(bias + columns, mask=columns < num_columns, other=0.0).to(
                    gl.float32
                )
            tma_store_wait(spec.buffers - 1)
            results.index(item % spec.buffers).store(value.to(y.dtype))
            fence_async_shared()
            tma_store(y, (row, part * spec.groups, 0), results.index(item % spec.buffers))
            item += 1
    tma_store_wait(0)
