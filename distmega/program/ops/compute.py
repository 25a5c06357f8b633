"""The closed set of ops. Each function states one op as iteration axes and access maps, and infers
its outputs.

A function takes the op's name and operand tensors, and returns the Op with the tensors it writes.
Users call the methods of ProgramBuilder instead, which add names and checks. Ops that only move
data are in data_movement.py, norms over rows in norms.py, attention in attention.py.
"""

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import Any

from distmega.arguments import shown
from distmega.errors import ProgramError, counted
from distmega.program import expr
from distmega.program.dtypes import ITEM_BYTES, is_integer
from distmega.program.kinds import (
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
    Built,
    access,
    axis_names,
    bad_op,
    index,
    inexact_integers,
    known_word,
    make_op,
    normal_dim,
    require_factors,
)
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


def _wrong_operands(op: Op) -> tuple[str, str] | None:
    """Of a formula over more operands than there are, where groups start not being one."""
    num = len(op.reads) - (grouped_index(op) is not None)
    if (needed := expr.num_args(_formula(op))) > num:
        return f"expr={op.attr('expr')!r} of {counted(num, 'operand')}"[:200], f"{needed}"
    return None


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
        misfit=_wrong_operands,
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
        zero_where=zero_if_all,
        flops=one_a_point,
        reference=_reduce_reference,
    )
)

COLLECTIVE = OpKind(name="all_to_all", origin="sharding", communicates=True, is_clipped=True)
define(replace(COLLECTIVE, name="reduce_scatter", scatters_sums=True))
define(COLLECTIVE)
define(replace(COLLECTIVE, name="all_gather", reaches_all=True, gathers_all=True))
define(replace(COLLECTIVE, name="all_reduce", reaches_all=True, sums_all=True, is_clipped=False))
# slices locally: no bytes move
define(
    OpKind(
        name="take_shard",
        origin="sharding",
        in_megakernel=True,
        is_clipped=True,
        reference=_take_shard_reference,
    )
)
