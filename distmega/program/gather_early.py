"""Rows that nobody reads are not computed: gathers of rows move in front of the ops before them.

Comes in: a program. Goes out: the program in which a gather or slice of rows stands as far up as
all that is read of the rows between is what it takes; the ops that it has passed do those rows
alone. Which ops treat rows apart, their axes say: an axis that is parallel and indexes one dim of
each operand that has it. Next on the walk: sharding/planner.py, which chooses by cost.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from distmega.program.dtypes import is_integer
from distmega.program.kinds import kind_of
from distmega.program.ops.data_movement import slice_dim
from distmega.program.ops.lookups import embedding
from distmega.program.ops.parts import fresh_name
from distmega.program.types import (
    Access,
    Index,
    Op,
    Program,
    Tensor,
    accesses,
    grouped_index,
    verify_program,
)

LEAST_FEWER = 2
"""Rows to one that is taken, at least: of almost all rows little is saved, and extents become
odd."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _TakenRows:
    """Which rows are taken: `num` of `whole`, by numbers that `ids` holds or, without, from `start`
    on in steps of `step`, as a view where is_view.
    """

    whole: int
    num: int
    ids: str = ""
    start: int = 0
    step: int = 1
    is_view: bool = False

    def gather(self, name: str, source: Tensor, dim: int, tensors: Mapping[str, Tensor]) -> Op:
        """The op that takes them along a dim."""
        if self.ids:
            return embedding(name, tensors[self.ids], source)[0]
        stop = self.start + self.step * (self.num - 1) + 1
        kind = "view" if self.is_view else "slice"
        return slice_dim(name, source, dim, self.start, stop, self.step, kind)[0]


def gather_early(program: Program, kept: Collection[str] = ()) -> Program:
    """The program with gathers and slices of rows moved up. kept: tensors besides outputs of which
    all rows are wanted. The same program where none can move.
    """
    for rows in dict.fromkeys(_taken_rows(program)):
        moved = _Move(program, rows, kept).run()
        if moved is not program:
            return gather_early(moved, kept)
    return program


def _taken_rows(program: Program) -> Iterator[_TakenRows]:
    tensors = program.tensor_map()
    for op in program.ops:
        found = _gather_of(op, tensors)
        if found and tensors[op.reads[-1].tensor].role == "temp":
            yield found[0]


def _gather_of(op: Op, tensors: Mapping[str, Tensor]) -> tuple[_TakenRows, int] | None:
    """What rows an op takes of its last operand and along which dim, where it does that alone."""
    kind, found = kind_of(op), None
    if kind.looks_up_rows:
        num, whole = (tensors[read.tensor].shape[0] for read in op.reads)
        found = _TakenRows(whole=whole, num=num, ids=op.reads[0].tensor), 0
    elif (op.is_view or kind.only_copies) and not kind.is_clipped:
        found = _slice_of(op, tensors)
    return found if found and LEAST_FEWER * found[0].num <= found[0].whole else None


def _slice_of(op: Op, tensors: Mapping[str, Tensor]) -> tuple[_TakenRows, int] | None:
    if len(op.reads) != 1 or len(op.writes) != 1:
        return None
    (read,), (write,) = op.reads, op.writes
    shape, result = (tensors[access.tensor].shape for access in (read, write))
    order = [index.axes for index in read.dims]
    whole = all(_is_whole(op, i, n) for i, n in zip(write.dims, result, strict=True))
    if not whole or order != [index.axes for index in write.dims]:
        return None
    indices = zip(read.dims, shape, strict=True)
    parts = [dim for dim, (index, n) in enumerate(indices) if not _is_whole(op, index, n)]
    if len(parts) != 1:
        return None
    (dim,), index = parts, read.dims[parts[0]]
    start, step = index.offset, index.stride
    rows = _TakenRows(whole=shape[dim], num=result[dim], start=start, step=step, is_view=op.is_view)
    return rows, dim


def _is_whole(op: Op, index: Index, extent: int) -> bool:
    """Whether one axis runs over all of a dim."""
    plain = len(index.axes) == 1 and index.offset == 0 and index.stride == 1
    return plain and op.axis(index.axes[0]).extent == extent


class _Move:
    """One choice of rows moved up.

    gathers: ops that take the rows, with the dim. few: by tensor and dim, what those rows of it are
    called; op_names: ops that take them, by that. same: results of gathers, by what the first one
    that takes the same rows calls them. demands: dims along which others read a tensor's rows
    alone, None where they read all. axes: of the ops that do these rows alone. ops, made: what the
    new program does so far, and the tensors that it has.
    """

    def __init__(self, program: Program, rows: _TakenRows, kept: Collection[str]) -> None:
        self.program, self.rows, self.tensors = program, rows, program.tensor_map()
        self.names = {*self.tensors, *(op.name for op in program.ops)}
        self.kept = {*program.outputs, *kept}
        self.rewritten = _rewritten(program)
        self.few: dict[tuple[str, int], str] = {}
        self.same: dict[str, str] = {}
        self.gathers: dict[str, int] = {}
        self.op_names: dict[str, str] = {}
        self.find_gathers()
        self.demands: dict[str, set[int | None]] = {name: {None} for name in self.kept}
        self.axes: dict[str, str] = {}
        self.find_axes()
        self.ops: list[Op] = []
        self.made: set[str] = set()

    def find_gathers(self) -> None:
        """From the first op to the last; the same rows are called what the first one calls them."""
        for op in self.program.ops:
            found = _gather_of(op, self.tensors)
            if found is None or found[0] != self.rows:
                continue
            source, result, dim = self.source(op), op.writes[0].tensor, found[1]
            name = self.few.get((source, dim), result)
            if self.is_written_once(result) and (name == result or result not in self.kept):
                self.few[source, dim] = self.same[result] = name
                self.gathers[op.name] = dim
                self.op_names.setdefault(name, op.name)

    def source(self, gather: Op) -> str:
        name = gather.reads[-1].tensor
        return self.same.get(name, name)

    def find_axes(self) -> None:
        """From the last op to the first: which rows are read of what each gives."""
        known = self.last_written(self.rows.ids)
        for position, op in reversed([*enumerate(self.program.ops)]):
            axis = self.movable_axis(op) if known < position else ""
            if axis:
                self.axes[op.name] = axis
            for number, read in enumerate(op.reads):
                taken = number == len(op.reads) - 1 and op.name in self.gathers
                dim = self.gathers[op.name] if taken else _dim_of(read, axis)
                self.demands.setdefault(read.tensor, set()).add(dim)

    def last_written(self, tensor: str) -> int:
        """The position of the last op that writes a tensor, -1 without one."""
        ops = enumerate(self.program.ops)
        return max((n for n, op in ops for a in op.writes if a.tensor == tensor), default=-1)

    def is_written_once(self, tensor: str) -> bool:
        """Whether a result may be written earlier than it is."""
        return self.tensors[tensor].role == "temp" and tensor not in self.rewritten

    def movable_axis(self, op: Op) -> str:
        """The axis of an op's rows, where nobody reads others of its results and it does each row
        by itself; empty for any other op, and for one that takes rows itself: two such, along two
        dims, would pass each other for ever.
        """
        kind = kind_of(op)
        mixes = kind.mixes_values or kind.counts_rows or kind.calls_torch or grouped_index(op)
        if kind.origin != "user" or mixes or _gather_of(op, self.tensors):
            return ""
        axis = next((self.axis_read(write) for write in op.writes if self.is_read(write)), "")
        does_rows = axis and op.axis(axis).role == "parallel"
        does_rows = does_rows and all(self.writes_rows(op, write, axis) for write in op.writes)
        return axis if does_rows and self.reads_rows(op, axis) else ""

    def is_read(self, write: Access) -> bool:
        return write.tensor in self.demands

    def axis_read(self, write: Access) -> str:
        """The axis along which nobody reads other rows of a result."""
        demands = self.demands[write.tensor]
        dim = next(iter(demands)) if len(demands) == 1 else None
        return write.dims[dim].axes[0] if dim is not None and write.dims[dim].axes else ""

    def writes_rows(self, op: Op, write: Access, axis: str) -> bool:
        """Whether an axis runs over one dim of a result, and the rows taken are all that is read
        along it.
        """
        dim = self.whole_dim(op, write, axis)
        alone = dim is not None and self.demands.get(write.tensor, {dim}) == {dim}
        return alone and self.is_written_once(write.tensor)

    def reads_rows(self, op: Op, axis: str) -> bool:
        """Whether the rows can be taken of every operand that the axis runs over, and it runs over
        a tensor everywhere or nowhere.
        """
        having = [read for read in op.reads if _dims_of(read, axis)]
        apart = {r.tensor for r in having} & {r.tensor for r in op.reads if r not in having}
        if apart and not kind_of(op).reads_apart:
            return False
        return all(self.can_take(op, read, axis) for read in having)

    def can_take(self, op: Op, read: Access, axis: str) -> bool:
        tensor, dim = self.tensors[read.tensor], self.whole_dim(op, read, axis)
        if dim is None or tensor.role in ("weight", "state") or tensor.name in self.rewritten:
            return False
        by_numbers = dim == 0 and len(tensor.shape) > 1 and not is_integer(tensor.dtype)
        return by_numbers or not self.rows.ids

    def whole_dim(self, op: Op, access: Access, axis: str) -> int | None:
        """The one dim that an axis runs over, all of it and alone."""
        dims = _dims_of(access, axis)
        shape = self.tensors[access.tensor].shape
        whole = len(dims) == 1 and _is_whole(op, access.dims[dims[0]], shape[dims[0]])
        return dims[0] if whole else None

    def run(self) -> Program:
        """The program with its gathers in front of the ops that do the taken rows alone."""
        if not self.axes:
            return self.program
        for op in self.program.ops:
            if op.name in self.gathers:
                self.take(self.source(op), self.gathers[op.name])
            else:
                self.ops.append(self.moved(op))
        used = {access.tensor for op in self.ops for access in accesses(op)}
        tensors = (t for t in self.tensors.values() if t.role != "temp" or t.name in used)
        return verify_program(replace(self.program, tensors=tuple(tensors), ops=tuple(self.ops)))

    def moved(self, op: Op) -> Op:
        """An op of the rows that are read of its results, behind what takes its operands'."""
        axis = self.axes.get(op.name, "")
        reads = tuple(replace(read, tensor=self.read(read, axis)) for read in op.reads)
        axes = tuple(replace(a, extent=self.rows.num) if a.name == axis else a for a in op.axes)
        writes = tuple(replace(write, tensor=self.written(write, axis)) for write in op.writes)
        return replace(op, axes=axes, reads=reads, writes=writes)

    def read(self, read: Access, axis: str) -> str:
        """What an op reads in place of an operand."""
        name, dim = self.same.get(read.tensor, read.tensor), _dim_of(read, axis)
        return name if dim is None else self.take(name, dim)

    def written(self, write: Access, axis: str) -> str:
        """What an op writes in place of a result."""
        dim = _dim_of(write, axis)
        name = write.tensor if dim is None else self.name_rows(write.tensor, dim)
        self.made.add(name)
        return name

    def take(self, source: str, dim: int) -> str:
        """The name of a tensor's rows; appends the op that takes them where nobody gave them."""
        name = self.name_rows(source, dim)
        if name not in self.made:
            op = self.rows.gather(name, self.tensors[source], dim, self.tensors)
            self.ops.append(replace(op, name=self.op_names.get(name, name)))
            self.made.add(name)
        return name

    def name_rows(self, source: str, dim: int) -> str:
        """What a tensor's rows are called; declared where they are new."""
        if (source, dim) not in self.few:
            name = fresh_name(f"{source}.rows", self.names)
            shape = self.tensors[source].shape
            few = (*shape[:dim], self.rows.num, *shape[dim + 1 :])
            self.tensors[name] = replace(self.tensors[source], name=name, shape=few, role="temp")
            self.names.add(name)
            self.few[source, dim] = name
        return self.few[source, dim]


def _dims_of(access: Access, axis: str) -> list[int]:
    """Dims of an operand that an axis runs over."""
    return [dim for dim, index in enumerate(access.dims) if axis in index.axes]


def _dim_of(access: Access, axis: str) -> int | None:
    """The first of them, None without one."""
    return next(iter(_dims_of(access, axis)), None)


def _rewritten(program: Program) -> frozenset[str]:
    """Tensors whose storage changes after it is first written, by whatever name."""
    roots = {tensor.name: tensor.name for tensor in program.tensors}
    for op in program.ops:
        if op.is_view:
            roots[op.writes[0].tensor] = roots[op.reads[0].tensor]
    written = Counter(
        roots[access.tensor] for op in program.ops if not op.is_view for access in op.writes
    )
    written.update(tensor.name for tensor in program.tensors if tensor.role == "state")
    changing = {name for name, times in written.items() if times > 1}
    return frozenset(name for name, root in roots.items() if root in changing)
