"""From one rank's tensor program to a host program: megakernel launches, library ops, collectives.

Comes in: a LocalProgram of sharding/localize.py. Goes out: a HostProgram whose temps are allocated
before their first write; passes.py frees them and moves waits. It runs on one stream but for host
loops, whose iterations take turns on several. With `megakernel`, maximal runs of ops that kernels
can do become segments; with `fuse`, other ops that one library kernel can do become one. A view
costs nothing, so it is stated again wherever it is used and never crosses a segment's edge. Next:
passes.py, then kernels/tasks/graph.py for the segments.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Protocol

from distmega.collecting import gc_paused
from distmega.errors import PlanError
from distmega.hostir.ir.matmul_nodes import FusedMatmul, needed_symmetric_buffers
from distmega.hostir.ir.nodes import (
    Binding,
    Collective,
    HostProgram,
    LaunchMegakernel,
    LibraryOp,
    Node,
    Wait,
    segment_args,
    walk_nodes,
)
from distmega.hostir.ir.uses import named_buffers
from distmega.hostir.lower.chunks import verify_homes
from distmega.hostir.lower.host_streams import Touched
from distmega.hostir.lower.loops import Around, LoopLowering, touched
from distmega.hostir.lower.scope import Scope
from distmega.hostir.lower.segments import Run, kernel_runs, make_segment
from distmega.hostir.passes.fuse import fuse_ops
from distmega.hostir.passes.fuse_attention import fuse_attention
from distmega.hostir.passes.join_formulas import join_formulas
from distmega.hostir.passes.join_rows import join_rows
from distmega.hostir.passes.mix_columns import mix_columns
from distmega.hostir.passes.norm_sums import norm_sums
from distmega.hostir.passes.order_results import order_results
from distmega.hostir.passes.split_sums import SumParts, split_sums
from distmega.program.kinds import kind_of, kinds
from distmega.program.ops.compute import communication_axis
from distmega.program.types import Op, Program, Tensor, accesses
from distmega.sharding.finalize import verify_storage
from distmega.sharding.layout.allocation import AllocationDomain
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.overlap.pairs import OverlapChoice
from distmega.sharding.streams.host_loops import HostLoop
from distmega.superopt.rewrite import Cost, apply_rules, fuse_graphs
from distmega.superopt.rules import RewriteRule

REACHING_ALL = frozenset(kind.name for kind in kinds() if kind.reaches_all)
"""Collectives that a megakernel does, unless the caller knows better."""

MAX_STREAMS = 4
"""Streams besides the main one that a host loop uses, unless the caller knows better."""

JOINS = (mix_columns, norm_sums, join_formulas, join_rows, order_results, fuse_attention)
"""What joins library ops once fuse_ops has, in order; each is a file of hostir/passes/. Then comes
split_sums.
"""

Encodable = Callable[[Op, Mapping[str, Tensor], Mapping[str, tuple[int, ...]]], bool]
"""Whether a megakernel can do an op, given tensors by name, and the strides of its operands."""


class Localized(Protocol):
    """What is needed of a LocalProgram: one rank's program, the rank symbolic, its mesh, its final
    allocations, its host loops and the pairs of ops that run as one kernel.
    """

    @property
    def program(self) -> Program: ...

    @property
    def mesh(self) -> DeviceMesh: ...

    @property
    def allocations(self) -> Mapping[str, AllocationDomain]: ...

    @property
    def host_loops(self) -> tuple[HostLoop, ...]: ...

    @property
    def fused(self) -> tuple[OverlapChoice, ...]: ...


class _Lowering:
    """Makes the nodes of one program."""

    def __init__(
        self,
        local: Localized,
        program: Program,
        fits: Callable[[Op, Scope], bool],
        max_streams: int,
        fuse: bool,
        fused: Sequence[OverlapChoice],
        *,
        along_one: bool,
        sum_parts: SumParts | None,
    ) -> None:
        self.along_one, self.sum_parts = along_one, sum_parts
        self.parts: Mapping[str, Tensor] = {}
        self.fused = {choice.pair.second: choice for choice in fused}
        self.firsts = {choice.pair.first for choice in fused}
        self.ops = {op.name: op for op in program.ops}
        self.local, self.program, self.mesh = local, program, local.mesh
        self.fits, self.fuse = fits, fuse
        self.chunked = {
            name: domain.chunk for name, domain in local.allocations.items() if domain.chunk
        }
        self.loops = {name: loop for loop in local.host_loops for name, _ in loop.splits}
        self.segments: list[Program] = []
        self.lowered = LoopLowering(self.chunked, max_streams, self.iteration)
        self.order = self.lowered.order

    def run(self) -> HostProgram:
        program = self.program
        verify_homes(program.ops, self.loops, self.chunked)
        tensors = program.tensor_map()
        given = {tensor.name for tensor in program.tensors if tensor.role != "temp"}
        views = {op.writes[0].tensor: op for op in program.ops if op.is_view}
        scope = Scope(tensors=tensors, views=views, slices={}, placed=given)
        body = (*self.body(program.ops, scope, program.outputs), *self.order.join())
        for name in program.outputs:
            body = (*body, *scope.named(name))
        if self.fuse:
            body = self.joined(body, tensors)
        buffers = self.declared(body, tensors)
        verify_storage(buffers, self.local.allocations)
        by_name = {buffer.name: buffer for buffer in buffers}
        return HostProgram(
            name=program.name,
            mesh=self.mesh,
            buffers=buffers,
            body=body,
            outputs=program.outputs,
            segments=tuple(self.segments),
            num_streams=self.lowered.num_streams,
            num_events=self.lowered.num_events,
            symmetric_buffers=needed_symmetric_buffers(
                walk_nodes(body), by_name, dict(self.mesh.axes)
            ),
        )

    def joined(self, body: tuple[Node, ...], tensors: Mapping[str, Tensor]) -> tuple[Node, ...]:
        """The body with library ops joined that one kernel can do."""
        buffers, outputs = {**tensors, **self.lowered.chunks}, self.program.outputs
        segments = {segment.name: segment for segment in self.segments}
        body = fuse_ops(body, buffers, outputs, segments)
        for join in JOINS:
            body = join(body, buffers, outputs)
        if self.sum_parts is not None:
            body, self.parts = split_sums(body, buffers, outputs, self.sum_parts)
        return body

    def declared(self, body: Sequence[Node], tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Buffers of a body: what the caller gives, the temps in use as they are stored, chunks,
        parts of sums.
        """
        used = {name for node in walk_nodes(body) for name in named_buffers(node)}
        used |= set(self.program.outputs)
        whole = [t for t in self.program.tensors if t.role != "temp" or t.name in used]
        chunks = self.lowered.chunks.values()
        parts = [t for t in chunks if t.name not in tensors and t.name in used]
        return (*map(self.stored, whole), *parts, *self.parts.values())

    def stored(self, tensor: Tensor) -> Tensor:
        return (
            self.lowered.chunks.get(tensor.name, tensor) if tensor.name in self.chunked else tensor
        )

    def body(self, ops: Sequence[Op], scope: Scope, kept: Sequence[str]) -> Iterator[Node]:
        """Nodes of a program's ops in order. kept: what must outlive them."""
        runs = self.split_runs(ops, scope)
        last_use = self.last_uses(runs, scope, kept)
        ends: dict[int, set[str]] = {}
        for name, last in last_use.items():
            if scope.tensors[name].role == "temp":
                ends.setdefault(last, set()).add(name)
        for position, run in enumerate(runs):
            ending = ends.get(position, set())
            if run.loop is not None:
                yield from self.lowered.loop(run.loop, run.ops, scope, ending)
                continue
            work = touched(run.ops, scope)
            work = Touched(work.reads, work.writes | ending)
            yield from self.order.before(work)
            if run.fused:
                yield from _fused_nodes(run.fused, run.ops, scope)
            elif run.segment:
                needed = {each for each, last in last_use.items() if last > position}
                yield from self.segment(run.ops, scope, needed)
            else:
                yield from _host_nodes(run.ops[0], scope)
            self.order.note(work)

    def iteration(self, ops: Sequence[Op], scope: Scope, around: Around) -> Iterator[Node]:
        """Nodes of the ops of one iteration of a loop."""
        runs = self.split_runs(ops, scope, around)
        last_use = self.last_uses(runs, scope, ())
        for position, run in enumerate(runs):
            before, after = around.get(run.ops[0].name, ((), ()))
            yield from before
            if run.segment:
                needed = {each for each, last in last_use.items() if last > position}
                yield from self.segment(run.ops, scope, needed)
            else:
                yield from _host_nodes(run.ops[0], scope)
            yield from after

    def segment(self, ops: Sequence[Op], scope: Scope, needed: set[str]) -> Iterator[Node]:
        names = dict.fromkeys(scope.storage(a.tensor) for op in ops for a in accesses(op))
        for name in names:
            if name in scope.slices:
                yield from scope.named(name)
        name = f"{self.program.name}.{len(self.segments)}"
        segment = make_segment(name, ops, scope, needed)
        self.segments.append(segment)
        given = segment_args(segment)
        yield from scope.allocated([tensor.name for tensor in given])
        args = tuple(Binding(name=tensor.name, buffer=tensor.name) for tensor in given)
        yield LaunchMegakernel(kernel=name, args=args)

    def split_runs(self, ops: Sequence[Op], scope: Scope, alone: Container[str] = ()) -> list[Run]:
        """Ops but views, in order: host loops, maximal runs that fit a kernel, and the rest one by
        one. alone: ops that are in no kernel. Nor are collectives of a loop: beside a kernel of
        several ranks no other iteration might exchange anything.
        """

        def fits(op: Op) -> bool:
            outside = scope.outer is None or not kind_of(op).communicates
            return outside and op.name not in alone and self.fits(op, scope)

        runs: list[Run] = []
        loops = {} if scope.outer is not None else self.loops
        made: set[str] = set()
        computing = (op for op in ops if not op.is_view and op.name not in self.firsts)

        def home(op: Op) -> HostLoop | OverlapChoice | None:
            return loops.get(op.name) or self.fused.get(op.name)

        for loop, group in groupby(computing, key=home):
            if isinstance(loop, OverlapChoice):
                pair = (self.ops[loop.pair.first], self.ops[loop.pair.second])
                runs.append(Run(ops=pair, segment=False, fused=loop))
            elif loop is not None:
                runs.append(Run(ops=tuple(group), segment=False, loop=loop))
            else:
                runs += kernel_runs(group, self.mesh, fits, scope, made, along_one=self.along_one)
                continue
            made |= {name for op in runs[-1].ops for name in scope.written_temps(op)}
        return runs

    def last_uses(self, runs: Sequence[Run], scope: Scope, kept: Sequence[str]) -> dict[str, int]:
        """Storage -> the last run that reads or writes it, one past the end for what is kept."""
        last: dict[str, int] = {}
        for position, run in enumerate(runs):
            for op in run.ops:
                last |= {scope.storage(access.tensor): position for access in accesses(op)}
        return last | {scope.storage(name): len(runs) for name in kept}


@gc_paused
def lower_program(
    local: Localized,
    *,
    megakernel: bool,
    peer_memory: bool,
    is_encodable: Encodable | None = None,
    apart: Container[str] = (),
    max_streams: int = MAX_STREAMS,
    fuse: bool = False,
    rules: Sequence[RewriteRule] = (),
    kept: Container[str] = (),
    collectives: Container[str] = REACHING_ALL,
    along_one: bool = True,
    cost: Cost | None = None,
    is_usable: Callable[[RewriteRule], bool] | None = None,
    sum_parts: SumParts | None = None,
) -> HostProgram:
    """One rank's host program, not yet freed: run passes.run_passes on it.

    PlanError if a user asked for fused kernels without peer memory, or for no stream.

    Args:
        local: The program of one rank.
        megakernel: Whether runs of ops that one can do become segments.
        peer_memory: Whether ranks reach each other's: then, outside of loops, `collectives` stay in
            the kernel, and what the plan fuses is one kernel.
        is_encodable: Which ops of kinds that a megakernel has it can do, all if None; the others
            become library ops and collectives between segments.
        apart: Names of ops that become so too.
        max_streams: Streams on which the iterations of a host loop take turns.
        fuse: Joins library ops that one kernel can do, which rounds fewer intermediate results.
        rules: Ops that are the program of one become an op that is its graph, before anything else
            is lowered; with `megakernel` its graph's ops, where that makes the program better.
        kept: Names of ops that no rule replaces.
        collectives: Kinds of collectives that a megakernel does.
        along_one: Whether a segment's collectives are along one mesh axis.
        cost: By which it must be better, by default what the rules' kernels save.
        is_usable: Whether a rule's kernels pay at a program's sizes, always if None.
        sum_parts: With `fuse`: into how many parts the sums of a product are cut where the op
            behind it adds them up (split_sums.py); none are if None.
    """
    _require_lowerable(local, peer_memory, max_streams)
    fused = local.fused if peer_memory else ()

    def fits(op: Op, scope: Scope) -> bool:
        if not megakernel or op.name in apart:
            return False
        if kind_of(op).communicates:
            return peer_memory and op.kind in collectives
        if not kind_of(op).in_megakernel or is_encodable is None:
            return kind_of(op).in_megakernel
        strides = {access.tensor: scope.strides(access.tensor) for access in accesses(op)}
        return is_encodable(op, scope.tensors, strides)

    program = local.program
    stays = _unreplaced(local, fused) | {op.name for op in program.ops if op.name in kept}
    if rules and megakernel:
        program = apply_rules(program, rules, cost, stays)
    elif rules:
        program = fuse_graphs(program, rules, stays, is_usable)
    lowering = _Lowering(
        local, program, fits, max_streams, fuse, fused, along_one=along_one, sum_parts=sum_parts
    )
    return lowering.run()


def _require_lowerable(local: Localized, peer_memory: bool, max_streams: int) -> None:
    if type(max_streams) is not int or max_streams < 1:
        raise PlanError(
            f"max_streams {max_streams!r}",
            expected="a whole number of at least 1",
            remedy="use 1 to run the iterations of a host loop one after the other",
        )
    if not peer_memory and any(choice.forced for choice in local.fused):
        raise PlanError(
            'overlap "kernel" without peer memory',
            expected="GPUs that reach each other's memory",
            remedy='plan with overlap "sequential", or lower_program(..., peer_memory=True) there',
        )


def _unreplaced(local: Localized, fused: Sequence[OverlapChoice]) -> set[str]:
    """Names of ops that the plan has put into fused pairs and host loops: no rule replaces them."""
    pairs = {name for choice in fused for name in (choice.pair.first, choice.pair.second)}
    return pairs | {name for loop in local.host_loops for name, _ in loop.splits}


def _fused_nodes(choice: OverlapChoice, ops: Sequence[Op], scope: Scope) -> Iterator[Node]:
    """A pair as one node: what its operands stand for, the allocation of its result, itself."""
    pair = choice.pair
    matmul = ops[1] if pair.kind == "all_gather_matmul" else ops[0]
    x, w = ops[0].reads[0].tensor, matmul.reads[1].tensor
    for name in (x, w):
        yield from scope.named(name)
    yield from scope.allocated([pair.result])
    yield from scope.named(pair.result)
    yield FusedMatmul(
        kind=pair.kind,
        mesh_axis=pair.mesh_axis,
        x=x,
        w=w,
        out=pair.result,
        num_rows=pair.num_rows,
        replicated=pair.product.extents.replicated,
        forced=choice.forced,
    )


def _host_nodes(op: Op, scope: Scope) -> Iterator[Node]:
    """An op outside of segments: what its operands stand for, allocations of what it writes,
    itself, and a wait.
    """
    for access in op.reads:
        yield from scope.named(access.tensor)
    yield from scope.allocated(access.tensor for access in op.writes)
    for access in op.writes:
        yield from scope.named(access.tensor)
    axis = communication_axis(op)
    if not axis:
        yield LibraryOp(op=op)
        return
    yield Collective(
        kind=op.kind,  # type: ignore[arg-type]
        mesh_axis=axis,
        ins=tuple(access.tensor for access in op.reads),
        outs=tuple(access.tensor for access in op.writes),
        handle=op.name,
        attrs=tuple((key, value) for key, value in op.attrs if key != "mesh_axis"),
    )
    yield Wait(handle=op.name)
