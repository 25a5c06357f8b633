"""From one rank's tensor program to a host program: megakernel launches, library ops, collectives.

Comes in: a LocalProgram of sharding/localize.py. Goes out: a HostProgram on one stream whose temps
are allocated before their first write; passes.py frees them and moves waits. With `megakernel`,
maximal runs of ops that kernels can do become segments. A view costs nothing, so it is stated again
wherever it is used and never crosses a segment's edge. Next: passes.py, then kernels/task_graph.py
for the segments.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from distmega.hostir.nodes import (
    Allocate,
    Arg,
    Collective,
    HostProgram,
    LaunchMegakernel,
    LibraryOp,
    Node,
    Wait,
    segment_args,
)
from distmega.ops import COLLECTIVES
from distmega.program import Op, Program, Role, Tensor, accesses
from distmega.sharding.mesh import DeviceMesh

KERNEL_KINDS = frozenset({
    "linear", "pointwise", "reduce", "rms_norm", "rope", "attention", "kv_append", "embedding",
    "slice", "concat", "reshape", "transpose", "set", "argmax", "take_shard",
})  # fmt: skip
"""Op kinds that a megakernel does, unless the caller knows better."""

PEER_KINDS = frozenset({"all_reduce", "all_gather"})
"""Collectives that stay inside a megakernel where ranks can write into each other's memory."""

LOCAL_KINDS = frozenset({"take_shard"})
"""Kinds of ops.COLLECTIVES that move no bytes between ranks."""


class Localized(Protocol):
    """What is needed of a LocalProgram: one rank's program, the rank symbolic, and its mesh."""

    @property
    def program(self) -> Program: ...

    @property
    def mesh(self) -> DeviceMesh: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Consecutive ops of one segment, or (segment False) a single op for the host."""

    ops: tuple[Op, ...]
    segment: bool


def lower_program(
    local: Localized,
    *,
    megakernel: bool,
    peer_memory: bool,
    kernel_kinds: frozenset[str] = KERNEL_KINDS,
    is_encodable: Callable[[Op, Mapping[str, Tensor]], bool] | None = None,
) -> HostProgram:
    """One rank's host program, not yet freed: run passes.run_passes on it.

    kernel_kinds, is_encodable: which ops a megakernel can do; the others become library ops between
    segments. peer_memory: all_reduce and all_gather stay in the kernel, over one mesh axis a
    segment.
    """
    program, mesh = local.program, local.mesh
    tensors = program.tensor_map()

    def fits(op: Op) -> bool:
        if not megakernel:
            return False
        if op.kind in PEER_KINDS:
            return peer_memory
        return op.kind in kernel_kinds and (is_encodable is None or is_encodable(op, tensors))

    views = {op.writes[0].tensor: op for op in program.ops if op.kind == "view"}
    runs = _split_runs(program, mesh, views, fits)
    last_use = _last_uses(program, runs, views)
    segments: list[Program] = []
    body: list[Node] = []
    placed = {tensor.name for tensor in program.tensors if tensor.role != "temp"}
    for position, run in enumerate(runs):
        if run.segment:
            needed = {each for each, last in last_use.items() if last > position}
            name = f"{program.name}.{len(segments)}"
            segment = _make_segment(name, run.ops, tensors, views, needed, placed)
            segments.append(segment)
            outs = segment_args(segment)
            body += _allocations([t.name for t in outs if t.name not in placed], placed)
            args = tuple(Arg(name=tensor.name, buffer=tensor.name) for tensor in outs)
            body.append(LaunchMegakernel(kernel=name, args=args))
        else:
            body += _host_nodes(run.ops[0], views, placed)
    for name in program.outputs:
        body += _view_nodes(name, views, placed)
    used = {name for node in body for name in _names_of(node)} | set(program.outputs)
    kept = [t for t in program.tensors if t.role != "temp" or t.name in used]
    return HostProgram(
        name=program.name,
        mesh=mesh,
        buffers=tuple(kept),
        body=tuple(body),
        outputs=program.outputs,
        segments=tuple(segments),
    )


def _names_of(node: Node) -> tuple[str, ...]:
    match node:
        case Allocate(buffer=buffer):
            return (buffer,)
        case LibraryOp(op=op):
            return tuple(access.tensor for access in accesses(op))
        case LaunchMegakernel(args=args):
            return tuple(arg.buffer for arg in args)
    return ()


def _split_runs(
    program: Program, mesh: DeviceMesh, views: Mapping[str, Op], fits: Callable[[Op], bool]
) -> list[_Run]:
    """Ops but views, in order: maximal runs that fit a kernel, over one mesh axis each, and the
    rest one by one. An op that overwrites a temp of an earlier run is among the rest: a kernel
    changes nothing outside of its arenas.
    """
    runs: list[_Run] = []
    pending: list[Op] = []
    axis = ""
    temps = {tensor.name for tensor in program.tensors if tensor.role == "temp"}
    made: set[str] = set()

    def close() -> None:
        nonlocal axis
        if pending:
            runs.append(_Run(ops=tuple(pending), segment=True))
            made.update(name for op in pending for name in stored_writes(op))
        pending.clear()
        axis = ""

    def stored_writes(op: Op) -> set[str]:
        return {_storage(access.tensor, views) for access in op.writes} & temps

    for op in program.ops:
        if op.kind == "view":
            continue
        if not fits(op) or stored_writes(op) & made:
            close()
            runs.append(_Run(ops=(op,), segment=False))
            made.update(stored_writes(op))
            continue
        over = str(op.attr("mesh_axis")) if op.kind in PEER_KINDS else ""
        if over and mesh.size(over) > 1:
            if axis not in ("", over):
                close()
            axis = over
        pending.append(op)
    close()
    return runs


def _sources(name: str, views: Mapping[str, Op]) -> Iterator[Op]:
    """The view ops that lead to a tensor, from its storage on; none if it is no view."""
    if name in views:
        yield from _sources(views[name].reads[0].tensor, views)
        yield views[name]


def _storage(name: str, views: Mapping[str, Op]) -> str:
    while name in views:
        name = views[name].reads[0].tensor
    return name


def _last_uses(program: Program, runs: Sequence[_Run], views: Mapping[str, Op]) -> dict[str, int]:
    """Storage -> the last run that reads or writes it, one past the end for the caller."""
    last: dict[str, int] = {}
    for position, run in enumerate(runs):
        for op in run.ops:
            last |= {_storage(access.tensor, views): position for access in accesses(op)}
    return last | {_storage(name, views): len(runs) for name in program.outputs}


def _make_segment(
    name: str,
    ops: Sequence[Op],
    tensors: Mapping[str, Tensor],
    views: Mapping[str, Op],
    needed: set[str],
    placed: set[str],
) -> Program:
    """The program of a run. Temps that exist before it become inputs."""
    stated: dict[str, Op] = {}
    for op in ops:
        for access in accesses(op):
            stated |= {view.name: view for view in _sources(access.tensor, views)}
        stated[op.name] = op
    used = dict.fromkeys(a.tensor for op in stated.values() for a in accesses(op))
    written = {_storage(a.tensor, views) for op in ops for a in op.writes}

    def role(tensor: Tensor) -> Role:
        is_given = tensor.role == "temp" and tensor.name in placed and tensor.name not in views
        return "input" if is_given else tensor.role

    declared = tuple(replace(t, role=role(t)) for t in tensors.values() if t.name in used)
    leaving = (t.name for t in declared if t.role == "temp" and t.name not in views)
    outputs = tuple(each for each in leaving if each in written and each in needed)
    return Program(name=name, tensors=declared, ops=tuple(stated.values()), outputs=outputs)


def _allocations(names: Sequence[str], placed: set[str]) -> Iterator[Node]:
    for name in names:
        placed.add(name)
        yield Allocate(buffer=name)


def _view_nodes(name: str, views: Mapping[str, Op], placed: set[str]) -> Iterator[Node]:
    for op in _sources(name, views):
        if op.writes[0].tensor not in placed:
            placed.add(op.writes[0].tensor)
            yield LibraryOp(op=op)


def _host_nodes(op: Op, views: Mapping[str, Op], placed: set[str]) -> Iterator[Node]:
    """An op outside of segments: the views it needs, allocations of what it writes, itself, and a
    wait.
    """
    fresh = [a.tensor for a in op.writes if a.tensor not in placed and a.tensor not in views]
    for access in accesses(op):
        if access.tensor not in fresh:
            yield from _view_nodes(access.tensor, views, placed)
    yield from _allocations(fresh, placed)
    if op.kind not in COLLECTIVES or op.kind in LOCAL_KINDS:
        yield LibraryOp(op=op)
        return
    yield Collective(
        kind=op.kind,  # type: ignore[arg-type]
        mesh_axis=str(op.attr("mesh_axis")),
        ins=tuple(access.tensor for access in op.reads),
        outs=tuple(access.tensor for access in op.writes),
        handle=op.name,
        attrs=tuple((key, value) for key, value in op.attrs if key != "mesh_axis"),
    )
    yield Wait(handle=op.name)
