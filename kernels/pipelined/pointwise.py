"""Launches of the pointwise kernels: operands become parts of one matrix, a choice is made, and TMA
or plain Triton runs it.

In: expressions and CUDA tensors of float types. Out: results, contiguous. Next: norms.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from distmega.expr import Expr
from distmega.kernels.pipelined.blocks import SWIZZLE_BYTES, describe, padded_to
from distmega.kernels.pipelined.choices import (
    Choice,
    Traffic,
    flat_choices,
    matrix_choices,
)
from distmega.kernels.pipelined.device import INT32, can_load, device_facts, has_tma, num_programs
from distmega.kernels.pipelined.pointwise_kernel import PointwiseSpec, pointwise_kernel
from distmega.kernels.pipelined.triton_path import BLOCK, Exprs, pointwise_any
from distmega.kernels.pipelined.tuning import pick
from distmega.kernels.pipelined.views import Matrix, as_matrix

MAX_INPUTS = 8
MAX_OUTPUTS = 4
Dtypes = tuple[torch.dtype, ...]
Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides of an operand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """A matrix, the kind of each operand in it, and choices, best first; none without TMA.

    width: a single row is seen as [columns / width, width], or as it is where width is 0.
    """

    matrix: Matrix
    kinds: tuple[str, ...]
    width: int
    choices: tuple[Choice, ...]


def launch_pointwise(
    exprs: tuple[Expr, ...], tensors: Sequence[Tensor], results: Sequence[Tensor]
) -> None:
    """Writes one result an expression, contiguous; tensors: 1 to 8 that broadcast to its shape."""
    shape = tuple(results[0].shape)
    if 0 in shape:
        return
    plan = _plan_of(tensors, results)
    if plan is None:
        tensors = [torch.broadcast_to(x, shape).contiguous() for x in tensors]
        plan = _plan_of(tensors, results)
        assert plan is not None, "contiguous tensors are one row"
    choices = pointwise_choices(tensors, results)
    if not choices:
        run_any(exprs, tensors, results, plan.matrix)
        return

    def run(choice: Choice) -> None:
        run_tma(exprs, tensors, results, choice)

    run(pick(shape_class(exprs, tensors, results), choices, run))


def pointwise_choices(tensors: Sequence[Tensor], results: Sequence[Tensor]) -> tuple[Choice, ...]:
    """Choices for the Gluon kernel, best first; none where it can't run."""
    plan = _plan_of(tensors, results)
    return plan.choices if plan and _is_aligned(tensors, results, plan) else ()


def shape_class(exprs: Sequence[Expr], tensors: Sequence[Tensor], results: Sequence[Tensor]) -> str:
    """Calls of one class share a measured choice: extents up to the next power of two."""
    plan = _plan_of(tensors, results)
    assert plan is not None, "shape classes are of operands that have choices"
    types = " ".join(str(x.dtype).removeprefix("torch.") for x in (*tensors, *results))
    size = f"{padded_to(plan.matrix.rows)}x{padded_to(plan.matrix.columns)}"
    return f"pointwise {'; '.join(map(str, exprs))}, {' '.join(plan.kinds)}, {types}, {size}"


def _plan_of(tensors: Sequence[Tensor], results: Sequence[Tensor]) -> _Plan | None:
    layouts = tuple((tuple(x.shape), x.stride()) for x in tensors)
    types = tuple(x.dtype for x in tensors), tuple(x.dtype for x in results)
    return _plan(tuple(results[0].shape), layouts, *types, results[0].device.index)


@lru_cache(maxsize=4096)
def _plan(
    shape: tuple[int, ...], layouts: tuple[Layout, ...], ins: Dtypes, outs: Dtypes, index: int
) -> _Plan | None:
    """None if the operands do not fit a matrix."""
    matrix = as_matrix(shape, layouts)
    if matrix is None:
        return None
    kinds = tuple(_kind(matrix, strides) for strides in matrix.strides)
    tiles = [dtype.itemsize for dtype, kind in zip(ins, kinds, strict=True) if kind == "tile"]
    leaving = [dtype.itemsize for dtype in outs]
    extents = (matrix.rows, matrix.columns)
    traffic = Traffic(in_bytes=sum(tiles), out_bytes=sum(leaving), num_elements=math.prod(extents))
    width = 0
    choices: tuple[Choice, ...] = ()
    if "" in kinds or not has_tma(index):
        pass
    elif matrix.rows > 1:
        if max(extents) < INT32 and not any(matrix.columns * size % 16 for size in leaving):
            choices = matrix_choices(*extents, traffic, device_facts(index))
    else:
        width = SWIZZLE_BYTES // max(tiles + leaving)
        width = 0 if matrix.columns % width else width
        if matrix.columns // max(1, width) < INT32:
            choices = flat_choices(traffic, device_facts(index), width)
    return _Plan(matrix=matrix, kinds=kinds, width=width, choices=choices)


def _kind(matrix: Matrix, strides: tuple[int, int]) -> str:
    """An operand's part in a tile as PointwiseSpec has it; empty if TMA can't read it."""
    row, column = strides
    if row == 0 and column == 0:
        return "scalar"
    if row == 0 and matrix.rows > 1:
        return "row"
    if column == 0:
        return "column"
    return "tile" if column == 1 else ""


def _is_aligned(tensors: Sequence[Tensor], results: Sequence[Tensor], plan: _Plan) -> bool:
    """Whether descriptors can address all operands that come or leave by TMA."""
    rows = (
        can_load(x, strides[0])
        for x, kind, strides in zip(tensors, plan.kinds, plan.matrix.strides, strict=True)
        if kind == "tile"
    )
    return all(rows) and all(can_load(y, 0) for y in results)


def run_tma(
    exprs: tuple[Expr, ...], tensors: Sequence[Tensor], results: Sequence[Tensor], choice: Choice
) -> None:
    """The Gluon kernel with a given choice."""
    plan = _plan_of(tensors, results)
    assert plan is not None, "run_tma is for operands that have choices"
    matrix = plan.matrix
    if matrix.rows > 1:
        shape = [matrix.rows, matrix.columns]
    else:
        shape = [matrix.columns // plan.width, plan.width] if plan.width else [matrix.columns]
    operands: list[object] = [None] * (MAX_INPUTS + MAX_OUTPUTS)
    for i, (x, kind) in enumerate(zip(tensors, plan.kinds, strict=True)):
        row, column = matrix.strides[i]
        if kind == "tile":
            strides = [row, 1] if matrix.rows > 1 else _packed(shape)
            operands[i] = describe(x, shape, strides, choice.tile)
        else:
            length, step = (matrix.columns, column) if kind == "row" else (matrix.rows, row)
            vector = x.as_strided((1 if kind == "scalar" else length,), (step,))
            operands[i] = vector.contiguous()
    for i, y in enumerate(results):
        operands[MAX_INPUTS + i] = describe(y, shape, _packed(shape), choice.tile)
    tiles = [-(-extent // size) for extent, size in zip(shape, choice.tile, strict=True)]
    spec = PointwiseSpec(
        exprs=exprs,
        kinds=plan.kinds,
        tile=choice.tile,
        stages=choice.stages,
        buffers=choice.buffers,
    )
    grid = num_programs(choice, math.prod(tiles), results[0])
    pointwise_kernel[(grid,)](
        *operands, matrix.rows, matrix.columns, math.prod(tiles), choice.run, tiles[-1], spec,
        num_warps=choice.num_warps, maxnreg=choice.max_registers,
    )  # fmt: skip


def _packed(shape: Sequence[int]) -> list[int]:
    """Row-major strides of one or two dims."""
    return [shape[1], 1] if len(shape) == 2 else [1]


def run_any(
    exprs: tuple[Expr, ...], tensors: Sequence[Tensor], results: Sequence[Tensor], matrix: Matrix
) -> None:
    """The plain Triton kernel."""
    num_elements = matrix.rows * matrix.columns
    inputs = [*tensors, *[None] * (MAX_INPUTS - len(tensors))]
    outputs = [*results, *[None] * (MAX_OUTPUTS - len(results))]
    row_strides, column_strides = zip(*matrix.strides, strict=True)
    pointwise_any[(-(-num_elements // BLOCK),)](
        *inputs, *outputs, row_strides, column_strides, matrix.columns, num_elements,
        Exprs(exprs=exprs), len(tensors), BLOCK,
    )  # fmt: skip
