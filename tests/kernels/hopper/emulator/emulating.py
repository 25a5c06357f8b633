"""Programs of one row, their queues emulated on a CPU, and what torch gives for them in float32."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from distmega.kernels.hopper.emulator import Found, RankArenas, RowLaunch, emulate_rows
from distmega.kernels.hopper.plan.types import RowQueues
from distmega.kernels.hopper.plan.weight_order import order_weights
from distmega.kernels.hopper.row_plan.queues import build_queues
from distmega.kernels.machines import H200
from distmega.kernels.runtime.arena import ArenaLayout, Space, layout_arena
from distmega.kernels.runtime.memory import allocate_arena, arena_views
from distmega.kernels.whole import divided_tensors
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import Layout
from distmega.sharding.localize import LocalProgram, localize
from distmega.sharding.planner import plan_program
from tests.hostir.programs import run_program

Values = Mapping[str, Tensor]
NO_MARKS: Mapping[str, Layout] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Case:
    """A program on so many ranks: queues of each, and where weights and states lie."""

    program: Program
    local: LocalProgram
    queues: tuple[RowQueues, ...]
    weights: ArenaLayout
    states: ArenaLayout

    def part(self, name: str, whole: Tensor, rank: int) -> Tensor:
        """A rank's part of a tensor."""
        found = whole[self.local.allocations[name].local_slices({"tp": rank})]
        shape = self.local.program.tensor_map()[name].shape
        part = torch.zeros(shape, dtype=whole.dtype)
        part[tuple(slice(extent) for extent in found.shape)] = found
        return part

    def memory(self, rank: int, values: Values) -> RankArenas:
        """A rank's arenas with its parts of weights and states."""
        arenas = [allocate_arena(layout) for layout in (self.weights, self.states)]
        for layout, arena in zip((self.weights, self.states), arenas, strict=True):
            for name, view in arena_views(layout, arena).items():
                view.copy_(self.part(name, values[name], rank))
        return RankArenas(
            queues=self.queues[rank],
            weights=self.weights,
            weights_arena=arenas[0],
            state_arena=arenas[1],
        )

    def emulate(self, values: Values, inputs: Sequence[Values], seed: int) -> list[list[Found]]:
        """What launches with these inputs leave on each rank."""
        ranks = range(len(self.queues))
        launches = [
            [
                RowLaunch(inputs={n: self.part(n, x, rank) for n, x in each.items()})
                for rank in ranks
            ]
            for each in inputs
        ]
        memories = [self.memory(rank, values) for rank in ranks]
        return emulate_rows(memories, launches, seed)


def case_of(
    program: Program, tp: int = 1, num_sms: int = 8, marks: Mapping[str, Layout] = NO_MARKS
) -> Case:
    """Queues as build_queues makes and proves them. marks: how ranks divide weights."""
    local = localize(plan_program(program, DeviceMesh(tp=tp), H200, marks if tp > 1 else {}))
    weights = layout_arena(Space.WEIGHT, order_weights(local.program))
    states = layout_arena(Space.STATE, local.program.with_role("state"))
    queues = tuple(
        build_queues(local.program, weights, states, num_sms, rank, divided=divided_tensors(local))
        for rank in range(tp)
    )
    return Case(program, local, queues, weights, states)


def with_queues(case: Case, queues: Sequence[RowQueues]) -> Case:
    """The case with other queues, which nothing has proven."""
    return replace(case, queues=tuple(queues))


def expected(program: Program, values: Values, inputs: Sequence[Values]) -> list[Values]:
    """All tensors after each of several calls, in float32, states going on."""

    def wide(x: Tensor) -> Tensor:
        return x.float() if x.is_floating_point() else x.clone()

    held = {name: wide(x) for name, x in values.items()}
    found = []
    for each in inputs:
        env = run_program(program, held | {name: wide(x) for name, x in each.items()})
        found.append({name: x.clone() for name, x in env.items()})
    return found


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.flatten() - exact.flatten()).norm() / exact.norm().clamp(min=1e-30))
