"""Cuts a program into stages: runs of consecutive ops for consecutive groups of ranks, a pipeline.

Comes in: a whole program, the number of stages, and stages that a user fixed by op. Goes out: one
Stage each, whose program any planner call takes: what comes from another stage is an input of it,
what another stage needs an output. planner.py then divides a stage's program over its own ranks,
and hostir/lower/pipeline.py links the host programs. Next: planner.py.

Where to cut: only where no state is used on both sides and no view crosses. The largest stage is
made as small as can be, counted in the bytes that its ops move, weights above all: first by cuts
where the least crosses, as between the layers of a model, by others only if these leave the stages
out of balance.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from distmega.errors import PlanError, argument, counted
from distmega.program.types import Program, Tensor, accesses, verify_program
from distmega.sharding.search.cost import op_bytes

AXIS = "pp"
"""The mesh axis of stages."""

BALANCE = 1.5
"""How much larger than it need be the largest stage may be before more places are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A tensor goes from the stage that makes it to another one. final: as a result only, no op of
    the target reads it.
    """

    tensor: Tensor
    source: int
    target: int
    final: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of a pipeline. transfers: those of the whole pipeline, in the order in which their
    tensors are made; results: tensors that every stage has in the end.
    """

    index: int
    num_stages: int
    program: Program
    transfers: tuple[Transfer, ...] = ()
    results: tuple[Tensor, ...] = ()


def cut_positions(
    program: Program,
    num_stages: int,
    fixed: Mapping[str, int] | None = None,
    starts: Collection[str] = (),
) -> tuple[str, ...]:
    """Names of the ops with which the stages after the first begin.

    fixed: stages of ops, by name. starts: ops that a stage may begin with, where they are enough,
    such as the first of each layer; none of them: any. PlanError for an unknown op or stage, where
    fixed stages go backwards, or if there are too few places to cut.
    """
    if num_stages == 1:
        return ()
    fixed = fixed or {}
    low, high = _bounds(program, num_stages, fixed)
    crossing, running = _crossing_bytes(program), _running_bytes(program)
    if starts and len(starts) >= num_stages - 1:
        named = zip(crossing, program.ops, strict=True)
        crossing = [num_bytes if op.name in starts else None for num_bytes, op in named]
    largest_op = max(after - before for before, after in pairwise(running))
    ideal = max(running[-1] / num_stages, largest_op)
    found: list[tuple[int, list[int]]] = []
    for limit in sorted({num_bytes for num_bytes in crossing if num_bytes is not None}):
        allowed = [at for at, num in enumerate(crossing) if num is not None and num <= limit]
        if len(allowed) >= num_stages - 1:
            found += _balance(running, allowed, low, high)
        if found and min(found)[0] <= BALANCE * ideal:
            break
    if not found:
        raise PlanError(
            f"{counted(num_stages, 'stage')} of program {program.name!r}"
            + (f" with {counted(len(fixed), 'op')} fixed" if fixed else ""),
            expected="as many places between its ops where no state and no view would be cut",
            remedy=f"use a smaller {argument('pp')}" + (", or fix fewer ops" if fixed else ""),
        )
    return tuple(program.ops[at].name for at in min(found)[1])


def split_stages(program: Program, cuts: Sequence[str]) -> tuple[Stage, ...]:
    """The stages that begin with the ops named, after a first one."""
    names = [op.name for op in program.ops]
    missing = [name for name in cuts if name not in names]
    if missing:
        raise PlanError(
            f"stages that begin with ops {missing}",
            expected=f"ops of program {program.name!r}",
            remedy="cut the programs of one model at the same ops",
        )
    bounds = [0, *(names.index(name) for name in cuts), len(names)]
    home = {
        access.tensor: stage
        for stage, (start, stop) in enumerate(pairwise(bounds))
        for op in program.ops[start:stop]
        for access in op.writes
    }
    tensors = program.tensor_map()
    results = tuple(tensors[name] for name in program.outputs)
    transfers = _transfers(program, bounds, home)
    return tuple(
        Stage(
            index=stage,
            num_stages=len(bounds) - 1,
            program=_stage_program(program, stage, bounds, home, transfers),
            transfers=transfers,
            results=results,
        )
        for stage in range(len(bounds) - 1)
    )


def _bounds(
    program: Program, num_stages: int, fixed: Mapping[str, int]
) -> tuple[list[int], list[int]]:
    """The first and last place that each cut may have, so that fixed ops come into their stage."""
    positions = {op.name: at for at, op in enumerate(program.ops)}
    for name, stage in fixed.items():
        if name not in positions or not 0 <= stage < num_stages:
            raise PlanError(
                f"op {name!r} in stage {stage}",
                expected=f"an op of {program.name!r}, and a stage of 0 to {num_stages - 1}",
                remedy="name ops as explain prints them, and count stages from 0",
            )
    low = [
        max((positions[n] + 1 for n, s in fixed.items() if s <= cut), default=1)
        for cut in range(num_stages - 1)
    ]
    high = [
        min((positions[n] for n, s in fixed.items() if s > cut), default=len(program.ops) - 1)
        for cut in range(num_stages - 1)
    ]
    return low, high


def _crossing_bytes(program: Program) -> list[int | None]:
    """For each op, what would cross a cut before it; None where none can be."""
    tensors = program.tensor_map()
    views = {op.writes[0].tensor for op in program.ops if op.is_view}
    uses: dict[str, list[int]] = {}
    for at, op in enumerate(program.ops):
        for access in accesses(op):
            if tensors[access.tensor].role in ("temp", "state"):
                uses.setdefault(access.tensor, []).append(at)
    for name in program.outputs:
        if name in uses:
            uses[name].append(uses[name][-1])
    crossing: list[int | None] = [0] * len(program.ops)
    for name, positions in uses.items():
        rigid = tensors[name].role == "state" or name in views
        for at in range(positions[0] + 1, positions[-1] + 1):
            so_far = crossing[at]
            if so_far is not None:
                crossing[at] = None if rigid else so_far + tensors[name].num_bytes
    return [None, *crossing[1:]]


def _running_bytes(program: Program) -> list[int]:
    tensors = program.tensor_map()
    return [0, *accumulate(op_bytes(op, tensors) for op in program.ops)]


def _balance(
    running: Sequence[int], allowed: Sequence[int], low: Sequence[int], high: Sequence[int]
) -> list[tuple[int, list[int]]]:
    """The smallest largest stage and its cuts; nothing if there are too few places.

    best[at]: the largest of the stages before a cut at `at`, and the cuts so far.
    """
    best: dict[int, tuple[int, list[int]]] = {0: (0, [])}
    for least, most in zip(low, high, strict=True):
        further: dict[int, tuple[int, list[int]]] = {}
        for at in allowed:
            if least <= at <= most:
                options = [
                    (max(largest, running[at] - running[before]), [*cuts, at])
                    for before, (largest, cuts) in best.items()
                    if before < at
                ]
                if options:
                    further[at] = min(options)
        best = further
    ends = [
        (max(largest, running[-1] - running[before]), cuts)
        for before, (largest, cuts) in best.items()
    ]
    return [min(ends)] if ends else []


def _transfers(
    program: Program, bounds: Sequence[int], home: Mapping[str, int]
) -> tuple[Transfer, ...]:
    """What each stage needs of an earlier one, and of results what the others lack."""
    tensors = program.tensor_map()
    readers: dict[str, set[int]] = {name: set() for name in home if tensors[name].role == "temp"}
    for stage, (start, stop) in enumerate(pairwise(bounds)):
        for op in program.ops[start:stop]:
            for access in op.reads:
                if access.tensor in readers:
                    readers[access.tensor].add(stage)
    results = {name: set(range(len(bounds) - 1)) for name in program.outputs}
    return tuple(
        Transfer(
            tensor=tensors[name], source=home[name], target=target, final=target not in reading
        )
        for name, reading in readers.items()
        for target in sorted((reading | results.get(name, set())) - {home[name]})
    )


def _stage_program(
    program: Program,
    stage: int,
    bounds: Sequence[int],
    home: Mapping[str, int],
    transfers: Sequence[Transfer],
) -> Program:
    ops = program.ops[bounds[stage] : bounds[stage + 1]]
    used = {access.tensor for op in ops for access in accesses(op)}
    given = {t.tensor.name for t in transfers if t.target == stage} & used
    sent = [t.tensor.name for t in transfers if t.source == stage]
    own = [name for name in program.outputs if home.get(name) == stage]
    tensors = (
        Tensor(name=t.name, shape=t.shape, dtype=t.dtype, role="input") if t.name in given else t
        for t in program.tensors
        if t.name in used
    )
    num_stages = len(bounds) - 1
    return verify_program(
        Program(
            name=f"{program.name}.stage{stage}" if num_stages > 1 else program.name,
            tensors=tuple(tensors),
            ops=ops,
            outputs=tuple(dict.fromkeys((*sent, *own))),
        )
    )
