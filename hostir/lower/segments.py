"""Which consecutive ops become one megakernel, and the program of such a segment.

Comes in: ops of one body in order. Goes out: Runs of ops, and Programs whose inputs and outputs are
buffers of the host program. Used by lower.py.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from distmega.hostir.lower.scope import Scope
from distmega.program.ops.compute import communication_axis
from distmega.program.types import Op, Program, Role, Tensor, accesses, view_chain
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.overlap.pairs import OverlapChoice
from distmega.sharding.streams.host_loops import HostLoop


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Consecutive ops of one segment or host loop, a fused pair, or a single op for the host."""

    ops: tuple[Op, ...]
    segment: bool
    loop: HostLoop | None = None
    fused: OverlapChoice | None = None


def kernel_runs(
    ops: Iterable[Op],
    mesh: DeviceMesh,
    fits: Callable[[Op], bool],
    scope: Scope,
    made: set[str],
    *,
    along_one: bool,
) -> list[Run]:
    """Runs of ops outside of loops. An op that overwrites a temp of an earlier run, or part of what
    isn't the run's own, is no part of a kernel, which changes nothing outside of its arenas; made:
    temps of earlier runs. along_one: a run's collectives are along one mesh axis.
    """
    runs: list[Run] = []
    pending: list[Op] = []
    axis = ""

    def close() -> None:
        nonlocal axis
        if pending:
            runs.append(Run(ops=tuple(pending), segment=True))
            made.update(name for op in pending for name in scope.written_temps(op))
        pending.clear()
        axis = ""

    for op in ops:
        written = scope.written_temps(op)
        if not fits(op) or written & made or scope.changes_part(op):
            close()
            runs.append(Run(ops=(op,), segment=False))
            made.update(written)
            continue
        over = communication_axis(op)
        if along_one and over and mesh.size(over) > 1:
            if axis not in ("", over):
                close()
            axis = over
        pending.append(op)
        made.update(scope.slices.keys() & {scope.storage(a.tensor) for a in accesses(op)})
    close()
    return runs


def make_segment(name: str, ops: Sequence[Op], scope: Scope, needed: set[str]) -> Program:
    """The program of a run. Temps that exist before it become inputs, but for chunks of buffers
    that it writes: those are outputs.
    """
    stated: dict[str, Op] = {}
    for op in ops:
        for access in accesses(op):
            stated |= {view.name: view for view in view_chain(access.tensor, scope.views)}
        stated[op.name] = op
    used = dict.fromkeys(a.tensor for op in stated.values() for a in accesses(op))
    written = {scope.storage(a.tensor) for op in ops for a in op.writes}

    def role(tensor: Tensor) -> Role:
        given = scope.is_placed(tensor.name) and tensor.name not in scope.views
        given = given and not (tensor.name in scope.slices and tensor.name in written)
        return "input" if given and tensor.role == "temp" else tensor.role

    declared = tuple(replace(t, role=role(t)) for t in scope.tensors.values() if t.name in used)
    leaving = (t.name for t in declared if t.role == "temp" and t.name not in scope.views)
    kept = needed | scope.slices.keys()
    outputs = tuple(each for each in leaving if each in written and each in kept)
    return Program(name=name, tensors=declared, ops=tuple(stated.values()), outputs=outputs)
