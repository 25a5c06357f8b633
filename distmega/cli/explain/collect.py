"""What would run, without running it: plan, host program, task graph, memory and predicted time.

Comes in: a configuration and a machine. Goes out: plain text by section. Reads no weights and
imports no torch, so that a 70B model takes seconds. Next on the walk: decode_plan.py.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from distmega.engine.decode_plan import DecodeBlueprint, lower_decode, num_stages_of, plan_decode
from distmega.engine.predict import predict_us
from distmega.engine.requests import EngineOptions
from distmega.errors import UnsupportedError
from distmega.hostir.ir.nodes import HostProgram
from distmega.hostir.ir.text import print_host
from distmega.hostir.run.host_cost import explain_host
from distmega.kernels.hopper.batch_queues import build_batch_queues
from distmega.kernels.hopper.queues import build_queues
from distmega.kernels.tasks.expand import expand_collectives, team_size
from distmega.kernels.tasks.graph import build_task_graph
from distmega.kernels.tasks.tile import tile_segment
from distmega.kernels.tasks.types import TaskGraph
from distmega.models.decoder import AnyDecoder
from distmega.program.ops.compute import COLLECTIVES
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.search.cost import CPU, Machine

Section = tuple[str, str]
"""Title and text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Collectives of one kind: how many, and the bytes of the tensors they work on, per rank."""

    kind: str
    count: int
    num_bytes: int


def explain_decode(
    config: AnyDecoder,
    mesh: DeviceMesh,
    machine: Machine,
    options: EngineOptions,
    *,
    memory_limit_bytes: int | None = None,
    full: bool = False,
) -> Iterator[Section]:
    """Sections as they become known. `full` prints the segments op by op."""
    num_stages = num_stages_of(mesh)
    for index in range(num_stages):
        title = f"stage {index} of {num_stages}: " if num_stages > 1 else ""
        plan = plan_decode(
            config, mesh, machine, options, memory_limit_bytes=memory_limit_bytes, index=index
        )
        yield f"{title}plan", plan.plan.explain()
        peer_memory = options.collectives != "host"
        blueprint = lower_decode(config, plan, options, peer_memory=peer_memory)
        yield f"{title}host program", _host_text(blueprint.host, machine, full)
        yield f"{title}task graph", "\n".join(_graph_lines(blueprint, machine.num_sms))
        yield f"{title}one rank", "\n".join(_rank_lines(blueprint))


def _host_text(host: HostProgram, machine: Machine, full: bool) -> str:
    text, cost = print_host(host), explain_host(host, machine)
    if full or not host.segments:
        return f"{text.rstrip()}\n{cost}"
    body, _, _ = text.partition(f"program {host.segments[0].name}")
    sizes = (f"segment {s.name}: {len(s.ops)} ops (--full prints them)" for s in host.segments)
    return "\n".join((body.rstrip(), *sizes, cost))


def _graph_lines(blueprint: DecodeBlueprint, num_sms: int) -> Iterator[str]:
    mesh = blueprint.staged.mesh
    for segment in blueprint.host.segments:
        expanded = expand_collectives(segment, mesh)
        groups = tile_segment(expanded, num_sms)
        graph = build_task_graph(expanded, groups, team_size(expanded, mesh))
        yield f"{segment.name}: {graph.num_tasks} tasks of {len(groups)} ops on {num_sms} SMs,"
        yield f"  {graph.num_events} events, {_num_triggers(graph)} triggers a launch"
        kinds = Counter[str]()
        for group in groups:
            kinds[group.op.kind] += group.num_tasks
        yield "  " + ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())


def _num_triggers(graph: TaskGraph) -> int:
    return sum(sum(event.counts) for event in graph.events)


def _rank_lines(blueprint: DecodeBlueprint) -> Iterator[str]:
    program, machine = blueprint.local.program, blueprint.machine
    if (copies := blueprint.staged.kv_copies) > 1:
        heads = blueprint.config.num_kv_heads // copies
        yield f"kv heads: {heads}, each copied {copies} times, for more ranks than there are"
    if machine != CPU:
        yield f"decode steps: {_decoder_of(blueprint)}"
    for name, arena in (("weights", blueprint.weights), ("KV cache", blueprint.states)):
        yield f"{name}: {arena.num_bytes / 2**20:,.1f} MiB"
    for traffic in count_collectives(program):
        yield f"{traffic.kind}: {traffic.count} a token, {traffic.num_bytes:,} bytes"
    yield f"predicted: {predict_us(program, blueprint.staged.mesh, machine):,.0f} us a token"
    yield f"  if every op were a library call on {machine.name}, one after another"


def _decoder_of(blueprint: DecodeBlueprint) -> str:
    """What does a decode step on a GPU."""
    segments, num_sms = blueprint.host.segments, blueprint.machine.num_sms
    if len(segments) != 1:
        return f"library ops, since a step is {len(segments)} segments"
    build = build_batch_queues if blueprint.options.batch > 1 else build_queues
    try:
        queues = build(segments[0], blueprint.weights, blueprint.states, num_sms)
    except UnsupportedError as error:
        return f"library ops, since {error.found}"
    num_tasks = sum(map(len, queues.queues))
    return f"one kernel of {num_tasks} tasks a step, on Hopper GPUs"


def count_collectives(program: Program) -> tuple[Traffic, ...]:
    """Collectives of one rank's program by kind, in the order they first occur."""
    tensors = program.tensor_map()
    found: dict[str, Traffic] = {}
    for op in program.ops:
        if op.kind not in COLLECTIVES:
            continue
        known = found.get(op.kind, Traffic(kind=op.kind, count=0, num_bytes=0))
        moved = sum(tensors[access.tensor].num_bytes for access in op.reads)
        found[op.kind] = Traffic(
            kind=op.kind, count=known.count + 1, num_bytes=known.num_bytes + moved
        )
    return tuple(found.values())
