"""The kernel of rms norm, layer norm and softmax: programs stay on their SM and walk over rows, the
next rows are loaded by TMA while the current ones reduce, results leave by TMA.

In: TMA descriptors of [rows, groups, width] views (column = group * width + place), a NormSpec.
Out: the normalised rows and, with a residual, the sums. Longer rows than a tile holds:
long_rows.py. Next: norms.py, which launches both.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, misc"

from dataclasses import dataclass

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from distmega.kernels.gluon_compat import tma_load, tma_store, tma_store_wait
from distmega.kernels.pipelined.layouts import TileLoads, count_tiles, row_layout, tile_number
from distmega.kernels.runtime.mbarriers import make_barriers


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """What the kernel is specialised for. All descriptors have block [rows, groups, width].

    op: "rms_norm", "layer_norm" or "softmax". has_residual: a second input is added first and the
    sum is an output. exact: the tile has no columns past the row's end. stages: loads in flight, 1
    for none ahead. buffers: tiles of each output that may wait to leave.
    """

    op: str
    has_residual: bool
    has_weight: bool
    has_bias: bool
    rows: int
    groups: int
    width: int
    exact: bool
    stages: int
    buffers: int


@triton.constexpr_function
def num_inputs(spec: NormSpec) -> int:
    """Inputs that come by TMA; as many outputs leave by it."""
    return 1 + spec.has_residual


@triton.constexpr_function
def stage_shape(spec: NormSpec, count: int) -> list[int]:
    """Shape of `count` tiles in shared memory."""
    return [count, spec.rows, spec.groups, spec.width]


@gluon.jit
def allocate_tiles(descriptor, count: gl.constexpr, spec: gl.constexpr):
    """Shared memory for `count` tiles of a descriptor's type."""
    shape: gl.constexpr = stage_shape(spec, count)
    return gl.allocate_shared_memory(descriptor.dtype, shape, descriptor.layout)


@gluon.jit
def start_loads(corner, slot, wanted, loads, spec: gl.constexpr):
    """Starts the load of one tile of every input into a slot, where `wanted`. loads: TileLoads."""
    count: gl.constexpr = num_inputs(spec)
    fence_async_shared()  # of reads of the slot, before the copy engine writes there
    for i in gl.static_range(count):
        bar = loads.landed.index(slot * count + i)
        source = loads.inputs[i]
        mbarrier.expect(bar, source.block_type.nbytes, pred=wanted)
        tma_load(source, corner, bar, loads.stages[i].index(slot), pred=wanted)


@gluon.jit
def take_tile(index, loads, spec: gl.constexpr, layout: gl.constexpr):
    """Tile `index` of x, with the residual added and rounded as the sum is stored; fp32.

    Each input is waited for by itself. loads: TileLoads.
    """
    stages, landed = loads.stages, loads.landed
    count: gl.constexpr = num_inputs(spec)
    slot = index % spec.stages
    phase = (index // spec.stages) & 1
    mbarrier.wait(landed.index(slot * count), phase)
    value = stages[0].index(slot).load(layout).to(gl.float32)
    if spec.has_residual:
        mbarrier.wait(landed.index(slot * count + 1), phase)
        value += stages[1].index(slot).load(layout).to(gl.float32)
        value = value.to(stages[0].dtype).to(gl.float32)
    return value


@gluon.jit
def tile_columns(spec: gl.constexpr, layout: gl.constexpr):
    """Column numbers of a tile, [1, groups, width]."""
    by_group: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, layout))
    by_column: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, layout))
    groups = gl.expand_dims(gl.expand_dims(gl.arange(0, spec.groups, by_group), 0), 2)
    positions = gl.expand_dims(gl.expand_dims(gl.arange(0, spec.width, by_column), 0), 1)
    return groups * spec.width + positions


@gluon.jit
def spread(value, layout: gl.constexpr):
    """A number a row as [rows, 1, 1] in a tile's layout; no data moves."""
    flat = gl.convert_layout(value, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    return gl.expand_dims(gl.expand_dims(flat, 1), 2)


@gluon.jit
def row_sum(value, spec: gl.constexpr, layout: gl.constexpr):
    """Sums of rows, [rows, 1, 1]."""
    flat = gl.reshape(value, [spec.rows, spec.groups * spec.width])
    return spread(gl.sum(flat, axis=1), layout)


@gluon.jit
def row_max(value, spec: gl.constexpr, layout: gl.constexpr):
    """Largest elements of rows, [rows, 1, 1]."""
    flat = gl.reshape(value, [spec.rows, spec.groups * spec.width])
    return spread(gl.max(flat, axis=1), layout)


@gluon.jit
def _normalise(value, columns, num_columns, eps, spec: gl.constexpr, layout: gl.constexpr):
    """Whole rows without weight and bias; columns past the end come as zeros."""
    if spec.op == "rms_norm":
        scale = gl.rsqrt(row_sum(value * value, spec, layout) / num_columns + eps)
        return value * scale
    elif spec.op == "layer_norm":
        centred = value - row_sum(value, spec, layout) / num_columns
        if not spec.exact:
            centred = gl.where(columns < num_columns, centred, 0.0)
        scale = gl.rsqrt(row_sum(centred * centred, spec, layout) / num_columns + eps)
        return centred * scale
    else:
        if not spec.exact:
            value = gl.where(columns < num_columns, value, float("-inf"))
        powers = gl.exp(value - row_max(value, spec, layout))
        return powers * (1.0 / row_sum(powers, spec, layout))


@gluon.jit(do_not_specialize=["num_columns", "num_tiles", "run"])
def norm_kernel(x, residual, weight, bias, y, total, num_columns, num_tiles, run, eps,
                spec: gl.constexpr):  # fmt: skip
    """x, residual: descriptors of local memory [rows, groups, width], read; weight, bias: local
    memory [num_columns], any float type, read; y, total: descriptors as of x, written: the result
    and, with a residual, the sum. Without a residual those of it and of the sum are not used.

    num_columns: of a row. num_tiles: of all rows. run: tiles that a program takes in a row, as in
    count_tiles. eps: of the norm, fp32. spec: NormSpec.
    """
    layout: gl.constexpr = row_layout(spec.rows, spec.groups, spec.width, gl.num_warps())
    num_stages: gl.constexpr = spec.stages
    count: gl.constexpr = num_inputs(spec)
    stages = (allocate_tiles(x, num_stages, spec),)
    leaving = (allocate_tiles(y, spec.buffers, spec),)
    if spec.has_residual:
        stages += (allocate_tiles(residual, num_stages, spec),)
        leaving += (allocate_tiles(total, spec.buffers, spec),)
    loads = TileLoads((x, residual), stages, make_barriers(num_stages * count))

    num_mine = count_tiles(num_tiles, run)
    if num_stages > 1:
        for ahead in gl.static_range(num_stages):
            corner = (tile_number(ahead, run) * spec.rows, 0, 0)
            start_loads(corner, ahead, ahead < num_mine, loads, spec)
    columns = tile_columns(spec, layout)
    inside = columns < num_columns
    if spec.has_weight:
        scale = gl.load(weight + columns, mask=inside, other=0.0)
    if spec.has_bias:
        shift = gl.load(bias + columns, mask=inside, other=0.0)
    for index in range(num_mine):
        first = tile_number(index, run) * spec.rows
        slot = index % num_stages
        if num_stages == 1:
            start_loads((first, 0, 0), slot, True, loads, spec)
        value = take_tile(index, loads, spec, layout)
        if num_stages > 1:
            corner = (tile_number(index + num_stages, run) * spec.rows, 0, 0)
            wanted = index + num_stages < num_mine
            start_loads(corner, slot, wanted, loads, spec)
        result = _normalise(value, columns, num_columns, eps, spec, layout)
        if spec.has_weight:
            result *= scale.to(gl.float32)
        if spec.has_bias:
            result += shift.to(gl.float32)
        tma_store_wait((spec.buffers - 1) * count)
        leaving[0].index(index % spec.buffers).store(result.to(y.dtype))
        if spec.has_residual:
            leaving[1].index(index % spec.buffers).store(value.to(total.dtype))
        fence_async_shared()
        tma_store(y, (first, 0, 0), leaving[0].index(index % spec.buffers))
        if spec.has_residual:
            tma_store(total, (first, 0, 0), leaving[1].index(index % spec.buffers))
    tma_store_wait(0)
