"""From a configuration to everything that is decided before weights are read, without torch.

Comes in: a configuration, a mesh, a Machine, options. Goes out: plans, host programs and layouts of
arenas, the same on every rank of a stage, as a DecodePlan (decode_plan.py). On a mesh with an axis
`pp` the layers are cut into stages (sharding/stages.py), each planned on its own ranks; on any
other there is one stage. engine.py asks for it where no earlier process did, cli/explain/ prints
what it finds; programs of prompts are planned in prefill_planner.py.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import dropwhile

from distmega.collecting import gc_paused
from distmega.engine.decode_plan import (
    DecodePlan,
    context_limit,
    num_stages_of,
    shipped_rules,
    stage_mesh,
)
from distmega.engine.kept_plans import ReadLater
from distmega.engine.requests import EngineOptions, Experts
from distmega.errors import PlanError, RequestError, argument, counted
from distmega.hostir import late as host_late
from distmega.hostir.ir.nodes import HostProgram
from distmega.hostir.lower.join_products import join_products
from distmega.hostir.lower.pipeline import StagePart, link_stage
from distmega.hostir.passes.split_sums import SumParts
from distmega.kernels import late as kernels_late
from distmega.kernels.hopper.plan.experts import is_of_experts
from distmega.kernels.hopper.plan.weight_order import order_weights
from distmega.kernels.library.sum_parts import choose_sum_parts
from distmega.kernels.machines import CPU
from distmega.kernels.runtime.arena import Space, layout_arena, tensor_space
from distmega.kernels.tasks.cost import segment_us
from distmega.models.decoder import PEAKS, AnyDecoder, Logits, build_decoder, layer_starts
from distmega.models.sampling import GREEDY, Method
from distmega.models.weights.kv_copies import copy_kv_heads, most_copies
from distmega.program.kinds import kind_of
from distmega.program.types import KNOWN, Op, Program, Tensor
from distmega.sharding.layout.mesh import STAGE_AXIS, DeviceMesh
from distmega.sharding.layout.placements import (
    Layout,
    fits,
    replicate,
    shard,
)
from distmega.sharding.localize import LocalProgram, localize, pair_for_library
from distmega.sharding.planner import Plan, plan_program
from distmega.sharding.search.cost import H200_DEVICE, Machine
from distmega.sharding.search.predict import predict_us
from distmega.sharding.stages import Stage, cut_positions, split_stages
from distmega.superopt import late as superopt_late

FEW_ROWS = 16
"""Rows up to which rewrite rules do a decode step's products side by side, not joined ones."""

SEQUENCE_DIM = 0
"""Dim of a cache of several sequences that tells them apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """The plan of one stage on its own ranks. mesh: of all ranks; cuts: where stages begin;
    kv_copies: of each kv head that the program has (models/weights/kv_copies.py).
    """

    plan: Plan
    mesh: DeviceMesh
    stage: Stage
    cuts: tuple[str, ...]
    kv_copies: int = 1

    def fingerprint(self) -> str:
        """A stable hash of everything the ranks of this stage must agree on."""
        return f"{self.plan.fingerprint()} {self.mesh} {self.stage.transfers}"

    @property
    def rules(self) -> "tuple[superopt_late.RewriteRule, ...]":
        """By which ops are replaced."""
        return shipped_rules(self.plan.machine)

    def lower(
        self,
        local: LocalProgram,
        *,
        megakernel: bool,
        peer_memory: bool,
        apart: Container[str] = (),
        kept: Container[str] = (),
        sum_parts: SumParts | None = None,
    ) -> HostProgram:
        """One rank's host program, its peers named on the mesh of all ranks. apart: ops that no
        megakernel shall do; kept: those that no rule replaces; sum_parts: as lower_program.
        """
        on_cpu = self.plan.machine == CPU
        return host_late.lower_program(
            replace(local, mesh=self.mesh),
            megakernel=megakernel,
            peer_memory=peer_memory,
            is_encodable=kernels_late.is_encodable if on_cpu else _is_for_gpu,
            apart=apart,
            fuse=not on_cpu,
            rules=self.rules,
            kept=kept,
            cost=lambda program: segment_us(program, H200_DEVICE),
            is_usable=kernels_late.pays,
            sum_parts=sum_parts,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What a decode step was lowered from: the plan of its stage, the program of one rank."""

    staged: StagePlan
    local: LocalProgram


def planned_of(decode_plan: DecodePlan) -> Planned:
    """What a decode plan was lowered from."""
    found = decode_plan.planned.get()
    assert isinstance(found, Planned), "lower_decode makes no other"
    return found


def _is_for_gpu(
    op: Op, tensors: Mapping[str, Tensor], strides: Mapping[str, tuple[int, ...]]
) -> bool:
    """Whether a megakernel on a GPU may do an op; which programs it does its queues tell."""
    return is_of_experts(op) or kernels_late.is_encodable(op, tensors, strides)


def samples_apart(method: Method, staged: StagePlan) -> bool:
    """Whether library ops look for limits and sample: on the CPU, among all tokens, where ranks
    share the vocabulary.
    """
    on_cpu = staged.plan.machine == CPU
    return on_cpu and method.sorts_all and staged.plan.mesh.num_ranks > 1


def choosing_ops(program: Program) -> frozenset[str]:
    """Ops from the first one on that turns logits into tokens: none of them leads back to what a
    megakernel does, so all before them can be one.
    """
    return frozenset(
        op.name for op in dropwhile(lambda op: not kind_of(op).chooses_token, program.ops)
    )


def expert_layouts(program: Program, ranks: DeviceMesh, way: Experts) -> dict[str, Layout]:
    """Annotations of what belongs to experts. Every rank has the routers, since each needs all
    scores; experts are divided by `way`. RequestError where so many ranks can't share them.
    """
    found: dict[str, Layout] = {}
    for tensor in program.with_role("weight"):
        kind = tensor.name.rpartition(".")[2]
        if kind in ("router", "shared_router"):
            found[tensor.name] = replicate()
        divided = {"tensor": 2 if kind == "expert_down" else 1, "expert": 0, "auto": -1}[way]
        if not kind.startswith("expert_") or divided < 0:
            continue
        for axis, size in ranks.axes:
            if not fits(tensor.shape[divided], size):
                what = "experts" if way == "expert" else "rows of each expert"
                asked = f"{way} with {tensor.shape[divided]} {what} on {counted(size, 'rank')}"
                raise RequestError(
                    f"{argument('experts')} {asked}",
                    expected="ranks of which less than half hold nothing",
                    remedy=f"use fewer ranks, or another {argument('experts')}",
                )
            if size > 1:
                found[tensor.name] = shard(divided, axis)
    return found


def known_layouts(program: Program) -> dict[str, Layout]:
    """Every rank has whole what is known when a program is built, which programs share by name."""
    return {
        tensor.name: replicate()
        for tensor in program.with_role("weight")
        if tensor.name.startswith(KNOWN)
    }


def _cache_layouts(
    program: Program, config: AnyDecoder, mesh: DeviceMesh, batch: int
) -> dict[str, Layout]:
    """Caches of several sequences are divided by heads, as those of one are, since a prefill writes
    all of a sequence's; where ranks can't divide heads, each has all of them.
    """
    caches = program.with_role("state") if batch > 1 else ()
    sizes = [(axis, size) for axis, size in mesh.axes if size > 1]
    return {
        cache.name: shard(SEQUENCE_DIM + 1, axis)
        if fits(config.num_kv_heads, size)
        else replicate()
        for cache in caches
        for axis, size in sizes
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _DecodeRequest:
    """What plan_decode is asked for, of any stage."""

    config: AnyDecoder
    mesh: DeviceMesh
    machine: Machine
    options: EngineOptions
    logits: Logits
    memory_limit_bytes: int | None
    method: Method

    def plan(self, copies: int, index: int) -> StagePlan:
        """The plan of a stage, with so many copies of each kv head."""
        config = copy_kv_heads(self.config, copies)
        if config.recurrent_states and num_stages_of(self.mesh) > 1:
            raise PlanError(
                f"{counted(num_stages_of(self.mesh), 'pipeline stage')} of a model whose layers"
                " keep recurrent states",
                expected="one stage",
                remedy=f"leave {argument('pp')} out, and divide layers by {argument('tp')}",
            )
        program = self._program(config)
        cuts = cut_positions(program, num_stages_of(self.mesh), starts=layer_starts(config))
        stage = split_stages(program, cuts)[index]
        ranks = stage_mesh(self.mesh, index)
        plan = plan_program(
            stage.program,
            ranks,
            self.machine,
            annotations=_cache_layouts(stage.program, config, ranks, self.options.batch)
            | expert_layouts(stage.program, ranks, self.options.experts)
            | known_layouts(stage.program),
            memory_limit_bytes=self.memory_limit_bytes,
        )
        return StagePlan(plan=plan, mesh=self.mesh, stage=stage, cuts=cuts, kv_copies=copies)

    def _program(self, config: AnyDecoder) -> Program:
        """A decode step of all stages."""
        return build_decoder(
            config,
            1,
            context_limit(config, self.options),
            batch=self.options.batch,
            logits=self.logits,
            dtype=self.machine.dtype,
            method=self.method,
            peaks=self.machine == CPU,  # a GPU's kernel leaves logits where the engine sees them
        )


@gc_paused
def plan_decode(
    config: AnyDecoder,
    mesh: DeviceMesh,
    machine: Machine,
    options: EngineOptions,
    logits: Logits = "none",
    memory_limit_bytes: int | None = None,
    method: Method = GREEDY,
    index: int = 0,
) -> StagePlan:
    """The plan of one decode step, of stage `index`. Raises PlanError where `mesh` or the limit
    can't be used.

    Where ranks can't divide the kv heads, each of these may be copied to several ranks, which share
    its query heads: where that costs less, as often as costs least, the same on all stages.
    """
    if (num_stages := num_stages_of(mesh)) > config.num_layers:
        raise PlanError(
            f"{counted(num_stages, 'stage')} of a model of {counted(config.num_layers, 'layer')}",
            expected="a layer a stage at least",
            remedy=f"use a smaller {argument('pp')}",
        )
    request = _DecodeRequest(
        config=config,
        mesh=mesh,
        machine=machine,
        options=options,
        logits=logits,
        memory_limit_bytes=memory_limit_bytes,
        method=method,
    )
    found: dict[int, StagePlan] = {}
    problem: PlanError | None = None
    for copies in kv_copies_to_try(config, mesh):
        try:
            found[copies] = request.plan(copies, 0)
        except PlanError as error:
            problem = problem or error
    if not found:
        assert problem is not None
        raise _undivided(config, mesh) or problem
    times = {
        copies: predict_us(localize(staged.plan).program, staged.plan.mesh, machine)
        for copies, staged in found.items()
        if len(found) > 1
    }
    best = min(times, key=lambda copies: times[copies]) if times else min(found)
    return request.plan(best, index) if index else found[best]


def kv_copies_to_try(config: AnyDecoder, mesh: DeviceMesh) -> tuple[int, ...]:
    """How often each kv head may be copied: not at all and, where ranks can't divide them, the
    least that lets them, and the least that gives all as many.
    """
    sizes = [size for axis, size in mesh.axes if axis != STAGE_AXIS and size > 1]
    heads, possible = config.num_kv_heads, range(1, most_copies(config) + 1)
    if all(fits(heads, size) for size in sizes):
        return (1,)
    fitting = [n for n in possible if all(fits(heads * n, size) for size in sizes)]
    even = [n for n in fitting if all(heads * n % size == 0 for size in sizes)]
    return tuple(sorted({1, *fitting[:1], *even[:1]}))


def _undivided(config: AnyDecoder, mesh: DeviceMesh) -> PlanError | None:
    """The error where no number of copies lets ranks divide attention."""
    for axis, size in mesh.axes:
        if axis == STAGE_AXIS or size == 1 or _divides(config, axis, size):
            continue
        largest = max(n for n in range(1, size) if _divides(config, axis, n))
        heads = counted(config.num_kv_heads, "kv head")
        each = counted(config.group, "query head")
        kept = config.group > 1 and most_copies(config) == 1
        more = "" if config.recurrent_states else f", and {argument('pp')} for more ranks"
        return PlanError(
            f"{axis}={size} can't divide attention of {heads}, {each} per kv head"
            + (", which this model's decoder can't copy to several ranks" if kept else ""),
            expected=f"at most {axis}={largest}, where less than half of the heads is padding",
            remedy=f"use {axis}={largest} or less{more}",
        )
    return None


def _divides(config: AnyDecoder, axis: str, size: int) -> bool:
    """Whether so many ranks can divide kv heads, query heads of each, or copies of kv heads."""
    alone = any(fits(extent, size) for extent in (config.num_kv_heads, config.group))
    return alone or len(kv_copies_to_try(config, DeviceMesh(**{axis: size}))) > 1


@gc_paused
def lower_decode(
    config: AnyDecoder,
    staged: StagePlan,
    options: EngineOptions,
    *,
    peer_memory: bool,
    method: Method = GREEDY,
) -> DecodePlan:
    """Lowers a decode plan made for `method`. With peer memory the stage's layers are one
    megakernel launch, otherwise it is split where ranks communicate. Where library ops sample
    (samples_apart), they and what follows from them come after it. CheckError for a program that
    may race or wait for ever; stages are proven together, as they are opened.
    """
    local = localize(staged.plan)
    apart = choosing_ops(local.program) if samples_apart(method, staged) else ()
    lowered = staged.lower(local, megakernel=True, peer_memory=peer_memory, apart=apart)
    host = host_late.run_passes(link_stage([StagePart(stage=staged.stage, host=lowered)]))
    if staged.stage.num_stages == 1:
        host_late.prove_once(host)
    persistent = [*order_weights(local.program), *local.program.with_role("state")]
    arenas = {
        space: layout_arena(space, (t for t in persistent if tensor_space(t) is space))
        for space in (Space.WEIGHT, Space.STATE)
    }
    return DecodePlan(
        config=copy_kv_heads(config, staged.kv_copies),
        machine=staged.plan.machine,
        options=options,
        method=method,
        mesh=staged.mesh,
        ranks=staged.plan.mesh,
        stage=staged.stage.index,
        num_stages=staged.stage.num_stages,
        cuts=staged.cuts,
        kv_copies=staged.kv_copies,
        fingerprint=staged.fingerprint(),
        allocations={tensor.name: local.allocations[tensor.name] for tensor in persistent},
        host=host,
        weights=arenas[Space.WEIGHT],
        states=arenas[Space.STATE],
        peer_memory=peer_memory,
        planned=ReadLater(Planned(staged=staged, local=local)),
    )


def lower_library_decode(decode_plan: DecodePlan) -> HostProgram:
    """The same decode step with every op a library op. On a GPU products of many rows whose weights
    lie side by side are one, as in a prompt, and PEAKS are an output, too. Ranks of one stage that
    reach each other's memory sum through it.
    """
    planned = planned_of(decode_plan)
    staged, local = planned.staged, planned.local
    on_gpu, program = decode_plan.machine != CPU, planned.local.program
    shares = on_gpu and decode_plan.shares_memory
    if shares:
        local = pair_for_library(local, staged.plan)
    if on_gpu and decode_plan.options.batch > FEW_ROWS:
        local = join_products(local, decode_plan.weights.neighbours(), decode_plan.machine)
    if on_gpu and staged.stage.num_stages == 1 and PEAKS in program.tensor_map():
        outputs = tuple(dict.fromkeys((*program.outputs, PEAKS)))
        local = replace(local, program=replace(local.program, outputs=outputs))
    num_sms = decode_plan.machine.num_sms
    sum_parts = partial(choose_sum_parts, num_sms=num_sms) if on_gpu else None
    host = staged.lower(local, megakernel=False, peer_memory=shares, sum_parts=sum_parts)
    return host_late.run_passes(link_stage([StagePart(stage=staged.stage, host=host)]))
