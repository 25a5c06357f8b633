"""Views of a segment that show a run of elements, or columns of rows, which need no work of their
own.

In: a segment. Out: where what each shows lies. Next on the walk: segment.py.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from distmega.program.types import Program, packed_strides, view_strides


@dataclass(frozen=True, slots=True)
class Shown:
    """What a view shows: `num` elements of a tensor from `first` on, in their order."""

    tensor: str
    first: int
    num: int


@dataclass(frozen=True, slots=True)
class Columns:
    """What a view shows: of each row of a tensor [rows, ...], `num` elements from `first` on."""

    tensor: str
    first: int
    num: int


class _Strided(NamedTuple):
    """Where a view lies: in a tensor that has storage, from an element on, by strides."""

    tensor: str
    first: int
    strides: tuple[int, ...]


def _strided_views(segment: Program) -> dict[str, _Strided]:
    """Of each view whose dims have one stride each in a tensor that has storage: where it lies."""
    tensors = segment.tensor_map()
    views = {op.writes[0].tensor for op in segment.ops if op.is_view}
    found: dict[str, _Strided] = {}
    for op in segment.ops:
        source = op.reads[0].tensor if op.is_view else ""
        if not op.is_view or source in views - found.keys():
            continue
        whole = _Strided(source, 0, packed_strides(tensors[source].shape))
        tensor, first, strides = found.get(source, whole)
        steps = view_strides(op, strides)
        if steps is not None:
            offsets = zip(op.reads[0].dims, strides, strict=True)
            first += sum(index.offset * stride for index, stride in offsets)
            found[op.writes[0].tensor] = _Strided(tensor, first, steps)
    return found


def columns_by_views(segment: Program) -> dict[str, Columns]:
    """Of each view that shows all rows of a tensor that has storage, and of each the same run of
    elements: which they are.
    """
    tensors = segment.tensor_map()
    found: dict[str, Columns] = {}
    for view, (tensor, first, steps) in _strided_views(segment).items():
        whole = tensors[tensor].shape
        if _shows_columns(tensors[view].shape, steps, first, whole):
            found[view] = Columns(tensor, first, tensors[view].num_elements // whole[0])
    return found


def _shows_columns(
    shape: tuple[int, ...], steps: tuple[int, ...], first: int, whole: tuple[int, ...]
) -> bool:
    """Whether elements by `steps` from `first` on are of all rows of a tensor of shape `whole`, and
    follow each other in each. One number without dims has no rows.
    """
    if not shape or not whole:
        return False
    rows, width = whole[0], math.prod(whole[1:])
    inner = zip(shape[1:], steps[1:], packed_strides(shape[1:]), strict=True)
    return (
        shape[0] == rows
        and (rows == 1 or steps[0] == width)
        and all(step == want for extent, step, want in inner if extent > 1)
        and first + math.prod(shape[1:]) <= width
    )


def shown_by_views(segment: Program) -> dict[str, Shown]:
    """Of each view that shows a run of elements: where these are in the tensor that has storage."""
    tensors = segment.tensor_map()
    views = {op.writes[0].tensor: op.reads[0].tensor for op in segment.ops if op.is_view}
    found: dict[str, Shown] = {}
    for view, (tensor, first, steps) in _strided_views(segment).items():
        shape = tensors[view].shape
        packed = zip(shape, steps, packed_strides(shape), strict=True)
        if views[view] in views.keys() - found.keys():  # of a view that is no run
            continue
        if all(step == want for extent, step, want in packed if extent > 1):
            found[view] = Shown(tensor, first, tensors[view].num_elements)
    return found
