"""Plans a program on a mesh: `plan_program` is the door to this folder.

Comes in: a program, a mesh, a machine, layouts a user fixed, a memory limit. Goes out: a Plan,
which says for every op how its loop is divided, for every tensor where it lives, and which
collectives run. Annotations are propagated first, the rest is searched, one mesh axis after the
other. Next: finalize.py.
"""

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from distmega.arguments import require_switch, shown
from distmega.collecting import gc_paused
from distmega.errors import PlanError
from distmega.program.gather_early import gather_early
from distmega.program.kinds import is_known, kind_of, user_kinds
from distmega.program.types import Access, Op, Program, accesses
from distmega.sharding import late
from distmega.sharding.finalize import finalize_allocations, finalize_loops
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import (
    REPLICATED,
    Chunks,
    Layout,
    Shard,
    fits,
    resolve_layout,
)
from distmega.sharding.local_ops import LocalOps
from distmega.sharding.memory import measure_memory
from distmega.sharding.overlap.pairs import CHEAPEST, OverlapRequest, fused_pairs
from distmega.sharding.overlap.plan import plan_overlaps
from distmega.sharding.plan import PlanFacts
from distmega.sharding.resolve.decompose import split_biases
from distmega.sharding.resolve.propagate import Hints, propagate_annotations
from distmega.sharding.resolve.resolve import (
    InexactSplitError,
    Resolver,
    Splits,
)
from distmega.sharding.search.cost import Machine, op_time_us, residency_prices_us
from distmega.sharding.search.options import SplitOption
from distmega.sharding.search.search import AxisSearch, NoOptionError, Problem
from distmega.sharding.search.signatures import OptionTable
from distmega.sharding.search.steps import Situation
from distmega.sharding.streams.stream_plan import resolve_chunks
from distmega.sharding.streams.verify_chunks import verify_chunks
from distmega.sharding.verify import verify_plan_parts

logger = logging.getLogger(__name__)

RESIDENCY_FACTORS = (1.0, 8.0, 64.0, 512.0)
"""Multiples of the usual price of residency, tried in turn until a plan fits a memory limit."""

SLACK = 0.005
"""Share of a program's time that early gathers may take more: of few rows nothing is saved, and a
launch more counts, but what is planned for few is run for many, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(PlanFacts):
    """How a program runs on a mesh, op by op and tensor by tensor.

    Attributes:
        program: What was planned.
        mesh: The ranks.
        machine: Whose cost model chose.
        steps: Ops and collectives in execution order, on local tensors.
        locals: Local tensor -> the tensor of the program and the layout in which it holds it.
        layouts: Tensor of the program -> the layout that it has under its own name.
        allocations: What a rank stores, by local tensor; final.
        loops: Iteration axes of each op after its divisions.
        host_loops: Which steps run together in chunks.
        memory: Bytes that a rank needs.
        annotations: Layouts that the user fixed.
        streams: Chunks that the user asked for.
        refused_chunks: (local tensor, op) -> why the op does not run in the chunks it comes in.
        prices_us: What holding a weight or state whole was priced at.
        overlaps: How matmuls and their collectives run together.
    """

    def explain(self) -> str:
        """Every tensor and op, axis by axis: what was chosen, what it costs, and what else was
        possible; ops of equal layers once.
        """
        return late.explain_plan(self)


class _Planner:
    """One call of plan_program."""

    def __init__(
        self,
        program: Program,
        mesh: DeviceMesh,
        machine: Machine,
        annotations: Mapping[str, Layout],
        overlap: OverlapRequest,
        *,
        spreads: bool,
    ) -> None:
        self.overlap = overlap
        self.mesh, self.machine = mesh, machine
        self.set_program(program)
        self.pins = self.resolve_pins(annotations)
        self.streams = self.resolve_streams(annotations)
        self.hints: Hints = propagate_annotations(
            program, mesh, self.table, self.pins, spreads=spreads
        )
        changed = split_biases(program, self.hints, self.pins)
        if changed is not program:
            program = self.set_program(changed)
            self.hints = propagate_annotations(
                program, mesh, self.table, self.pins, spreads=spreads
            )
        self.given = self.given_layouts()
        self.prices = residency_prices_us(program, machine)
        self.demands: dict[tuple[str, str], tuple[list[str], ...]] = {
            (op.name, axis): self.demanded_axes(op, axis, size)
            for axis, size in mesh.axes
            for op in program.ops
            if size > 1
        }

    def set_program(self, program: Program) -> Program:
        self.program, self.tensors = program, program.tensor_map()
        self.table = OptionTable.of(program)
        return program

    def resolve_pins(self, annotations: Mapping[str, Layout]) -> dict[str, Layout]:
        """Annotations with chunks filled in. PlanError for a tensor that the program lacks, or an
        annotation that is no layout.
        """
        for name, layout in annotations.items():
            if not isinstance(layout, Layout):
                raise PlanError(
                    f"annotation {shown(layout)} of tensor {shown(name)}",
                    expected="a layout",
                    remedy="make it with shard, replicate or stream",
                )
            if name not in self.tensors:
                raise PlanError(
                    f"annotation of tensor {shown(name)}",
                    expected=f"a tensor of program {self.program.name!r}",
                    remedy="name one of its tensors",
                )
        return {
            name: resolve_layout(self.tensors[name], layout, self.mesh)
            for name, layout in annotations.items()
            if not layout.is_open
        }

    def resolve_streams(self, annotations: Mapping[str, Layout]) -> dict[str, Chunks]:
        """The chunks that annotations ask for."""
        found = {
            name: resolve_chunks(self.tensors[name], layout, self.mesh)
            for name, layout in annotations.items()
        }
        return {name: chunks for name, chunks in found.items() if chunks is not None}

    def given_layouts(self) -> dict[str, Layout]:
        """Layouts not to be searched: annotated; inputs and outputs are whole by default."""
        given = {t.name: REPLICATED for t in self.program.tensors if t.role == "input"}
        given |= dict.fromkeys(self.program.outputs, REPLICATED)
        return given | self.pins

    def demanded_axes(self, op: Op, axis: str, size: int) -> tuple[list[str], ...]:
        """Iteration axes of which an attention over states must use one, in groups, best first.

        It must divide by an axis of the states it reads (kv heads), or else by one of both its
        first operand and its result (query heads per kv head, query rows): any other way has every
        rank do the same work on the whole state. PlanError if there is none; annotations along the
        mesh axis, and of such a state, leave it to them.
        """
        states = [a for a in op.reads if self.tensors[a.tensor].role == "state"]
        annotated = any(isinstance(layout.at(axis), Shard) for layout in self.pins.values())
        annotated = annotated or any(state.tensor in self.pins for state in states)
        if not kind_of(op).mixes_values or not states or annotated:
            return ()
        names = _shared_parallel_axes(op, (op.reads[0], *op.writes))
        options = self.table.options(op, size)
        first = _shared_parallel_axes(op, (op.reads[0], *states, *op.writes))
        if not names or any(options.by_axis(name) for name in names):
            return first, names
        extents = {name: op.axis(name).extent for name in names}
        largest = max(n for n in range(1, size) if any(fits(e, n) for e in extents.values()))
        words = {"h": "kv heads", "g": "query heads per kv head", "m": "query rows"}
        described = [f"{extent} {words.get(n, n)}" for n, extent in extents.items() if extent > 1]
        have = ", ".join(described) or "one head"
        raise PlanError(
            f"{axis}={size} can't divide {op.kind} {op.name!r} over {states[0].tensor!r} of {have}",
            expected=f"at most {axis}={largest}, where less than half of the heads is padding",
            remedy=f"use {axis}={largest} or less",
        )

    def plan(self, factor: float, banned: Mapping[str, tuple[str, ...]]) -> Plan:
        """A plan with a multiple of the usual residency price; some (op, axis) excluded."""
        chosen: dict[str, Splits] = {op.name: () for op in self.program.ops}
        for axis, size in self.mesh.axes:
            if size > 1:
                found = self.search(axis, factor, chosen, banned)
                for name, option in found.items():
                    if option.axis:
                        chosen[name] = (*chosen[name], (axis, option))
        try:
            return build_plan(
                self.program,
                self.mesh,
                self.machine,
                chosen,
                self.given,
                annotations=self.pins,
                streams=self.streams,
                prices_us={name: factor * price for name, price in self.prices.items()},
                table=self.table,
                overlap=self.overlap,
            )
        except InexactSplitError as error:
            logger.info("op %s not divided by %s: %s", error.op, error.axis, error.reason)
            more = {**banned, error.op: (*banned.get(error.op, ()), error.axis)}
            return self.plan(factor, more)

    def search(
        self,
        axis: str,
        factor: float,
        chosen: Mapping[str, Splits],
        banned: Mapping[str, tuple[str, ...]],
    ) -> dict[str, SplitOption]:
        """Options of all ops along one mesh axis, given those along the axes before it."""
        closed: dict[str, tuple[str, ...]] = {}
        taken: dict[str, tuple[tuple[str, int], ...]] = {}
        for op in self.program.ops:
            hints = self.hints[op.name]
            others = [name for other, name in hints.items() if other != axis]
            used = [option.axis for _, option in chosen[op.name]]
            shut = [name for name in (*others, *used) if name != hints.get(axis)]
            closed[op.name] = tuple(dict.fromkeys((*shut, *banned.get(op.name, ()))))
            taken[op.name] = tuple((o.axis, o.chunk) for _, o in chosen[op.name])
        fixed = {
            name: layout.at(axis)
            for name, layout in self.given.items()
            if name in self.pins or self.tensors[name].role != "temp"
        }
        wanted = {op.name: self.wanted(op, axis, closed[op.name]) for op in self.program.ops}
        prices = {name: round(1000 * factor * price) for name, price in self.prices.items()}
        careful = False
        while True:
            situation = Situation(
                pins=fixed, taken=taken, closed=closed, wanted=wanted, prices_ns=prices
            )
            problem = Problem(
                program=self.program,
                axis=axis,
                num_ranks=self.mesh.size(axis),
                machine=self.machine,
                situation=situation,
            )
            try:
                return AxisSearch(problem, self.table, careful=careful).run()
            except NoOptionError as error:
                around = self.around(error.op)
                if any(wanted[name] for name in around):
                    wanted = {n: () if n in around else axes for n, axes in wanted.items()}
                elif not careful:
                    careful = True
                else:
                    raise self.unfit(error, axis) from error

    def wanted(self, op: Op, axis: str, closed: Sequence[str]) -> tuple[str, ...]:
        """Iteration axes that an op should be divided by: as annotated around it, or demanded."""
        if axis in self.hints[op.name]:
            return (self.hints[op.name][axis],)
        options = self.table.options(op, self.mesh.size(axis))
        for group in self.demands[op.name, axis]:
            left = [name for name in group if name not in closed and options.by_axis(name)]
            if left:
                return tuple(left)
        return ()

    def around(self, op: Op) -> set[str]:
        """The producers of an op's operands and the other users of its weights and states: what
        they give or how they hold these may fit the op nowhere.
        """
        reads = {access.tensor for access in op.reads}
        held = {
            access.tensor
            for access in accesses(op)
            if self.tensors[access.tensor].role != "temp" and access.tensor not in self.given
        }
        return {
            other.name
            for other in self.program.ops
            if other is not op
            and (
                reads.intersection(access.tensor for access in other.writes)
                or held.intersection(access.tensor for access in other.reads)
            )
        }

    def unfit(self, error: NoOptionError, axis: str) -> PlanError:
        """The error of an op that annotations leave no way."""
        op = error.op
        reasons = "; ".join(f"{name}: {why}" for name, why in error.options.rejected)
        touched = [access.tensor for access in accesses(op)]
        return PlanError(
            f"op {op.name!r} fits mesh axis {axis!r} of {self.mesh.size(axis)} in no way"
            f" ({reasons or 'every axis contradicts the layouts around it'})",
            expected="annotations that the op can read and write",
            remedy=f"leave out the annotation of one of {touched}",
        )


def _shared_parallel_axes(op: Op, operands: Iterable[Access]) -> list[str]:
    """Parallel axes that index every one of the operands."""
    used = [{name for index in access.dims for name in index.axes} for access in operands]
    return [a.name for a in op.axes if a.role == "parallel" and all(a.name in u for u in used)]


def build_plan(
    program: Program,
    mesh: DeviceMesh,
    machine: Machine,
    chosen: Mapping[str, Splits],
    given: Mapping[str, Layout],
    *,
    annotations: Mapping[str, Layout],
    prices_us: Mapping[str, float],
    table: OptionTable,
    streams: Mapping[str, Chunks] | None = None,
    overlap: OverlapRequest = CHEAPEST,
) -> Plan:
    """The plan that follows from how each op is divided: collectives, allocations, loops, memory.

    given: layouts of inputs, outputs and other tensors that are fixed. streams: chunks asked for;
    overlap: how matmuls and collectives shall run together.
    Host loops come first, then allocations, which nothing changes afterwards. Raises
    InexactSplitError if padding of a division would reach a result.
    """
    schedule = Resolver(program, mesh, machine, table, chosen, given).run()
    local = LocalOps(program.tensor_map(), mesh, schedule.locals)
    schedule, stream_plan, overlaps = plan_overlaps(
        program, local, machine, schedule, streams or {}, overlap
    )
    loops = stream_plan.loops
    allocations = finalize_allocations(program, mesh, schedule, stream_plan.chunks)
    plan = Plan(
        program=program,
        mesh=mesh,
        machine=machine,
        steps=schedule.steps,
        locals=schedule.locals,
        layouts=schedule.homes,
        allocations=allocations,
        loops=finalize_loops(mesh, schedule, table, loops),
        host_loops=loops,
        memory=measure_memory(program, schedule, allocations, loops, fused_pairs(overlaps)),
        annotations=annotations,
        streams=streams or {},
        refused_chunks=stream_plan.refused,
        prices_us=prices_us,
        overlaps=overlaps,
    )
    verify_plan_parts(schedule, plan.loops, allocations, mesh, table)
    verify_chunks(program, local, schedule, allocations, loops)
    return plan


@gc_paused
def plan_program(
    program: Program,
    mesh: DeviceMesh,
    machine: Machine,
    annotations: Mapping[str, Layout] | None = None,
    memory_limit_bytes: int | None = None,
    overlap: OverlapRequest = CHEAPEST,
    *,
    spreads: bool = True,
) -> Plan:
    """The cheapest plan found. Inputs and outputs are whole on every rank unless annotated.

    spreads: what annotated tensors say of the ops around them goes on to the ops around those;
    otherwise costs decide there. memory_limit_bytes: what one rank may hold (inputs, weights,
    states, temporaries at their peak).
    overlap: how matmuls run beside collectives, by default as the cost model expects to be fastest.
    PlanError: an annotation, `overlap` or the limit can't be met, or a mesh axis has more ranks
    than the heads of the program's attention allow.

    Rows that nobody reads are not computed (gather_early), where that is expected to be no slower:
    the plan's `program` then is another one with the same inputs, weights, states, outputs and
    annotated tensors.
    """
    _check_types(program, mesh, machine, {} if annotations is None else annotations)
    _check_kinds(program)
    _check_limit(memory_limit_bytes)
    require_switch("spreads", spreads, error=PlanError)
    start = time.perf_counter()
    plans: list[Plan] = []
    for each in _forms(program, mesh, machine, annotations or {}):
        planner = _Planner(each, mesh, machine, annotations or {}, overlap, spreads=spreads)
        plans.append(_fitting_plan(planner, memory_limit_bytes))
    found = [plan for plan in plans if _fits(plan, memory_limit_bytes)]
    if not found:
        raise PlanError(
            f"program {program.name!r} needs"
            f" {min(plan.memory.total_bytes for plan in plans)} bytes per rank on {mesh}",
            expected=f"at most {memory_limit_bytes} bytes per rank",
            remedy="use more ranks, a shorter context or a smaller model",
        )
    least_us = min(plan.time_us for plan in found)
    plan = next(plan for plan in reversed(found) if plan.time_us <= (1 + SLACK) * least_us)
    took = 1000 * (time.perf_counter() - start)
    logger.info("planned %s on %s in %.0f ms", program.name, mesh, took)
    return plan


def _forms(
    program: Program, mesh: DeviceMesh, machine: Machine, annotations: Mapping[str, Layout]
) -> tuple[Program, ...]:
    """The program as it is, and with its gathers early if that is no slower on one rank; alone
    where there is no other rank.
    """
    early = gather_early(program, annotations)
    more_us = _ops_us(early, program, machine) - _ops_us(program, early, machine)
    if early is program or more_us > SLACK * _ops_us(program, None, machine):
        return (program,)
    return (program, early) if mesh.num_ranks > 1 else (early,)


def _ops_us(program: Program, other: Program | None, machine: Machine) -> float:
    """Time of the ops on one rank, but for those of another program."""
    tensors = program.tensor_map()
    known = {op.name: op for op in other.ops} if other else {}
    times = (op_time_us(op, tensors, machine) for op in program.ops if known.get(op.name) != op)
    return math.fsum(times)


def _fitting_plan(planner: _Planner, memory_limit_bytes: int | None) -> Plan:
    """The plan of the lowest price of residency that keeps a memory limit, or the smallest one."""
    smallest: Plan | None = None
    for factor in RESIDENCY_FACTORS:
        plan = planner.plan(factor, {})
        if _fits(plan, memory_limit_bytes):
            return plan
        if smallest is None or plan.memory.total_bytes < smallest.memory.total_bytes:
            smallest = plan
    assert smallest is not None
    return smallest


def _fits(plan: Plan, memory_limit_bytes: int | None) -> bool:
    return memory_limit_bytes is None or plan.memory.total_bytes <= memory_limit_bytes


def _check_kinds(program: Program) -> None:
    """PlanError for an op of a kind that nothing defines, as a written program may have one."""
    for op in program.ops:
        if not is_known(op.kind):
            raise PlanError(
                f"op {op.name!r} of kind {op.kind!r}",
                expected=f"one of {', '.join(user_kinds())}",
                remedy="correct its text, or define the kind before it is planned",
            )


def _check_limit(memory_limit_bytes: object) -> None:
    if memory_limit_bytes is None or (type(memory_limit_bytes) is int and memory_limit_bytes > 0):
        return
    raise PlanError(
        f"memory_limit_bytes {shown(memory_limit_bytes)}",
        expected="a whole number of bytes, at least 1",
        remedy="leave it out for no limit",
    )


def _check_types(program: object, mesh: object, machine: object, annotations: object) -> None:
    """PlanError for what a caller is likely to mix up."""
    remedies: dict[type, tuple[object, str]] = {
        Program: (program, "call build of the ProgramBuilder"),
        DeviceMesh: (mesh, "give DeviceMesh(tp=2)"),
        Machine: (machine, "give CPU, H100 or H200"),
        Mapping: (annotations, 'give layouts by tensor name, {"w": shard(0, "tp")}'),
    }
    for kind, (given, remedy) in remedies.items():
        if not isinstance(given, kind):
            raise PlanError(
                f"{type(given).__name__} in place of a {kind.__name__}",
                expected=f"a {kind.__name__}",
                remedy=remedy,
            )
