"""Views of views of the tensor below, and rows without dims of extent 1 in front.

In: a draft. Out: the same with shorter chains of views; a view that shows a whole tensor in its own
shape is gone. Used by products.py; last of the passes.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

from distmega.program.kinds import kind_of
from distmega.program.ops import data_movement
from distmega.program.types import Access, Op, Tensor, contracts, packed_strides, view_strides
from distmega.torch_import.forms.draft import Draft, Emitter

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StridedView:
    """What a view shows of the tensor below all views: offset and strides, in elements."""

    tensor: str
    offset: int
    strides: tuple[int, ...]


def shown_by_views(draft: Draft) -> dict[str, StridedView]:
    """Of each view what it shows."""
    found: dict[str, StridedView] = {}
    for op in draft.ops:
        if not op.is_view:
            continue
        source = draft.tensors[op.reads[0].tensor]
        base = found.get(source.name) or StridedView(source.name, 0, packed_strides(source.shape))
        strides = view_strides(op, base.strides)
        if strides is None:
            continue
        offset = base.offset + sum(
            index.offset * stride
            for index, stride in zip(op.reads[0].dims, base.strides, strict=True)
        )
        found[op.writes[0].tensor] = StridedView(base.tensor, offset, strides)
    return found


def last_views(draft: Draft) -> list[Op]:
    """Views that others than views read, or that are outputs."""
    users = draft.users()
    found = []
    for op in draft.ops:
        out = op.writes[0].tensor if op.is_view else ""
        readers = users.get(out, ())
        if op.is_view and (out in draft.outputs or any(not each.is_view for each in readers)):
            found.append(op)
    return found


def _is_by_rows(op: Op) -> bool:
    """Whether an op does the same for each row."""
    kind = kind_of(op)
    return kind.is_elementwise or kind.scales_elements or contracts(op)


def drop_front(draft: Draft) -> None:
    """Lets ops on rows go without the first dim of extent 1, which torch's batches have in front,
    or behind the rows where these are its batch.
    """
    changes: dict[str, list[Op]] = {}
    for op in draft.ops:
        out = draft.tensors[op.writes[0].tensor] if op.writes else None
        if not _is_by_rows(op) or out is None or len(out.shape) < 3:
            continue
        if out.shape[0] != 1 and (len(out.shape) > 3 or out.shape[1] != 1):
            continue
        at = out.shape.index(1)
        emitter = Emitter(draft)
        (front,) = op.writes[0].dims[at].axes
        seen: dict[str, str] = {}
        rank = len(out.shape)
        reads = tuple(_bare(emitter, read, front, at, rank, seen) for read in op.reads)
        bare = Tensor(name=emitter.name(out.name), shape=_without(out.shape, at), dtype=out.dtype)
        write = Access(tensor=bare.name, dims=_without(op.writes[0].dims, at))
        axes = tuple(axis for axis in op.axes if axis.name != front)
        emitter.add((replace(op, axes=axes, reads=reads, writes=(write,)), (bare,)))
        emitter.add(data_movement.reshape(out.name, bare, out.shape, kind="view"))
        emitter.ops[-1] = replace(emitter.ops[-1], name=f"{bare.name}.view")
        changes[op.name] = emitter.ops
    draft.replace(changes)


def _bare(
    emitter: Emitter, read: Access, front: str, at: int, rank: int, seen: dict[str, str]
) -> Access:
    """An operand without the dim of axis `front`, dim number `at` of `rank` ones of the result, if
    it has that dim. seen: tensor -> it without that dim.
    """
    own = [dim for dim, index in enumerate(read.dims) if index.axes == (front,)]
    source = emitter.draft.tensors[read.tensor]
    dim = own[0] if own else at
    if not own and (len(read.dims) < rank or source.shape[dim] != 1):
        return read
    if read.tensor not in seen:
        name = emitter.name(source.name)
        built = data_movement.reshape(name, source, _without(source.shape, dim), kind="view")
        seen[read.tensor] = emitter.add(built).name
    return Access(tensor=seen[read.tensor], dims=_without(read.dims, dim))


def _without(dims: tuple[T, ...], dim: int) -> tuple[T, ...]:
    return dims[:dim] + dims[dim + 1 :]


def flatten_views(draft: Draft) -> None:
    """Makes views show the tensor below them at once."""
    shown = shown_by_views(draft)
    changes: dict[str, list[Op]] = {}
    names: dict[str, str] = {}
    for op in last_views(draft):
        out = draft.tensors[op.writes[0].tensor]
        found = shown.get(out.name)
        if found is None:
            continue
        base = draft.tensors[found.tensor]
        if is_whole(out, base, found) and base.shape == out.shape:
            if out.name not in draft.outputs:
                names[out.name] = base.name
            continue
        ops = show(draft, op.name, out, base, found)
        if ops is not None:
            changes[op.name] = ops
    draft.replace(changes)
    draft.rename(names)


def show(
    draft: Draft, op_name: str, out: Tensor, base: Tensor, shown: StridedView
) -> list[Op] | None:
    """Views from `base` to `out`; None where its strides are no parts of each other."""
    if is_whole(out, base, shown):
        op, _ = data_movement.reshape(out.name, base, out.shape, kind="view")
        return [replace(op, name=op_name)]
    dims = [n for n, extent in enumerate(out.shape) if extent > 1]
    dims.sort(key=lambda n: -shown.strides[n])
    steps = [base.num_elements, *(shown.strides[n] for n in dims)]
    if steps[-1] != 1:
        steps.append(1)
    if any(large % small for large, small in pairwise(steps)):
        return None
    shape = [large // small for large, small in pairwise(steps)]
    extents = [out.shape[n] for n in dims] + [1] * (len(shape) - len(dims))
    emitter, made = Emitter(draft), base

    def step(kind: str, *arguments: object) -> None:
        nonlocal made
        name = emitter.name(out.name)
        made = emitter.add(getattr(data_movement, kind)(name, made, *arguments, kind="view"))

    if tuple(shape) != base.shape:
        step("reshape", shape)
    left = shown.offset
    for position, (extent, stride) in enumerate(zip(extents, steps[1:], strict=True)):
        start, left = left // stride, left % stride
        if start + extent > shape[position]:
            return None
        if extent < shape[position]:
            step("slice_dim", position, start, start + extent)
    order = sorted(range(len(dims)), key=lambda position: dims[position])
    if order != list(range(len(dims))):
        if len(made.shape) > len(dims):
            step("reshape", [made.shape[position] for position in range(len(dims))])
        step("transpose", order)
    if made.shape != out.shape or not emitter.ops:
        step("reshape", out.shape)
    last = emitter.ops[-1]
    write = replace(last.writes[0], tensor=out.name)
    emitter.ops[-1] = replace(last, name=op_name, writes=(write,))
    return emitter.ops


def is_whole(out: Tensor, base: Tensor, shown: StridedView) -> bool:
    """Whether a view shows all of a tensor in its order."""
    packed = zip(out.shape, shown.strides, packed_strides(out.shape), strict=True)
    in_order = all(stride == wanted for extent, stride, wanted in packed if extent > 1)
    return in_order and out.num_elements == base.num_elements
