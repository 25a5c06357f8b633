"""From annotated tensors to the loops of the ops around them, forwards and then backwards.

Comes in: the user's layouts. Goes out: for each op, which iteration axis runs on which mesh axis as
far as annotations decide it. A decision is never overwritten, neither the user's nor an earlier
one: what a user annotated comes before what was derived, and of derived layouts that disagree the
first wins. The cost model decides where two annotated operands disagree, and whether a sum is
divided as follows from others or as its annotated result. Next: search.py.
"""

from collections.abc import Iterable, Mapping

from distmega.program.types import Access, Op, Program, accesses
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import (
    REPLICATE,
    REPLICATED,
    Layout,
    Partial,
    Placement,
    Shard,
)
from distmega.sharding.resolve.padding import additive_reads
from distmega.sharding.search.options import SplitOption
from distmega.sharding.search.signatures import OptionTable

Hints = dict[str, dict[str, str]]
"""Op name -> mesh axis -> iteration axis."""


class _Propagation:
    def __init__(
        self,
        program: Program,
        mesh: DeviceMesh,
        table: OptionTable,
        pins: Mapping[str, Layout],
        *,
        spreads: bool,
    ) -> None:
        self.spreads = spreads
        self.program, self.mesh, self.table, self.pins = program, mesh, table, pins
        self.known = dict(pins)
        self.hints: Hints = {op.name: {} for op in program.ops}
        self.taken: dict[str, dict[str, int]] = {op.name: {} for op in program.ops}
        self.open = {op.name: self.disagreements(op) for op in program.ops}
        self.changed = True

    def run(self) -> Hints:
        for op in self.program.ops:
            self.visit(op, op.reads, is_write=False, pinned=True)
            if not self.is_summed(op, op.extents):
                self.visit(op, op.writes, is_write=True, pinned=True)
        while self.changed and self.spreads:
            self.changed = False
            for op in self.program.ops:
                self.visit(op, op.reads, is_write=False)
            for op in reversed(self.program.ops):
                self.visit(op, op.writes, is_write=True)
        return self.hints

    def visit(
        self, op: Op, operands: tuple[Access, ...], *, is_write: bool, pinned: bool = False
    ) -> None:
        """Takes over what is known of one side of an op, or only what is annotated."""
        for position, access in enumerate(operands):
            if pinned and access.tensor not in self.pins:
                continue
            known = self.known.get(access.tensor, REPLICATED)
            for axis in self.mesh.names if known.placements else ():
                placement = known.at(axis)
                decided = {*self.hints[op.name], *self.open[op.name]}
                if isinstance(placement, Shard) and axis not in decided:
                    self.take(op, axis, placement, position, is_write=is_write)

    def disagreements(self, op: Op) -> list[str]:
        """Mesh axes along which annotated operands ask for different divisions of an op. What is
        added to a sum doesn't count: it can be added after it, divided as it likes.
        """
        found: dict[str, set[str]] = {axis: set() for axis in self.mesh.names}
        added = additive_reads(op)
        for position, access in enumerate(op.reads):
            for axis, placement in self.pins.get(access.tensor, REPLICATED).placements:
                if not isinstance(placement, Shard):
                    continue
                for option in self.table.options(op, self.mesh.size(axis)).options:
                    if option.reads[position] == placement and not self.contradicts(
                        op, axis, option
                    ):
                        if not (position in added and self.is_summed(op, found[axis])):
                            found[axis].add(option.axis)
                        break
        return [axis for axis, names in found.items() if len(names) > 1]

    def is_summed(self, op: Op, names: Iterable[str]) -> bool:
        """Whether one of an op's axes of these names is summed over."""
        return any(op.axis(name).role == "reduce" for name in names)

    def take(
        self, op: Op, axis: str, placement: Placement, position: int, *, is_write: bool
    ) -> None:
        """Divides the op as an operand is divided, if that is exact and contradicts no pin."""
        hints, order = self.hints[op.name], self.mesh.names
        inner = {hints[later] for later in order[order.index(axis) :] if later in hints}
        taken = tuple(self.taken[op.name].items())
        for option in self.table.options(op, self.mesh.size(axis), taken).options:
            mine = (option.writes if is_write else option.reads)[position]
            if mine != placement or option.axis in inner:
                continue
            if not self.contradicts(op, axis, option):
                if not is_write and self.competes(op, axis, position, option):
                    self.open[op.name].append(axis)
                    return
                hints[axis] = option.axis
                self.taken[op.name][option.axis] = option.chunk
                self.learn(op, axis, option)
                self.changed = True
                return

    def competes(self, op: Op, axis: str, position: int, option: SplitOption) -> bool:
        """Whether a division that only follows from others leaves parts of a sum, of a result that
        is annotated as divided. It may come of either, so costs decide.
        """
        return any(
            isinstance(made, Partial)
            and op.reads[position].tensor not in self.pins
            and isinstance(self.pins.get(access.tensor, REPLICATED).at(axis), Shard)
            for access, made in zip(op.writes, option.writes, strict=True)
        )

    def contradicts(self, op: Op, axis: str, option: SplitOption) -> bool:
        """Whether a result would not come out as its annotation says."""
        return any(
            access.tensor in self.pins
            and not isinstance(made, Partial)
            and self.pins[access.tensor].at(axis) != made
            for access, made in zip(op.writes, option.writes, strict=True)
        )

    def learn(self, op: Op, axis: str, option: SplitOption) -> None:
        """Notes what an op's division says of its other operands, unless they are annotated."""
        placed = (*option.reads, *option.writes)
        for access, placement in zip(accesses(op), placed, strict=True):
            if access.tensor in self.pins or not isinstance(placement, Shard):
                continue
            before = self.known.get(access.tensor, REPLICATED)
            there = before.moved(axis, placement)
            if before.at(axis) == REPLICATE and self.nests(there, axis, placement):
                self.known[access.tensor] = there

    def nests(self, layout: Layout, axis: str, placement: Shard) -> bool:
        """Whether a mesh axis shards a dim alone, or evenly what the ones before it left of it."""
        others = [(name, p) for name, p in layout.shards_of(placement.dim) if name != axis]
        if not others:
            return True
        left = min(p.chunk for _, p in others)
        order = self.mesh.names
        before = all(order.index(name) < order.index(axis) for name, _ in others)
        return before and placement.chunk == -(-left // self.mesh.size(axis)) < left


def propagate_annotations(
    program: Program,
    mesh: DeviceMesh,
    table: OptionTable,
    pins: Mapping[str, Layout],
    *,
    spreads: bool = True,
) -> Hints:
    """Iteration axes decided by annotations; `pins` are resolved layouts. spreads: through ops
    that touch no annotated tensor, too.
    """
    if not any(layout.placements for layout in pins.values()):
        return {op.name: {} for op in program.ops}
    return _Propagation(program, mesh, table, pins, spreads=spreads).run()
