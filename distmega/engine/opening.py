"""Opening an engine: a rank's memory, and its host programs made ready to run in it.

In: a decode plan (decode_plan.py) and the communicator of this rank. Out: Arenas, the decode steps
of this rank, and evaluators of programs of prompts. All ranks of the mesh open together. Next on
the walk: hostir/run/evaluator.py.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from distmega.engine import late
from distmega.engine.decode_plan import DecodePlan
from distmega.engine.kept_plans import KeptPlans
from distmega.engine.ranks.agreement import on_all_ranks
from distmega.errors import LaunchError, UnsupportedError
from distmega.hostir import late as host_late
from distmega.hostir.comm.communicator import Communicator
from distmega.hostir.comm.nccl import NcclCommunicator
from distmega.hostir.ir.nodes import HostProgram
from distmega.hostir.ir.text import parse_host, print_host
from distmega.hostir.lower.joined_weights import first_covered
from distmega.hostir.run.deadline import graph_limit_s
from distmega.hostir.run.evaluator import Evaluator, KernelRunner
from distmega.kernels import late as kernels_late
from distmega.kernels.hopper.queues import Queues, why_not_one_kernel
from distmega.kernels.library.device_ops import KernelOps
from distmega.kernels.runners import (
    fold,
    open_hopper,
    plan_hopper,
    unfold,
)
from distmega.kernels.runtime.memory import allocate_arena, arena_views, spanning_view
from distmega.kernels.runtime.stepping import SteppingRunner
from distmega.kernels.runtime.symmetric import Team
from distmega.program.types import KNOWN

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Arenas:
    """A rank's weights and states. weights, states: the memory itself, flat u8; weight_views,
    state_views: tensors in it, by name, as the plan has them.
    """

    plan: DecodePlan
    weights: Tensor
    states: Tensor
    weight_views: dict[str, Tensor]
    state_views: dict[str, Tensor]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors that live across calls, by name."""
        return {**self.weight_views, **self.state_views}

    def slots(self) -> list[dict[str, Tensor]]:
        """The caches of each sequence where there are several; one has the states as they are."""
        batch = self.plan.options.batch
        caches = self.state_views if batch > 1 else {}
        return [{name: cache[slot] for name, cache in caches.items()} for slot in range(batch)]

    def joined_weights(self, host: HostProgram) -> dict[str, Tensor]:
        """Weights of a program that cover several of the arena's (join_products.py)."""
        layout = self.plan.weights
        joined = [
            buffer
            for buffer in host.buffers
            if buffer.role == "weight"
            and buffer.name not in layout.tensors
            and not buffer.name.startswith(KNOWN)
        ]
        firsts = [first_covered(buffer.name, layout.tensors) for buffer in joined]
        return {
            buffer.name: spanning_view(layout, self.weights, buffer, first)
            for buffer, first in zip(joined, firsts, strict=True)
        }


def allocate_arenas(plan: DecodePlan, device: str) -> Arenas:
    """Zeroed memory for a rank's weights and states. RequestError where there isn't so much."""
    weights = allocate_arena(plan.weights, device=device)
    states = allocate_arena(plan.states, device=device)
    weight_views = arena_views(plan.weights, weights)
    return Arenas(plan, weights, states, weight_views, arena_views(plan.states, states))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSteps:
    """What runs the decode steps of a rank.

    runner: one step a call. stepping: steps of a GPU that choose the tokens of the next, None where
    the host does. cpu_kernels: by segment. joined: weights that only this program knows, by name.
    """

    runner: "Evaluator | late.LibrarySteps"
    stepping: SteppingRunner | None = None
    cpu_kernels: Mapping[str, "late.CpuMegakernel"] = field(default_factory=dict)
    joined: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Opener:
    """Makes host programs of a rank ready to run in its arenas. plan: proven where there is one
    stage. kept: queues on disk.
    """

    plan: DecodePlan
    arenas: Arenas
    comm: Communicator
    device: torch.device
    kept: KeptPlans

    @property
    def _is_alone(self) -> bool:
        """Whether there is one stage, whose programs are proven as they are planned."""
        return self.plan.num_stages == 1

    def open_decode(self, sample_inputs: Mapping[str, Tensor]) -> DecodeSteps:
        """The decode steps. sample_inputs: how tokens are chosen, by name, a row a sequence."""
        return self._open_gpu(sample_inputs) if self.device.type == "cuda" else self._open_cpu()

    def open_prompts(self, host: HostProgram, proven: bool) -> tuple[Evaluator, dict[str, Tensor]]:
        """A program of prompts, and the joined weights that it multiplies by. proven: it is one
        that was proven, with other extents, which change no order.
        """
        evaluator = self._evaluator(host, {}, proven=proven)
        return evaluator, self.arenas.joined_weights(host)

    def _open_cpu(self) -> DecodeSteps:
        kernels = late.open_kernels(self.plan, self.comm, self.arenas.weights, self.arenas.states)
        return DecodeSteps(
            runner=self._evaluator(self.plan.host, kernels, proven=self._is_alone),
            cpu_kernels=kernels,
        )

    def _open_gpu(self, sample_inputs: Mapping[str, Tensor]) -> DecodeSteps:
        """The decode kernel, or library ops for a model or GPUs that it can't do."""
        host = self.plan.host
        try:
            kernel = self.open_kernel()
        except (UnsupportedError, LaunchError) as error:
            if self.plan.options.collectives == "kernel":
                raise
            logger.warning("decoding by library ops: %s", error)
            kernel = None
        if kernel is None:
            return self._open_library_steps(sample_inputs)
        kernels = {host.segments[0].name: kernel}
        evaluator = self._evaluator(host, kernels, proven=self._is_alone)
        return DecodeSteps(runner=evaluator, stepping=kernel if self._is_alone else None)

    def _open_library_steps(self, sample_inputs: Mapping[str, Tensor]) -> DecodeSteps:
        """Decode steps by library ops: where one stage is all a graph, which feeds itself unless
        no step may run ahead.
        """
        host = late.lower_library_decode(self.plan)
        joined = self.arenas.joined_weights(host)
        evaluator = self._evaluator(host, {}, masked=True)
        if self.plan.num_stages > 1:
            return DecodeSteps(runner=evaluator, joined=joined)
        given, options = {**self.arenas.tensors, **joined, **sample_inputs}, self.plan.options
        recurrent = bool(self.plan.config.recurrent_states)
        steps = late.LibrarySteps(
            evaluator, given, options.batch, graph_limit_s(options.timeout_s), copy_states=recurrent
        )
        return DecodeSteps(runner=steps, stepping=None if recurrent else steps, joined=joined)

    def _evaluator(
        self,
        host: HostProgram,
        kernels: Mapping[str, KernelRunner],
        *,
        proven: bool = False,
        masked: bool = False,
    ) -> Evaluator:
        """masked: see KernelOps."""
        if not proven:
            self._prove(host)
        ops = None
        if self.device.type == "cuda":
            ops = KernelOps(
                masked=masked,
                rules=lambda: self.plan.rules,
                groups=self.plan.options.expert_tiles,
                device=self.device,
            )
        matmuls = None
        if isinstance(self.comm, NcclCommunicator):
            matmuls = kernels_late.PeerMatmuls(self.comm)
        return Evaluator(host, self.comm, kernels, str(self.device), ops=ops, matmuls=matmuls)

    def _prove(self, host: HostProgram) -> None:
        """CheckError for a program that may race or wait for ever; stages have one each, which are
        proven together, so all ranks of the mesh ask together.
        """
        if self.plan.num_stages == 1:
            host_late.prove_once(host)
            return
        texts = self.comm.all_gather_object(print_host(host))
        host_late.prove_once(tuple(map(parse_host, texts)))

    def open_kernel(self) -> SteppingRunner | None:
        """The decode kernel; None where a stage can have none, whatever its ops are.

        Stages differ in what a kernel can do, and open their memory together: so all of them open
        a kernel, or all have this answer or error.
        """
        segments, options, team = self.plan.host.segments, self.plan.options, self._team()
        recurrent = bool(self.plan.config.recurrent_states)
        make: Callable[[], Queues] | None = None
        if not why_not_one_kernel(segments, recurrent=recurrent):
            plan = partial(
                plan_hopper,
                segments[0],
                weights=self.plan.weights,
                states=self.plan.states,
                device=self.arenas.weights.device,
                team=team,
                mode=options.events,
                most_rows=options.kernel_rows,
            )
            make = partial(self._kept_queues, plan, team)
        queues = on_all_ranks(self.comm, make)
        if queues is None:
            return None
        return open_hopper(
            segments[0],
            queues,
            weights=self.plan.weights,
            weights_arena=self.arenas.weights,
            state_arena=self.arenas.states,
            team=team,
            timeout_s=options.timeout_s,
        )

    def _team(self) -> Team | None:
        """The ranks of this stage; None for a rank alone."""
        mesh = self.plan.ranks
        axes = [axis for axis in mesh.names if mesh.size(axis) > 1]
        if not axes:
            return None
        assert isinstance(self.comm, NcclCommunicator), "GPUs communicate over NCCL"
        return Team(comm=self.comm, axis=axes[0])

    def _kept_queues(self, plan: Callable[[], Queues], team: Team | None) -> Queues:
        """What `plan` gives, or gave an earlier process."""
        position = (team.team_rank, team.size) if team else (0, 1)
        key = (self.plan.peer_memory, position)
        return self.kept.get_folded("queues", key, plan, fold, unfold)
