"""Products of up to 64 rows on a Hopper GPU, which read large weights once: a program an SM streams
its rows of them through shared memory, and begins before the kernel in front of it has ended.

In: x [rows, sums] and w [columns, sums] of a half type, or two weights of [columns, sums] of whose
products a formula is made; a bias [columns] or None; weights that were known before the program
that the product is of began. Out: a new tensor [rows, columns], or parts of the sums in f32
[parts, rows, columns]. What asks for weights does not wait for x, so the memory is busy while
norms, formulas and the ends of other kernels run. Used by device_ops.py; next: streamed_tiles.py.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, misc"

import math
from collections.abc import Sequence

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from distmega.hostir.library.pointwise import OpFunction
from distmega.hostir.run.early_reads import reads_constants_early
from distmega.kernels.gluon_compat import cta_barrier, reinterpret, tma_load
from distmega.kernels.library.small_tiles import ALIGNED
from distmega.kernels.library.streamed_tiles import (
    MOST_BOXES,
    MOST_ROWS,
    StreamedProduct,
    StreamedTiles,
    choose_streamed,
    is_measured,
)
from distmega.kernels.pipelined.pointwise.formula import evaluate
from distmega.kernels.runtime.ahead import launch
from distmega.kernels.runtime.gpus import is_hopper, num_sms
from distmega.kernels.runtime.mbarriers import make_barriers
from distmega.kernels.runtime.memory import has_tma_rows, tma_rows
from distmega.program import expr
from distmega.program.expr import Expr
from distmega.program.types import Op

ROWS = gl.constexpr(MOST_ROWS)
"""Of a slot of x's ring. Those behind x_rows hold anything: they make rows that nobody stores."""
TMA_TERMS = gl.constexpr(64)
"""That a row of a block has where TMA brings it in one piece."""
SHARED = gl.NVMMASharedLayout(128, 16, 2)
HALVES = (torch.bfloat16, torch.float16)
UNIT = gl.constexpr(ALIGNED)
"""Of columns: what a thread writes at once, of a half type."""
NUMBERS = ("k_tiles", "rows", "units", "lower")
"""Arguments that one compiled kernel takes at any value."""


@triton.constexpr_function
def _sum_of(boxes: tuple[int, ...]) -> int:
    return sum(boxes)


@triton.constexpr_function
def sums_layout(box: int) -> gl.NVMMADistributedLayout:
    """Of a block of results."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, box, 16])


@triton.constexpr_function
def stored_layout(box: int, item_bits: int) -> gl.BlockedLayout:
    """Of a block of results where it is written: 16 bytes a thread, whole rows a warp."""
    items = 128 // item_bits
    threads = box // items
    return gl.BlockedLayout([1, items], [32 // threads, threads], [4, 1], [1, 0])


@gluon.jit
def ring_of(w, number: gl.constexpr, box: gl.constexpr, terms: gl.constexpr):
    """Shared memory for `number` blocks of a weight."""
    return gl.allocate_shared_memory(w.dtype, [number, box, terms], w.layout)


@gluon.jit
def zeros_of(box: gl.constexpr):
    """No sums yet, of a block of results."""
    return gl.zeros([ROWS, box], gl.float32, layout=sums_layout(box))


@gluon.jit
def load_weights(ws, others, rings, ready, slot, top, lower, term, boxes: gl.constexpr,
                 halves: gl.constexpr, there):  # fmt: skip
    """A slot's blocks of weights, rows `top` and on, from a term of the sum on, if `there`."""
    at = top
    for i in gl.static_range(len(boxes)):
        to = slot * halves
        tma_load(ws[i], [at, term], ready, rings[i].index(to), pred=there)
        if halves == 2:
            tma_load(others[i], [at + lower, term], ready, rings[i].index(to + 1), pred=there)
        at += boxes[i]


@gluon.jit
def load_x(x, blocks, ready, slot, term, x_rows: gl.constexpr, terms: gl.constexpr, there):
    """A slot's block of x from a term of the sum on, if `there`."""
    for i in gl.static_range(terms // TMA_TERMS):
        to = (slot * (terms // TMA_TERMS) + i) * (ROWS // x_rows)
        tma_load(x, [0, term + i * TMA_TERMS], ready, blocks.index(to), pred=there)


@gluon.jit
def add_products(x_ring, slot, ring, at, acc):
    """A slot of x times a block of weights, added to acc, under way."""
    return warpgroup_mma(x_ring.index(slot), ring.index(at).permute((1, 0)), acc, is_async=True)


@gluon.jit
def store_block(block, out, bias, left, rows, columns, formula: gl.constexpr, box: gl.constexpr):
    """A block of results from column `left` on, with its bias and by its formula, if any."""
    if bias is not None:
        column = left + gl.arange(0, box, layout=gl.SliceLayout(0, sums_layout(box)))
        shift = gl.load(bias + column, mask=column < columns, other=0.0).to(gl.float32)
        block += gl.expand_dims(shift, 0)
    if formula is not None:
        block = evaluate(formula, (block,))
    kind: gl.constexpr = out.dtype.element_ty
    layout: gl.constexpr = stored_layout(box, kind.primitive_bitwidth)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    column = left + gl.arange(0, box, layout=gl.SliceLayout(0, layout))
    inside = gl.expand_dims(row < rows, 1) & gl.expand_dims(column < columns, 0)
    to = out + gl.expand_dims(row * columns, 1) + gl.expand_dims(column, 0)
    gl.store(to, gl.convert_layout(block.to(kind), layout), mask=inside)


@gluon.jit(do_not_specialize=NUMBERS)
def multiply_streamed(x, w0, w1, w2, other0, other1, other2, bias, out, k_tiles, rows, units,
                      lower, boxes: gl.constexpr, halves: gl.constexpr, terms: gl.constexpr,
                      stages: gl.constexpr, x_rows: gl.constexpr, mixes: gl.constexpr,
                      formula: gl.constexpr, early: gl.constexpr):  # fmt: skip
    """Tile program_id(0) of out, of the sum of `boxes` columns, and part program_id(1) of the sums.

    Descriptors of local memory, read: x [rows, sums] in blocks of x_rows x 64; w0 to w2, the weight
    [columns, sums], in blocks of as many rows as `boxes` says, side by side in a tile, and `terms`;
    other0 to other2, where `halves` is 2, the same of the weight that begins `lower` rows behind.
    None for those that there aren't. bias: [columns], read, or None. out: [parts, rows, columns],
    contiguous, written: f32 where there are several parts. k_tiles: of `terms`, of a part. units:
    of UNIT columns. mixes: formula of a result and the other weight's, where there is one; formula:
    of each result, or None. stages: slots of the ring. early: weights are read before what is in
    front has ended.
    """
    columns = units * UNIT
    width: gl.constexpr = _sum_of(boxes)
    num_products: gl.constexpr = halves * len(boxes)
    ws, others = (w0, w1, w2), (other0, other1, other2)
    rings = ()
    for i in gl.static_range(len(boxes)):
        rings += (ring_of(ws[i], halves * stages, boxes[i], terms),)
    x_ring = gl.allocate_shared_memory(x.dtype, [stages, ROWS, terms], x.layout)
    x_shape: gl.constexpr = (stages * ROWS * terms // (x_rows * TMA_TERMS), x_rows, TMA_TERMS)
    x_layout: gl.constexpr = x.layout
    blocks = reinterpret(x_ring, x.dtype, x_shape, x_layout)
    ready = make_barriers(stages)
    slot_bytes: gl.constexpr = 2 * terms * (halves * width + x_rows)
    if not early:
        gdc_wait()
    top, first = gl.program_id(0) * width, gl.program_id(1) * k_tiles
    for slot in gl.static_range(stages):
        there = slot < k_tiles
        mbarrier.expect(ready.index(slot), slot_bytes, pred=there)
        load_weights(ws, others, rings, ready.index(slot), slot, top, lower, (first + slot) * terms,
                     boxes, halves, there)  # fmt: skip
    gdc_launch_dependents()
    if early:
        gdc_wait()
    for slot in gl.static_range(stages):
        load_x(x, blocks, ready.index(slot), slot, (first + slot) * terms, x_rows, terms,
               slot < k_tiles)  # fmt: skip
    accs = ()
    for i in gl.static_range(len(boxes)):
        for _ in gl.static_range(halves):
            accs += (zeros_of(boxes[i]),)
    for step in range(k_tiles):
        at = step % stages
        mbarrier.wait(ready.index(at), (step // stages) & 1)
        sums = ()
        for i in gl.static_range(len(boxes)):
            for half in gl.static_range(halves):
                sums += (add_products(x_ring, at, rings[i], at * halves + half, accs[len(sums)]),)
        accs = warpgroup_mma_wait(num_outstanding=num_products, deps=sums)
        if num_products == 1:
            accs = (accs,)
        cta_barrier()  # all warps have read the slot before this one
        free, k = (step + stages - 1) % stages, step - 1 + stages
        there = (step > 0) & (k < k_tiles)
        bar, term = ready.index(free), (first + k) * terms
        mbarrier.expect(bar, slot_bytes, pred=there)
        load_x(x, blocks, bar, free, term, x_rows, terms, there)
        load_weights(ws, others, rings, bar, free, top, lower, term, boxes, halves, there)
    accs = warpgroup_mma_wait(num_outstanding=0, deps=accs)
    if num_products == 1:
        accs = (accs,)
    cta_barrier()  # all warps have read the slots, whose memory results go through
    out += gl.program_id(1).to(gl.int64) * rows * columns
    left = top
    for i in gl.static_range(len(boxes)):
        if halves == 2:
            mixed = evaluate(mixes, (accs[2 * i], accs[2 * i + 1]))
            store_block(mixed, out, bias, left, rows, columns, formula, boxes[i])
        else:
            store_block(accs[i], out, bias, left, rows, columns, formula, boxes[i])
        left += boxes[i]


def compile_streamed(op: Op, otherwise: OpFunction) -> OpFunction:
    """An op of kind linear, of rows and columns, fused_product, fused_linear or split_linear, whose
    weights are known before its program begins: streamed where that is expected to be fastest; else
    by `otherwise`.
    """
    text, parts = str(op.get("expr", "")), len(op.writes)
    formula = expr.parse(text) if text else None
    mixes = op.kind == "fused_linear"
    num_weights = 1 + (mixes and op.reads[1].tensor != op.reads[2].tensor)
    shape = [math.prod(op.extents[n] for n in index.axes) for index in op.writes[0].dims]
    sums = {axis.name for axis in op.axes if axis.role == "reduce"}
    depth = math.prod(op.extents[n] for n in sums)
    kept = {n for index in op.reads[1].dims for n in index.axes} - sums
    columns = math.prod(op.extents[n] for n in kept)
    rows, halves = math.prod(shape) // columns, 2 if mixes else 1
    product = StreamedProduct(rows=rows, columns=columns, depth=depth, halves=halves)
    if not is_measured(product):
        return otherwise

    def run(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        x, *weights = operands
        weights, bias = weights[:num_weights], [] if mixes else weights[1:]
        flat = [_rows_of(w, depth) for w in weights]
        known = [w for w in flat if w is not None]
        types = {each.dtype for each in operands}
        if len(known) < num_weights or types != {x.dtype} or not _takes(x, known):
            return otherwise(operands)
        tiles = choose_streamed(product, num_sms(x.device.index), (parts,))
        if tiles is None:
            return otherwise(operands)
        found = stream_product(
            x.reshape(-1, depth),
            known,
            tiles,
            bias=bias[0].reshape(-1).contiguous() if bias else None,
            formula=None if mixes else formula,
            mixes=formula if mixes else None,
        )
        return (found.view(shape),) if parts == 1 else found.view(parts, *shape).unbind(0)

    return run


def _rows_of(w: Tensor, depth: int) -> Tensor | None:
    """w as [columns, depth] where it lies; None if that can't be."""
    try:
        return w.view(-1, depth)
    except RuntimeError:
        return None


def _takes(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether the kernel runs on x's device and type, and reads weights where they are."""
    on_hopper = x.is_cuda and is_hopper(x.device.index) and x.dtype in HALVES
    return on_hopper and all(map(has_tma_rows, weights))


def stream_product(
    x: Tensor,
    weights: Sequence[Tensor],
    tiles: StreamedTiles,
    *,
    bias: Tensor | None = None,
    formula: Expr | None = None,
    mixes: Expr | None = None,
) -> Tensor:
    """x W' + bias, [rows, columns], of the one weight, and the formula of each element; [parts,
    rows, columns] in f32 where tiles have parts. columns: a multiple of UNIT. mixes: a formula of
    columns n and N / 2 + n of x W', or of columns n of both weights'.
    """
    rows, depth = x.shape
    halves = 1 if mixes is None else 2
    columns = sum(w.shape[0] for w in weights) // halves
    assert columns % ALIGNED == 0, columns
    parts, boxes, terms = tiles.parts, tiles.boxes, tiles.terms
    x_rows = MOST_ROWS // 2 if rows <= MOST_ROWS // 2 else MOST_ROWS
    if parts > 1:
        out = torch.empty((parts, rows, columns), dtype=torch.float32, device=x.device)
    else:
        out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    launch(
        multiply_streamed, (-(-columns // sum(boxes)), parts),
        _blocks(tma_rows(x), x_rows, TMA_TERMS.value), *_all_blocks(weights[0], boxes, terms),
        *_all_blocks(weights[-1], boxes[: None if halves == 2 else 0], terms), bias, out,
        -(-depth // (terms * parts)), rows, columns // ALIGNED,
        columns if len(weights) < halves else 0, boxes=boxes, halves=halves, terms=terms,
        stages=tiles.stages, x_rows=x_rows, mixes=mixes, formula=formula,
        early=reads_constants_early(), num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return out


def _all_blocks(w: Tensor, boxes: Sequence[int], terms: int) -> list[TensorDescriptor | None]:
    """A descriptor for each block of a tile, None for the rest."""
    return [*(_blocks(w, box, terms) for box in boxes), *[None] * (MOST_BOXES - len(boxes))]


def _blocks(x: Tensor, rows: int, terms: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(x, [rows, terms], SHARED)
