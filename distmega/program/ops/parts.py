"""What every op is put together from: accesses, names, and the error of a bad operand.

Used by the files beside this one, which state the ops, and by passes that make some of others.
`as_stated` holds ops of a written program to what these functions state.
"""

import inspect
import operator
import sys
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from distmega.arguments import is_list, is_number, shown
from distmega.errors import ProgramError, counted
from distmega.program.dtypes import is_integer
from distmega.program.kinds import Misfit, kind_of
from distmega.program.ops.axis_views import access_axes
from distmega.program.text import print_op
from distmega.program.types import MAX_EXTENT, Access, Attr, Axis, Index, Op, Tensor, accesses

Built = tuple[Op, tuple[Tensor, ...]]
"""An op and the tensors it declares."""


def index(*axes: str) -> Index:
    """A dim indexed by the axes composed, outer first."""
    return Index(axes=axes)


def access(tensor: Tensor, *axes: str) -> Access:
    """A tensor indexed by one axis a dim."""
    return access_named(tensor.name, *axes)


def access_named(tensor: str, *axes: str) -> Access:
    """As access, of the tensor of that name."""
    return Access(tensor=tensor, dims=tuple(index(axis) for axis in axes))


def rename_axes(found: Access, names: Mapping[str, str]) -> Access:
    """The access with other names of its axes. names: of each its new one."""
    dims = (replace(each, axes=tuple(names[n] for n in each.axes)) for each in found.dims)
    return Access(tensor=found.tensor, dims=tuple(dims))


def make_op(
    name: str,
    kind: str,
    axes: Sequence[Axis],
    reads: Sequence[Access],
    out: Sequence[Access],
    **attrs: Attr,
) -> Op:
    """The Op of these parts, attributes sorted by name."""
    return Op(
        name=name,
        kind=kind,
        axes=tuple(axes),
        reads=tuple(reads),
        writes=tuple(out),
        attrs=tuple(sorted(attrs.items())),
    )


def bad_op(
    name: str, found: str, expected: str, remedy: str = "change the operands"
) -> ProgramError:
    """The error of an op whose operands do not fit."""
    return ProgramError(f"op {name!r}: {found}", expected=expected, remedy=remedy)


def axis_names(prefix: str, num: int) -> list[str]:
    """prefix0, prefix1, ...; none if `num` is not positive."""
    return [f"{prefix}{i}" for i in range(num)]


def fresh_name(name: str, *taken: Container[str]) -> str:
    """The name, with as many underscores behind it as make it none of those taken."""
    while any(name in each for each in taken):
        name += "_"
    return name


def whole_number(name: str, what: str, value: object) -> int:
    """A count or a place that an op is given; ProgramError for what is no whole number below 2^63,
    which no extent reaches.
    """
    try:
        found = -MAX_EXTENT if isinstance(value, bool) else operator.index(value)  # type: ignore
    except (TypeError, RuntimeError):  # a tensor of many has none
        found = -MAX_EXTENT
    if not -MAX_EXTENT < found < MAX_EXTENT:
        raise bad_op(name, f"{what} {shown(value)}", "a whole number", f"change {what}")
    return found


def whole_number_list(name: str, what: str, values: object) -> list[int]:
    """Extents or dims that an op is given; ProgramError for what is no sequence of them."""
    if not is_list(values):
        found = f"{what}s {shown(values)}"
        raise bad_op(name, found, "a list or tuple of whole numbers", f"change the {what}s")
    return [whole_number(name, what, value) for value in values]


def finite_number(name: str, what: str, value: object) -> float:
    """A factor that an op is given; ProgramError for what is no finite number."""
    if not is_number(value) or not abs(value) <= sys.float_info.max:  # nor NaN
        raise bad_op(name, f"{what} {shown(value)}", "a finite number", f"change {what}")
    return float(value)


def known_word(name: str, what: str, value: object, known: Sequence[str]) -> str:
    """A choice that an op is given; ProgramError for one that is not known."""
    if not isinstance(value, str) or value not in known:
        expected = f"one of {', '.join(known)}"
        raise bad_op(name, f"{what} {shown(value)}", expected, "choose one of these")
    return value


def require_floats(name: str, x: Tensor) -> None:
    """Raises ProgramError unless x holds floats."""
    if is_integer(x.dtype):
        remedy = 'convert it, as by pointwise("a0", x, dtype="f32")'
        raise bad_op(name, f"{x.name!r} of dtype {x.dtype}", "a float type", remedy)


def require_factors(name: str, x: Tensor, factors: Sequence[Tensor]) -> None:
    """Raises ProgramError for an x of bool, and for factors of floats where x, whose type the
    result has, holds whole numbers.
    """
    if x.dtype == "bool":
        raise bad_op(name, f"{x.name!r} of dtype bool", "numbers", "convert it")
    floats = [factor for factor in factors if not is_integer(factor.dtype)]
    if floats and is_integer(x.dtype):
        remedy = f'convert {x.name!r}, as by pointwise("a0", x, dtype="{floats[0].dtype}")'
        found = f"{floats[0].name!r} of {floats[0].dtype} with {x.name!r} of {x.dtype}"
        raise bad_op(name, f"{found}, whose type the result has", "whole numbers", remedy)


def normal_dim(name: str, x: Tensor, dim: int) -> int:
    """`dim` counted from the front; negative ones count from the back."""
    dim = whole_number(name, "dim", dim)
    if not -len(x.shape) <= dim < len(x.shape):
        found = f"dim {dim} of a tensor with {counted(len(x.shape), 'dim')}"
        raise bad_op(name, found, f"at least {-len(x.shape)} and below {len(x.shape)}")
    return dim % len(x.shape)


def require_integers(name: str, x: Tensor) -> None:
    """Raises ProgramError unless x holds integers, as token ids and positions do."""
    if x.dtype not in ("i32", "i64"):
        raise bad_op(name, f"{x.name!r} of dtype {x.dtype}", "dtype i32 or i64")


def inexact_integers(text: str, part: str, dtype: str) -> ProgramError:
    """The error of an expression with a part that has no exact value in integers."""
    return ProgramError(
        f"expression {text!r} with a result in {dtype} holds {part!r}",
        expected=f"whole constants that {dtype} holds, operands no wider, and neither division nor "
        "roots nor powers but of a constant that isn't negative",
        remedy="change it, or give dtype=... for the type to convert the result to",
    )


def misplaced_axes(
    op: Op, reads: Sequence[Access], others: Collection[str] = ()
) -> tuple[str, str] | None:
    """Of an op with one result: axes by which it reads these operands and does not write, and those
    that are neither written nor others that it may have.
    """
    if len(op.writes) != 1:
        return f"is {op.kind} with {counted(len(op.writes), 'result')}", "one"
    written = access_axes(op.writes[0])
    for read in reads:
        if more := [name for name in access_axes(read) if name not in written]:
            found = f"reads {read.tensor!r} by {', '.join(more)}"
            return found, f"axes of what it writes, {', '.join(written) or 'none'}"
    if lost := [axis.name for axis in op.axes if axis.name not in {*written, *others}]:
        return f"has axes {', '.join(lost)}, by which it does nothing", "axes of its operands"
    return None


def wrong_dtype(op: Op, writes: Sequence[Tensor], dtype: str) -> tuple[str, str] | None:
    """Of results that have another type than they should."""
    for tensor in writes:
        if tensor.dtype != dtype:
            return f"is {op.kind} with a result {tensor.name!r} of {tensor.dtype}", dtype
    return None


def wrong_build(op: Op, error: ProgramError) -> tuple[str, str]:
    """What a function that states ops says of an op's operands."""
    return f"is {op.kind} of {error.found.removeprefix(f'op {op.name!r}: ')}", error.expected


def as_stated(state: Callable[..., Built]) -> Misfit:
    """The rule of a kind whose ops are all as one function states them, but for the names of axes
    that it numbers: what looks at shapes alone, or at axes by their names, may rely on it.

    state: from an op, the tensors that it reads and those that it updates in place, to the op that
    these make and its results, or the ProgramError of tensors that make none.
    """
    parameters = [*inspect.signature(state).parameters.values()][1:]
    is_open = any(each.kind == each.VAR_POSITIONAL for each in parameters)
    least = sum(each.default is each.empty for each in parameters) - is_open
    expected = ", ".join(each.name for each in parameters)

    def misfit(op: Op, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> tuple[str, str] | None:
        operands = [*reads, *writes] if kind_of(op).inplace else reads
        if len(operands) < least or (len(operands) > len(parameters) and not is_open):
            return f"is {op.kind} of {counted(len(operands), 'operand')}", expected
        try:
            stated, made = state(op, *operands)
        except ProgramError as error:
            return wrong_build(op, error)
        if made and _types(made) != _types(writes):
            return f"is {op.kind} with results {_types(writes)}", _types(made)
        if not _is_same(op, stated):
            return f"is stated as {print_op(op)}"[:MAX_SHOWN], print_op(stated)[:MAX_SHOWN]
        return None

    return misfit


MAX_SHOWN = 400
"""Characters of an op in a message."""


def _types(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{t.dtype}[{', '.join(map(str, t.shape))}]" for t in tensors) or "none"


def _is_same(op: Op, stated: Op) -> bool:
    """Whether two ops have equal axes, and equal accesses of operands of the same names, but for
    the names of axes that the second numbers. Of an op that ranks share, which has a `base_axis` or
    a `group_axis`, axes may be parts.
    """
    names = _paired_axes(op, stated)
    if names is None or len(op.axes) != len(stated.axes):
        return False
    is_part = bool(op.get("base_axis", "") or op.get("group_axis", ""))
    axes = {axis.name: axis for axis in op.axes}
    for wanted in stated.axes:
        axis = axes.get(names.get(wanted.name, wanted.name))
        if axis is None:
            return False
        extent = wanted.extent if is_part else axis.extent
        if replace(axis, name=wanted.name, extent=extent) != wanted:
            return False
    return True


def _paired_axes(op: Op, stated: Op) -> dict[str, str] | None:
    """By name of an axis of the second op: that of the first which stands in its places. None where
    the two access other tensors or differ in more than names of numbered axes.
    """
    if [a.tensor for a in op.reads] != [a.tensor for a in stated.reads]:
        return None
    mine, theirs = ([[*access.dims] for access in accesses(each)] for each in (op, stated))
    if [*map(len, mine)] != [*map(len, theirs)]:
        return None
    names: dict[str, str] = {}
    for index, wanted in zip(chain(*mine), chain(*theirs), strict=True):
        if len(index.axes) != len(wanted.axes) or replace(index, axes=wanted.axes) != wanted:
            return None
        for name, found in zip(wanted.axes, index.axes, strict=True):
            is_free = name[-1].isdigit()
            if names.setdefault(name, found) != found or not (is_free or name == found):
                return None
    return names if len({*names.values()}) == len(names) else None
