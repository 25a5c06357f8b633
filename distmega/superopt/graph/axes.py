"""Names for the axes of a whole program: which dims of which tensors run along together.

Comes in: a Program. Goes out: Axes: for each op's local axes and each tensor's dims the program's
axes, those that a reshape divides divided everywhere, those of extent 1 left out. An op that the
superoptimizer doesn't know is refused by name. Next: lower.py and reference.py.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from distmega.errors import ProgramError
from distmega.program.dtypes import FLOATS
from distmega.program.kinds import kind_of
from distmega.program.ops.norms import NORMS
from distmega.program.types import Access, Op, Program, accesses, contracts
from distmega.superopt.graph.named import Dims

COMPUTE = ("linear", "pointwise", "reduce", *NORMS, "attend")
DATA_MOVEMENT = ("reshape", "transpose", "view", "set", "expand")
KNOWN = (*COMPUTE, *DATA_MOVEMENT)
"""Op kinds that a program to be optimized may hold."""

MAX_OPS = 12


@dataclass(frozen=True, slots=True)
class Axes:
    """extents: of each axis of the program. ops: op name -> local axis -> axes, outer first.
    reads: op name -> for each read the axes of the tensor's dims.
    """

    extents: Mapping[str, int]
    ops: Mapping[str, Mapping[str, tuple[str, ...]]]
    reads: Mapping[str, tuple[Dims, ...]]
    tensors: Mapping[str, Dims]


def unsupported(op: Op, found: str) -> ProgramError:
    """The error of an op that is outside what is searched."""
    return ProgramError(
        f"op {op.name!r}: {found}",
        expected=f"at most {MAX_OPS} ops of kinds {', '.join(KNOWN)}, on whole tensors of "
        f"{', '.join(FLOATS)}, without states",
        remedy="leave it outside the part that is optimized",
    )


def check_program(program: Program) -> Program:
    """Refuses what is outside the bounds, naming the op; gives the program."""
    states = {tensor.name for tensor in program.with_role("state")}
    dtypes = {tensor.name: tensor.dtype for tensor in program.tensors}
    for op in program.ops:
        other = next((x.tensor for x in accesses(op) if dtypes[x.tensor] not in FLOATS), None)
        if other:
            raise unsupported(op, f"tensor {other!r} of type {dtypes[other]}")
        if any(access.tensor in states for access in accesses(op)):
            raise unsupported(op, "it uses a state")
        if op.kind not in KNOWN:
            raise unsupported(op, f"kind {op.kind!r}")
        if len(op.writes) != 1 or (op.kind == "set" and _overwrites(program, op)):
            raise unsupported(op, "it writes a tensor that others write")
        if any(i.offset or i.stride != 1 for a in accesses(op) for i in a.dims if i.axes):
            raise unsupported(op, "it takes a part of a dim")
        if op.kind == "attend" and (op.attr("softcap") or _has_bool_mask(program, op)):
            raise unsupported(op, "a softcap or a mask of bools")
    if len(program.ops) > MAX_OPS:
        raise unsupported(program.ops[MAX_OPS], f"it is the {MAX_OPS + 1}th of {len(program.ops)}")
    if not program.ops:
        raise ProgramError(
            f"program {program.name!r} without ops", expected="at least one", remedy="add some"
        )
    tensors = program.tensor_map()
    for name in program.outputs:
        if tensors[name].role != "temp":
            raise ProgramError(
                f"output {name!r} is an {tensors[name].role}",
                expected="outputs that ops compute",
                remedy="leave it out",
            )
    return program


def _overwrites(program: Program, op: Op) -> bool:
    writers = [o for o in program.ops for a in o.writes if a.tensor == op.writes[0].tensor]
    return len(writers) > 1


def _has_bool_mask(program: Program, op: Op) -> bool:
    return len(op.reads) == 4 and program.tensor_map()[op.reads[3].tensor].dtype == "bool"


_Dims = Sequence[tuple[int, ...]]
"""Axes of each dim of a tensor, outer first, by the finder's numbers."""


class _Finder:
    """Union-find over axes, each whole or divided into others, outer first."""

    def __init__(self) -> None:
        self.extents: list[int] = []
        self.names: list[str] = []
        self._into: list[tuple[int, ...]] = []

    def copy(self) -> "_Finder":
        """Its state now."""
        found = _Finder()
        found.restore(self)
        return found

    def restore(self, other: "_Finder") -> None:
        """Takes the state of another."""
        self.extents, self.names = [*other.extents], [*other.names]
        self._into = [*other._into]

    def new(self, extent: int, name: str) -> tuple[int, ...]:
        """An axis of its own; none for an extent of 1."""
        if extent == 1:
            return ()
        self.extents.append(extent)
        self.names.append(name)
        self._into.append(())
        return (len(self.extents) - 1,)

    def resolve(self, axes: Iterable[int]) -> tuple[int, ...]:
        """The axes that stand for these now."""
        found: list[int] = []
        for axis in axes:
            found += self.resolve(self._into[axis]) if self._into[axis] else (axis,)
        return tuple(found)

    def unify(self, a: Sequence[int], b: Sequence[int]) -> bool:
        """Makes two lists of axes, of equal extent in all, the same; False if they can't be."""
        left, right = list(self.resolve(a)), list(self.resolve(b))
        while left and right:
            x, y = left.pop(0), right.pop(0)
            if x == y:
                continue
            big, small = self.extents[x], self.extents[y]
            if big == small:
                self._into[max(x, y)] = (min(x, y),)
            elif big % small and small % big:
                return False
            else:
                whole, outer = (x, y) if big > small else (y, x)
                rest = self.new(max(big, small) // min(big, small), self.names[whole])
                self._into[whole] = (outer, *rest)
                (left if big > small else right)[:0] = rest
            left, right = list(self.resolve(left)), list(self.resolve(right))
        return not left and not right


def find_axes(program: Program) -> Axes:
    """Names the axes of a program. ProgramError for an op outside the bounds."""
    check_program(program)
    finder = _Finder()
    tensors: dict[str, _Dims] = {}
    reads: dict[str, list[_Dims]] = {}
    ops: dict[str, dict[str, tuple[int, ...]]] = {}
    temps = {tensor.name for tensor in program.with_role("temp")}
    for op in program.ops:
        local: dict[str, tuple[int, ...]] = {}
        found: dict[int, _Dims] = {}
        # inputs last: they can be read along other axes than before, what ops compute can't
        for number, access in sorted(enumerate(op.reads), key=lambda x: x[1].tensor not in temps):
            known = tensors.get(access.tensor)
            operands = [*chain.from_iterable(reads.values()), *found.values()]
            if known is not None and not _try_binds(finder, op, access, local, known, operands):
                if access.tensor in temps:
                    raise unsupported(op, f"it reads {access.tensor!r} along two axes at once")
                known = None
            if known is None:
                known = _fresh(finder, op, access, local)
                tensors.setdefault(access.tensor, known)
            found[number] = known
        for axis in op.axes:
            if axis.name not in local:
                local[axis.name] = finder.new(axis.extent, axis.name)
        if kind_of(op).is_norm and not finder.unify(local["d"], local["r"]):
            raise unsupported(op, "its row is divided in two ways")
        reads[op.name] = [found[number] for number in range(len(op.reads))]
        ops[op.name] = {name: local[name] for name in _in_order(op)}
        tensors[op.writes[0].tensor] = [
            tuple(axis for name in index.axes for axis in local[name])
            for index in op.writes[0].dims
        ]
    return _named(finder, program, ops, reads, tensors)


def _in_order(op: Op) -> Iterable[str]:
    """Local axes, as reads name them, then the others."""
    named = (name for access in op.reads for index in access.dims for name in index.axes)
    return dict.fromkeys([*named, *(axis.name for axis in op.axes)])


def _try_binds(
    finder: _Finder,
    op: Op,
    access: Access,
    local: dict[str, tuple[int, ...]],
    known: _Dims,
    operands: Iterable[_Dims],
) -> bool:
    """As _binds; changes nothing where it can't be, also because two dims of one of the operands
    would run along one axis.
    """
    saved, before = finder.copy(), dict(local)
    if _binds(finder, op, access, local, known) and not any(
        _repeats(finder, dims) for dims in (known, *operands)
    ):
        return True
    finder.restore(saved)
    local.clear()
    local.update(before)
    return False


def _repeats(finder: _Finder, dims: _Dims) -> bool:
    axes = [axis for dim in dims for axis in finder.resolve(dim)]
    return len({*axes}) < len(axes)


def _binds(
    finder: _Finder,
    op: Op,
    access: Access,
    local: dict[str, tuple[int, ...]],
    known: _Dims,
) -> bool:
    """Whether a tensor whose dims are known can be read so, axis by axis; notes it if it can."""
    mixes = contracts(op) or kind_of(op).mixes_values
    if mixes and not _keeps_apart(finder, access, local, known):
        return False
    for index, dim in zip(access.dims, known, strict=True):
        axes: tuple[int, ...] = ()
        for name in index.axes:
            if name not in local:
                local[name] = finder.new(op.axis(name).extent, name)
            axes += local[name]
        if not finder.unify(dim, axes):
            return False
    return True


def _keeps_apart(
    finder: _Finder,
    access: Access,
    local: Mapping[str, tuple[int, ...]],
    known: _Dims,
) -> bool:
    """Whether no axis of the tensor is already another axis of this op."""
    for index, dim in zip(access.dims, known, strict=True):
        mine = finder.resolve(dim)
        for name, axes in local.items():
            if name not in index.axes and set(finder.resolve(axes)) & set(mine):
                return False
    return True


def _fresh(
    finder: _Finder, op: Op, access: Access, local: dict[str, tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """Axes of a tensor that is read for the first time."""
    dims = []
    for index in access.dims:
        for name in index.axes:
            if name not in local:
                local[name] = finder.new(op.axis(name).extent, name)
        dims.append(tuple(axis for name in index.axes for axis in local[name]))
    return dims


def _named(
    finder: _Finder,
    program: Program,
    ops: Mapping[str, Mapping[str, tuple[int, ...]]],
    reads: Mapping[str, Sequence[Sequence[tuple[int, ...]]]],
    tensors: Mapping[str, Sequence[tuple[int, ...]]],
) -> Axes:
    names: dict[int, str] = {}
    extents: dict[str, int] = {}

    def named(axes: Sequence[int]) -> tuple[str, ...]:
        for axis in finder.resolve(axes):
            if axis not in names:
                base = finder.names[axis]
                taken = (f"{base}{n}" if n else base for n in range(len(names) + 1))
                names[axis] = next(name for name in taken if name not in extents)
                extents[names[axis]] = finder.extents[axis]
        return tuple(names[axis] for axis in finder.resolve(axes))

    locals_ = {op: {n: named(a) for n, a in local.items()} for op, local in ops.items()}
    found = {op: tuple(tuple(map(named, dims)) for dims in all_) for op, all_ in reads.items()}
    shown = {name: tuple(map(named, dims)) for name, dims in tensors.items()}
    for op in program.ops:
        for dims in found[op.name]:
            flat = [axis for dim in dims for axis in dim]
            if len(set(flat)) != len(flat):
                raise unsupported(op, "two dims of an operand run along one axis")
    return Axes(extents, locals_, found, shown)


def used_part(program: Program) -> Program:
    """The same without ops on whose results no output and no state depends, and without what they
    alone use: they may read an input along axes that only have equal extents by chance.
    """
    needed = {*program.outputs, *(t.name for t in program.tensors if t.role != "temp")}
    kept: list[Op] = []
    for op in reversed(program.ops):
        if any(access.tensor in needed for access in op.writes):
            kept.append(op)
            needed |= {access.tensor for access in op.reads}
    used, known = (
        {access.tensor for op in ops for access in accesses(op)} for ops in (kept, program.ops)
    )
    tensors = tuple(t for t in program.tensors if t.name in used or t.name not in known)
    return replace(program, tensors=tensors, ops=tuple(reversed(kept)))


def shrink_program(program: Program, axes: Axes, extents: Mapping[str, int]) -> Program:
    """The same program with other extents of its axes."""

    def size(names: Iterable[str]) -> int:
        return math.prod(extents[name] for name in names)

    tensors = tuple(
        replace(t, shape=tuple(map(size, axes.tensors[t.name]))) if t.name in axes.tensors else t
        for t in program.tensors
    )
    ops = tuple(
        replace(
            op,
            axes=tuple(replace(a, extent=size(axes.ops[op.name][a.name])) for a in op.axes),
        )
        for op in program.ops
    )
    return replace(program, tensors=tensors, ops=ops)
