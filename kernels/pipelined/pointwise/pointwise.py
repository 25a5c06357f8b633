"""Launches of the pointwise kernels: operands become parts of one matrix, a choice is made, and TMA
or plain Triton runs it.

In: expressions and CUDA tensors of float types. Out: results, contiguous. Next: norms.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distmega.hostir.passes.fused_kinds import MAX_READS, MAX_WRITES
from distmega.kernels.pipelined.blocks import SWIZZLE_BYTES, padded_to
from distmega.kernels.pipelined.choices import (
    KernelChoice,
    Traffic,
    flat_choices,
    matrix_choices,
    plain_choices,
)
from distmega.kernels.pipelined.device import INT32, device_facts, num_programs
from distmega.kernels.pipelined.families import (
    Argument,
    Block,
    Launch,
    LaunchFamily,
    Vector,
    pointer,
)
from distmega.kernels.pipelined.pointwise.exprs import Formula
from distmega.kernels.pipelined.pointwise.pointwise_kernel import PointwiseSpec, pointwise_kernel
from distmega.kernels.pipelined.pointwise.views import (
    VECTOR_BYTES,
    Matrix,
    as_matrix,
    layout_key,
    result_key,
)
from distmega.kernels.pipelined.triton_path import pointwise_plain
from distmega.kernels.runtime.gpus import is_hopper
from distmega.kernels.runtime.memory import has_tma_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class _PointwiseClass:
    """What calls have in common that share launches. kinds: each operand's part in the matrix.

    width: a single row is seen as [columns / width, width], or as it is where width is 0. types: of
    the operands, then of the results.
    """

    formula: Formula
    matrix: Matrix
    kinds: tuple[str, ...]
    types: tuple[torch.dtype, ...]
    width: int
    index: int

    @property
    def num_elements(self) -> int:
        return self.matrix.rows * self.matrix.columns

    @property
    def name(self) -> str:
        """The shape class: extents up to the next power of two."""
        types = " ".join(str(dtype).removeprefix("torch.") for dtype in self.types)
        size = f"{padded_to(self.matrix.rows)}x{padded_to(self.matrix.columns)}"
        return f"pointwise {self.formula.text}, {' '.join(self.kinds)}, {types}, {size}"

    def launch(self, choice: KernelChoice) -> Launch:
        return self.tma_launch(choice) if choice.stages else self.plain_launch(choice)

    def tma_launch(self, choice: KernelChoice) -> Launch:
        """The Gluon kernel."""
        rows, columns = self.matrix.rows, self.matrix.columns
        shape: tuple[int, ...] = (rows, columns)
        if rows == 1:
            shape = (columns // self.width, self.width) if self.width else (columns,)
        packed = (shape[1], 1) if len(shape) == 2 else (1,)
        arguments: list[Argument] = []
        for kind, (row, column) in zip(self.kinds, self.matrix.strides, strict=True):
            if kind == "tile":
                strides = (row, 1) if rows > 1 else packed
                arguments.append(Block(shape=shape, strides=strides, tile=choice.tile))
            elif kind == "scalar":
                arguments.append(pointer)
            else:
                length, step = (columns, column) if kind == "row" else (rows, row)
                arguments.append(Vector(length=length, step=step))
        leaving = Block(shape=shape, strides=packed, tile=choice.tile)
        tiles = [-(-extent // size) for extent, size in zip(shape, choice.tile, strict=True)]
        num_tiles = math.prod(tiles)
        spec = PointwiseSpec(
            exprs=self.formula.exprs,
            kinds=self.kinds,
            tile=choice.tile,
            stages=choice.stages,
            buffers=choice.buffers,
        )
        return Launch(
            kernel=pointwise_kernel,
            arguments=[*_filled(arguments, MAX_READS), *[leaving] * MAX_WRITES],
            rest=(rows, columns, num_tiles, choice.run, tiles[-1], spec),
            grid=num_programs(choice, num_tiles, self.index),
            options={"num_warps": choice.num_warps, "maxnreg": choice.max_registers},
        )

    def plain_launch(self, choice: KernelChoice) -> Launch:
        """The plain Triton kernel."""
        matrix, block = self.matrix, choice.tile[0]
        row_strides, column_strides = zip(*matrix.strides, strict=True)
        reach = max(matrix.rows * row + matrix.columns * step for row, step in matrix.strides)
        wide = max(reach, self.num_elements + block) >= INT32
        return Launch(
            kernel=pointwise_plain,
            arguments=[pointer] * (MAX_READS + MAX_WRITES),
            rest=(
                row_strides, column_strides, matrix.columns, self.num_elements, self.formula,
                len(self.kinds), matrix.rows == 1, wide, block, self.num_elements % block == 0,
                choice.once,
            ),
            grid=-(-self.num_elements // block),
            options={"num_warps": choice.num_warps},
        )  # fmt: skip


def _filled(items: Sequence[Argument], count: int) -> list[Argument]:
    return [*items, *[pointer] * (count - len(items))]


_families: dict[object, LaunchFamily | None] = {}


def run_pointwise(formula: Formula, tensors: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    """Writes one result an expression, contiguous; tensors: 1 to 8 that broadcast to its shape."""
    if not results[0].numel():
        return
    family = family_of(formula, tensors, results)
    if family is None:
        tensors = [torch.broadcast_to(x, results[0].shape).contiguous() for x in tensors]
        family = family_of(formula, tensors, results)
        assert family is not None, "contiguous tensors are one row"
    family.run(inplace_inputs(tensors, results))


def inplace_inputs(
    tensors: Sequence[Tensor], results: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """The kernels' tensors, with None for the operands and results that are not there."""
    inputs = (*tensors, *(None,) * (MAX_READS - len(tensors)))
    return (*inputs, *results, *(None,) * (MAX_WRITES - len(results)))


def family_of(
    formula: Formula, tensors: Sequence[Tensor], results: Sequence[Tensor]
) -> LaunchFamily | None:
    """The launches for such operands; None where they do not fit a matrix."""
    index = results[0].device.index
    key = (formula.text, index, *map(layout_key, tensors), *map(result_key, results))
    if key not in _families:
        _families[key] = _make_family(formula, tensors, results)
    return _families[key]


def _make_family(
    formula: Formula, tensors: Sequence[Tensor], results: Sequence[Tensor]
) -> LaunchFamily | None:
    shape, index = results[0].shape, results[0].device.index
    matrix = as_matrix(shape, [(x.shape, x.stride()) for x in tensors])
    if matrix is None:
        return None
    kinds = tuple(_kind(matrix, strides) for strides in matrix.strides)
    tiles = [x.element_size() for x, kind in zip(tensors, kinds, strict=True) if kind == "tile"]
    leaving = [y.element_size() for y in results]
    width = SWIZZLE_BYTES // max(tiles + leaving)
    made = _PointwiseClass(
        formula=formula,
        matrix=matrix,
        kinds=kinds,
        types=tuple(x.dtype for x in (*tensors, *results)),
        width=width if matrix.rows == 1 and not matrix.columns % width else 0,
        index=index,
    )
    traffic = Traffic(in_bytes=sum(tiles), out_bytes=sum(leaving), num_elements=made.num_elements)
    facts = device_facts(index)
    if not _takes_tma(made, tensors, results):
        return LaunchFamily(made.name, plain_choices(traffic, facts)[:1], made.launch)
    if matrix.rows > 1:
        choices = matrix_choices(matrix.rows, matrix.columns, traffic, facts)
    else:
        choices = flat_choices(traffic, facts, made.width)
    return LaunchFamily(made.name, choices, made.launch)


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


def _takes_tma(made: _PointwiseClass, tensors: Sequence[Tensor], results: Sequence[Tensor]) -> bool:
    """Whether the Gluon kernel runs there and descriptors can address what comes or leaves."""
    if "" in made.kinds or not is_hopper(made.index):
        return False
    rows, columns = made.matrix.rows, made.matrix.columns
    extent = columns // max(1, made.width) if rows == 1 else max(rows, columns)
    if extent >= INT32 or (rows > 1 and any(columns * y.element_size() % 16 for y in results)):
        return False
    tiles = [
        (x, strides[0])
        for x, kind, strides in zip(tensors, made.kinds, made.matrix.strides, strict=True)
        if kind == "tile"
    ]
    if rows > 1 and not all(has_tma_rows(x, row, columns) for x, row in tiles):
        return False
    return all(each.data_ptr() % VECTOR_BYTES == 0 for each in (*(x for x, _ in tiles), *results))
