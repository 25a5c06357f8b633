"""The pointwise kernel: tiles stream through shared memory by TMA, several stages of loads in
flight, each consumed as it lands; results leave by TMA.

In: TMA descriptors of the whole operands, pointers to broadcast ones, a PointwiseSpec. Out: up to
four results, bounds clipped by the descriptors. Launched by pointwise.py. Next: norm_kernel.py.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from dataclasses import dataclass

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from distmega.kernels.gluon_compat import tma_load, tma_store, tma_store_wait
from distmega.kernels.pipelined.layouts import TileLoads, count_tiles, tile_layout, tile_number
from distmega.kernels.pipelined.pointwise.formula import evaluate
from distmega.kernels.runtime.mbarriers import make_barriers
from distmega.program.expr import Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class PointwiseSpec:
    """What the kernel is specialised for. Descriptors of inputs and outputs have block `tile`.

    kinds: an input's part in a tile: "tile" (TMA), "row" (a vector along the columns), "column" (a
    vector along the rows) or "scalar". stages: loads in flight, 1 for none ahead. buffers: tiles of
    each output that may wait to leave.
    """

    exprs: tuple[Expr, ...]
    kinds: tuple[str, ...]
    tile: tuple[int, ...]
    stages: int
    buffers: int


@triton.constexpr_function
def _expr(spec: PointwiseSpec, index: int) -> Expr:
    return spec.exprs[index]


@triton.constexpr_function
def _count(spec: PointwiseSpec, name: str) -> int:
    return len(getattr(spec, name))


@triton.constexpr_function
def _kind(spec: PointwiseSpec, index: int) -> str:
    return spec.kinds[index] if index < len(spec.kinds) else ""


@triton.constexpr_function
def _buffers_shape(spec: PointwiseSpec, count: int) -> list[int]:
    return [count, *spec.tile]


@gluon.jit
def _allocate(descriptor, count: gl.constexpr, spec: gl.constexpr):
    shape: gl.constexpr = _buffers_shape(spec, count)
    return gl.allocate_shared_memory(descriptor.dtype, shape, descriptor.layout)


@gluon.jit
def _corner(tile, column_tiles, spec: gl.constexpr):
    """Coordinates of a tile's first element."""
    if _count(spec, "tile") == 1:
        return (tile * spec.tile[0],)
    else:
        return (tile // column_tiles * spec.tile[0], tile % column_tiles * spec.tile[1])


@gluon.jit
def _start_loads(index, num_mine, run, column_tiles, loads, spec: gl.constexpr):
    """Starts the loads of this program's tile `index`, one an input, if there is such a tile.
    loads: TileLoads, of which only inputs of kind "tile" have a stage.
    """
    corner = _corner(tile_number(index, run), column_tiles, spec)
    slot = index % spec.stages
    fence_async_shared()  # of reads of the slot, before the copy engine writes there
    for i in gl.static_range(_count(spec, "kinds")):
        if _kind(spec, i) == "tile":
            bar = loads.landed.index(slot * _count(spec, "kinds") + i)
            source = loads.inputs[i]
            mbarrier.expect(bar, source.block_type.nbytes, pred=index < num_mine)
            tma_load(source, corner, bar, loads.stages[i].index(slot), pred=index < num_mine)


@gluon.jit
def _take(index, corner, num_rows, num_columns, loads, i: gl.constexpr, spec: gl.constexpr,
          layout: gl.constexpr):  # fmt: skip
    """Input i of a tile in fp32: waits for its load only, or reads its broadcast vector."""
    source = loads.inputs[i]
    if _kind(spec, i) == "tile":
        slot = index % spec.stages
        bar = loads.landed.index(slot * _count(spec, "kinds") + i)
        mbarrier.wait(bar, (index // spec.stages) & 1)
        value = loads.stages[i].index(slot).load(layout)
    elif _kind(spec, i) == "row":
        columns = corner[1] + gl.arange(0, spec.tile[1], gl.SliceLayout(0, layout))
        value = gl.expand_dims(gl.load(source + columns, mask=columns < num_columns), 0)
    elif _kind(spec, i) == "column":
        rows = corner[0] + gl.arange(0, spec.tile[0], gl.SliceLayout(1, layout))
        value = gl.expand_dims(gl.load(source + rows, mask=rows < num_rows), 1)
    else:
        value = gl.load(source)
    return value.to(gl.float32)


@gluon.jit(do_not_specialize=["num_rows", "num_columns", "num_tiles", "run", "column_tiles"])
def pointwise_kernel(x0, x1, x2, x3, x4, x5, x6, x7, y0, y1, y2, y3, num_rows, num_columns,
                     num_tiles, run, column_tiles, spec: gl.constexpr):  # fmt: skip
    """x0 to x7: inputs, of any float type in local memory, read: descriptors [rows, columns] or
    [elements] (kind "tile") or pointers to vectors; y0 to y3: descriptors of the results, written.
    As many are used as spec.kinds and spec.exprs have. They are arguments of their own since
    Triton 3.6 launches descriptors only so.

    num_rows, num_columns: of the results, by which vectors are masked. num_tiles: of a result;
    column_tiles: of these in a row. run: tiles that a program takes in a row, as in count_tiles.
    spec: PointwiseSpec.
    """
    inputs = (x0, x1, x2, x3, x4, x5, x6, x7)
    outputs = (y0, y1, y2, y3)
    layout: gl.constexpr = tile_layout(spec.tile, gl.num_warps())
    num_inputs: gl.constexpr = _count(spec, "kinds")
    num_outputs: gl.constexpr = _count(spec, "exprs")
    stages, ready = (), ()
    for i in gl.static_range(num_inputs):
        if _kind(spec, i) == "tile":
            stages += (_allocate(inputs[i], spec.stages, spec),)
        else:
            stages += (0,)
    for i in gl.static_range(num_outputs):
        ready += (_allocate(outputs[i], spec.buffers, spec),)
    num_stages: gl.constexpr = spec.stages
    loads = TileLoads(inputs, stages, make_barriers(num_stages * num_inputs))

    num_mine = count_tiles(num_tiles, run)
    if num_stages > 1:
        for ahead in gl.static_range(num_stages):
            _start_loads(ahead, num_mine, run, column_tiles, loads, spec)
    for index in range(num_mine):
        if num_stages == 1:
            _start_loads(index, num_mine, run, column_tiles, loads, spec)
        corner = _corner(tile_number(index, run), column_tiles, spec)
        args = ()
        for i in gl.static_range(num_inputs):
            args += (_take(index, corner, num_rows, num_columns, loads, i, spec, layout),)
        if num_stages > 1:
            _start_loads(index + num_stages, num_mine, run, column_tiles, loads, spec)
        tma_store_wait((spec.buffers - 1) * num_outputs)
        for i in gl.static_range(num_outputs):
            result = evaluate(_expr(spec, i), args)
            whole = gl.broadcast(result, gl.full(spec.tile, 0.0, gl.float32, layout))[0]
            ready[i].index(index % spec.buffers).store(whole.to(outputs[i].dtype))
        fence_async_shared()
        for i in gl.static_range(num_outputs):
            tma_store(outputs[i], corner, ready[i].index(index % spec.buffers))
    tma_store_wait(0)
