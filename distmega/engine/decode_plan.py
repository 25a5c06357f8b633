"""What a rank runs of a decode plan, and what its options allow.

Comes in: what decode_planner.py made, in this process or an earlier one. Goes out: one stage's host
program, the layouts of its arenas, and all else that a start asks of them, the same on every rank
of a stage; opening.py compiles the kernels. What it was planned from is read when a further program
is planned on top of it. Without torch. Used by engine.py; next on the walk: opening.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from distmega.arguments import require_whole
from distmega.engine.kept_plans import ReadLater
from distmega.engine.requests import DEFAULT_CONTEXT, EngineOptions
from distmega.errors import RequestError, argument, counted
from distmega.hostir.ir.nodes import HostProgram
from distmega.kernels.machines import CPU
from distmega.kernels.runtime.arena import ArenaLayout
from distmega.models.decoder import AnyDecoder
from distmega.models.sampling import Method
from distmega.sharding.layout.allocation import AllocationDomain
from distmega.sharding.layout.mesh import STAGE_AXIS, DeviceMesh
from distmega.sharding.search.cost import Machine
from distmega.superopt import late as superopt_late


def context_limit(config: AnyDecoder, options: EngineOptions) -> int:
    """Positions of the KV cache under these options; RequestError for more than the model's."""
    if options.max_context > config.max_positions:
        raise RequestError(
            f"{argument('max_context')} {options.max_context}",
            expected=f"at most {config.max_positions}, what the model was trained for",
            remedy="lower it",
        )
    return options.max_context or min(config.max_positions, DEFAULT_CONTEXT)


def require_positions(
    config: AnyDecoder,
    options: EngineOptions,
    num_new: int,
    num_tokens: int | None = None,
    which: str = "",
) -> None:
    """RequestError where a prompt and new tokens do not fit the KV cache. num_tokens: of the
    prompt; None where they are not counted yet: it has one at least. which: says in a message which
    prompt it is.
    """
    limit = context_limit(config, options)
    if (1 if num_tokens is None else num_tokens) + num_new <= limit:
        return
    prompt = "at least 1 token" if num_tokens is None else counted(num_tokens, "token") + which
    fewer, more = f"lower {argument('max_new_tokens')}", f"raise {argument('max_context')}"
    wider = f", {fewer} or {more} (the model allows {config.max_positions})"
    raise RequestError(
        f"a prompt of {prompt} and {num_new} new ones",
        expected=f"at most {counted(limit, 'position')} together",
        remedy="shorten the prompt"
        + (f" or {fewer}; the model allows no more" if limit == config.max_positions else wider),
    )


def untraced(device: str) -> RequestError:
    """The error for a trace where no decode kernel runs."""
    return RequestError(
        f"a trace on {device}",
        expected="a Hopper GPU and a model that the decode kernel runs",
        remedy="run on such a GPU with triton installed",
    )


def require_traced(limit: int, num_steps: int, position: int) -> None:
    """RequestError where a trace of steps from a position on, which run twice, does not fit a KV
    cache of `limit` positions.
    """
    require_whole("num_steps", num_steps, 1)
    require_whole("position", position, 0)
    if position + 2 * num_steps > limit:
        raise RequestError(
            f"two launches of {counted(num_steps, 'step')} after {counted(position, 'position')}",
            expected=f"at most {counted(limit, 'position')} together",
            remedy=f"lower {argument('num_steps')} or {argument('position')}, or raise"
            f" {argument('max_context')}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """One decode step: one rank's host program, and arenas for what lives across calls. Prefill is
    planned on top of it, with the same weights and caches.

    mesh: all ranks; ranks: those of this stage. stage, num_stages: which stage of the pipeline it
    is, of how many; cuts: where stages begin. kv_copies: of each kv head that the program has
    (models/weights/kv_copies.py). fingerprint: of all that ranks of a stage must agree on.
    allocations: of the tensors in `weights` and `states`. peer_memory: whether ranks reach each
    other's memory. planned: what it was lowered from, see decode_planner.py.
    """

    config: AnyDecoder
    machine: Machine
    options: EngineOptions
    method: Method
    mesh: DeviceMesh
    ranks: DeviceMesh
    stage: int
    num_stages: int
    cuts: tuple[str, ...]
    kv_copies: int
    fingerprint: str
    allocations: Mapping[str, AllocationDomain]
    host: HostProgram
    weights: ArenaLayout
    states: ArenaLayout
    peer_memory: bool
    planned: ReadLater[object]

    @property
    def rules(self) -> "tuple[superopt_late.RewriteRule, ...]":
        """By which ops are replaced."""
        return shipped_rules(self.machine)

    @property
    def max_context(self) -> int:
        return context_limit(self.config, self.options)

    @property
    def shares_memory(self) -> bool:
        """Whether programs of library ops communicate through peer memory: those of one stage."""
        return self.peer_memory and self.num_stages == 1


def shipped_rules(machine: Machine) -> "tuple[superopt_late.RewriteRule, ...]":
    """By which ops are replaced on a machine: the shipped ones on GPUs, none on CPUs."""
    return () if machine == CPU else superopt_late.shipped_rules()


def model_mesh(tp: int, pp: int) -> DeviceMesh:
    """Stages of `tp` ranks each, one stage's ranks after the other's."""
    return DeviceMesh(pp=pp, tp=tp) if pp > 1 else DeviceMesh(tp=tp)


def num_stages_of(mesh: DeviceMesh) -> int:
    """Stages of the pipeline that runs on a mesh."""
    return mesh.size(STAGE_AXIS) if STAGE_AXIS in mesh.names else 1


def stage_mesh(mesh: DeviceMesh, index: int) -> DeviceMesh:
    """The ranks of one stage of the pipeline that runs on a mesh."""
    return mesh.part(STAGE_AXIS, index) if STAGE_AXIS in mesh.names else mesh
