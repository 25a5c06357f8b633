"""Cuts a program into stages: runs of consecutive ops for consecutive groups of ranks, a pipeline.

Comes in: a whole program, the number of stages, and stages that a user fixed by op. Goes out: one
Stage each, whose program any planner call takes: what comes from another stage is an input of it,
what another stage needs an output. planner.py then divides a stage's program over its own ranks,
and hostir/lower/pipeline.py links the host programs. Next: planner.py.

Where to cut: only where no view crosses, no state is used on both sides and nothing is written on
both. The largest stage is made as small as can be, counted in the bytes that its ops move, weights
above all: first by cuts where the least crosses, as between the layers of a model, by others only
if these leave the stages out of balance.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from distmega.arguments import require_whole
from distmega.errors import PlanError, argument, counted
from distmega.program.types import Program, Tensor, accesses, verify_program
from distmega.sharding.layout.aliases import alias_roots
from distmega.sharding.search.cost import op_bytes

HELD = ("weight", "state")
"""Roles of what ranks of a stage hold from call to call."""

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
    require_whole("num_stages", num_stages, least=1, error=PlanError)
    fixed = fixed or {}
    if num_stages > max(len(program.ops), 1):
        raise _too_many_stages(program, num_stages, fixed)
    if num_stages == 1:
        return ()
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
        raise _too_many_stages(program, num_stages, fixed)
    return tuple(program.ops[at].name for at in min(found)[1])


def _too_many_stages(program: Program, num_stages: int, fixed: Mapping[str, int]) -> PlanError:
    return PlanError(
        f"{counted(num_stages, 'stage')} of program {program.name!r}"
        + (f" with {counted(len(fixed), 'op')} fixed" if fixed else ""),
        expected="as many places between its ops where no state and no view would be cut",
        remedy=f"use a smaller {argument('pp')}" + (", or fix fewer ops" if fixed else ""),
    )


def split_stages(program: Program, cuts: Sequence[str]) -> tuple[Stage, ...]:
    """The stages that begin with the ops named, after a first one. PlanError unless these are ops
    of the program in its order, or where two stages would use one state or write one tensor.
    """
    bounds = [0, *_positions(program, cuts), len(program.ops)]
    used = [
        {access.tensor for op in program.ops[start:stop] for access in accesses(op)}
        for start, stop in pairwise(bounds)
    ]
    home = {
        access.tensor: stage
        for stage, (start, stop) in enumerate(pairwise(bounds))
        for op in program.ops[start:stop]
        for access in op.writes
    }
    tensors = program.tensor_map()
    results = tuple(tensors[name] for name in program.outputs)
    for tensor in results:
        if tensor.role in HELD:
            holders = (stage for stage, names in enumerate(used) if tensor.name in names)
            home.setdefault(tensor.name, next(holders, 0))
    transfers = _transfers(program, used, home)
    return tuple(
        Stage(
            index=stage,
            num_stages=len(used),
            program=_stage_program(program, stage, bounds, home, transfers),
            transfers=transfers,
            results=results,
        )
        for stage in range(len(used))
    )


def _positions(program: Program, cuts: Sequence[str]) -> list[int]:
    """Places of the ops that stages begin with."""
    numbers = {op.name: at for at, op in enumerate(program.ops)}
    if any(name not in numbers for name in cuts):
        raise PlanError(
            f"stages that begin with ops {[name for name in cuts if name not in numbers]}",
            expected=f"ops of program {program.name!r}",
            remedy="cut the programs of one model at the same ops",
        )
    at = [0, *(numbers[name] for name in cuts)]
    if any(before >= after for before, after in pairwise(at)):
        raise PlanError(
            f"stages that begin with ops {list(cuts)}",
            expected="different ops behind the first, in the order of the program",
            remedy="sort them as the program has them, and leave out its first op",
        )
    for name, (first, last) in _undivided(program).items():
        cut = next((cut for cut in cuts if first < numbers[cut] <= last), None)
        if cut is not None:
            raise PlanError(
                f"a stage that begins with op {cut!r}, where {name!r} is used on both sides",
                expected="all uses of a state, and all writes of a tensor, in one stage",
                remedy="cut before them or after them",
            )
    return at[1:]


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


def _undivided(program: Program) -> dict[str, tuple[int, int]]:
    """First and last of the ops that must be in one stage, by what they share: uses of a state,
    writes of a temporary, by whatever name.
    """
    tensors, roots = program.tensor_map(), alias_roots(program)
    found: dict[str, tuple[int, int]] = {}
    for at, op in enumerate(program.ops):
        for access in accesses(op):
            root = roots[access.tensor]
            writes = access in op.writes and not op.is_view
            if writes or tensors[root].role == "state":
                found[root] = found.get(root, (at, at))[0], at
    return found


def _crossing_bytes(program: Program) -> list[int | None]:
    """For each op, what would cross a cut before it; None where none can be."""
    tensors = program.tensor_map()
    views = {op.writes[0].tensor for op in program.ops if op.is_view}
    uses: dict[str, list[int]] = {}
    for at, op in enumerate(program.ops):
        for access in accesses(op):
            if tensors[access.tensor].role == "temp":
                uses.setdefault(access.tensor, []).append(at)
    for name in program.outputs:
        if name in uses:
            uses[name].append(uses[name][-1])
    crossing: list[int | None] = [0] * len(program.ops)
    for name, positions in uses.items():
        for at in range(positions[0] + 1, positions[-1] + 1):
            so_far = crossing[at]
            if so_far is not None:
                crossing[at] = None if name in views else so_far + tensors[name].num_bytes
    for first, last in _undivided(program).values():
        crossing[first + 1 : last + 1] = [None] * (last - first)
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
    program: Program, used: Sequence[Collection[str]], home: Mapping[str, int]
) -> tuple[Transfer, ...]:
    """What each stage needs of an earlier one, and of results what the others lack. used: tensors
    of each stage's ops.
    """
    tensors = program.tensor_map()
    found: list[Transfer] = []
    for name, source in home.items():
        using = {stage for stage, names in enumerate(used) if name in names}
        needing = {*range(len(used))} if name in program.outputs else using
        held = using if tensors[name].role in HELD else {source}
        found += (
            Transfer(tensor=tensors[name], source=source, target=target, final=target not in using)
            for target in sorted(needing - held - {source})
        )
    return tuple(found)


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
    held = {t.name for t in program.tensors if t.role in HELD and t.name in used}
    own = [name for name in program.outputs if home.get(name) == stage or name in held]
    tensors = (
        Tensor(name=t.name, shape=t.shape, dtype=t.dtype, role="input") if t.name in given else t
        for t in program.tensors
        if t.name in used or t.name in own
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
