"""Operands of a pointwise op as parts of one matrix: dims that lie behind each other are merged.

In: shapes and strides. Out: a Matrix, or None if two dims are not enough; what calls must share to
share launches. Next: choices.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from distmega.errors import ProgramError

VECTOR_BYTES = 16
"""Of a tensor's start and rows for TMA, and for the widest plain loads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """The result's extents as rows and columns; per operand its (row, column) strides in elements,
    0 along what it is broadcast over.
    """

    rows: int
    columns: int
    strides: tuple[tuple[int, int], ...]


def broadcast_shapes(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Common shape by numpy's rules; ProgramError if there is none."""
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    extents = []
    for column in zip(*padded, strict=True):
        wide = {extent for extent in column if extent != 1}
        if len(wide) > 1:
            raise ProgramError(
                f"operands of shapes {[list(shape) for shape in shapes]}",
                expected="extents that are equal or 1, counted from the last dim",
                remedy="reshape or expand the operands",
            )
        extents.append(wide.pop() if wide else 1)
    return tuple(extents)


def as_matrix(
    shape: Sequence[int], operands: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> Matrix | None:
    """Operands (shape, strides) that broadcast to `shape`, as one matrix; None if no two dims do.

    The split that makes rows longest wins, so plain tensors become one long row.
    """
    strides = [_expanded(shape, *operand) for operand in operands]
    dims = [dim for dim in range(len(shape)) if shape[dim] != 1]
    merged: list[tuple[int, tuple[int, ...]]] = []
    for dim in reversed(dims):
        steps = tuple(operand[dim] for operand in strides)
        if merged and all(
            step == inner * merged[-1][0] for step, inner in zip(steps, merged[-1][1], strict=True)
        ):
            merged[-1] = (merged[-1][0] * shape[dim], merged[-1][1])
        else:
            merged.append((shape[dim], steps))
    if len(merged) > 2:
        return None
    none = (0,) * len(operands)
    merged += [(1, none)] * (2 - len(merged))
    (columns, inner), (rows, outer) = merged
    return Matrix(rows=rows, columns=columns, strides=tuple(zip(outer, inner, strict=True)))


def _expanded(
    shape: Sequence[int], own_shape: Sequence[int], own_strides: Sequence[int]
) -> tuple[int, ...]:
    missing = len(shape) - len(own_shape)
    own = [
        0 if extent == 1 else stride for extent, stride in zip(own_shape, own_strides, strict=True)
    ]
    return (0,) * missing + tuple(own)


def layout_key(x: Tensor | None) -> object:
    """What two tensors have in common that a launch treats alike, on one device."""
    if x is None:
        return None
    return (x.shape, x.stride(), x.dtype, x.data_ptr() % VECTOR_BYTES == 0)


def result_key(y: Tensor | None) -> object:
    """As layout_key, of a contiguous result whose shape follows from the operands."""
    return None if y is None else (y.dtype, y.data_ptr() % VECTOR_BYTES == 0)


def as_rows(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int] | None:
    """(Row, element) strides of a tensor as rows of its last dim; None if they have no one stride.

    A row stride of what has one row is the row's length.
    """
    *outer, columns = shape
    outer_strides, step = list(strides[:-1]), strides[-1] if columns > 1 else 1
    stride, num_rows = 0, 1
    for extent, own in reversed(list(zip(outer, outer_strides, strict=True))):
        if extent == 1:
            continue
        if num_rows == 1:
            stride = own
        elif own != stride * num_rows:
            return None
        num_rows *= extent
    return (stride if num_rows > 1 else columns, step)
