"""What every op is put together from: accesses, axis names, and the error of a bad operand.

Used by the files beside this one, which state the ops, and by passes that make some of others.
"""

import operator
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from distmega.arguments import is_list, is_number, shown
from distmega.errors import ProgramError, counted
from distmega.program.dtypes import is_integer
from distmega.program.types import MAX_EXTENT, Access, Attr, Axis, Index, Op, Tensor

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
