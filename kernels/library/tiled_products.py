"""Products of a few hundred rows on a GPU, which have too few tiles of the usual size to busy its
SMs: small tiles, sums cut in parts, bias and a formula of each element before it is written.

In: x [rows, sums] and w [columns, sums] of a half type on one device, a bias [columns] or None, a
formula of a0 or None. Out: a new tensor [rows, columns]. Programs that make parts of one tile leave
them in memory, and the last to come adds them up, in the order of the parts, so that results are
the same each time. The kernel may start while the one before it ends; it waits for it before it
reads. Used by device_ops.py.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import math
from collections.abc import Sequence

import torch
import triton
from torch import Tensor
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from distmega.hostir.library.pointwise import OpFunction
from distmega.kernels.library.small_tiles import ALIGNED, SmallTiles, choose_small_tiles
from distmega.kernels.pipelined.pointwise.formula import evaluate
from distmega.kernels.runtime.ahead import launch
from distmega.kernels.runtime.gpus import is_hopper, num_sms
from distmega.kernels.runtime.memory import has_tma_rows
from distmega.program import expr
from distmega.program.expr import Expr
from distmega.program.types import Op

EARLY = True
"""Whether launches may begin before what came before them ends, and ask for weights then."""
HALVES = (torch.bfloat16, torch.float16)
LINE = tl.constexpr(64)
"""Elements of a line of memory."""


@triton.jit
def fetch_ahead(at, inside):
    """Asks for lines of memory to be in the L2, where `inside`."""
    # a load would bring them further, and wait for them
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
        "=r,l,r", [at, inside.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def multiply_tiles(x, w, w_start, bias, out, partials, counts, rows, columns, depth_units,
                   x_row_units, x_step_units, w_units, parts, tile_rows: tl.constexpr,
                   tile_columns: tl.constexpr, tile_depth: tl.constexpr, unit: tl.constexpr,
                   by_tma: tl.constexpr, turned: tl.constexpr, split: tl.constexpr,
                   early: tl.constexpr, formula: tl.constexpr):  # fmt: skip
    """A part of a tile of out [rows, columns], contiguous, a program each.

    x, w: descriptors of [rows, depth] and [columns, depth] in blocks of a tile where `by_tma`; else
    pointers. Rows lie x_row_units and w_units apart, in units of `unit` elements, as is the depth;
    elements of w's rows lie together, those of x's too unless `turned`: then rows are neighbours,
    and elements of a row x_step_units apart. w_start: w's first element. bias: [columns], or None.
    All in local memory, read but out, written. partials: f32, parts x tiles of them, where `split`;
    counts: i32, one a tile, zero before and after. early: the launch may begin before what came
    before it ends, and asks for its part of w then, which may not be known yet, but is read only
    when it is. formula: of each element with its bias, or None.
    """
    program = tl.program_id(0)
    tile, part = program // parts, program % parts
    depth = depth_units * unit
    row_tiles = tl.cdiv(rows, tile_rows)
    top, left = tile % row_tiles * tile_rows, tile // row_tiles * tile_columns
    steps = tl.cdiv(depth, tile_depth)
    first, last = steps * part // parts, steps * (part + 1) // parts
    line = top + tl.arange(0, tile_rows)
    position = left + tl.arange(0, tile_columns)
    if early:
        gdc_launch_dependents()
        start = w_start + position.to(tl.int64)[:, None] * (w_units * unit)
        near = (position < columns)[:, None]
        for step in tl.range(first, last):
            terms = step * tile_depth + tl.arange(0, tile_depth // LINE)[None, :] * LINE
            fetch_ahead(start + terms, near & (terms < depth))
        gdc_wait()
    acc = tl.zeros([tile_rows, tile_columns], tl.float32)
    if by_tma:
        for step in tl.range(first, last):
            some = x.load([top, step * tile_depth])
            other = w.load([left, step * tile_depth])
            acc = tl.dot(some, other.T, acc)
    else:
        term = tl.arange(0, tile_depth)
        known, there = (line < rows)[:, None], (position < columns)[:, None]
        if turned:
            x_at = x + line[:, None] + term[None, :] * (x_step_units * unit)
        else:
            x_at = x + line[:, None] * (x_row_units * unit) + term[None, :]
        w_at = w + position[:, None] * (w_units * unit) + term[None, :]
        for step in tl.range(first, last):
            begin = step * tile_depth
            inside = (begin + term < depth)[None, :]
            moved = begin * (x_step_units * unit) if turned else begin
            some = tl.load(x_at + moved, mask=inside & known, other=0.0)
            other = tl.load(w_at + begin, mask=inside & there, other=0.0)
            acc = tl.dot(some, other.T, acc)
    is_last = True
    if split:
        lines, within = tl.arange(0, tile_rows)[:, None], tl.arange(0, tile_columns)[None, :]
        inner = lines * tile_columns + within
        home = partials + (tile * parts).to(tl.int64) * (tile_rows * tile_columns)
        tl.store(home + part * (tile_rows * tile_columns) + inner, acc)
        tl.debug_barrier()  # all of the program's stores stand before its count
        is_last = tl.atomic_add(counts + tile, 1, sem="acq_rel") == parts - 1
        if is_last:
            acc = tl.zeros([tile_rows, tile_columns], tl.float32)
            for each in tl.range(0, parts):
                # past the L1, which may hold what lay there before
                acc += tl.load(
                    home + each * (tile_rows * tile_columns) + inner, cache_modifier=".cg"
                )
            tl.store(counts + tile, 0)
    if is_last:
        if bias is not None:
            shift = tl.load(bias + position, mask=position < columns, other=0.0)
            acc += shift.to(tl.float32)[None, :]
        if formula is not None:
            acc = evaluate(formula, (acc,))
        to = out + line.to(tl.int64)[:, None] * columns + position[None, :]
        inside = (line < rows)[:, None] & (position < columns)[None, :]
        tl.store(to, acc.to(out.dtype.element_ty), mask=inside)


def compile_product(op: Op, otherwise: OpFunction) -> OpFunction:
    """An op of kind linear, of rows and columns, or fused_product, by small tiles where these are
    expected to be fastest; else by `otherwise`.
    """
    text = str(op.get("expr", ""))
    product = TiledProduct(expr.parse(text) if text else None)
    shape = [math.prod(op.extents[n] for n in index.axes) for index in op.writes[0].dims]
    num_columns = sum(index in op.writes[0].dims for index in op.reads[1].dims)

    def run(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        x, w, *bias = operands
        columns = math.prod(w.shape[:num_columns])
        num_rows = math.prod(shape) // columns
        tiles = None
        if x.dtype in HALVES and {each.dtype for each in operands} == {x.dtype} and takes(x):
            tiles = choose_small_tiles(
                num_rows, columns, w.numel() // columns, num_sms(x.device.index),
                has_formula=bool(text),
            )  # fmt: skip
        if tiles is None:
            return otherwise(operands)
        flat = x.reshape(num_rows, -1), w.reshape(columns, -1)
        return (product(*flat, bias[0].reshape(-1) if bias else None, tiles).view(shape),)

    return run


def takes(x: Tensor) -> bool:
    """Whether the kernel runs on x's device."""
    return x.is_cuda and is_hopper(x.device.index)


class TiledProduct:
    """Products with one formula, from one place of a program: launches on a stream come one after
    the other, and share what counts parts.
    """

    def __init__(self, formula: Expr | None) -> None:
        self.formula = formula
        self._counts: dict[tuple[int, int], Tensor] = {}

    def __call__(self, x: Tensor, w: Tensor, bias: Tensor | None, tiles: SmallTiles) -> Tensor:
        """x W' + bias, and the formula of it; all of any strides."""
        if x.stride(1) != 1 and x.stride(0) != 1:
            x = x.contiguous()
        w = w if w.stride(1) == 1 else w.contiguous()
        (rows, depth), columns = x.shape, w.shape[0]
        bias = None if bias is None else bias.contiguous()
        out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
        num_tiles = -(-rows // tiles.rows) * -(-columns // tiles.columns)
        partials = counts = out
        if tiles.parts > 1:
            size = num_tiles * tiles.parts * tiles.rows * tiles.columns
            partials = torch.empty(size, dtype=torch.float32, device=x.device)
            counts = self._zeros(num_tiles, x.device)
        turned = x.stride(1) != 1
        by_tma = not turned and has_tma_rows(x) and has_tma_rows(w)
        row, step = x.stride()
        unit = unit_of(depth, step if turned else row, w.stride(0))
        blocks = (tiles.rows, tiles.depth), (tiles.columns, tiles.depth)
        operands = [
            TensorDescriptor.from_tensor(each, [*block]) if by_tma else each
            for each, block in zip((x, w), blocks, strict=True)
        ]
        launch(
            multiply_tiles, (num_tiles * tiles.parts,),
            *operands, w, bias, out, partials, counts, rows, columns, depth // unit,
            1 if turned else row // unit, step // unit if turned else 1, w.stride(0) // unit,
            tiles.parts, tile_rows=tiles.rows, tile_columns=tiles.columns, tile_depth=tiles.depth,
            unit=unit, by_tma=by_tma, turned=turned, split=tiles.parts > 1, early=EARLY,
            formula=self.formula, num_warps=tiles.warps, num_stages=tiles.stages,
            launch_pdl=EARLY,
        )  # fmt: skip
        return out

    def _zeros(self, num: int, device: torch.device) -> Tensor:
        """A count for each tile on the current stream, which launches leave as they find it. What
        a graph's capture makes is zero only once the graph runs: it is the graph's alone.
        """
        on_gpu = device.type == "cuda"
        stream = torch.cuda.current_stream(device).cuda_stream if on_gpu else 0
        found = self._counts.get((stream, num))
        if found is None:
            found = torch.zeros(num, dtype=torch.int32, device=device)
            if not (on_gpu and torch.cuda.is_current_stream_capturing()):
                self._counts[stream, num] = found
        return found


def unit_of(*numbers: int) -> int:
    """The largest power of two up to ALIGNED that divides all."""
    return math.gcd(ALIGNED, *numbers)
