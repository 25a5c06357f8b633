"""The closed set of ops. Each function states one op as iteration axes and access maps, and infers
its outputs.

A function takes the op's name and operand tensors, and returns the Op with the tensors it writes.
Users call the methods of ProgramBuilder instead, which add names and checks. Ops that only move
data are in data_movement.py, norms over rows in norms.py, attention in attention.py.
"""

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

from distmega.arguments import shown
from distmega.errors import ProgramError, counted
from distmega.program import expr
from distmega.program.dtypes import ITEM_BYTES, is_integer
from distmega.program.kinds import (
    COUNT,
    TEXT,
    AttrRule,
    Coordinate,
    OpKind,
    StatedOp,
    define,
    in_fp32,
    kind_of,
    one_a_point,
    one_of,
    zero_if_all,
)
from distmega.program.ops.axis_views import access_axes, fold_axes, order_axes, unfold_axes
from distmega.program.ops.parts import (
    MAX_SHOWN,
    Built,
    access,
    axis_names,
    bad_op,
    index,
    inexact_integers,
    known_word,
    make_op,
    misplaced_axes,
    normal_dim,
    require_factors,
    wrong_build,
    wrong_dtype,
)
from distmega.program.text import print_op
from distmega.program.types import Access, Attr, Axis, Index, Op, Tensor, grouped_index


def communication_axis(op: Op) -> str:
    """The mesh axis whose ranks do an op together; empty for an op that a rank does alone."""
    return str(op.attr("mesh_axis")) if kind_of(op).communicates else ""


def linear(name: str, x: Tensor, w: Tensor, bias: Tensor | None = None, spec: str = "") -> Built:
    """Contraction by named axes: out = sum over axes missing from the output of x * w, plus bias.

    spec: like "m k, n k -> m n", or "m k, n k, n -> m n" with a bias. By default the last dims of x
    and w contract. Sums in fp32 or wider; output dtype is x's.
    """
    tensors = [x, w] if bias is None else [x, w, bias]
    require_factors(name, x, tensors[1:])
    by_default = isinstance(spec, str) and not spec
    spec = _default_spec(x, w, bias) if by_default else spec
    operands, out_axes = _parse_spec(name, spec, len(tensors))
    extents: dict[str, int] = {}
    for tensor, group in zip(tensors, operands, strict=True):
        if len(group) != len(tensor.shape):
            found = f"spec group {group} for {tensor.name!r} of shape {tensor.shape}"
            raise bad_op(name, found, "one axis name a dim")
        for axis, extent in zip(group, tensor.shape, strict=True):
            if extents.setdefault(axis, extent) != extent:
                found = f"axis {axis!r} is {extents[axis]} and {extent} ({tensor.name!r})"
                raise bad_op(name, found, "equal extents")
    reduced = [axis for axis in extents if axis not in out_axes]
    axes = [Axis(name=a, extent=extents[a]) for a in out_axes]
    axes += [Axis(name=a, extent=extents[a], role="reduce", combine="sum") for a in reduced]
    out = Tensor(name=name, shape=tuple(extents[a] for a in out_axes), dtype=x.dtype)
    reads = [access(tensor, *group) for tensor, group in zip(tensors, operands, strict=True)]
    return make_op(name, "linear", axes, reads, [access(out, *out_axes)]), (out,)


def _parse_spec(name: str, spec: str, num_operands: int) -> tuple[list[list[str]], list[str]]:
    """Axis names of each operand, and of the output."""
    if not isinstance(spec, str):
        raise bad_op(name, f"spec {shown(spec)}", 'text, as "m k, n k -> m n"', "change spec")
    left, arrow, right = spec.partition("->")
    operands, out_axes = [part.split() for part in left.split(",")], right.split()
    if not arrow or len(operands) != num_operands:
        found = f"spec {shown(spec)} for {counted(num_operands, 'operand')}"
        raise bad_op(name, found, "one comma-separated group an operand and '->'")
    for group in (*operands, out_axes):
        if len(set(group)) != len(group) or not all(axis.isidentifier() for axis in group):
            raise bad_op(name, f"group {group} of spec {spec!r}", "names, each once in a group")
    if not {*out_axes} <= {*operands[0], *operands[1]}:
        raise bad_op(name, f"output {out_axes} of spec {spec!r}", "axes of x and w")
    if not {axis for group in operands[2:] for axis in group} <= {*out_axes}:
        raise bad_op(name, f"bias {operands[2]} of spec {spec!r}", "axes of the output")
    return operands, out_axes


def _default_spec(x: Tensor, w: Tensor, bias: Tensor | None) -> str:
    rows = " ".join(axis_names("m", len(x.shape) - 1))
    return f"{rows} k, n k{', n' if bias else ''} -> {rows} n"


def pointwise(name: str, text: str, *args: Tensor, dtype: str = "") -> Built:
    """An expression of expr.py over a0, a1, ...; dims align from the right and broadcast where the
    extent is 1. dtype: of the result, by default that of a0.

    Constants take the operands' type. Of integers only what is exact in a0's type is accepted,
    unless dtype says what to convert to; sums and products out of range wrap around.
    """
    tree = expr.parse(text)
    if not args or expr.num_args(tree) != len(args):
        found = f"expression {text!r} over {counted(len(args), 'operand')}"
        raise bad_op(name, found, expr.expected_args(tree))
    if not dtype and (part := expr.inexact_part(tree, [a.dtype for a in args])):
        raise inexact_integers(text, part, args[0].dtype)
    rank = max(len(a.shape) for a in args)
    shape = [1] * rank
    for a in args:
        for i, extent in enumerate(a.shape, start=rank - len(a.shape)):
            if extent != 1 and shape[i] not in (1, extent):
                found = f"shapes {[a.shape for a in args]}"
                raise bad_op(name, found, "shapes that broadcast from the right")
            shape[i] = max(shape[i], extent)
    axes = [Axis(name=n, extent=e) for n, e in zip(axis_names("i", rank), shape, strict=True)]
    reads = []
    for a in args:
        names = axes[rank - len(a.shape) :]
        dims = (
            index(n.name) if e == n.extent else Index() for n, e in zip(names, a.shape, strict=True)
        )
        reads.append(Access(tensor=a.name, dims=tuple(dims)))
    out = Tensor(name=name, shape=tuple(shape), dtype=dtype or args[0].dtype)
    converts = out.dtype != args[0].dtype or (dtype and is_integer(dtype))
    other: dict[str, Attr] = {"dtypes": (out.dtype,)} if converts else {}
    write = access(out, *axis_names("i", rank))
    return make_op(name, "pointwise", axes, reads, [write], expr=str(tree), **other), (out,)


def reduce(name: str, x: Tensor, dim: int, combine: str = "sum") -> Built:
    """Combines one dim away with "sum", "max" or "min"."""
    dim = normal_dim(name, x, dim)
    combine = known_word(name, "combine", combine, ("sum", "max", "min"))
    names = axis_names("i", len(x.shape))
    axes = [Axis(name=n, extent=e) for n, e in zip(names, x.shape, strict=True)]
    axes[dim] = Axis(name=names[dim], extent=x.shape[dim], role="reduce", combine=combine)
    kept = [n for i, n in enumerate(names) if i != dim]
    out = Tensor(
        name=name, shape=tuple(e for i, e in enumerate(x.shape) if i != dim), dtype=x.dtype
    )
    return make_op(
        name, "reduce", axes, [access(x, *names)], [access(out, *kept)], combine=combine
    ), (out,)


def _linear_reference(op: Op, coordinate: Coordinate) -> Callable[..., Any]:
    """Products at all points of the iteration space, summed."""
    extents, axes, write = op.extents, [axis.name for axis in op.axes], op.writes[0]
    kept = [name for name in axes if name in access_axes(write)]
    summed = [dim for dim, name in enumerate(axes) if name not in kept]

    def run(*operands: Any) -> Any:
        reads = zip(operands, op.reads, strict=True)
        x, w, *bias = [
            order_axes(unfold_axes(y, read, extents), access_axes(read), axes) for y, read in reads
        ]
        terms = x * w
        out = terms.sum(summed, keepdim=True) if summed else terms
        out = out + bias[0] if bias else out
        return fold_axes(out.squeeze(summed), kept, write, extents).contiguous()

    return in_fp32(run)(op, coordinate)


def reduce_values(x: Any, dims: Sequence[int], combine: str) -> Any:
    """Combines dims of a tensor away by "sum", "max" or "min"; sums of half types in fp32, as torch
    adds them up.
    """
    if combine == "sum":
        return x.sum(tuple(dims)).to(x.dtype)
    return x.amax(tuple(dims)) if combine == "max" else x.amin(tuple(dims))


def _reduce_reference(op: Op, coordinate: Coordinate) -> Callable[..., Any]:
    extents, combine = op.extents, str(op.attr("combine"))
    read, write = op.reads[0], op.writes[0]
    axes, kept = access_axes(read), access_axes(write)
    dims = [dim for dim, name in enumerate(axes) if name not in kept]
    left = [name for name in axes if name in kept]

    def run(x: Any) -> Any:
        out = reduce_values(unfold_axes(x, read, extents), dims, combine)
        return fold_axes(out, left, write, extents).contiguous()

    return run


def take_shard_values(x: Any, dim: int, extent: int, coordinate: int) -> Any:
    """Rows [coordinate * extent, + extent) of one dim; zeros where they lie past its end."""
    start = min(coordinate * extent, x.shape[dim])
    shard = x.narrow(dim, start, min(extent, x.shape[dim] - start))
    out = x.new_zeros([extent if i == dim else e for i, e in enumerate(x.shape)])
    out.narrow(dim, 0, shard.shape[dim]).copy_(shard)
    return out


def _take_shard_reference(op: Op, coordinate: Coordinate) -> Callable[..., Any]:
    dim, here = int(str(op.attr("dim"))), coordinate[str(op.attr("mesh_axis"))]
    extent = math.prod(op.extents[name] for name in op.writes[0].dims[dim].axes)
    return lambda x: take_shard_values(x, dim, extent, here)


def _collective_misfit(
    op: Op, reads: Sequence[Tensor], writes: Sequence[Tensor], parted: str, gathered: str
) -> tuple[str, str] | None:
    """Equal accesses of what is read and written, but for the dim of which ranks have or get a part
    each: there the axis over ranks stands in front. parted, gathered: the attributes that name that
    dim of operands, of results.
    """
    num = 2 if op.get("combine", "") == "argmax" else 1
    if (len(reads), len(writes)) != (num, num):
        found = f"{counted(len(reads), 'operand')} and {counted(len(writes), 'result')}"
        return f"is {op.kind} of {found}", f"{num} of each"
    for read, write, x, y in zip(op.reads, op.writes, reads, writes, strict=True):
        if x.dtype != y.dtype:
            return f"is {op.kind} of {x.dtype} to {y.dtype}", "equal types"
        mine, theirs = _without_ranks(op, read, parted), _without_ranks(op, write, gathered)
        if mine is None or mine != theirs or any(len(names) != 1 for names in mine):
            expected = "an axis a dim, the same for both"
            for attr, side in ((parted, "its operand"), (gathered, "its result")):
                if attr:
                    ranks = f"that of {op.attr('num_ranks')} ranks"
                    expected += f", and {ranks} in front in dim {op.attr(attr)} of {side}"
            return f"is stated as {print_op(op)}"[:MAX_SHOWN], expected
    return None


def _without_ranks(op: Op, access: Access, attr: str) -> list[tuple[str, ...]] | None:
    """Axes by dim, without that over ranks, which stands in front in the dim that an attribute
    names; None where it doesn't.
    """
    axes = [index.axes for index in access.dims]
    if attr:
        dim = int(str(op.attr(attr)))
        rank = op.extents.get(axes[dim][0]) if dim < len(axes) and len(axes[dim]) == 2 else None
        if rank != op.attr("num_ranks"):
            return None
        axes[dim] = axes[dim][1:]
    return axes


def _linear_is_zero(op: StatedOp, holders: Set[int], zero: Set[int]) -> bool:
    added = set(range(2, len(op.reads)))
    return bool(zero - added) and added <= zero


def _formula(op: StatedOp) -> expr.Expr:
    return expr.parse(str(op.attr("expr")))


def _is_formula(text: object) -> bool:
    try:
        return isinstance(text, str) and expr.num_args(expr.parse(text)) > 0
    except ProgramError:
        return False


def _formula_misfit(
    op: Op, reads: Sequence[Tensor], writes: Sequence[Tensor]
) -> tuple[str, str] | None:
    """What is no formula of its operands at the same point, where groups start being none."""
    grouped, tree = grouped_index(op), _formula(op)
    num = len(reads) - (grouped is not None)
    if (needed := expr.num_args(tree)) > num:
        found = f"has expr={op.attr('expr')!r} of {counted(num, 'operand')}"
        return found[:200], f"{needed}"
    starts = () if grouped is None else access_axes(op.reads[-1])
    if wrong := misplaced_axes(op, op.reads[:num], starts):
        return wrong
    if grouped is not None and any(
        (read.dims, x.shape) != (op.writes[0].dims, writes[0].shape)
        for read, x in zip(op.reads[:num], reads[:num], strict=True)
    ):
        return "is a formula over other groups", "one index and one shape for all, starts last"
    if grouped is not None and grouped.starts != num:
        return f"takes starts of groups from operand {grouped.starts}", f"the last, {num}"
    chosen = op.get("dtypes", ())
    dtype = str(chosen[0]) if isinstance(chosen, tuple) and chosen else reads[0].dtype
    if not chosen and (part := expr.inexact_part(tree, [x.dtype for x in reads[:num]])):
        error = inexact_integers(str(tree), part, reads[0].dtype)
        return f"has {error.found}", error.expected
    return wrong_dtype(op, writes, dtype)


def _linear_misfit(
    op: Op, reads: Sequence[Tensor], writes: Sequence[Tensor]
) -> tuple[str, str] | None:
    """What is no sum of products of two operands, with a third added to it at most."""
    if not 2 <= len(reads) <= 3:
        return f"is linear of {counted(len(reads), 'operand')}", "x, w, or x, w, bias"
    factors = {name for read in op.reads[:2] for name in access_axes(read)}
    if lost := [axis.name for axis in op.axes if axis.name not in factors]:
        return f"has axes {', '.join(lost)} that index neither factor", "axes of x and w"
    if wrong := misplaced_axes(op, op.reads[2:], factors):
        return wrong
    try:
        require_factors(op.name, reads[0], reads[1:])
    except ProgramError as error:
        return wrong_build(op, error)
    return wrong_dtype(op, writes, reads[0].dtype)


def _reduce_misfit(
    op: Op, reads: Sequence[Tensor], writes: Sequence[Tensor]
) -> tuple[str, str] | None:
    if len(reads) != 1:
        return f"is reduce of {counted(len(reads), 'operand')}", "one"
    axes = access_axes(op.reads[0])
    if lost := [axis.name for axis in op.axes if axis.name not in axes]:
        return f"has axes {', '.join(lost)} that its operand has not", f"of {', '.join(axes)}"
    if all(axis.role != "reduce" for axis in op.axes):
        return "is reduce along no axis", "an axis of role reduce at least"
    return misplaced_axes(op, (), axes) or wrong_dtype(op, writes, reads[0].dtype)


FORMULA = AttrRule(_is_formula, "an expression of a0, a1, ...")
ONE_TYPE = AttrRule(
    lambda value: isinstance(value, tuple) and len(value) == 1 and value[0] in ITEM_BYTES,
    f"one of {', '.join(ITEM_BYTES)}, in brackets",
)

define(
    OpKind(
        name="linear",
        in_megakernel=True,
        combine="sum",
        reads_whole=True,
        contracts=True,
        reads_apart=True,
        added_from=2,
        misfit=_linear_misfit,
        zero_where=_linear_is_zero,
        flops=lambda op, work: 2 * work.points,
        reference=_linear_reference,
    )
)
define(
    OpKind(
        name="pointwise",
        in_megakernel=True,
        is_elementwise=True,
        attrs={"expr": FORMULA, "dtypes": ONE_TYPE.optional()},
        misfit=_formula_misfit,
        zero_where=lambda op, holders, zero: expr.is_zero(_formula(op), frozenset(zero)),
        finite_where=lambda op, zero: expr.is_finite(_formula(op), frozenset(zero)),
        flops=lambda op, work: work.points * expr.num_flops(_formula(op)),
        grouped_flops=lambda op, points: points * expr.num_flops(_formula(op)),
    )
)
define(
    OpKind(
        name="reduce",
        in_megakernel=True,
        attrs={"combine": one_of("sum", "max", "min")},
        misfit=_reduce_misfit,
        zero_where=zero_if_all,
        flops=one_a_point,
        reference=_reduce_reference,
    )
)

TEAM = {"mesh_axis": TEXT, "num_ranks": COUNT}
"""Attributes of all that ranks of a mesh axis do together."""
PART = {**TEAM, "dim": COUNT, "extent": COUNT}
"""And of what gathers a dim, or gives each rank a part of it."""
SUM = one_of("sum", "max", "min")

COLLECTIVE = OpKind(
    name="all_to_all",
    origin="sharding",
    communicates=True,
    is_clipped=True,
    attrs={**PART, "dst_dim": COUNT, "dst_extent": COUNT},
    misfit=partial(_collective_misfit, parted="dst_dim", gathered="dim"),
)
define(
    replace(
        COLLECTIVE,
        name="reduce_scatter",
        scatters_sums=True,
        attrs={**PART, "combine": SUM},
        misfit=partial(_collective_misfit, parted="dim", gathered=""),
    )
)
define(COLLECTIVE)
define(
    replace(
        COLLECTIVE,
        name="all_gather",
        reaches_all=True,
        gathers_all=True,
        attrs=PART,
        misfit=partial(_collective_misfit, parted="", gathered="dim"),
    )
)
define(
    replace(
        COLLECTIVE,
        name="all_reduce",
        reaches_all=True,
        sums_all=True,
        is_clipped=False,
        attrs={**TEAM, "combine": one_of("sum", "max", "min", "argmax")},
        misfit=partial(_collective_misfit, parted="", gathered=""),
    )
)
# slices locally: no bytes move
define(
    OpKind(
        name="take_shard",
        origin="sharding",
        in_megakernel=True,
        is_clipped=True,
        attrs=PART,
        misfit=partial(_collective_misfit, parted="dim", gathered=""),
        reference=_take_shard_reference,
    )
)
