"""A program as the search sees it: one Step an op, operands as slots of a list of live tensors.

Comes in: ops, what is already fixed about them and their tensors. Goes out: Steps that are equal
for equal situations, whatever the tensors are called, so that search.py solves each layer of a
model once. A live tensor is one whose layout is still a choice, or which is still to be read.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count

from distmega.program.dtypes import item_bytes
from distmega.program.types import Access, Op, Program, Tensor, accesses
from distmega.sharding.layout.aliases import bound_views, volatile_tensors
from distmega.sharding.layout.placements import REPLICATE, Placement
from distmega.sharding.search.signatures import OptionTable

CONSTANT = -1
"""Slot of an operand whose layout is given and isn't part of the search's state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOperand:
    """One access of a step.

    slot: index among the live tensors. fixed: its placement where given. exact: it must be held
    as the op needs it. keeps: a resharded copy stays usable. is_free: a weight or state whose
    layout is chosen at its first use. price_ns: of holding it whole. useful: of a result, the
    placements that later ops can use. shape: extents as if whole along this mesh axis.
    """

    slot: int
    fixed: Placement | None
    exact: bool
    keeps: bool
    is_free: bool
    price_ns: int
    useful: tuple[Placement, ...]
    is_state: bool
    shape: tuple[int, ...]
    item_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchStep:
    """One op: its class, fixed choices, operands. num_new: slots behind the others that it adds;
    dropped: those that are not alive after it, in their order. The others keep theirs, and the
    slots before theirs are filled up.
    """

    op_class: int
    taken: tuple[tuple[str, int], ...]
    closed: tuple[str, ...]
    wanted: tuple[str, ...]
    reads: tuple[StepOperand, ...]
    writes: tuple[StepOperand, ...]
    num_new: int
    dropped: tuple[int, ...]

    @property
    def used(self) -> tuple[int, ...]:
        """Slots that it reads or writes."""
        slots = {operand.slot for operand in (*self.reads, *self.writes)}
        return tuple(sorted(slots - {CONSTANT}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What is fixed when one mesh axis is planned.

    pins: placement of tensors along this axis where given (inputs, annotated tensors, outputs that
    are no temporaries). taken: op -> chunks of iteration axes that other mesh axes divide.
    closed: op -> iteration axes that may not be used. wanted: op -> iteration axes to use
    if any of them fits. prices_ns: of holding a weight or state whole.
    """

    pins: Mapping[str, Placement]
    taken: Mapping[str, tuple[tuple[str, int], ...]]
    closed: Mapping[str, tuple[str, ...]]
    wanted: Mapping[str, tuple[str, ...]]
    prices_ns: Mapping[str, int]


def seen_shape(
    access: Access, tensor: Tensor, op: Op, taken: tuple[tuple[str, int], ...]
) -> tuple[int, ...]:
    """Extents of an operand on a rank after the divisions in `taken`."""
    if not taken:
        return tensor.shape
    chunks = dict(taken)
    extents = op.extents
    shape = list(tensor.shape)
    for dim, index in enumerate(access.dims):
        if index.axes and index.axes[0] in chunks:
            inner = math.prod(extents[name] for name in index.axes[1:])
            shape[dim] = chunks[index.axes[0]] * inner
    return tuple(shape)


class StepBuilder:
    """Walks a program once and gives its Steps, and the live tensors at the end."""

    def __init__(
        self, program: Program, situation: Situation, table: OptionTable, num_ranks: int
    ) -> None:
        self.program, self.situation, self.table = program, situation, table
        self.num_ranks = num_ranks
        self.tensors = program.tensor_map()
        self.volatile, self.bound = volatile_tensors(program), bound_views(program)
        self.last_use = {name: len(program.ops) for name in program.outputs}
        for i, op in reversed(list(enumerate(program.ops))):
            for access in accesses(op):
                self.last_use.setdefault(access.tensor, i)
        self.useful = self.useful_placements()
        self.live: list[str] = []
        self.slots: dict[str, int] = {}

    def run(self) -> list[SearchStep]:
        """The steps, in program order."""
        return [self.step(i, op) for i, op in enumerate(self.program.ops)]

    def useful_placements(self) -> dict[str, tuple[Placement, ...]]:
        """Placements in which ops can read each tensor, and the one in which it leaves."""
        found: dict[str, dict[Placement, None]] = {}
        for name in self.program.outputs:
            found[name] = {self.situation.pins.get(name, REPLICATE): None}
        for op in self.program.ops:
            taken = self.situation.taken.get(op.name, ())
            options = self.table.options(op, self.num_ranks, taken).options
            closed = self.situation.closed.get(op.name, ())
            wanted = self.situation.wanted.get(op.name, ())
            for option in options:
                if option.axis in wanted or (not wanted and option.axis not in closed):
                    for access, need in zip(op.reads, option.reads, strict=True):
                        found.setdefault(access.tensor, {REPLICATE: None})[need] = None
        return {name: tuple(placements) for name, placements in found.items()}

    def step(self, position: int, op: Op) -> SearchStep:
        """The step of op number `position`: each operand by its slot among the live tensors, and
        the slots that stay live behind it.
        """
        slots, num_before = self.slots, len(self.live)
        taken = self.situation.taken.get(op.name, ())
        for access in accesses(op):
            if not self.is_constant(access.tensor) and access.tensor not in slots:
                slots[access.tensor] = len(slots)
                self.live.append(access.tensor)
        reads = tuple(self.operand(op, a, slots, taken, is_read=True) for a in op.reads)
        writes = tuple(self.operand(op, a, slots, taken, is_read=False) for a in op.writes)
        num_new, dropped = len(self.live) - num_before, self.drop(position, op)
        return SearchStep(
            op_class=self.table.class_of(op),
            taken=taken,
            closed=self.situation.closed.get(op.name, ()),
            wanted=self.situation.wanted.get(op.name, ()),
            reads=reads,
            writes=writes,
            num_new=num_new,
            dropped=dropped,
        )

    def drop(self, position: int, op: Op) -> tuple[int, ...]:
        """Takes out what no op behind this position uses; gives the slots it had."""
        names = {access.tensor for access in accesses(op)} & self.slots.keys()
        ended = [name for name in names if self.last_use[name] <= position]
        dropped = tuple(sorted(self.slots.pop(name) for name in ended))
        for slot in reversed(dropped):
            del self.live[slot]
        if dropped:
            self.slots.update(zip(self.live[dropped[0] :], count(dropped[0])))
        return dropped

    def is_constant(self, name: str) -> bool:
        """Whether a tensor from outside has one placement, so that no slot is kept for it."""
        return self.tensors[name].role != "temp" and name in self.situation.pins

    def operand(
        self,
        op: Op,
        access: Access,
        slots: Mapping[str, int],
        taken: tuple[tuple[str, int], ...],
        *,
        is_read: bool,
    ) -> StepOperand:
        """What the search is told of an operand. slots: of live tensors, by name; taken: axes that
        are divided already, by how much.
        """
        tensor = self.tensors[access.tensor]
        constant, temp = self.is_constant(tensor.name), tensor.role == "temp"
        volatile = tensor.name in self.volatile
        if is_read:
            is_bound = op.is_view and op.writes[0].tensor in self.bound
            shared = is_bound and (volatile or tensor.role == "state")
            exact = (not temp and not constant) or shared
        else:
            exact = not temp or volatile
        fixed = self.situation.pins.get(tensor.name)
        if fixed is None and volatile and tensor.name in self.program.outputs:
            fixed = REPLICATE
        return StepOperand(
            slot=CONSTANT if constant else slots[tensor.name],
            fixed=fixed,
            exact=exact,
            keeps=temp and not volatile,
            is_free=not temp and not constant,
            price_ns=self.situation.prices_ns.get(tensor.name, 0),
            is_state=tensor.role == "state",
            useful=() if is_read else self.useful.get(tensor.name, ()),
            shape=seen_shape(access, tensor, op, taken),
            item_bytes=item_bytes(tensor.dtype),
        )
