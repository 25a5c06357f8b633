"""Programs and tilings that the tests of the task level share."""

from dataclasses import replace
from math import prod

from hypothesis import strategies as st

from distmega.kernels.tasks.expand import expand_collectives, team_size
from distmega.kernels.tasks.graph import build_task_graph
from distmega.kernels.tasks.tile import tile_segment, verify_groups
from distmega.kernels.tasks.types import RangeSplit, TaskGraph, TaskGroup
from distmega.program.builder import Handle, ProgramBuilder
from distmega.program.types import Op, Program
from distmega.sharding.layout.mesh import DeviceMesh


def even(axes: str, extent: int, num_tiles: int) -> RangeSplit:
    """`num_tiles` uniform tiles of ceil(extent / num_tiles); the last may be shorter."""
    tile = -(-extent // num_tiles)
    return RangeSplit(axes=tuple(axes.split()), bounds=(*range(0, extent, tile), extent))


def sized(axes: str, extent: int, tile: int) -> RangeSplit:
    """Tiles of a given size; the last may be shorter."""
    return RangeSplit(axes=tuple(axes.split()), bounds=(*range(0, extent, tile), extent))


def tile_ops(program: Program, **splits: tuple[RangeSplit, ...]) -> tuple[TaskGroup, ...]:
    """One group an op, cut as the keyword of the op's name says."""
    return tuple(
        TaskGroup(op=op, splits=splits.get(op.name, ()), all_ranks=op.kind == "push")
        for op in program.ops
        if not op.is_view
    )


def edges(graph: TaskGraph) -> set[tuple[str, int, str, int]]:
    """(Producer op, task, consumer op, task) of every wait of the graph."""
    found = set()
    for event in graph.events:
        producer = graph.groups[event.producer].op.name
        triggers = triggers_of(graph, producer)
        for consumer, waits in event.consumers:
            name = graph.groups[consumer].op.name
            for task, events in enumerate(waits):
                found |= {(producer, p, name, task) for e in events for p in triggers[e]}
    return found


def triggers_of(graph: TaskGraph, producer: str) -> list[tuple[int, ...]]:
    """For each event of one producer op, the tasks that trigger it."""
    for event in graph.events:
        if graph.groups[event.producer].op.name == producer:
            sets: list[list[int]] = [[] for _ in event.counts]
            for task, events in enumerate(event.notify):
                for one in events:
                    sets[one].append(task)
            assert tuple(map(len, sets)) == event.counts
            return [tuple(one) for one in sets]
    return []


def waits_of(graph: TaskGraph, producer: str, consumer: str) -> list[set[int]]:
    """For each task of `consumer`, the tasks of `producer` it waits for."""
    num_tasks = next(g.num_tasks for g in graph.groups if g.op.name == consumer)
    found: list[set[int]] = [set() for _ in range(num_tasks)]
    for name, p, other, c in edges(graph):
        if (name, other) == (producer, consumer):
            found[c].add(p)
    return found


def with_collectives(program: Program, tp: int) -> Program:
    """Copies named `all_reduce*` become all_reduce ops, as sharding leaves them in a local
    program."""
    attrs = (("combine", "sum"), ("mesh_axis", "tp"), ("num_ranks", tp))

    def convert(op: Op) -> Op:
        return replace(op, kind="all_reduce", attrs=attrs)

    ops = tuple(convert(op) if op.name.startswith("all_reduce") else op for op in program.ops)
    return replace(program, ops=ops)


def decoder(num_layers: int, tp: int = 1, *, k: int = 64, h: int = 4, f: int = 128) -> Program:
    """Decoder layers as one rank of `tp` runs them; kv heads and ffn are split over ranks."""
    p = ProgramBuilder("decoder")
    g, d, context, vocab = 2, 16, 32, 96
    x = p.embedding(p.input("tokens", (1,), "i64"), p.weight("embed", (vocab, k)))
    positions, table = p.input("positions", (1,), "i64"), p.weight("rope_table", (context, d))
    for i in range(num_layers):
        x = x + _attention(p, x, positions, table, i, (h // tp, g, d, k, context), tp)
        n = p.rms_norm(x, p.weight(f"layers.{i}.ffn_norm", (k,)), 1e-5)
        gate = p.linear(n, p.weight(f"layers.{i}.w_gate", (f // tp, k)))
        up = p.linear(n, p.weight(f"layers.{i}.w_up", (f // tp, k)))
        down = p.weight(f"layers.{i}.w_down", (k, f // tp))
        x = x + _all_reduce(p, p.linear(gate.map("silu(a0) * a1", up), down), f"ffn.{i}", tp)
    logits = p.linear(p.rms_norm(x, p.weight("norm", (k,)), 1e-5), p.weight("head", (vocab, k)))
    program = with_collectives(p.build(p.argmax(logits, name="next")), tp)
    return expand_collectives(program, DeviceMesh(tp=tp))


def _attention(
    p: ProgramBuilder,
    x: Handle,
    positions: Handle,
    table: Handle,
    i: int,
    sizes: tuple[int, int, int, int, int],
    tp: int,
) -> Handle:
    h, g, d, k, context = sizes
    n = p.rms_norm(x, p.weight(f"layers.{i}.attn_norm", (k,)), 1e-5)
    wq = p.weight(f"layers.{i}.wq", (h, g, d, k))
    q = p.rope(p.linear(n, wq, spec="m k, h g d k -> m h g d"), positions, table)
    caches = []
    for name in ("k", "v"):
        w = p.weight(f"layers.{i}.w{name}", (h, d, k))
        y = p.linear(n, w, spec="m k, h d k -> m h d")
        cache = p.state(f"layers.{i}.{name}_cache", (h, context, d))
        p.kv_append(cache, p.rope(y, positions, table) if name == "k" else y, positions)
        caches.append(cache)
    a = p.attention(q, caches[0], caches[1], positions, d**-0.5)
    o = p.linear(a, p.weight(f"layers.{i}.wo", (k, h, g, d)), spec="m h g d, k h g d -> m k")
    return _all_reduce(p, o, f"attn.{i}", tp)


def _all_reduce(p: ProgramBuilder, x: Handle, name: str, tp: int) -> Handle:
    return p.set(x, name=f"all_reduce.{name}") if tp > 1 else x


def graph_of(program: Program, num_sms: int, tp: int = 1, *, task_bytes: int = 1024) -> TaskGraph:
    """Tiled finely enough that most ops have several tasks."""
    groups = tile_segment(program, num_sms, min_task_bytes=task_bytes)
    verify_groups(program, groups)
    return build_task_graph(program, groups, team_size(program, DeviceMesh(tp=tp)))


SHAPES = ((12,), (6, 4), (2, 3, 4))


@st.composite
def random_programs(draw: st.DrawFn, tp: int = 1) -> tuple[Program, tuple[TaskGroup, ...]]:
    """Small programs of copies, sums, overwrites, views and all-reduces, randomly cut."""
    p = ProgramBuilder("random")
    pool = [p.state(f"s{i}", draw(st.sampled_from(SHAPES))) for i in range(2)]
    owner = {x.name: x.name for x in pool}
    for i in range(draw(st.integers(2, 6))):
        x = draw(st.sampled_from(pool))
        kind = draw(st.sampled_from(("map", "add", "set", "view", "slice", "transpose", "reduce")))
        same = [y for y in pool if y.shape == x.shape]
        free = [y for y in same if owner[y.name] != owner[x.name]]
        if kind == "set" and free:
            p.set(x, into=draw(st.sampled_from(free)), name=f"set{i}")
            continue
        name = f"all_reduce{i}" if kind == "map" and tp > 1 else f"t{i}"
        y = _random_op(draw, p, x, same, kind, name)
        owner[y.name] = owner[x.name] if kind in ("view", "transpose") else y.name
        pool.append(y)
    program = with_collectives(p.build(pool[-1]), tp)
    program = expand_collectives(program, DeviceMesh(tp=tp))
    groups = tuple(
        TaskGroup(op=op, splits=draw(random_splits(op)), all_ranks=op.kind == "push")
        for op in program.ops
        if not op.is_view
    )
    return program, groups


def _random_op(
    draw: st.DrawFn, p: ProgramBuilder, x: Handle, same: list[Handle], kind: str, name: str
) -> Handle:
    if kind == "add":
        return p.pointwise("a0 + a1", x, draw(st.sampled_from(same)), name=name)
    if kind in ("view", "slice"):
        dim = draw(st.integers(0, len(x.shape) - 1))
        start = draw(st.integers(0, x.shape[dim] - 1))
        stop = draw(st.integers(start + 1, x.shape[dim]))
        step = draw(st.integers(1, 3))
        return p.slice(x, dim, start, stop, step, view=kind == "view", name=name)
    if kind == "transpose":
        return p.transpose(x, draw(st.permutations(range(len(x.shape)))), view=True, name=name)
    if kind == "reduce" and len(x.shape) > 1:
        return p.reduce(x, draw(st.integers(0, len(x.shape) - 1)), name=name)
    return p.set(x, name=name)


@st.composite
def random_splits(draw: st.DrawFn, op: Op) -> tuple[RangeSplit, ...]:
    """Cuts of the parallel axes: one split over all of them composed, or one for each."""
    names = [axis.name for axis in op.axes if axis.role == "parallel" and not axis.lookup]
    composed = draw(st.booleans()) and names
    splits = []
    for axes in [tuple(names)] if composed else [(name,) for name in names]:
        extent = prod(op.axis(name).extent for name in axes)
        cuts = draw(st.sets(st.integers(1, max(1, extent - 1)), max_size=3))
        bounds = sorted({0, extent, *(cut for cut in cuts if cut < extent)})
        splits.append(RangeSplit(axes=axes, bounds=tuple(bounds)))
    return tuple(splits)
