"""The facts that explain tells, from a configuration: plans, host programs, task graphs, memory.

Comes in: a configuration, a mesh, a machine. Goes out: an ExplainReport. Reads no weights and
imports no torch, so that a 70B model takes seconds. Next: text.py and page.py, which show it; on
the walk, distmega/engine/decode_planner.py.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from distmega.cli.explain.facts import (
    Bound,
    CollectiveFacts,
    ExplainReport,
    HostFacts,
    MemoryFacts,
    OpFacts,
    Rejected,
    SegmentFacts,
    StageFacts,
    TensorFacts,
    TimeFacts,
)
from distmega.cli.explain.timeline import predict_timeline
from distmega.engine.decode_plan import DecodePlan, num_stages_of
from distmega.engine.decode_planner import (
    lower_decode,
    lower_library_decode,
    plan_decode,
    planned_of,
)
from distmega.engine.requests import EngineOptions
from distmega.errors import UnsupportedError, counted
from distmega.hostir.ir.nodes import HostProgram, LibraryOp, walk_nodes
from distmega.hostir.ir.text import print_host
from distmega.hostir.run.host_cost import count_instructions
from distmega.kernels.hopper.queues import Queues, plan_queues, why_not_one_kernel
from distmega.kernels.machines import CPU, H200
from distmega.kernels.tasks.expand import expand_segment, team_size
from distmega.kernels.tasks.graph import build_task_graph
from distmega.kernels.tasks.schedule import schedule_graph
from distmega.kernels.tasks.tile import tile_segment
from distmega.models.config import ModelConfig
from distmega.models.decoder import AnyDecoder
from distmega.models.weights.tensors import weight_specs
from distmega.program.dtypes import item_bytes
from distmega.program.kinds import FUSED_GRAPH, kind_of
from distmega.program.text import print_program
from distmega.program.types import Program, Tensor
from distmega.sharding.explain import layer_pattern
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import Layout, Shard, local_shape
from distmega.sharding.plan import PlanFacts
from distmega.sharding.resolve.resolve import PlacedOp
from distmega.sharding.search.cost import Machine
from distmega.sharding.search.whatif import WhatIf
from distmega.superopt.rewrite import explain_op, rules_of_ops

Kernel = tuple[Queues | None, str]
"""The queues of the one kernel that does a decode step on the machine, None where others do, and
what does it."""
GPU_BYTES = 10**9
"""Of weights in bf16: a built-in model that has more is planned for GPUs unless asked otherwise."""


def usual_machine(config: AnyDecoder) -> Machine:
    """The machine that a model is meant for: an H200 for a built-in one of more than GPU_BYTES."""
    if not isinstance(config, ModelConfig):
        return CPU
    sizes = (spec.shape for spec in weight_specs(config).values())
    return H200 if sum(map(_bf16_bytes, sizes)) > GPU_BYTES else CPU


def _bf16_bytes(shape: Sequence[int]) -> int:
    return Tensor(name="w", shape=tuple(shape), dtype="bf16").num_bytes


def collect_decode(
    model: str,
    config: AnyDecoder,
    mesh: DeviceMesh,
    machine: Machine,
    options: EngineOptions,
    *,
    memory_limit_bytes: int | None = None,
    full: bool = False,
) -> ExplainReport:
    """What a decode step of `config` is planned to be. full: with the texts of plan and segments,
    every choice and every op. Raises PlanError where `mesh` or the limit
    can't be used, RequestError for options that the model can't have.
    """
    decodes = []
    for index in range(num_stages_of(mesh)):
        staged = plan_decode(
            config, mesh, machine, options, memory_limit_bytes=memory_limit_bytes, index=index
        )
        peer_memory = options.collectives != "host"
        decodes.append(lower_decode(config, staged, options, peer_memory=peer_memory))
    kernels = _gpu_kernels(decodes)
    stages = [
        _stage(index, decode, kernel, full)
        for index, (decode, kernel) in enumerate(zip(decodes, kernels, strict=True))
    ]
    return ExplainReport(
        model=model,
        machine=machine.name,
        batch=options.batch,
        num_layers=config.num_layers,
        memory_limit_bytes=memory_limit_bytes,
        stages=tuple(stages),
    )


def _stage(index: int, decode: DecodePlan, kernel: Kernel, full: bool) -> StageFacts:
    plan, machine = planned_of(decode).staged.plan, decode.machine
    fused_us = {one.pair.result: dict(one.times_us).get(one.way, 0.0) for one in plan.overlaps}
    memory = plan.memory
    queues, runs_as = kernel
    return StageFacts(
        index=index,
        ranks=plan.mesh.axes,
        runs_as=runs_as,
        one_kernel=queues is not None,
        notes=(*_notes(decode), *_rule_notes(decode, queues is not None)),
        time=_time(plan),
        memory=MemoryFacts(
            weight_bytes=memory.weight_bytes,
            state_bytes=memory.state_bytes,
            input_bytes=memory.input_bytes,
            temp_peak_bytes=memory.temp_peak_bytes,
            peer_bytes=memory.symmetric_bytes,
        ),
        ops=tuple(_ops(plan)),
        collectives=tuple(_collectives(plan)),
        tensors=tuple(
            _tensor(tensor, plan.layouts[tensor.name], tensor.name)
            for tensor in plan.program.tensors
        ),
        parts=tuple(_parts(plan)),
        overlaps=tuple(str(choice) for choice in plan.overlaps),
        host=_host(decode.host, machine, _tasks(decode, queues), full),
        timeline=predict_timeline(decode.host, machine, fused_us),
        plan_text=plan.explain() if full else "",
    )


def _gpu_kernels(decodes: Sequence[DecodePlan]) -> list[Kernel]:
    """Of each stage; without a kernel in all where one has none, as in the engine."""
    found = [_gpu_kernel(decode) for decode in decodes]
    refused = next((kernel for kernel in found if kernel[0] is None), None)
    return [refused] * len(found) if refused else found


def _gpu_kernel(decode: DecodePlan) -> Kernel:
    segments, options, plan = decode.host.segments, decode.options, planned_of(decode).staged.plan
    if decode.machine == CPU:
        count = counted(len(segments), "segment")
        return None, f"{count} by the interpreter of queues"
    if problem := why_not_one_kernel(segments, recurrent=bool(decode.config.recurrent_states)):
        return None, f"library ops, since {problem}"
    try:
        queues = plan_queues(
            segments[0],
            decode.weights,
            decode.states,
            decode.machine.num_sms,
            num_ranks=plan.mesh.num_ranks,
            mode=options.events,
            most_rows=options.kernel_rows,
        )
    except UnsupportedError as error:
        return None, f"library ops, since {error.found}"
    return (
        queues,
        f"one kernel of {counted(sum(map(len, queues.queues)), 'task')} a step, on Hopper GPUs",
    )


def _notes(decode: DecodePlan) -> Iterator[str]:
    if (copies := decode.kv_copies) > 1:
        heads = decode.config.num_kv_heads // copies
        yield f"kv heads: {heads}, each copied {copies} times, for more ranks than there are"
    plan = planned_of(decode).staged.plan
    used = {axis for step in plan.decisions for axis, _ in step.splits}
    for axis, size in plan.mesh.axes:
        if size > 1 and axis not in used:
            yield f"idle: {axis}={size} divides no op; --full says why, op by op"
    opaque = Counter(str(op.attr("target")) for op in plan.program.ops if kind_of(op).calls_torch)
    for target, count in opaque.items():
        yield f"run whole on every rank by torch: {count} x {target}"


def _rule_notes(decode: DecodePlan, one_kernel: bool) -> Iterator[str]:
    """The rewrite rules that made ops of what runs."""
    known = {rule.name: rule for rule in decode.rules}
    if one_kernel:
        for used, names in rules_of_ops(decode.host.segments[0], known).items():
            yield f"ops {', '.join(names)} are made by rule {used.partition('#')[0]}"
    elif known:
        nodes = walk_nodes(lower_library_decode(decode).body)
        ops = [node.op for node in nodes if isinstance(node, LibraryOp)]
        graphs = [op for op in ops if op.kind == FUSED_GRAPH]
        for attrs, count in Counter(op.attrs for op in graphs).items():
            first = next(op for op in graphs if op.attrs == attrs)
            others = f", {count - 1} more alike" if count > 1 else ""
            yield f"{explain_op(first, known)}{others}"


def _time(plan: PlanFacts) -> TimeFacts:
    machine, parts = plan.machine, {"bytes": 0.0, "flops": 0.0}
    launches_us = 0.0
    for step in plan.decisions:
        if step.op.is_view:
            continue
        by, busy_us = _busy(step, machine)
        parts[by] += busy_us
        launches_us += step.cost.time_us - busy_us
    moved = sum(step.cost.num_bytes for step in plan.decisions if not step.op.is_view)
    return TimeFacts(
        bytes_us=parts["bytes"],
        flops_us=parts["flops"],
        launch_us=launches_us,
        collectives_us=sum(step.move.time_us for step in plan.reshards),
        least_us=moved / machine.memory_bandwidth_bytes_per_us,
    )


def _busy(step: PlacedOp, machine: Machine) -> tuple[str, float]:
    """Whether bytes or flops take longer, and how long."""
    bytes_us = step.cost.num_bytes / machine.memory_bandwidth_bytes_per_us
    busy_us = max(0.0, step.cost.time_us - machine.launch_us)
    return ("bytes" if bytes_us >= busy_us * (1 - 1e-9) else "flops"), busy_us


def _ops(plan: PlanFacts) -> Iterator[OpFacts]:
    what_if = WhatIf(plan)
    known: dict[object, tuple[Rejected, ...]] = {}
    persistent = {t.name for t in plan.program.tensors if t.role in ("weight", "state")}
    for step in plan.decisions:
        same = layer_pattern(step.op.name), what_if.table.class_of(step.op), step.splits
        if same not in known:
            known[same] = tuple(_rejected(plan, what_if, step))
        by, busy_us = _busy(step, plan.machine)
        bound: Bound = "launch"
        if busy_us >= step.cost.time_us - busy_us:
            bound = "bytes" if by == "bytes" else "flops"
        operands = [plan.locals[name][0] for name in step.reads if name in plan.locals]
        yield OpFacts(
            name=step.op.name,
            kind=step.op.kind,
            time_us=step.cost.time_us,
            num_bytes=step.cost.num_bytes,
            flops=step.cost.flops,
            bound=bound,
            divided=tuple(f"{option.axis}/{axis}" for axis, option in step.splits),
            reads=step.reads,
            writes=step.writes,
            weights=tuple(name for name in dict.fromkeys(operands) if name in persistent),
            rejected=known[same],
        )


def _rejected(plan: PlanFacts, what_if: WhatIf, step: PlacedOp) -> Iterator[Rejected]:
    """Alternatives with a price, cheapest first, then those that are ruled out."""
    chosen_us = what_if.chosen(step).total_us
    for axis, size in plan.mesh.axes:
        if size == 1:
            continue
        found = what_if.alternatives(step, axis)
        priced = [(one.bill.total_us - chosen_us, one) for one in found if one.bill]
        for change_us, one in sorted(priced, key=lambda pair: pair[0]):
            assert one.bill is not None
            why = (
                what_if.why_lost(step, axis, one)
                if change_us < 0
                else ", ".join(one.bill.movements)
            )
            yield Rejected(mesh_axis=axis, choice=one.axis or "whole", change_us=change_us, why=why)
        for one in found:
            if one.bill is None:
                choice = one.axis or "whole"
                yield Rejected(mesh_axis=axis, choice=choice, change_us=None, why=one.reason)


def _collectives(plan: PlanFacts) -> Iterator[CollectiveFacts]:
    for step in plan.reshards:
        yield CollectiveFacts(
            name=plan.locals[step.writes[0]][0],
            kind=f"{step.move.kind} {step.combine}".rstrip(),
            mesh_axis=step.move.axis,
            time_us=step.move.time_us,
            num_bytes=step.move.num_bytes,
            reads=step.reads,
            writes=step.writes,
        )


def _parts(plan: PlanFacts) -> Iterator[TensorFacts]:
    tensors = plan.program.tensor_map()
    for local, (name, layout) in plan.locals.items():
        yield _tensor(tensors[name], layout, local)


def _tensor(tensor: Tensor, layout: Layout, name: str) -> TensorFacts:
    rank_bytes = item_bytes(tensor.dtype)
    for extent in local_shape(tensor.shape, layout):
        rank_bytes *= extent
    return TensorFacts(
        name=name,
        role=tensor.role,
        dtype=tensor.dtype,
        shape=tensor.shape,
        axes=dim_axes(layout, len(tensor.shape)),
        num_bytes=tensor.num_bytes,
        rank_bytes=rank_bytes,
        partial=layout.partial_axes,
    )


def dim_axes(layout: Layout, num_dims: int) -> tuple[str, ...]:
    """For each dim the mesh axes that divide it, joined by *; "" for none."""
    found: list[list[str]] = [[] for _ in range(num_dims)]
    for axis, placement in layout.placements:
        if isinstance(placement, Shard):
            found[placement.dim].append(axis)
    return tuple("*".join(axes) for axes in found)


def _host(
    host: HostProgram, machine: Machine, segments: Sequence[SegmentFacts], full: bool
) -> HostFacts:
    num, rates = count_instructions(host.body), machine.overlap
    return HostFacts(
        text=print_host(replace(host, segments=())),
        segment_texts=tuple(print_program(segment) for segment in host.segments if full),
        num_instructions=num,
        host_us=num * rates.host_us,
        replay_us=num * rates.replay_us,
        segments=tuple(segments),
    )


def _tasks(decode: DecodePlan, queues: Queues | None) -> list[SegmentFacts]:
    """The tasks that a decode step runs on a rank: of its one kernel on a GPU, of the interpreter
    on a CPU; none where library ops do it.
    """
    segments = decode.host.segments
    if queues is None:
        return [_interpreted(one, decode) for one in segments] if decode.machine == CPU else []
    kinds = Counter(type(one).__name__ for queue in queues.queues for one in queue)
    (segment,) = segments
    return [_segment(segment, kinds, len(queues.queues), queues.num_events)]


def _interpreted(segment: Program, decode: DecodePlan) -> SegmentFacts:
    """As engine/cpu_kernels.py opens it."""
    options, mesh = decode.options, decode.mesh
    expanded = expand_segment(segment, mesh)
    groups = tile_segment(expanded, options.num_sms)
    graph = build_task_graph(expanded, groups, team_size(expanded, mesh), options.events)
    schedule = schedule_graph(graph, options.num_sms)
    kinds = Counter(groups[t.group].op.kind for queue in schedule.queues for t in queue)
    return _segment(segment, kinds, options.num_sms, schedule.num_events)


def _segment(segment: Program, kinds: Counter[str], num_sms: int, num_events: int) -> SegmentFacts:
    return SegmentFacts(
        name=segment.name,
        num_ops=sum(not op.is_view for op in segment.ops),
        num_tasks=kinds.total(),
        num_sms=num_sms,
        num_events=num_events,
        tasks=tuple(kinds.most_common()),
    )
