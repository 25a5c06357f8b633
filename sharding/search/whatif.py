"""What an op would cost divided otherwise, with everything around it as planned.

Comes in: a plan. Goes out: for an op and a mesh axis, the Alternatives that were open and what each
would change, for explain.py. Nothing here takes part in planning.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from distmega.errors import PlanError
from distmega.program.dtypes import item_bytes
from distmega.program.types import Op, accesses
from distmega.sharding.layout.placements import PAIR, Layout, Placement, local_shape
from distmega.sharding.plan import PlanFacts
from distmega.sharding.resolve.reshard import find_movements
from distmega.sharding.resolve.resolve import PlacedOp, Splits, operand_layouts
from distmega.sharding.search.cost import op_time_us
from distmega.sharding.search.options import SplitOption
from distmega.sharding.search.signatures import OptionTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """Costs of one op in us: itself, collectives on its operands, residency of what it keeps.

    movements: the collectives, by tensor.
    """

    op_us: float
    movements_us: float
    residency_us: float
    movements: tuple[str, ...] = ()

    @property
    def total_us(self) -> float:
        return self.op_us + self.movements_us + self.residency_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """One option of an op along a mesh axis; `bill` is None where `reason` rules it out."""

    axis: str
    option: SplitOption | None
    bill: Bill | None
    reason: str = ""


class WhatIf:
    """Prices of options in one plan, memoised by op class."""

    def __init__(self, plan: PlanFacts) -> None:
        self.plan = plan
        self.tensors = plan.program.tensor_map()
        self.table = OptionTable.of(plan.program)
        self.parts = {form for form in plan.locals.values() if form[1].partial_axes}
        """Tensors that are there in parts, and how."""

    def bill(self, step: PlacedOp, splits: Splits) -> Bill | str:
        """Costs of an op under other divisions, or why its operands can't be brought there."""
        extents = {option.axis: option.chunk for _, option in splits}
        movements_us = residency_us = 0.0
        movements: list[str] = []
        for name, source, target in self._relaid(step.op, splits):
            tensor = self.tensors[name]
            if tensor.role in ("weight", "state"):
                kept = target if name in {a.tensor for a in step.op.reads} else source
                share = math.prod(local_shape(tensor.shape, kept)) / tensor.num_elements
                residency_us += share * self.plan.prices_us.get(name, 0.0)
                continue
            if (name, target) in self.parts:
                continue
            try:
                path = find_movements(
                    tensor.shape,
                    item_bytes(tensor.dtype),
                    source,
                    target,
                    self.plan.mesh,
                    self.plan.machine,
                )
            except PlanError:
                return f"{name} can't become [{target}]"
            movements_us += sum(move.time_us for move in path)
            movements += [f"{move.kind} {name}" for move in path]
        op_us = op_time_us(step.op, self.tensors, self.plan.machine, extents)
        return Bill(
            op_us=op_us,
            movements_us=movements_us,
            residency_us=residency_us,
            movements=tuple(movements),
        )

    def _relaid(self, op: Op, splits: Splits) -> list[tuple[str, Layout, Layout]]:
        """Tensors of an op, each with the layout that it comes from and the one it goes to: from
        the plan's to what these divisions read, and from what they write to the plan's.
        """
        reads, writes = operand_layouts(op, splits)
        found: dict[str, tuple[str, Layout, Layout]] = {}
        for access, layout in zip(op.reads, reads, strict=True):
            way = access.tensor, self.plan.layouts[access.tensor], layout
            found.setdefault(access.tensor, way)
        pair = any(placement == PAIR for _, placement in writes[0].placements)
        results = zip(op.writes[: 1 if pair else None], writes, strict=False)
        made = ((a.tensor, layout, self.plan.layouts[a.tensor]) for a, layout in results)
        return [*found.values(), *made]

    def chosen(self, step: PlacedOp) -> Bill:
        """Costs of an op as it is planned."""
        bill = self.bill(step, step.splits)
        assert isinstance(bill, Bill), (step.op.name, bill)
        return bill

    def alternatives(self, step: PlacedOp, axis: str) -> list[Alternative]:
        """What else could have been done with an op along a mesh axis."""
        options = self.table.options(step.op, self.plan.mesh.size(axis))
        others = {a: option for a, option in step.splits if a != axis}
        now = dict(step.splits).get(axis)
        found: list[Alternative] = []
        if now is not None:
            for a, other in others.items():
                if other.axis == now.axis:
                    reason = f"{a} divides {now.axis} too"
                    return [Alternative(axis=now.axis, option=None, bill=None, reason=reason)]
        for option in options.options:
            if option == now or (now is None and not option.axis):
                continue
            taken = [a for a, other in others.items() if option.axis and other.axis == option.axis]
            if taken:
                reason = f"{taken[0]} divides it"
                found.append(Alternative(axis=option.axis, option=None, bill=None, reason=reason))
                continue
            splits = {**others, axis: option} if option.axis else others
            order = [name for name in self.plan.mesh.names if name in splits]
            bill = self.bill(step, tuple((name, splits[name]) for name in order))
            entry = Alternative(axis=option.axis, option=option, bill=None)
            if isinstance(bill, Bill):
                found.append(replace(entry, bill=bill))
            else:
                found.append(replace(entry, reason=bill))
        for name, why in options.rejected:
            found.append(Alternative(axis=name, option=None, bill=None, reason=why))
        return found

    def why_lost(self, step: PlacedOp, axis: str, other: Alternative) -> str:
        """Why an alternative along a mesh axis, cheaper by itself, was not taken: a tensor that is
        fixed, or one that lives across runs and that other ops want as it is.
        """
        assert other.option is not None
        for name, placement in self._operands(step, other.option):
            tensor = self.tensors[name]
            if placement == self.plan.layouts[name].at(axis):
                continue
            if name in self.plan.annotations:
                return f"{name} is fixed, as annotated"
            if tensor.role not in ("weight", "state"):
                continue
            for user in self.plan.decisions:
                if user is step or name not in {a.tensor for a in accesses(user.op)}:
                    continue
                change = self._change(user, axis, name, placement)
                if change is None:
                    return f"{user.op.name} can't use {name} so"
                if change > 0:
                    return f"{user.op.name} uses {name} too, which would add {change:.3g} us there"
        return "the search prices whole plans, in which what stands around it changes too"

    def _operands(self, step: PlacedOp, option: SplitOption) -> Iterator[tuple[str, Placement]]:
        """Operands and results of an op with the placements of an option."""
        placements = (*option.reads, *option.writes)
        for access, placement in zip(accesses(step.op), placements, strict=False):
            yield access.tensor, placement

    def _change(self, step: PlacedOp, axis: str, name: str, placement: Placement) -> float | None:
        """What an op that takes a tensor so would cost more, at least; None where it can't."""
        bills = [
            one.bill.total_us
            for one in self.alternatives(step, axis)
            if one.bill and one.option and (name, placement) in self._operands(step, one.option)
        ]
        return min(bills) - self.chosen(step).total_us if bills else None
