"""Views of a segment that show a run of elements, or columns of rows, which need no work of their
own.

In: a segment. Out: where what each shows lies. Next on the walk: segment.py.
"""

import math
from dataclasses import dataclass

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


def columns_by_views(segment: Program) -> dict[str, Columns]:
    """Of each view that shows all rows of a tensor that has storage, and of each the same run of
    elements: which they are.
    """
    tensors = segment.tensor_map()
    views = {op.writes[0].tensor for op in segment.ops if op.is_view}
    lies: dict[str, tuple[str, int, tuple[int, ...]]] = {}
    """Of each view: the tensor that has storage, its first element there, its strides."""
    found: dict[str, Columns] = {}
    for op in segment.ops:
        source, view = op.reads[0].tensor if op.is_view else "", op.writes[0].tensor
        if not op.is_view or source in views - lies.keys():
            continue
        known = source, 0, packed_strides(tensors[source].shape)
        name, first, strides = lies.get(source, known)
        steps = view_strides(op, strides)
        if steps is None:
            continue
        first += sum(i.offset * step for i, step in zip(op.reads[0].dims, strides, strict=True))
        lies[view] = name, first, steps
        if _shows_columns(tensors[view].shape, steps, first, tensors[name].shape):
            num = tensors[view].num_elements // tensors[name].shape[0]
            found[view] = Columns(name, first, num)
    return found


def _shows_columns(
    shape: tuple[int, ...], steps: tuple[int, ...], first: int, whole: tuple[int, ...]
) -> bool:
    """Whether elements by `steps` from `first` on are of all rows of a tensor of shape `whole`, and
    follow each other in each.
    """
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
    views = {op.writes[0].tensor for op in segment.ops if op.is_view}
    found: dict[str, Shown] = {}
    for op in segment.ops:
        if not op.is_view:
            continue
        source, view = tensors[op.reads[0].tensor], tensors[op.writes[0].tensor]
        if source.name in views - found.keys():
            continue
        strides = packed_strides(source.shape)
        steps = view_strides(op, strides)
        packed = zip(view.shape, steps or (), packed_strides(view.shape), strict=False)
        if steps is None or any(step != want for extent, step, want in packed if extent > 1):
            continue
        base = found.get(source.name, Shown(source.name, 0, source.num_elements))
        first = base.first + sum(
            index.offset * stride for index, stride in zip(op.reads[0].dims, strides, strict=True)
        )
        found[view.name] = Shown(base.tensor, first, view.num_elements)
    return found
