"""A rule at other sizes: the same program and graph with other extents and constants.

Comes in: a RewriteRule, extents of its program's axes, constants. Goes out: the rule for these,
confirmed, or the reason against it. Only what its proof leaves free changes (Proof.free,
Proof.constants); a mean's share follows its extent. Kernels are divided anew, by the model that
the search has; how they were launched for the rule's own sizes says nothing here.
Next: matching.py, which finds the sizes.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product

from distmega.errors import VerifyError
from distmega.program.kinds import kind_of
from distmega.sharding.search.cost import DEVICES, DeviceRates
from distmega.superopt.graph.axes import Axes, find_axes, shrink_program
from distmega.superopt.graph.cost import graph_us, kernel_us, program_us, work_of
from distmega.superopt.graph.regrid import Parts, free_axes, regrid_kernel, with_kernels
from distmega.superopt.graph.text import parse_graph, print_graph
from distmega.superopt.graph.ugraph import (
    LOOPS,
    SHARED_BYTES,
    Kernel,
    UGraph,
    joint_extents,
    shared_bytes,
)
from distmega.superopt.proof.equivalence import axis_parts, confirm
from distmega.superopt.rules import RewriteRule
from distmega.superopt.symbols import (
    find_symbols,
    graph_with_constants,
    program_with_constants,
)

Sizes = tuple[tuple[str, int], ...]
Constants = tuple[tuple[float, float], ...]

MOST_BLOCKS = 4096
LEAST_TILE = 16
"""Elements of a part of an axis that a graph divides, at least."""


@cache
def rule_axes(rule: RewriteRule) -> Axes:
    """Axes of the rule's program."""
    return find_axes(rule.program)


@cache
def resized_rule(rule: RewriteRule, sizes: Sizes, constants: Constants = ()) -> RewriteRule:
    """The rule with these extents of its program's axes, and these constants in place of its own;
    not confirmed yet, but with its predicted times. VerifyError where the proof does not leave
    them free, or no division of the graph has them.
    """
    axes, proof = rule_axes(rule), rule.proof
    extents = dict(axes.extents) | dict(sizes)
    fixed = [a for a, size in axes.extents.items() if extents[a] != size and a not in proof.free]
    bound = [old for old, new in constants if new != old and old not in proof.constants]
    if fixed or bound:
        shown = ", ".join([f"axis {a} of {extents[a]}" for a in fixed] + [f"{x}" for x in bound])
        raise _refused(rule, shown, f"what its proof leaves free: {_free(rule)}")
    if any(extents[axis] < 2 for axis in axes.extents):
        raise _refused(rule, f"extents {extents}", "at least 2 along each axis of the rule")
    changed = _changed_constants(rule, axes, extents, dict(constants))
    if extents == axes.extents and all(old == new for old, new in changed.items()):
        return rule
    program = program_with_constants(shrink_program(rule.program, axes, extents), changed)
    graph = graph_with_constants(_resized_graph(rule, extents), changed)
    machine = DEVICES[rule.machine]
    return replace(
        rule,
        program=program,
        graph=print_graph(graph),
        program_us=program_us(program, machine),
        graph_us=round(graph_us(graph, machine), 6),
        launches=(),
        library_us=0.0,
        measured_us=0.0,
    )


@cache
def confirmed_rule(rule: RewriteRule, sizes: Sizes, constants: Constants = ()) -> RewriteRule:
    """resized_rule, compared with its program in floats. VerifyError where it is not as good."""
    made = resized_rule(rule, sizes, constants)
    if made == rule:
        return rule
    return replace(made, proof=confirm(made.program, parse_graph(made.graph), rule.proof))


def _free(rule: RewriteRule) -> str:
    names = [f"axis {axis}" for axis in rule.proof.free]
    return ", ".join([*names, *map(str, rule.proof.constants)]) or "nothing"


def _refused(rule: RewriteRule, found: str, expected: str) -> VerifyError:
    return VerifyError(
        f"rule {rule.name!r}: {found}",
        expected=expected,
        remedy="run `distmega superopt` for a program of these sizes",
    )


def _changed_constants(
    rule: RewriteRule,
    axes: Axes,
    extents: Mapping[str, int],
    constants: Mapping[float, float],
) -> dict[float, float]:
    """All constants that change, by their absolute values: those given, and the shares of means.
    VerifyError where one number would become two.
    """
    known = find_symbols(rule.program, axes)
    changed = dict(constants)
    for op in rule.program.ops:
        if not kind_of(op).scales_elements:
            continue
        old = new = 1
        for axis in axes.ops[op.name]["r"]:
            old *= axes.extents[axis]
            new *= extents[axis]
        if old == new:
            continue
        given = changed.setdefault(1.0 / old, 1.0 / new)
        stated = 1.0 / old in known.literals and 1.0 / old not in constants
        if given != 1.0 / new or stated:
            raise _refused(rule, f"constant {1.0 / old} is also a mean's share", "two numbers")
    return changed


def _resized_graph(rule: RewriteRule, extents: Mapping[str, int]) -> UGraph:
    """The rule's graph at these extents, its kernels divided again."""
    graph = parse_graph(rule.graph)
    old, sizes = dict(graph.extents), dict(graph.extents)
    for axis, names in axis_parts(rule.program, graph).items():
        if len(names) == 1:
            sizes[names[0]] = extents[axis]
        elif names:
            outer, *others = names
            whole, inner = extents[axis], _inner(old, others)
            parts = _parts(whole, old[outer])
            if whole != old[outer] * inner and (len(others) > 1 or not parts):
                raise _refused(rule, f"axis {axis} of {whole}", "one that can be divided")
            if whole != old[outer] * inner:
                sizes[outer], sizes[others[0]] = parts, whole // parts
    made = replace(graph, extents=tuple(sizes.items()))
    machine = DEVICES[rule.machine]
    return with_kernels(made, [_divided(made, kernel, machine) for kernel in graph.kernels])


def _inner(extents: Mapping[str, int], names: Sequence[str]) -> int:
    size = 1
    for name in names:
        size *= extents[name]
    return size


def _parts(whole: int, wanted: int) -> int:
    """How many parts of at least LEAST_TILE elements are the nearest below or at `wanted`; 0 for
    none.
    """
    fits = [n for n in range(2, wanted + 1) if whole % n == 0 and whole // n >= LEAST_TILE]
    return max(fits, default=0)


def _divided(graph: UGraph, kernel: Kernel, machine: DeviceRates) -> Kernel:
    """A kernel with the numbers of blocks and iterations of least predicted time. VerifyError where
    none fits an SM.
    """
    found = [
        (float(kernel_us(work_of(graph, one), machine)[0]), number, one)
        for number, one in enumerate(_divisions(graph, kernel))
        if shared_bytes(graph, one) <= SHARED_BYTES
    ]
    if not found:
        raise VerifyError(
            f"graph {graph.name!r}: no division of kernel {kernel.name!r} at {graph.extents}",
            expected=f"blocks of at most {SHARED_BYTES} shared bytes",
            remedy="use the program as it is",
        )
    return min(found)[2]


def _divisions(graph: UGraph, kernel: Kernel) -> Iterator[Kernel]:
    """The kernel with all grids of powers of two and of parts that are such, and all numbers of
    iterations of the search.
    """
    extents = joint_extents(graph)
    looped = kernel.loop[0] if kernel.loop else ""
    axes = [axis for axis in free_axes(graph, kernel) if axis != looped]
    loops = [n for n in (1, *LOOPS) if looped and extents[looped] % n == 0] or [1]
    loops = [n for n in loops if n == 1 or extents[looped] // n >= LEAST_TILE] or loops
    for parts in product(*(_counts(extents[axis]) for axis in axes)):
        if math.prod(parts) <= MOST_BLOCKS:
            grid: Parts = tuple(zip(axes, parts, strict=True))
            for count in loops:
                yield regrid_kernel(graph, kernel, grid, count)


def _counts(extent: int) -> list[int]:
    """Numbers of parts: powers of two that divide an extent, and those that leave such parts."""
    powers = [1 << n for n in range(extent.bit_length()) if extent % (1 << n) == 0]
    return sorted({*powers, *(extent // power for power in powers)})
