"""Ops that only move data: set, slice, concat, expand, transpose, reshape, and views of these.

Like compute.py: one function an op, names and tensors in, the Op and the tensors it writes out.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from distmega.errors import counted
from distmega.program.kinds import COUNT, Coordinate, OpKind, define, zero_if_all
from distmega.program.ops.axis_views import access_axes, fold_axes, order_axes, unfold_axes
from distmega.program.ops.compute import pointwise
from distmega.program.ops.parts import (
    Built,
    access,
    as_stated,
    axis_names,
    bad_op,
    index,
    make_op,
    misplaced_axes,
    normal_dim,
    whole_number,
    whole_number_list,
    wrong_dtype,
)
from distmega.program.types import Access, Axis, Index, Op, Tensor


def copy(name: str, x: Tensor, into: Tensor | None = None) -> Built:
    """Kind `set`: out = x, or overwrites `into`, a state or temporary of the same shape; one of
    another type by kind `pointwise`, which converts.
    """
    if into is not None and into.shape != x.shape:
        raise bad_op(name, f"set of {x.shape} into {into.shape}", "equal shapes")
    names = axis_names("i", len(x.shape))
    axes = [Axis(name=n, extent=e) for n, e in zip(names, x.shape, strict=True)]
    out = into or Tensor(name=name, shape=x.shape, dtype=x.dtype)
    if into is not None and into.dtype != x.dtype:
        converted, _ = pointwise(name, "a0", x, dtype=into.dtype)
        (write,) = converted.writes
        return replace(converted, writes=(replace(write, tensor=into.name),)), ()
    return make_op(name, "set", axes, [access(x, *names)], [access(out, *names)]), (
        () if into else (out,)
    )


def slice_dim(
    name: str, x: Tensor, dim: int, start: int, stop: int, step: int = 1, kind: str = "slice"
) -> Built:
    """x[start:stop:step] along one dim. kind "view" shares x's storage."""
    dim = normal_dim(name, x, dim)
    start, stop, step = (
        whole_number(name, what, value)
        for what, value in (("start", start), ("stop", stop), ("step", step))
    )
    if not 0 <= start < stop <= x.shape[dim] or step < 1:
        raise bad_op(
            name,
            f"slice {start}:{stop}:{step} of extent {x.shape[dim]}",
            "0 <= start < stop <= extent, step >= 1",
        )
    names = axis_names("i", len(x.shape))
    shape = tuple(-(-(stop - start) // step) if i == dim else e for i, e in enumerate(x.shape))
    axes = [Axis(name=n, extent=e) for n, e in zip(names, shape, strict=True)]
    dims = tuple(
        Index(axes=(n,), offset=start, stride=step) if i == dim else index(n)
        for i, n in enumerate(names)
    )
    out = Tensor(name=name, shape=shape, dtype=x.dtype)
    return make_op(name, kind, axes, [Access(tensor=x.name, dims=dims)], [access(out, *names)]), (
        out,
    )


def concat(name: str, xs: Sequence[Tensor], dim: int) -> Built:
    """Joins tensors of one dtype along a dim; positions outside an operand are simply not read from
    it.
    """
    if not xs:
        raise bad_op(name, "concat of no tensors", "at least one")
    if len(dtypes := list(dict.fromkeys(x.dtype for x in xs))) > 1:
        remedy = f'convert the others, as by pointwise("a0", x, dtype="{dtypes[0]}")'
        raise bad_op(name, f"concat of dtypes {', '.join(dtypes)}", "one dtype", remedy)
    dim = normal_dim(name, xs[0], dim)
    for x in xs:
        if len(x.shape) != len(xs[0].shape) or any(
            a != b for i, (a, b) in enumerate(zip(x.shape, xs[0].shape, strict=True)) if i != dim
        ):
            raise bad_op(
                name,
                f"concat of {[x.shape for x in xs]} along dim {dim}",
                "equal shapes but for that dim",
            )
    total = sum(x.shape[dim] for x in xs)
    names = axis_names("i", len(xs[0].shape))
    shape = tuple(total if i == dim else e for i, e in enumerate(xs[0].shape))
    reads, offset = [], 0
    for x in xs:
        dims = tuple(
            Index(axes=(n,), offset=-offset if i == dim else 0) for i, n in enumerate(names)
        )
        reads.append(Access(tensor=x.name, dims=dims))
        offset += x.shape[dim]
    out = Tensor(name=name, shape=shape, dtype=xs[0].dtype)
    axes = [Axis(name=n, extent=e) for n, e in zip(names, shape, strict=True)]
    return make_op(name, "concat", axes, reads, [access(out, *names)], dim=dim), (out,)


def expand(name: str, x: Tensor, shape: Sequence[int]) -> Built:
    """x repeated along dims of extent 1 and along new dims in front, to `shape`."""
    shape = whole_number_list(name, "extent", shape)
    behind = shape[len(shape) - len(x.shape) :]
    fits = len(shape) >= len(x.shape) and all(
        mine in (1, wanted) for mine, wanted in zip(x.shape, behind, strict=True)
    )
    if not fits or min(shape, default=1) < 1:
        raise bad_op(name, f"{x.shape} repeated to {tuple(shape)}", "a shape it broadcasts to")
    names = axis_names("i", len(shape))
    axes = [Axis(name=n, extent=e) for n, e in zip(names, shape, strict=True)]
    mine = zip(names[len(shape) - len(x.shape) :], x.shape, behind, strict=True)
    dims = tuple(index(n) if extent == wanted else Index() for n, extent, wanted in mine)
    out = Tensor(name=name, shape=tuple(shape), dtype=x.dtype)
    reads = [Access(tensor=x.name, dims=dims)]
    return make_op(name, "expand", axes, reads, [access(out, *names)]), (out,)


def transpose(name: str, x: Tensor, order: Sequence[int], kind: str = "transpose") -> Built:
    """Dims of x in a new order: out dim i is x dim order[i]. kind "view" shares x's storage."""
    order = whole_number_list(name, "dim", order)
    if sorted(order) != list(range(len(x.shape))):
        raise bad_op(
            name,
            f"order {order} for {counted(len(x.shape), 'dim')}",
            "a permutation of the dims",
        )
    names = axis_names("i", len(x.shape))
    axes = [Axis(name=names[i], extent=x.shape[i]) for i in order]
    out = Tensor(name=name, shape=tuple(x.shape[i] for i in order), dtype=x.dtype)
    return make_op(
        name, kind, axes, [access(x, *names)], [access(out, *(names[i] for i in order))]
    ), (out,)


def reshape(name: str, x: Tensor, shape: Sequence[int], kind: str = "reshape") -> Built:
    """Same elements in row-major order under another shape. kind "view" shares x's storage."""
    shape = whole_number_list(name, "extent", shape)
    if math.prod(shape) != x.num_elements or min(shape, default=1) < 1:
        raise bad_op(
            name,
            f"reshape of {x.shape} to {tuple(shape)}",
            f"a shape of {counted(x.num_elements, 'element')}",
        )
    axes, x_dims, out_dims = _factor(name, x.shape, tuple(shape))
    out = Tensor(name=name, shape=tuple(shape), dtype=x.dtype)
    read = Access(tensor=x.name, dims=tuple(index(*d) for d in x_dims))
    return make_op(
        name, kind, axes, [read], [Access(tensor=name, dims=tuple(index(*d) for d in out_dims))]
    ), (out,)


def _factor(
    name: str, old: tuple[int, ...], new: tuple[int, ...]
) -> tuple[list[Axis], list[list[str]], list[list[str]]]:
    """Common refinement of two shapes: axes such that every dim of both is a composition of
    consecutive axes.
    """
    ends_old = _suffix_products(old)
    ends_new = _suffix_products(new)
    cuts = sorted({*ends_old, *ends_new}, reverse=True)
    if any(big % small for big, small in pairwise(cuts)):
        raise bad_op(
            name,
            f"reshape of {old} to {new}",
            "dims that split or merge evenly",
            "reshape in two steps",
        )
    axes = [
        Axis(name=f"i{n}", extent=big // small) for n, (big, small) in enumerate(pairwise(cuts))
    ]
    spans = list(pairwise(cuts))

    def compose(ends: list[int]) -> list[list[str]]:
        dims = []
        for big, small in pairwise(ends):
            dims.append([f"i{n}" for n, (hi, lo) in enumerate(spans) if hi <= big and lo >= small])
        return dims

    return axes, compose(ends_old), compose(ends_new)


def _suffix_products(shape: tuple[int, ...]) -> list[int]:
    ends = [1]
    for extent in reversed(shape):
        ends.append(ends[-1] * extent)
    return ends[::-1]


def _copy_reference(op: Op, coordinate: Coordinate) -> Callable[..., Any]:
    """The same elements at the indices of the access maps, row-major."""
    extents, read, write = op.extents, op.reads[0], op.writes[0]
    axes = access_axes(read)

    def run(x: Any) -> Any:
        return _copied(fold_axes(unfold_axes(x, read, extents), axes, write, extents))

    return run


def _copied(x: Any) -> Any:
    """A view in storage of its own, row-major."""
    return x.new_empty(x.shape).copy_(x)


def _view_reference(op: Op, coordinate: Coordinate) -> Callable[..., Any]:
    """As _copy_reference, in the storage of the operand."""
    extents, read, write = op.extents, op.reads[0], op.writes[0]
    axes, ordered = access_axes(read), access_axes(write)
    shape = [math.prod([extents[n] for n in index.axes]) for index in write.dims]
    return lambda x: order_axes(unfold_axes(x, read, extents), axes, ordered).view(shape)


def _expand_reference(op: Op, coordinate: Coordinate) -> Callable[..., Any]:
    extents, read = op.extents, op.reads[0]
    axes, write = access_axes(read), op.writes[0]
    out_axes = access_axes(write)
    shape = [extents[name] for name in out_axes]

    def run(x: Any) -> Any:
        seen = order_axes(unfold_axes(x, read, extents), axes, out_axes)
        return _copied(fold_axes(seen.expand(shape), out_axes, write, extents))

    return run


def _concat_reference(op: Op, coordinate: Coordinate) -> Callable[..., Any]:
    dim = int(str(op.attr("dim")))

    def run(*xs: Any) -> Any:
        shape = list(xs[0].shape)
        shape[dim] = sum(x.shape[dim] for x in xs)
        out, start = xs[0].new_empty(shape), 0
        for x in xs:
            out.narrow(dim, start, x.shape[dim]).copy_(x)
            start += x.shape[dim]
        return out

    return run


def _copy_misfit(
    op: Op, reads: Sequence[Tensor], writes: Sequence[Tensor]
) -> tuple[str, str] | None:
    """The elements of one operand, each to one place."""
    if len(reads) != 1:
        return f"is {op.kind} of {counted(len(reads), 'operand')}", "one"
    if wrong := misplaced_axes(op, op.reads):
        return wrong
    if lost := {axis.name for axis in op.axes} - {*access_axes(op.reads[0])}:
        return f"writes by {', '.join(sorted(lost))}, which its operand has not", "the same axes"
    return wrong_dtype(op, writes, reads[0].dtype)


_joins = as_stated(lambda op, *xs: concat(op.name, xs, op.attr("dim")))


def _restated_concat_misfit(
    op: Op, reads: Sequence[Tensor], writes: Sequence[Tensor]
) -> tuple[str, str] | None:
    """What joins tensors, but for parts of ranks that a kernel has side by side, along one dim more
    than they have together (kernels/tasks/expand.py).
    """
    of_ranks = len(reads) == 1 and len(reads[0].shape) == len(op.writes[0].dims) + 1
    return None if of_ranks else _joins(op, reads, writes)


def _expand_misfit(
    op: Op, reads: Sequence[Tensor], writes: Sequence[Tensor]
) -> tuple[str, str] | None:
    if len(reads) != 1:
        return f"is expand of {counted(len(reads), 'operand')}", "one"
    return misplaced_axes(op, op.reads) or wrong_dtype(op, writes, reads[0].dtype)


COPY = OpKind(
    name="set",
    in_megakernel=True,
    only_copies=True,
    misfit=_copy_misfit,
    zero_where=zero_if_all,
    reference=_copy_reference,
)
for _name in ("set", "slice", "reshape", "transpose"):
    define(replace(COPY, name=_name))
define(replace(COPY, name="view", in_megakernel=False, reference=_view_reference))
define(
    replace(
        COPY,
        name="concat",
        is_clipped=True,
        attrs={"dim": COUNT},
        misfit=_joins,
        restated_misfit=_restated_concat_misfit,
        reference=_concat_reference,
    )
)
define(
    OpKind(
        name="expand",
        in_megakernel=True,
        only_copies=True,
        misfit=_expand_misfit,
        reference=_expand_reference,
    )
)
