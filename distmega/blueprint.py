"""From a configuration to everything that is decided before weights are read, without torch.

Comes in: a ModelConfig, a mesh, a Machine, options. Goes out: plans, host programs and compiled
megakernels, the same on every rank. engine.py runs them, explain.py prints them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from distmega.errors import RequestError
from distmega.hostir.lower import lower_program
from distmega.hostir.nodes import HostProgram
from distmega.hostir.passes import run_passes
from distmega.kernels.arena import ArenaLayout, Space, layout_arena, tensor_space
from distmega.kernels.hopper.weight_order import order_weights
from distmega.kernels.lowering import is_encodable
from distmega.kernels.megakernel import Megakernel, compile_megakernel
from distmega.models.config import ModelConfig
from distmega.models.decoder import Logits, build_decoder
from distmega.models.sampling import GREEDY, Method
from distmega.requests import DEFAULT_CONTEXT, EngineOptions
from distmega.sharding.cost import Machine
from distmega.sharding.localize import LocalProgram, localize
from distmega.sharding.mesh import DeviceMesh
from distmega.sharding.placements import fits, layout_of_part, shard
from distmega.sharding.planner import Plan, plan_program


def context_limit(config: ModelConfig, options: EngineOptions) -> int:
    """Positions of the KV cache under these options; RequestError for more than the model's."""
    if options.max_context > config.max_positions:
        raise RequestError(
            f"--max-context {options.max_context}",
            expected=f"at most {config.max_positions}, what the model was trained for",
            remedy="lower it",
        )
    return options.max_context or min(config.max_positions, DEFAULT_CONTEXT)


SEQUENCE_DIM = 0
"""Dim of a cache of several sequences that tells them apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBlueprint:
    """One decode step: the plan, one rank's program, its host program, and arenas for what lives
    across calls. Prefill is planned on top of it, with the same weights and caches.
    """

    config: ModelConfig
    machine: Machine
    options: EngineOptions
    method: Method
    plan: Plan
    local: LocalProgram
    host: HostProgram
    weights: ArenaLayout
    states: ArenaLayout

    @property
    def max_context(self) -> int:
        return context_limit(self.config, self.options)


def plan_decode(
    config: ModelConfig,
    mesh: DeviceMesh,
    machine: Machine,
    options: EngineOptions,
    logits: Logits = "none",
    memory_limit_bytes: int | None = None,
    method: Method = GREEDY,
) -> Plan:
    """The plan of one decode step. Raises PlanError where `mesh` or the limit can't be used.

    Caches of several sequences are divided by heads, as those of one are, since a prefill writes
    all of a sequence's.
    """
    context, batch = context_limit(config, options), options.batch
    program = build_decoder(
        config,
        1,
        context,
        batch=batch,
        logits=logits,
        dtype=machine.dtype,
        method=method,
    )
    caches = program.with_role("state") if batch > 1 else ()
    by_heads = {
        cache.name: shard(SEQUENCE_DIM + 1, axis)
        for cache in caches
        for axis, size in mesh.axes
        if size > 1 and fits(config.num_kv_heads, size)
    }
    return plan_program(
        program, mesh, machine, annotations=by_heads, memory_limit_bytes=memory_limit_bytes
    )


def draw_decode(
    config: ModelConfig,
    plan: Plan,
    options: EngineOptions,
    *,
    peer_memory: bool,
    method: Method = GREEDY,
) -> DecodeBlueprint:
    """Lowers a decode plan made for `method`. With peer memory the layer stack is one megakernel
    launch, otherwise it is split where ranks communicate.
    """
    local = localize(plan)
    host = run_passes(
        lower_program(local, megakernel=True, peer_memory=peer_memory, is_encodable=is_encodable)
    )
    persistent = [*order_weights(local.program), *local.program.with_role("state")]
    arenas = {
        space: layout_arena(space, (t for t in persistent if tensor_space(t) is space))
        for space in (Space.WEIGHT, Space.STATE)
    }
    return DecodeBlueprint(
        config=config,
        machine=plan.machine,
        options=options,
        method=method,
        plan=plan,
        local=local,
        host=host,
        weights=arenas[Space.WEIGHT],
        states=arenas[Space.STATE],
    )


def compile_kernels(blueprint: DecodeBlueprint, num_sms: int) -> Mapping[str, Megakernel]:
    """Task graph, schedule, proof and device words of each segment of the host program."""
    return {
        segment.name: compile_megakernel(
            segment,
            blueprint.plan.mesh,
            num_sms=num_sms,
            weights=blueprint.weights,
            states=blueprint.states,
        )
        for segment in blueprint.host.segments
    }


def draw_library_decode(blueprint: DecodeBlueprint) -> HostProgram:
    """The same decode step with every op a library op."""
    return run_passes(lower_program(blueprint.local, megakernel=False, peer_memory=False))


def draw_prefill(blueprint: DecodeBlueprint, num_tokens: int, logits: Logits) -> HostProgram:
    """Host program of `num_tokens` tokens of one sequence at once by library ops, on the decode
    plan's layouts; its caches are those of one sequence, [h, t, d].
    """
    layouts = blueprint.plan.persistent_layouts()
    if blueprint.options.batch > 1:
        for cache in blueprint.local.program.with_role("state"):
            layouts[cache.name] = layout_of_part(layouts[cache.name], SEQUENCE_DIM)
    program = build_decoder(
        blueprint.config,
        num_tokens,
        blueprint.max_context,
        logits=logits,
        dtype=blueprint.machine.dtype,
        method=blueprint.method,
    )
    plan = plan_program(
        program,
        blueprint.plan.mesh,
        blueprint.machine,
        annotations=layouts,
    )
    return run_passes(lower_program(localize(plan), megakernel=False, peer_memory=False))
