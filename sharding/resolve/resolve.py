"""From the chosen division of every op to where every tensor lives and which collectives run.

Comes in: a program, one SplitOption per op and mesh axis, the given layouts. Goes out: a
RankSchedule of PlacedOps and Reshards over local tensors, in execution order. A tensor keeps its
name where it is at home; other forms of it (parts before a reduction, copies) get names of their
own. Padding is proved here once more, over all mesh axes together. Next: finalize.py.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from distmega.program import expr
from distmega.program.dtypes import item_bytes
from distmega.program.kinds import kind_of
from distmega.program.ops.parts import fresh_name
from distmega.program.types import Access, Op, Program, accesses
from distmega.sharding.layout.aliases import alias_roots
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import (
    PAIR,
    REPLICATE,
    REPLICATED,
    ROWS,
    Layout,
    Partial,
    Placement,
    Shard,
)
from distmega.sharding.resolve.padding import AxisPads, Pad, inexact_reason, result_pads
from distmega.sharding.resolve.reshard import Move, find_movements
from distmega.sharding.search.cost import Machine, op_bytes, op_flops, op_time_us
from distmega.sharding.search.options import SUM, SplitOption, summed_read
from distmega.sharding.search.signatures import OptionTable

Splits = tuple[tuple[str, SplitOption], ...]
"""How one op is divided: (mesh axis, option), whole options left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCost:
    """One rank's part of an op."""

    num_bytes: int
    flops: int
    time_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedOp:
    """An op on local tensors: names in the order of its reads and writes."""

    op: Op
    splits: Splits
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    cost: OpCost


@dataclass(frozen=True, slots=True, kw_only=True)
class Reshard:
    """One collective on local tensors; two of them for the pair of an argmax."""

    name: str
    move: Move
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    combine: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSchedule:
    """What one rank does, and the local tensors it does it on: name -> (tensor, layout).

    homes: layout of each tensor of the program under its own name.
    """

    steps: tuple[PlacedOp | Reshard, ...]
    locals: Mapping[str, tuple[str, Layout]]
    homes: Mapping[str, Layout]


class InexactSplitError(Exception):
    """A division isn't exact once all mesh axes are taken together; the planner tries another."""

    def __init__(self, op: str, axis: str, reason: str) -> None:
        super().__init__(op, axis, reason)
        self.op, self.axis, self.reason = op, axis, reason


class Resolver:
    """Builds a RankSchedule by walking a program once."""

    def __init__(
        self,
        program: Program,
        mesh: DeviceMesh,
        machine: Machine,
        table: OptionTable,
        chosen: Mapping[str, Splits],
        given: Mapping[str, Layout],
    ) -> None:
        self.program, self.mesh, self.machine, self.table = program, mesh, machine, table
        self.chosen = chosen
        self.tensors = program.tensor_map()
        self.homes: dict[str, Layout] = dict(given)
        self.forms: dict[str, dict[Layout, str]] = {}
        self.pads: dict[str, dict[int, Pad]] = {}
        self.locals: dict[str, tuple[str, Layout]] = {}
        self.names = {tensor.name for tensor in program.tensors}
        self.op_names = {op.name for op in program.ops}
        self.steps: list[PlacedOp | Reshard] = []
        self.roots = alias_roots(program)
        self.num_reads = Counter(read.tensor for op in program.ops for read in op.reads)
        self.num_reads.update(program.outputs)
        self.aliases: dict[str, list[str]] = {}
        for name, root in self.roots.items():
            self.aliases.setdefault(root, []).append(name)
        self.needs: dict[tuple[int, Splits], tuple[tuple[Layout, ...], tuple[Layout, ...]]] = {}
        self.costs: dict[tuple[int, Splits], OpCost] = {}
        self.paths: dict[tuple[tuple[int, ...], int, Layout, Layout], tuple[Move, ...]] = {}

    def run(self) -> RankSchedule:
        """The schedule; raises InexactSplitError if padding can't be proved harmless."""
        for op in self.program.ops:
            self.resolve_op(op)
        for tensor in self.program.tensors:
            if tensor.name not in self.homes:
                self.homes[tensor.name] = next(iter(self.forms.get(tensor.name, {REPLICATED: ""})))
            if tensor.role != "temp":
                self.locals.setdefault(tensor.name, (tensor.name, self.homes[tensor.name]))
        return RankSchedule(steps=tuple(self.steps), locals=self.locals, homes=self.homes)

    def resolve_op(self, op: Op) -> None:
        """Adds the collectives that bring its operands into the layouts of its splits, and the op
        itself. InexactSplitError as `run`.
        """
        splits = self.chosen[op.name]
        if (parts := self.parts_added(op, splits)) is not None:
            splits = tuple(each for each in splits if each[0] not in parts.partial_axes)
        key = self.table.class_of(op), splits
        if key not in self.needs:
            self.needs[key] = operand_layouts(op, splits)
            self.costs[key] = self.cost(op, splits)
        read_layouts, write_layouts = self.needs[key]
        if parts is not None:
            read_layouts, write_layouts = (parts,) * len(op.reads), (parts,)
        elif carried := self.sums_carried(op, splits, read_layouts):
            read_layouts = _moved(read_layouts, (summed_read(op),), carried)
            write_layouts = _moved(write_layouts, range(len(op.writes)), carried)
        reads = tuple(
            self.form(access.tensor, layout)
            for access, layout in zip(op.reads, read_layouts, strict=True)
        )
        pads = self.prove(op, splits, reads)
        writes = tuple(
            self.new_form(access.tensor, layout)
            for access, layout in zip(op.writes, write_layouts, strict=True)
        )
        self.steps.append(
            PlacedOp(op=op, splits=splits, reads=reads, writes=writes, cost=self.costs[key])
        )
        for access, name in zip(op.writes, writes, strict=True):
            self.written(op, access, name, pads)
        self.settle(op, writes, write_layouts)

    def parts_added(self, op: Op, splits: Splits) -> Layout | None:
        """The layout in which parts of sums over ranks are added before they are summed, where an
        op adds two or more and nobody else wants them: one collective instead of one each.
        """
        if not kind_of(op).is_elementwise or len(op.reads) < 2 or not self.adds_same_indices(op):
            return None
        names = [read.tensor for read in op.reads]
        found = {layout for name in names for layout in self.forms.get(name, {REPLICATED: ""})}
        if len(found) != 1 or any(n in self.homes or self.num_reads[n] != 1 for n in names):
            return None
        (layout,) = found
        axes = layout.partial_axes
        if not axes or any(layout.at(axis) != Partial("sum") for axis in axes):
            return None
        rest = tuple(each for each in splits if each[0] not in axes)
        whole = layout
        for axis in axes:
            whole = whole.moved(axis, REPLICATE)
        wanted = operand_layouts(op, rest)
        return layout if {*wanted[0], *wanted[1]} == {whole} else None

    def sums_carried(
        self, op: Op, splits: Splits, read_layouts: Sequence[Layout]
    ) -> tuple[str, ...]:
        """Mesh axes along which an op takes an operand in parts of a sum and leaves its results so,
        where it is linear in it and nobody else wants it: there is less to sum afterwards.
        """
        position = summed_read(op)
        if position is None:
            return ()
        name, wanted = op.reads[position].tensor, read_layouts[position]
        forms = tuple(self.forms.get(name, {}))
        if len(forms) != 1 or name in self.homes or self.num_reads[name] != 1:
            return ()
        divided = {axis for axis, _ in splits}
        summed = (a for a in forms[0].partial_axes if forms[0].at(a) == SUM)
        axes = tuple(a for a in summed if a not in divided)
        return axes if _moved((wanted,), (0,), axes) == forms else ()

    def adds_same_indices(self, op: Op) -> bool:
        """Whether an op adds up its operands, all indexed alike."""
        summed = expr.is_sum(expr.parse(str(op.attr("expr"))))
        return summed and len({a.dims for a in accesses(op)}) == 1

    def cost(self, op: Op, splits: Splits) -> OpCost:
        extents = {option.axis: option.chunk for _, option in splits}
        return OpCost(
            num_bytes=op_bytes(op, self.tensors, extents),
            flops=op_flops(op, extents, self.tensors),
            time_us=op_time_us(op, self.tensors, self.machine, extents),
        )

    def form(self, tensor: str, layout: Layout) -> str:
        """Local name of a tensor in a layout; moves it there if it isn't."""
        forms = self.forms.setdefault(tensor, {})
        if not forms:
            forms[self.homes.setdefault(tensor, layout)] = tensor
            self.locals[tensor] = tensor, self.homes[tensor]
        if layout not in forms:
            sources = [at for at in forms if _holds_parts(at, layout)] or forms
            paths = [(self.path(tensor, source, layout), source) for source in sources]
            movements, source = min(paths, key=lambda p: sum(move.time_us for move in p[0]))
            self.follow(tensor, forms[source], movements)
        return forms[layout]

    def path(self, tensor: str, source: Layout, target: Layout) -> tuple[Move, ...]:
        shape, item = self.tensors[tensor].shape, item_bytes(self.tensors[tensor].dtype)
        key = shape, item, source, target
        if key not in self.paths:
            args = shape, item, source, target, self.mesh, self.machine
            self.paths[key] = find_movements(*args)
        return self.paths[key]

    def follow(self, tensor: str, start: str, movements: Sequence[Move]) -> None:
        """Appends collectives that bring a local tensor through `movements`."""
        if tensor not in self.homes and movements:
            self.homes[tensor] = movements[-1].target
        here = start
        for move in movements:
            name = self.new_form(tensor, move.target)
            source = move.source.at(move.axis)
            combine = source.combine if isinstance(source, Partial) else ""
            combine = "sum" if source == ROWS else combine
            self.steps.append(self.reshard(move, (here,), (name,), combine))
            fresh = {p.dim for p in _changed(move) if isinstance(p, Shard)}
            fresh -= {
                dim for dim in fresh if move.source.moved(move.axis, REPLICATE).shards_of(dim)
            }
            self.pads[name] = {d: p for d, p in self.pads.get(here, {}).items() if d not in fresh}
            here = name

    def reshard(
        self, move: Move, reads: tuple[str, ...], writes: tuple[str, ...], combine: str
    ) -> Reshard:
        """A collective, under a name that no op has."""
        name = fresh_name(f"{writes[0]}.{move.kind}", self.op_names)
        self.op_names.add(name)
        return Reshard(name=name, move=move, reads=reads, writes=writes, combine=combine)

    def new_form(self, tensor: str, layout: Layout) -> str:
        """Name under which a tensor comes to be in a layout: its own, where that is its home."""
        forms = self.forms.setdefault(tensor, {})
        if layout not in forms:
            at_home = self.homes.get(tensor) == layout
            if tensor not in self.homes and not layout.partial_axes:
                self.homes[tensor] = layout
                at_home = True
            forms[layout] = tensor if at_home else self.fresh(f"{tensor}.{_suffix(layout)}")
            self.locals[forms[layout]] = tensor, layout
        return forms[layout]

    def fresh(self, name: str) -> str:
        name = fresh_name(name, self.names)
        self.names.add(name)
        return name

    def prove(self, op: Op, splits: Splits, reads: Sequence[str]) -> dict[str, Pad]:
        """Padding of the results by iteration axis, after proving that none reaches them."""
        uneven = {option.axis: axis for axis, option in splits if option.uneven}
        if not uneven:
            return {}
        operands: list[AxisPads] = []
        for access, name in zip(op.reads, reads, strict=True):
            pads = self.pads.get(name, {})
            operands.append(
                {
                    index.axes[0]: pads.get(dim, Pad.ZERO)
                    for dim, index in enumerate(access.dims)
                    if index.axes and index.axes[0] in uneven and not index.is_grouped
                }
            )
        found = self.table.options(op, self.mesh.size(next(iter(uneven.values()))))
        reason = inexact_reason(op, tuple(uneven), operands, found.index_reads)
        results = dict(result_pads(op, tuple(uneven), operands))
        kept = any(self.tensors[access.tensor].role == "state" for access in op.writes)
        if kept and any(pad != Pad.ZERO for pad in results.values()):
            reason = "padding of a state must stay zero"
        if reason:
            raise InexactSplitError(op.name, next(iter(uneven)), reason)
        return results

    def written(self, op: Op, access: Access, name: str, pads: Mapping[str, Pad]) -> None:
        """Notes padding of a result, seen through views too, and forgets copies of storage that it
        overwrote.
        """
        self.pads[name] = {
            dim: pads[index.axes[0]]
            for dim, index in enumerate(access.dims)
            if index.axes and index.axes[0] in pads and not index.is_grouped
        }
        if op.is_view:
            return
        assert self.tensors[access.tensor].role == "temp" or name == access.tensor, op
        worst = max(self.pads[name].values(), default=Pad.ZERO)
        for alias in self.aliases[self.roots[access.tensor]]:
            forms = self.forms.get(alias, {})
            for layout in [at for at, form in forms.items() if form not in (alias, name)]:
                del forms[layout]
            if alias != access.tensor and alias in self.locals:
                seen = self.pads.setdefault(alias, {})
                placed = (p for _, p in self.locals[alias][1].placements)
                for dim in {p.dim for p in placed if isinstance(p, Shard)}:
                    seen[dim] = max(seen.get(dim, Pad.ZERO), worst)

    def settle(self, op: Op, writes: Sequence[str], layouts: Sequence[Layout]) -> None:
        """Brings results home: outputs and annotated tensors, and the pair of a divided argmax."""
        pairs = [a for a, p in layouts[0].placements if p == PAIR]
        names, here = tuple(writes), layouts[0]
        for axis in pairs:
            there = here.moved(axis, REPLICATE)
            after = tuple(self.new_form(access.tensor, there) for access in op.writes)
            move = self.path(op.writes[0].tensor, here, there)[0]
            self.steps.append(self.reshard(move, names, after, "argmax"))
            for before, name in zip(names, after, strict=True):
                self.pads[name] = dict(self.pads.get(before, {}))
            names, here = after, there
        for access in op.writes:
            home = self.homes.get(access.tensor)
            if home is not None and home not in self.forms[access.tensor]:
                self.form(access.tensor, home)


def operand_layouts(op: Op, splits: Splits) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
    """Layouts in which an op divided like this needs its reads and gives its writes."""

    def joined(position: int, *, is_write: bool) -> Layout:
        placements: dict[str, Placement] = {}
        for axis, option in splits:
            placements[axis] = (option.writes if is_write else option.reads)[position]
        return Layout.of(placements)

    reads = tuple(joined(i, is_write=False) for i in range(len(op.reads)))
    return reads, tuple(joined(i, is_write=True) for i in range(len(op.writes)))


def _moved(
    layouts: Sequence[Layout], positions: Iterable[int | None], axes: Sequence[str]
) -> tuple[Layout, ...]:
    """The layouts, with those at some places in parts of a sum along mesh axes."""
    found = list(layouts)
    for position in positions:
        assert position is not None
        for axis in axes:
            found[position] = found[position].moved(axis, SUM)
    return tuple(found)


def _holds_parts(source: Layout, target: Layout) -> bool:
    """Whether what is in parts in the target is so in the source, for nothing becomes a part of a
    combination by moving.
    """
    return all(source.at(axis) == target.at(axis) for axis in target.partial_axes)


def _changed(move: Move) -> tuple[Placement, Placement]:
    return move.source.at(move.axis), move.target.at(move.axis)


def _suffix(layout: Layout) -> str:
    """Short name of a form of a tensor: partial, whole, or its mesh axes and dims."""
    if layout.partial_axes:
        return "partial"
    parts = [f"{axis}{p.dim}" for axis, p in layout.placements if isinstance(p, Shard)]
    return "_".join(parts) or "whole"
