"""Views of a segment that show a run of elements, which need no work of their own.

In: a segment. Out: where what each shows lies. Next on the walk: segment.py.
"""

from dataclasses import dataclass

from distmega.program.types import Program, packed_strides, view_strides


@dataclass(frozen=True, slots=True)
class Shown:
    """What a view shows: `num` elements of a tensor from `first` on, in their order."""

    tensor: str
    first: int
    num: int


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
