"""Runs kernels in one process, and evaluates the same programs op by op with the library."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from distmega.hostir.ir.nodes import segment_args
from distmega.hostir.library.ops import run_op
from distmega.hostir.library.torch_types import torch_dtype
from distmega.kernels.cpu.interpreter import interpret_ranks
from distmega.kernels.cpu.peer import Peers, local_peers
from distmega.kernels.cpu.runner import CpuMegakernel, peer_sizes
from distmega.kernels.isa.encoder import encode
from distmega.kernels.megakernel import Megakernel
from distmega.kernels.runtime.arena import Space, layout_segment, tensor_space
from distmega.kernels.runtime.memory import allocate_arena, arena_views
from distmega.kernels.tasks.expand import team_size
from distmega.kernels.tasks.graph import build_task_graph
from distmega.kernels.tasks.schedule import schedule_graph
from distmega.kernels.tasks.types import Schedule, TaskGroup
from distmega.program.types import Op, Program
from distmega.sharding.layout.mesh import DeviceMesh

Tensors = dict[str, Tensor]


def kernel_of(schedule: Schedule, mesh: DeviceMesh) -> Megakernel:
    """A kernel from a schedule, hand-made or not, unchecked."""
    layout = layout_segment(schedule.graph.segment)
    return Megakernel(
        segment=schedule.graph.segment,
        mesh=mesh,
        schedule=schedule,
        layout=layout,
        encoded=encode(schedule, layout, mesh.axes),
        stages_us=(),
    )


def tiled_kernel(
    program: Program, groups: Sequence[TaskGroup], *, tp: int = 1, num_sms: int = 3
) -> Megakernel:
    """A kernel of an expanded program with the given tiling."""
    mesh = DeviceMesh(tp=tp)
    graph = build_task_graph(program, groups, team_size(program, mesh))
    return kernel_of(schedule_graph(graph, num_sms), mesh)


class Rank:
    """One rank of a kernel: its arenas, the tensors of its launches, and the bound kernel."""

    def __init__(
        self, kernel: Megakernel, rank: int, peers: Peers, seed: int | None = None
    ) -> None:
        weights, states = (
            allocate_arena(layout) for layout in (kernel.layout.weights, kernel.layout.states)
        )
        self.tensors: Tensors = {
            **arena_views(kernel.layout.weights, weights),
            **arena_views(kernel.layout.states, states),
        }
        for tensor in segment_args(kernel.segment):
            if tensor_space(tensor) is Space.ACT:
                self.tensors[tensor.name] = torch.zeros(
                    tensor.shape, dtype=torch_dtype(tensor.dtype)
                )
        self.runner = CpuMegakernel(
            kernel,
            rank=rank,
            weights_arena=weights,
            state_arena=states,
            peers=peers,
            seed=seed,
            timeout_s=5,
            poison=True,
        )

    def fill(self, values: Mapping[str, Tensor]) -> None:
        """Gives inputs, weights and states these values."""
        for name, value in values.items():
            self.tensors[name].copy_(value)


def make_ranks(kernel: Megakernel, seed: int | None = None) -> list[Rank]:
    """All ranks of a kernel's mesh, each with the peers of its team."""
    ranks, sizes = kernel.mesh.ranks, peer_sizes(kernel)
    peers = {team: local_peers(team, sizes) for team in {kernel.team(rank) for rank in ranks}}
    seeds = [None if seed is None else 1000 * seed + rank for rank in ranks]
    return [
        Rank(kernel, rank, peers[kernel.team(rank)], own)
        for rank, own in zip(ranks, seeds, strict=True)
    ]


def launch_all(ranks: Sequence[Rank], seed: int | None = None) -> None:
    """One launch on all ranks."""
    interpret_ranks(
        [rank.runner.interpreter for rank in ranks],
        seed=seed,
        before=lambda place, launch: ranks[place].runner.load(ranks[place].tensors),
        after=lambda place, launch: ranks[place].runner.store(ranks[place].tensors),
    )


def random_values(program: Program, seed: int, *, integers: bool = False) -> Tensors:
    """Inputs, weights and states; small whole numbers make sums exact. Index tensors are zero."""
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for tensor in program.tensors:
        if tensor.role != "temp" and tensor_space(tensor) is not Space.PEER:
            value = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            value = (value * 4).round() if integers else value
            value = value * 0 if tensor.dtype == "i64" else value
            values[tensor.name] = value.to(torch_dtype(tensor.dtype))
    return values


def evaluate(program: Program, values: Sequence[Mapping[str, Tensor]]) -> list[Tensors]:
    """All tensors of every rank after running the ops of an expanded program in order; `values` a
    rank are copied."""
    ranks: list[Tensors] = [{name: v.clone() for name, v in each.items()} for each in values]
    for op in program.ops:
        if op.kind == "push":
            slots = torch.stack([tensors[op.reads[0].tensor] for tensors in ranks])
            for tensors in ranks:
                tensors[op.writes[0].tensor] = slots
        else:
            for place, tensors in enumerate(ranks):
                _store(tensors, _results(op, tensors, place))
    return ranks


def _results(op: Op, tensors: Tensors, place: int) -> Tensors:
    if op.kind == "sum_ranks":
        slots = tensors[op.reads[0].tensor]
        combine = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[
            str(op.attr("combine"))
        ]
        total = slots[0]
        for slot in slots[1:]:
            total = combine(total, slot)
        return {op.writes[0].tensor: total.clone()}
    if op.kind == "argmax_ranks":
        value, slot = tensors[op.reads[0].tensor].max(0)
        index = tensors[op.reads[1].tensor].gather(0, slot.unsqueeze(0)).squeeze(0)
        return {op.writes[0].tensor: value, op.writes[1].tensor: index}
    return run_op(op, tensors, {"tp": place})


def _store(tensors: Tensors, results: Tensors) -> None:
    for name, result in results.items():
        if name in tensors:
            tensors[name].copy_(result)
        else:
            tensors[name] = result
