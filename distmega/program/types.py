"""The tensor program: frozen value types in which every op is stated once, as iteration axes and
access maps.

An op is an iteration space. Its `axes` name the loop nest; each `Access` says which axes index
which dim of which tensor. Sharding, streams, tiles, dependencies, bytes and flops are all derived
from this one statement; nothing else describes an op. Programs come from builder.py (or text.py,
which prints and parses them) and go to sharding/planner.py.
"""

import math
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from distmega.arguments import shown
from distmega.errors import ProgramError, counted
from distmega.program.dtypes import ITEM_BYTES, item_bytes
from distmega.program.kinds import kind_of, wrong_attr

Attr = str | int | float | bool | tuple["Attr", ...]
Role = Literal["input", "weight", "state", "temp"]
AxisRole = Literal["parallel", "reduce", "scatter"]
KNOWN = "constant."
"""Begins the names of weights that are known when a program is built, and say what they hold."""

COMBINES = ("", "sum", "max", "min", "argmax")
"""How values of a reduce axis are combined; "" where the op needs all of them at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One iteration axis of an op.

    role `parallel`: every value writes its own output elements. `reduce`: values are combined into
    one output element by `combine` ("sum", "max", "min", "argmax"; "" means the op needs all of
    them at once, as softmax does, so the axis can't be split across ranks). `scatter`: indexes an
    output dim at positions known only at run time. lookup: only one value per output element is
    touched, chosen at run time (a row of an embedding table).
    """

    name: str
    extent: int
    role: AxisRole = "parallel"
    combine: str = ""
    lookup: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """How a tensor dim is indexed: offset + stride * (axes composed as mixed-radix digits, outer
    first).

    No axes means the constant `offset`. Positions outside the dim are not accessed (concat and
    slices use this).

    starts: place among the op's reads of a vector that says at run time where groups of positions
    start, -1 without one. The axes are then (group, row): row r of group g is position
    starts[g] + r, and group g has the rows below starts[g + 1] - starts[g] and no others, whichever
    positions these are.
    """

    axes: tuple[str, ...] = ()
    offset: int = 0
    stride: int = 1
    starts: int = -1

    @property
    def is_grouped(self) -> bool:
        """Whether positions come in groups whose extents the data decide."""
        return self.starts >= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """One operand of an op: a tensor and one Index per dim of it."""

    tensor: str
    dims: tuple[Index, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A named tensor. `input`s come with each call, `weight`s once, `state` lives across calls and
    is updated in place.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Role = "temp"

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * item_bytes(self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """An operation: `kind` of kinds.py, iteration axes, accesses, attributes sorted by name."""

    name: str
    kind: str
    axes: tuple[Axis, ...]
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    attrs: tuple[tuple[str, Attr], ...] = ()

    def axis(self, name: str) -> Axis:
        """The axis of that name; KeyError is a bug of the caller."""
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise KeyError(name)

    def attr(self, name: str) -> Attr:
        """The attribute of that name; KeyError is a bug of the caller."""
        for key, value in self.attrs:
            if key == name:
                return value
        raise KeyError(name)

    def get(self, name: str, default: Attr) -> Attr:
        """The attribute of that name, or `default`."""
        return next((value for key, value in self.attrs if key == name), default)

    @property
    def is_view(self) -> bool:
        """Whether it only shows storage of its operand as another tensor."""
        return self.kind == "view"

    @property
    def extents(self) -> dict[str, int]:
        """Extents of the axes by name."""
        return {axis.name: axis.extent for axis in self.axes}

    @property
    def num_reduced(self) -> int:
        """Elements that each result is made of: the product of the extents of its reduce axes."""
        return math.prod(axis.extent for axis in self.axes if axis.role == "reduce")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A tensor program; build it with ProgramBuilder.

    Attributes:
        name: Of the program.
        tensors: All that ops name, each once.
        ops: In execution order.
        outputs: Names of the tensors that leave it.
    """

    name: str
    tensors: tuple[Tensor, ...]
    ops: tuple[Op, ...]
    outputs: tuple[str, ...]

    def __hash__(self) -> int:
        """Of names alone, which tell nearly all programs apart: that of all ops takes 5 ms."""
        return hash((self.name, tuple([op.name for op in self.ops]), self.outputs))

    def tensor_map(self) -> dict[str, Tensor]:
        """Tensors by name."""
        return {tensor.name: tensor for tensor in self.tensors}

    def with_role(self, role: Role) -> tuple[Tensor, ...]:
        """Tensors of one role, in order of declaration."""
        return tuple(tensor for tensor in self.tensors if tensor.role == role)


def contracts(op: Op) -> bool:
    """Whether an op is a contraction by named axes, and not of groups of rows."""
    return kind_of(op).contracts and grouped_index(op) is None


def grouped_index(op: Op) -> Index | None:
    """The index by which an op runs over groups of rows; None where its extents are all known."""
    return next((i for a in accesses(op) for i in a.dims if i.is_grouped), None)


def accesses(op: Op) -> Iterator[Access]:
    """All accesses of an op, reads first."""
    yield from op.reads
    yield from op.writes


def updates(op: Op) -> Iterator[Access]:
    """Writes of which the data decide what they reach: all else stays as it was."""
    for access in op.writes:
        if any(op.axis(name).lookup for index in access.dims for name in index.axes):
            yield access


def op_form(op: Op, tensors: Sequence[Tensor]) -> Hashable:
    """An op and its tensors, in the order of its accesses, without their names; which operands are
    one tensor is part of it. Equal for ops of equal layers, of which rules say the same; but not
    those of attributes, where 1, 1.0 and True are equal.
    """
    names = [tensor.name for tensor in tensors]
    dims = tuple([each.dims for each in (*op.reads, *op.writes)])
    types = tuple([(tensor.shape, tensor.dtype, tensor.role) for tensor in tensors])
    same = tuple(map(names.index, names))
    return kind_of(op).name, op.kind, len(op.reads), op.axes, dims, op.attrs, types, same


def view_strides(view: Op, strides: Sequence[int]) -> tuple[int, ...] | None:
    """Strides of a view's dims from those of what it shows; None where no strides show it, as of
    dims joined that have a gap between them.
    """
    steps: dict[str, int] = {}
    for index, stride in zip(view.reads[0].dims, strides, strict=True):
        step = index.stride * stride
        for name in reversed(index.axes):
            steps[name] = step
            step *= view.axis(name).extent
    found: list[int] = []
    for index in view.writes[0].dims:
        names = [name for name in index.axes if view.axis(name).extent > 1]
        for outer, inner in pairwise(names):
            if steps[outer] != steps[inner] * view.axis(inner).extent:
                return None
        found.append(steps[names[-1]] if names else 1)
    return tuple(found)


def view_chain(name: str, views: Mapping[str, Op]) -> tuple[Op, ...]:
    """The views by which storage is shown as a tensor, the view of the storage first. views: each
    by the tensor that it makes.
    """
    chain: list[Op] = []
    while name in views:
        chain.append(views[name])
        name = views[name].reads[0].tensor
    return (*reversed(chain),)


def storage_behind(name: str, views: Mapping[str, Op]) -> str:
    """The tensor that owns the storage of `name`. views: each by the tensor that it makes."""
    while name in views:
        name = views[name].reads[0].tensor
    return name


def packed_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a tensor whose dims follow each other without gaps, row-major."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


MAX_EXTENT = 2**63
"""Which no extent of a tensor reaches."""
NAMES = "letters, digits, _ . / @ # - and no keyword"
_NAME = re.compile(r"\w[\w./@#-]*")
"""Names print as one word; "return" and "program" begin other lines of the printed form."""


class SoundForms:
    """Forms of ops that were found right once: layers of a model are alike, and a program is
    verified whenever it has changed.
    """

    def __init__(self) -> None:
        self._known = set[Hashable]()

    def new_ops(self, ops: Iterable[Op], tensors: Mapping[str, Tensor]) -> list[Op]:
        """The first op of each form that is not known, of tensors by name, and all that have an
        unknown tensor, or a list in place of a tuple.
        """
        found: list[Op] = []
        here = set[Hashable]()
        for op in ops:
            with suppress(KeyError, TypeError):
                form = op_form(op, [tensors[each.tensor] for each in accesses(op)])
                if form in self._known or form in here:
                    continue
                here.add(form)
            found.append(op)
        return found

    def note(self, ops: Iterable[Op], tensors: Mapping[str, Tensor]) -> None:
        """Ops of these forms are right."""
        for op in ops:
            if len(self._known) < MAX_FORMS:
                with suppress(TypeError):
                    self._known.add(op_form(op, [tensors[each.tensor] for each in accesses(op)]))


MAX_FORMS = 10_000
"""That are remembered at one place."""
_sound, _sound_restated = SoundForms(), SoundForms()


def verify_program(program: Program, *, is_restated: bool = False) -> Program:
    """Checks names, ranks, extents and definition before use, and returns the program. is_restated:
    it is a kernel's segment, whose passes have forms of ops of their own.

    Raises ProgramError.
    """
    is_text = isinstance(program.name, str) and program.name != "" and program.name.isprintable()
    if not is_text or program.name != " ".join(program.name.split()):
        raise _broken(program, "its name", "one printable line, without spaces at its ends")
    tensors = program.tensor_map()
    if len(tensors) != len(program.tensors):
        raise _broken(program, "two tensors share a name", "unique tensor names")
    for tensor in program.tensors:
        _verify_name(program, tensor.name)
        if tensor.dtype not in ITEM_BYTES or not _are_extents(tensor.shape):
            dtypes = ", ".join(ITEM_BYTES)
            found = f"{tensor.name!r} of shape {shown(tensor.shape)} and dtype {tensor.dtype}"
            raise _broken(program, found, f"dims of at least 1 and a dtype of {dtypes}")
    if len({op.name for op in program.ops}) != len(program.ops):
        raise _broken(program, "two ops share a name", "unique op names")
    defined = {tensor.name for tensor in program.tensors if tensor.role != "temp"}
    sound = _sound_restated if is_restated else _sound
    new = {op.name: op for op in sound.new_ops(program.ops, tensors)}
    for op in program.ops:
        _verify_name(program, op.name)
        if op.name in new:
            if wrong := wrong_axes(op):
                raise _broken(program, f"op {op.name!r} {wrong[0]}", wrong[1])
            _verify_accesses(program, op, tensors)
        if wrong := wrong_attr(op, is_restated=is_restated):
            raise _broken(program, f"op {op.name!r} has {wrong[0]}", wrong[1])
        for access in (*op.reads, *updates(op)):
            if access.tensor not in defined:
                found = f"op {op.name!r} reads {access.tensor!r} before it is written"
                raise _broken(program, found, "a producer above")
        defined.update(access.tensor for access in op.writes)
    _verify_views(program, tensors)
    _verify_written_views(program)
    for op in new.values():
        if wrong := wrong_roles(op) or wrong_operands(op, tensors, is_restated=is_restated):
            raise _broken(program, f"op {op.name!r} {wrong[0]}", wrong[1])
    sound.note(new.values(), tensors)
    for name in program.outputs:
        if name not in defined:
            raise _broken(program, f"output {name!r} is never written", "outputs that an op writes")
    return program


def _verify_views(program: Program, tensors: dict[str, Tensor]) -> None:
    known: dict[str, tuple[int, ...]] = {}
    for op in program.ops:
        if op.is_view:
            _verify_view(program, op)
            source = tensors[op.reads[0].tensor]
            found = view_strides(op, known.get(source.name) or packed_strides(source.shape))
            if found is None:
                what = (
                    f"view {op.name!r} joins dims of {source.name!r} that have gaps or are turned"
                )
                raise _broken(program, what, "dims that follow each other", "copy it, view=False")
            known[op.writes[0].tensor] = found


def _verify_written_views(program: Program) -> None:
    """Inputs and weights are not written through their views either."""
    shown: dict[str, str] = {}
    constant = {tensor.name for tensor in program.tensors if tensor.role in ("input", "weight")}
    for op in program.ops:
        if op.is_view:
            source = op.reads[0].tensor
            if source in constant or source in shown:
                shown[op.writes[0].tensor] = shown.get(source, source)
            continue
        for access in op.writes:
            if access.tensor in shown:
                source = shown[access.tensor]
                found = f"op {op.name!r} writes {access.tensor!r}, a view of {source!r}"
                remedy = "copy it first: view=False, or set without into"
                raise _broken(program, found, "inputs and weights are only read", remedy)


def _verify_view(program: Program, view: Op) -> None:
    """Whether it shows one tensor as one other, whose axes are all found in the first."""
    if len(view.reads) == len(view.writes) == 1:
        read, written = (
            {name for index in access.dims for name in index.axes} for access in accesses(view)
        )
        if written <= read:
            return
    expected = "one tensor read and one written, by axes that the read has"
    raise _broken(program, f"view {view.name!r} of other operands or axes", expected)


def _are_extents(shape: tuple[int, ...]) -> bool:
    return all(1 <= extent < MAX_EXTENT for extent in shape)


def _verify_name(program: Program, name: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in ("return", "program"):
        raise _broken(program, f"name {shown(name)}", NAMES)


def wrong_axes(op: Op) -> tuple[str, str] | None:
    """What of an op's axes breaks the rules, and what was expected; None where they keep them."""
    if len({axis.name for axis in op.axes}) != len(op.axes):
        return "has two axes of one name", "unique axis names"
    for axis in op.axes:
        known = axis.role in get_args(AxisRole) and axis.combine in COMBINES
        known = known and (axis.role == "reduce" or not axis.combine)
        if not axis.name.isidentifier() or axis.extent < 1 or not known:
            return f"has {axis}", "an identifier, an extent of at least 1, a known role and combine"
    return None


def _verify_accesses(program: Program, op: Op, tensors: dict[str, Tensor]) -> None:
    for access in accesses(op):  # all of them first: groups ask for each other's
        if access.tensor not in tensors:
            found = f"op {op.name!r} accesses unknown tensor {access.tensor!r}"
            raise _broken(program, found, "a declared tensor")
    for access in accesses(op):
        shape = tensors[access.tensor].shape
        if len(access.dims) != len(shape):
            found = (
                f"op {op.name!r} indexes {access.tensor!r} by {counted(len(access.dims), 'dim')}"
            )
            raise _broken(program, found, f"one index for each of its {counted(len(shape), 'dim')}")
        for index, extent in zip(access.dims, shape, strict=True):
            _verify_index(program, op, access, index, extent)
        if wrong := wrong_access(op, access, shape):
            raise _broken(program, f"op {op.name!r} {wrong[0]}", wrong[1])
    for access in op.writes:
        if tensors[access.tensor].role in ("input", "weight"):
            found = f"op {op.name!r} writes {access.tensor!r}"
            raise _broken(program, found, "inputs and weights are only read")


def wrong_roles(op: Op) -> tuple[str, str] | None:
    """Which axis does something else than its role says, by which ranks and tiles share it out, and
    what was expected; None where none does. Its axes and accesses are right by themselves.
    """
    written = {name for access in op.writes for index in access.dims for name in index.axes}
    combine = kind_of(op).combine or op.get("combine", "")
    for axis in op.axes:
        is_written = axis.name in written
        if axis.role != "scatter" and is_written != (axis.role == "parallel"):
            by = "by" if is_written else "without"
            found = f"writes {by} {axis.role} axis {axis.name!r}"
            return found, "writes by all parallel axes and no reduce axis"
        if axis.combine and combine and axis.combine != combine:
            found = f"combines {axis.name!r} by {axis.combine}"
            return found, f"{combine}, as what it computes does"
    return None


def wrong_access(op: Op, access: Access, shape: Sequence[int]) -> tuple[str, str] | None:
    """What of an access of a tensor of that shape breaks the rules, and what was expected; None
    where it keeps them. Known axes, one index a dim.
    """
    names = [name for index in access.dims for name in index.axes]
    if len({*names}) != len(names):
        return f"indexes {access.tensor!r} by one axis twice", "each axis once"
    kind, extents = kind_of(op), op.extents
    writes = access in op.writes and not kind.inplace
    if not (writes or kind.reads_whole):
        return None
    for index, extent in zip(access.dims, shape, strict=True):
        reached = math.prod(extents[name] for name in index.axes)
        fits = reached >= extent if kind.is_clipped else reached == extent
        if not (fits and (index.offset, index.stride) == (0, 1)) and not index.is_grouped:
            verb = "writes" if writes else "reads"
            return f"{verb} a part of {access.tensor!r} of {list(shape)}", "all elements of it"
    return None


def wrong_operands(
    op: Op, tensors: Mapping[str, Tensor], *, is_restated: bool = False
) -> tuple[str, str] | None:
    """What of an op and its tensors does not fit together, and what was expected; None where all
    fits. Its accesses and attributes are right by themselves. is_restated: see verify_program.
    """
    reads, writes = ([tensors[a.tensor] for a in side] for side in (op.reads, op.writes))
    kind = kind_of(op)
    misfit = (kind.restated_misfit if is_restated else None) or kind.misfit
    return misfit(op, reads, writes)


def _verify_index(program: Program, op: Op, access: Access, index: Index, extent: int) -> None:
    extents = op.extents
    unknown = [name for name in index.axes if name not in extents]
    if unknown:
        found = f"op {op.name!r} uses unknown axes {unknown}"
        raise _broken(program, found, f"axes of {list(extents)}")
    if index.stride < 1 or (index.stride > 1 and not index.axes):
        found = f"op {op.name!r} indexes {access.tensor!r} with stride {index.stride}"
        raise _broken(program, found, "a stride of at least 1, and 1 where there are no axes")
    if kind_of(op).is_clipped:
        return
    if index.is_grouped:
        _verify_groups(program, op, access, index, extent)
        return
    last = index.offset + index.stride * (math.prod(extents[name] for name in index.axes) - 1)
    if last >= extent or index.offset < 0:
        found = f"op {op.name!r} reaches past a dim of {extent} of {access.tensor!r}"
        raise _broken(program, found, "an index inside")


def _verify_groups(program: Program, op: Op, access: Access, index: Index, extent: int) -> None:
    """A grouped dim: two parallel or summed axes of its own, and an integer vector of starts."""
    extents, tensors = op.extents, program.tensor_map()
    starts = tensors[op.reads[index.starts].tensor] if index.starts < len(op.reads) else None
    plain = len(index.axes) == 2 and index.offset == 0 and index.stride == 1
    known = starts is not None and starts.dtype in ("i32", "i64")
    if not plain or not known or any(i.is_grouped for i in op.reads[index.starts].dims):
        found = f"op {op.name!r} indexes {access.tensor!r} by groups {index}"
        raise _broken(program, found, "a group and a row axis, and an operand of integer starts")
    if starts is not None and starts.shape != (starts.num_elements,):
        found = f"op {op.name!r} takes starts of groups from {starts}"
        raise _broken(program, found, "a vector")
    if extents[index.axes[1]] > extent:
        found = f"op {op.name!r} has groups of {extents[index.axes[1]]} rows"
        raise _broken(program, found, f"at most the {extent} of {access.tensor!r}")


def _broken(
    program: Program, found: str, expected: str, remedy: str = "build it with ProgramBuilder"
) -> ProgramError:
    return ProgramError(f"program {shown(program.name)}: {found}", expected=expected, remedy=remedy)
