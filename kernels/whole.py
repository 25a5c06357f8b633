"""A whole program as one persistent kernel: what it is asked to do, and its memory.

In: one rank's local program. Out: a host program of one launch, and the runner of that launch with
the arenas that hold the program's weights and states. On Hopper GPUs it is the kernel of one row
(hopper/row_plan/queues.py) or that of several (hopper/batch_plan/queues.py), on CPUs the
interpreter (cpu/runner.py), whose records a GPU runs where its kernels refuse a program and one
launch is asked for (records/runner.py). Used by distmega/compiled/lowering.py.
"""

import hashlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from distmega.errors import UnsupportedError, counted
from distmega.hostir.comm.communicator import Communicator
from distmega.hostir.comm.nccl import NcclCommunicator
from distmega.hostir.ir.nodes import (
    Allocate,
    Deallocate,
    HostProgram,
    LaunchMegakernel,
    LibraryOp,
    Node,
)
from distmega.hostir.lower.lower import REACHING_ALL, Localized, lower_program
from distmega.hostir.passes.passes import run_passes
from distmega.hostir.run.evaluator import KernelRunner
from distmega.kernels import late
from distmega.kernels.cpu.runner import CpuMegakernel, open_cpu
from distmega.kernels.hopper.batch_plan.types import BatchQueues
from distmega.kernels.hopper.batch_plan.words import BATCH
from distmega.kernels.hopper.plan.extents import count_rows
from distmega.kernels.hopper.plan.types import unfit
from distmega.kernels.hopper.plan.weight_order import order_weights
from distmega.kernels.hopper.queues import Queues
from distmega.kernels.isa.lowering import why_not_encodable
from distmega.kernels.library.graph_times import library_ops_us
from distmega.kernels.megakernel import Megakernel, compile_megakernel
from distmega.kernels.records.specs import find_specs
from distmega.kernels.runners import (
    FoldedQueues,
    fold,
    open_hopper,
    plan_hopper,
    require_hopper,
    unfold,
)
from distmega.kernels.runtime.arena import ArenaLayout, Space, layout_arena
from distmega.kernels.runtime.memory import allocate_arena, arena_views
from distmega.kernels.runtime.stepping import TracedRunner
from distmega.kernels.runtime.symmetric import Team
from distmega.kernels.tasks.cost import fused_us, segment_us
from distmega.kernels.tasks.fuse import FusedContraction, FusedPointwise, fuse_segment
from distmega.program.kinds import collective_kinds, kind_of, kinds
from distmega.program.types import Op, Program, packed_strides, view_strides
from distmega.program.types import Tensor as ProgramTensor
from distmega.sharding.search.cost import CPU_DEVICE, H200_DEVICE
from distmega.superopt.graph.cost import program_us
from distmega.superopt.rules import RewriteRule
from distmega.trace_file import Span

CPU_SMS = 8
"""Virtual SMs of a rank on a CPU."""
MOST_INSTRUCTIONS = 16384
"""Of an op of a program that is asked to be one launch."""
LEAST_GAIN = 1.1
"""By which library ops are to be faster where a kernel can do a program, since both times are
predicted.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholePlan:
    """A host program of one launch. queues: of the GPU's kernel; kernel: of the CPU's, the other is
    None. num_tasks, num_events: that the launch runs, and what tasks wait for there: buffers whose
    flagged words are polled, or counters. fingerprint: stable hash of what is equal on all ranks
    that run the launch together.
    """

    host: HostProgram
    weights: ArenaLayout
    states: ArenaLayout
    queues: Queues | None
    kernel: Megakernel | None
    num_tasks: int
    num_events: int
    fingerprint: str

    @property
    def segment(self) -> Program:
        return self.host.segments[0]


FoldedWhole = tuple[WholePlan, FoldedQueues | None]
"""A plan as it is kept, without what a launch does not take."""


def fold_whole(plan: WholePlan) -> FoldedWhole:
    """The plan in the form in which it is kept."""
    return replace(plan, queues=None), fold(plan.queues) if plan.queues else None


def unfold_whole(folded: FoldedWhole, plan: Callable[[], WholePlan]) -> WholePlan:
    """The plan that fold_whole was given. plan: makes it anew, when its instructions are asked
    for.
    """
    whole, queues = folded

    def plan_queues() -> Queues:
        made = plan().queues
        assert made is not None, "the same kernel as before"
        return made

    return replace(whole, queues=unfold(queues, plan_queues) if queues else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedStates:
    """A runner whose states stay with its caller: a launch begins by copying them to where the
    kernel has them, `states`, and ends by copying them back.
    """

    runner: KernelRunner
    states: Mapping[str, Tensor]

    @property
    def replays(self) -> bool:
        return self.runner.replays

    def launch(self, tensors: Mapping[str, Tensor]) -> None:
        """As that of the runner."""
        for name, state in self.states.items():
            state.copy_(tensors[name])
        self.runner.launch({**tensors, **self.states})
        for name, state in self.states.items():
            tensors[name].copy_(state)


@dataclass(slots=True, kw_only=True)
class TracedKernel:
    """A runner that takes the timeline of each launch. spans: of the last."""

    replays = False
    runner: TracedRunner
    spans: list[Span] = field(default_factory=list)

    def launch(self, tensors: Mapping[str, Tensor]) -> None:
        """As that of the runner, once it has ended."""
        self.spans = self.runner.trace_launch(tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeKernel:
    """A launch bound to memory. tensors: weights and states by name, where the kernel has them."""

    runner: TracedRunner | CpuMegakernel
    tensors: Mapping[str, Tensor]

    def with_copied(
        self, states: Collection[str], traced: TracedKernel | None = None
    ) -> CopiedStates:
        """The runner for a caller who keeps these states, of which it may use some; traced: in its
        place.
        """
        used = {name: self.tensors[name] for name in states if name in self.tensors}
        return CopiedStates(runner=traced or self.runner, states=used)

    def traced(self) -> TracedKernel:
        """The runner with stamps, of a GPU."""
        assert not isinstance(self.runner, CpuMegakernel)
        return TracedKernel(runner=self.runner)

    def raise_hang(self) -> None:
        """HangError if a wait of an earlier launch has expired on the GPU; costs nothing."""
        if not isinstance(self.runner, CpuMegakernel):
            self.runner.raise_hang()


def plan_whole(
    local: Localized,
    comm: Communicator,
    device: torch.device,
    rules: Sequence[RewriteRule] = (),
    most_rows: int = BATCH,
    *,
    forced: bool = False,
) -> WholePlan:
    """What one kernel a rank is to do for a whole program; asks nothing of other ranks. rules: by
    which ops are replaced where the kernel is faster then, or only then can do the program.
    most_rows: that a GPU's kernel takes, see build_batch_queues. forced: whether one launch is
    asked for, even where library ops are faster: a program that the GPU's kernels of rows refuse
    is one of records then, as on CPUs.

    UnsupportedError names what no kernel does, or does later than library ops.
    """
    _require_no_loops(local)
    if device.type != "cuda":
        return _plan_records(local, comm, CPU_SMS, rules)
    try:
        return _plan_rows(local, comm, device, rules, most_rows, forced=forced)
    except UnsupportedError as refused:
        if not forced:
            raise
        try:
            return _plan_records(local, comm, require_hopper(device), on_gpu=True)
        except UnsupportedError as lacking:
            if lacking.found == refused.found:
                raise
            raise UnsupportedError(
                f"{lacking.found} (and for the kernels of rows: {refused.found})",
                expected=lacking.expected,
                remedy=lacking.remedy,
            ) from None


def _plan_rows(
    local: Localized,
    comm: Communicator,
    device: torch.device,
    rules: Sequence[RewriteRule],
    most_rows: int,
    *,
    forced: bool,
) -> WholePlan:
    """By the kernels of rows of a Hopper GPU."""
    if (rows := count_rows(local.program)) > most_rows:  # before all else: fusing many takes long
        raise unfit(f"{rows} rows")
    host = run_passes(
        lower_program(
            local,
            megakernel=True,
            peer_memory=True,
            collectives=REACHING_ALL,
            rules=rules,
            cost=lambda program: segment_us(program, H200_DEVICE),
        )
    )
    _require_one_launch(host)
    segment = host.segments[0]
    if not forced:
        _require_several(sum(not op.is_view for op in local.program.ops))
        _require_sooner(segment, local)
    weights, states = _layouts(segment)
    queues = plan_hopper(
        segment,
        weights=weights,
        states=states,
        device=device,
        team=_team(comm),
        divided=divided_tensors(local),
        most_rows=most_rows,
    )
    _require_whole_rows(queues, local)
    return WholePlan(
        host=host,
        weights=weights,
        states=states,
        queues=queues,
        kernel=None,
        num_tasks=sum(map(len, queues.queues)),
        num_events=queues.num_events,
        fingerprint=_hash_queues(queues),
    )


def _hash_queues(queues: Queues) -> str:
    instructions = [[one.name for one in queue] for queue in queues.queues]
    text = f"{queues.num_ranks} {queues.matrices} {queues.epilogues} {queues.buffers}"
    return hashlib.sha256(f"{text} {instructions}".encode()).hexdigest()[:16]


def _plan_records(
    local: Localized,
    comm: Communicator,
    num_sms: int,
    rules: Sequence[RewriteRule] = (),
    *,
    on_gpu: bool = False,
) -> WholePlan:
    """By the records of the general pipeline, which CPUs and, where it has bodies, a GPU run."""
    host = run_passes(
        lower_program(
            local,
            megakernel=True,
            peer_memory=True,
            is_encodable=_is_encodable,
            collectives=collective_kinds(),
            along_one=False,
            rules=rules,
            cost=_interpreted_us,
        )
    )
    _require_one_launch(host)
    segment = host.segments[0]
    weights, states = _layouts(segment)
    kernel = compile_megakernel(segment, comm.mesh, num_sms=num_sms, weights=weights, states=states)
    if on_gpu:
        _team(comm)
        find_specs(kernel.encoded, [group.op for group in kernel.schedule.graph.groups])
    return WholePlan(
        host=host,
        weights=weights,
        states=states,
        queues=None,
        kernel=kernel,
        num_tasks=kernel.schedule.graph.num_tasks,
        num_events=kernel.schedule.num_events,
        fingerprint=kernel.fingerprint(),
    )


def _layouts(segment: Program) -> tuple[ArenaLayout, ArenaLayout]:
    """Of weights and states."""
    weights = layout_arena(Space.WEIGHT, order_weights(segment))
    return weights, layout_arena(Space.STATE, segment.with_role("state"))


def divided_tensors(local: Localized) -> frozenset[str]:
    """Those of which each rank has another part."""
    allocations = local.allocations.items()
    return frozenset(name for name, found in allocations if any(dim.axes for dim in found.dims))


def open_whole(plan: WholePlan, comm: Communicator, device: torch.device) -> WholeKernel:
    """The kernel with memory for its weights and states, all zero. Collective over all ranks."""
    arenas = [allocate_arena(layout, 1, str(device)) for layout in (plan.weights, plan.states)]
    tensors = {
        name: view
        for layout, arena in zip((plan.weights, plan.states), arenas, strict=True)
        for name, view in arena_views(layout, arena).items()
    }
    kernel = plan.kernel
    runner: TracedRunner | CpuMegakernel
    if plan.queues is not None:
        runner = open_hopper(
            plan.segment,
            plan.queues,
            weights=plan.weights,
            weights_arena=arenas[0],
            state_arena=arenas[1],
            team=_team(comm),
            timeout_s=comm.timeout_s,
        )
    elif kernel is not None and device.type == "cuda":
        runner = late.RecordRunner(
            kernel,
            rank=comm.rank,
            weights_arena=arenas[0],
            state_arena=arenas[1],
            team=_team(comm),
            timeout_s=comm.timeout_s,
        )
    else:
        assert kernel is not None
        runner = open_cpu(
            kernel,
            comm,
            weights_arena=arenas[0],
            state_arena=arenas[1],
            timeout_s=comm.timeout_s,
        )
    return WholeKernel(runner=runner, tensors=tensors)


def _team(comm: Communicator) -> Team | None:
    """The ranks that share the program; UnsupportedError where these are of several mesh axes."""
    axes = [axis for axis in comm.mesh.names if comm.mesh.size(axis) > 1]
    if not axes:
        return None
    if len(axes) > 1 or not isinstance(comm, NcclCommunicator):
        raise UnsupportedError(
            f"a kernel of ranks over mesh axes {axes}",
            expected="one axis of GPUs that reach each other's memory",
            remedy="plan on a mesh of one axis, or leave out megakernel=True",
        )
    return Team(comm=comm, axis=axes[0])


def _require_whole_rows(queues: Queues, local: Localized) -> None:
    """Refuses rows that come in of which ranks have other columns each, where a kernel takes them
    for the same: ranks hand out an id's row, and that of an input to the kernel of one row.
    """
    if queues.num_ranks == 1 or (isinstance(queues, BatchQueues) and not queues.ids):
        return
    columns = max(local.allocations[queues.embed].dims, key=lambda found: found.dim)
    if columns.axes and columns.local_extent == queues.entry_columns:
        raise UnsupportedError(
            f"rows of {queues.embed!r} with {columns.local_extent} of {columns.extent} columns on "
            "each rank",
            expected="whole rows on all ranks, or ranks that gather them",
            remedy=f"replicate {queues.embed!r}, or leave out megakernel=True",
        )


def _require_several(num_ops: int) -> None:
    """Refuses a single op, which a library op does in less time: a kernel of the whole program has
    nothing to join or to begin early; 128 us where the kernel takes 137, of 512 MB of weights on an
    H200.
    """
    if num_ops == 1:
        raise UnsupportedError(
            "a program of one op",
            expected="several ops, which one kernel does sooner than as many",
            remedy="leave it to a library op, or ask for one launch by megakernel=True",
        )


def _require_sooner(segment: Program, local: Localized) -> None:
    """Refuses what library ops do in clearly less time: short programs, or rows of small weights,
    where SMs wait for each other longer than a kernel takes to start. Two products of 128 columns
    take 7 us by library ops and 12 by the kernel of several rows on an H200.
    """
    try:
        fused = fuse_segment(segment)
    except UnsupportedError:
        return  # whoever plans the kernel fuses less, or names the op
    if not all(isinstance(op, FusedContraction | FusedPointwise) for op in fused):
        return  # nothing is known of what library ops take
    kernel_us = fused_us(fused, segment.tensor_map(), H200_DEVICE)
    host = lower_program(local, megakernel=False, peer_memory=False, fuse=True)
    library_us = library_ops_us(host, H200_DEVICE)
    if library_us * LEAST_GAIN < kernel_us:
        raise UnsupportedError(
            f"a program of {kernel_us:.1f} us by one kernel, as predicted, and {library_us:.1f} us"
            " by library ops",
            expected="one that a kernel does sooner",
            remedy="leave it to library ops, or ask for one launch by megakernel=True",
        )


def _interpreted_us(program: Program) -> float:
    """Predicted time of a program on CPUs; inf where the interpreter lacks an op."""
    tensors = program.tensor_map()
    strides = {tensor.name: packed_strides(tensor.shape) for tensor in program.tensors}
    computing = [op for op in program.ops if kind_of(op).in_megakernel]
    if all(_is_encodable(op, tensors, strides) for op in computing):
        return program_us(program, CPU_DEVICE)
    return math.inf


def _is_encodable(
    op: Op, tensors: Mapping[str, ProgramTensor], strides: Mapping[str, tuple[int, ...]]
) -> bool:
    return why_not_encodable(op, tensors, strides, most=MOST_INSTRUCTIONS) is None


def _require_no_loops(local: Localized) -> None:
    if not local.host_loops:
        return
    loop = local.host_loops[0]
    raise UnsupportedError(
        f"a host loop of {counted(loop.num_chunks, 'chunk')} in program {local.program.name!r},"
        f" {loop}",
        expected="a plan without host loops, whose layouts have no stream axis",
        remedy="state it so, or leave out megakernel=True: library ops run in chunks",
    )


def _require_one_launch(host: HostProgram) -> None:
    others = [
        node
        for node in host.body
        if not isinstance(node, LaunchMegakernel | Allocate | Deallocate)
        and not (isinstance(node, LibraryOp) and node.op.is_view)
    ]
    if len(host.segments) == 1 and not others:
        return
    found, expected = _what_is_no_launch(others, host)
    raise UnsupportedError(
        f"{found} in program {host.name!r}",
        expected=expected,
        remedy="state it so, or leave out megakernel=True: library ops do the others",
    )


def _what_is_no_launch(others: Sequence[Node], host: HostProgram) -> tuple[str, str]:
    """What keeps a program from one launch, and what would have been right. others: nodes of it
    that no megakernel does.
    """
    op = next((node.op for node in others if isinstance(node, LibraryOp)), None)
    if op is not None and kind_of(op).in_megakernel:
        refused = why_not_encodable(op, host.buffer_map(), _strides(host), most=MOST_INSTRUCTIONS)
        if refused:
            return f"{refused.found} ({_extents(op)})", refused.expected
    done = sorted({*REACHING_ALL, *(kind.name for kind in kinds() if kind.in_megakernel)})
    expected = f"ops of one megakernel: {', '.join(done)}"
    if op is not None:
        return f"op {op.name!r} of kind {op.kind}: no megakernel does it ({_extents(op)})", expected
    if others:
        return str(others[0]), expected
    return "views alone" if not host.segments else f"{len(host.segments)} kernels", expected


def _extents(op: Op) -> str:
    return ", ".join(f"{axis.name} {axis.extent}" for axis in op.axes)


def _strides(host: HostProgram) -> dict[str, tuple[int, ...]]:
    """Of each buffer and view outside of loops, in elements."""
    found = {buffer.name: packed_strides(buffer.shape) for buffer in host.buffers}
    for node in host.body:
        if isinstance(node, LibraryOp) and node.op.is_view:
            steps = view_strides(node.op, found[node.op.reads[0].tensor])
            assert steps is not None, f"{node.op.name} is no view"
            found[node.op.writes[0].tensor] = steps
    return found
