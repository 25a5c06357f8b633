"""Proves that a graph computes what a program does, or says why it is refused.

Comes in: a Program and a UGraph. Goes out: a Proof, or VerifyError. First over finite fields: both
are run on the same random residues, at small extents in which every divided axis has two parts and
every loop two iterations, as often as counting.py says. Then in half floats: the graph's results,
as a GPU would round them, must be as near to the program's in float64 as the program's own rounding
could bring its own, for inputs of several sizes, one of them large or masked by -inf, so that what
is equal in exact arithmetic but overflows or cancels is refused. Knows nothing of the search and
its laws.

What carries over from small extents to the stated ones is by form: programs and graphs speak of
axes alike along their whole extents. Constants, and what means divide by, are symbols, sampled like
inputs, so that the identity holds for all of them (symbols.py); where that fails they are those of
the stated extents. Checked once more with three parts, and those numbers.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from distmega.errors import VerifyError
from distmega.program.types import Program
from distmega.superopt.graph.arithmetic import Array, Float, Planes
from distmega.superopt.graph.axes import Axes, find_axes, shrink_program, used_part
from distmega.superopt.graph.interpret import run_graph
from distmega.superopt.graph.ugraph import UGraph
from distmega.superopt.graph.verify import verify_graph
from distmega.superopt.proof.counting import (
    NUM_SAMPLES,
    Bound,
    Counts,
    bound_of,
    inputs_of,
    num_symbol_tests,
    num_tests,
)
from distmega.superopt.proof.fields import P, Q, RandomFields, sample_planes
from distmega.superopt.proof.reference import run_program
from distmega.superopt.proof.rounding import Rounded, round_to
from distmega.superopt.symbols import Symbols, find_symbols

LOG2_BOUND = 40
"""A wrong graph passes with probability at most 2^-40."""

MOST_TESTS = 250_000
BATCH = 2048
FEW_TESTS = 32
"""Tests at least, and tests with three parts besides."""

FLOAT_EXTENT = 1024
FLOAT_PARTS = 4
"""Elements along a reduced axis, and its parts, in the comparison in floats."""

INPUT_SIZES = (1.0, 16.0, 2.0**-6)
"""Factors of normal inputs for the comparison in floats."""

MOST_SAMPLES = 64
"""Of inputs of each size in the comparison in floats, where no operand has more than FLOAT_EXTENT
elements in all of them together; one of larger operands.
"""

LARGE = 128.0
"""The factor of one input beside others of 1: its exponentials overflow."""

OFFSET = 4.0
"""Added to normal inputs in one more comparison: there differences of sums cancel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What was shown, and how.

    tests valid ones mod p and q with the given extents; a wrong graph passes with probability at
    most 2^-log2_bound. terms, degree, inner, squares, roots: counting.Bound.
    uninterpreted: functions that were sampled at random. compared: cases in floats; worst: the
    largest error of the graph, as a share of what the program's own rounding allows. free: axes of
    the program (axes.py) for whose extents above 1 all of this holds but the comparison in floats;
    constants: those for which it holds whatever they are. `confirm` makes that comparison.
    """

    p: int
    q: int
    seed: int
    tests: int
    log2_bound: int
    terms: float
    degree: float
    inner: float
    squares: float
    roots: float
    extents: tuple[tuple[str, int], ...]
    uninterpreted: tuple[str, ...]
    compared: int
    worst: float
    free: tuple[str, ...]
    constants: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Match:
    """A program beside a graph: which of the graph's axes each of the program's is."""

    program: Program
    axes: Axes
    graph: UGraph
    parts: Mapping[str, tuple[str, ...]]


def prove(program: Program, graph: UGraph, seed: int = 0) -> Proof:
    """The proof. VerifyError with the first reason against it."""
    verify_graph(graph)
    match = _match(program, graph)
    small, extents = _shrunk(match, 2)
    known = find_symbols(program, match.axes)
    proven = _test_symbols(match, small, known, seed) if known.values else None
    symbols = known.values if proven else frozenset[float]()
    bound, wanted, names = proven or _test_numbers(match, small, seed)
    rng = np.random.default_rng(seed)
    _test(match, _shrunk(match, 3)[0], FEW_TESTS, rng)
    compared, worst = _compare(match, rng, _run_rounded)
    bound_axes = set() if proven else known.axes
    return Proof(
        p=P, q=Q, seed=seed, tests=wanted, log2_bound=LOG2_BOUND, terms=bound.terms,
        degree=bound.degree, inner=bound.inner, squares=bound.squares, roots=bound.roots,
        extents=tuple(extents.items()), uninterpreted=tuple(sorted(names)), compared=compared,
        worst=worst, free=tuple(a for a in match.axes.extents if a not in bound_axes),
        constants=tuple(sorted(symbols & known.literals)),
    )  # fmt: skip


def confirm(program: Program, graph: UGraph, proof: Proof) -> Proof:
    """The proof for other extents of free axes and other constants of program and graph: a few
    tests over finite fields, since their identity is proven, and the comparison in floats.
    VerifyError where the graph is not as good here.
    """
    verify_graph(graph)
    match, rng = _match(program, graph), np.random.default_rng(proof.seed)
    _test(match, _shrunk(match, 2)[0], FEW_TESTS, rng)
    compared, worst = _compare(match, rng, _run_rounded)
    return replace(proof, compared=compared, worst=worst)


def axis_parts(program: Program, graph: UGraph) -> Mapping[str, tuple[str, ...]]:
    """Which axes of the graph each axis of the program is, outer first. VerifyError where they are
    not the same tensors.
    """
    return _match(program, graph).parts


def _test_numbers(match: _Match, small: UGraph, seed: int) -> tuple[Bound, int, set[str]]:
    """The proof with the constants that program and graph have."""
    bound = _bound(match, small)
    wanted = num_tests(bound, LOG2_BOUND, P, Q)
    if not 0 < wanted <= MOST_TESTS:
        raise _refused(match.graph, f"{wanted or 'no number of'} tests for a bound of "
                       f"2^-{LOG2_BOUND}", f"at most {MOST_TESTS}")  # fmt: skip
    wanted = max(wanted, FEW_TESTS)
    return bound, wanted, _test(match, small, wanted, np.random.default_rng(seed))


def _test_symbols(
    match: _Match, small: UGraph, known: Symbols, seed: int
) -> tuple[Bound, int, set[str]] | None:
    """The proof with constants that stand for any number; None where that is none, as of a graph
    whose constants were computed from several of the program's.
    """
    bound = _bound(match, small, known.values)
    wanted = num_symbol_tests(bound, LOG2_BOUND, P, Q)
    if not 0 < wanted <= MOST_TESTS:
        return None
    wanted = max(wanted, FEW_TESTS)
    try:
        names = _test(match, small, wanted, np.random.default_rng(seed), known.values)
    except VerifyError:
        return None
    return bound, wanted, names


def _refused(graph: UGraph, found: str, expected: str) -> VerifyError:
    return VerifyError(
        f"graph {graph.name!r}: {found}", expected=expected, remedy="use the program as it is"
    )


def _match(program: Program, graph: UGraph) -> _Match:
    """Compares tensors and finds the axes. VerifyError where they don't fit."""
    program = used_part(program)
    axes, known = find_axes(program), program.tensor_map()
    if graph.outputs != program.outputs:
        raise _refused(graph, f"outputs {graph.outputs}", f"{program.outputs}")
    extents, parts = dict(graph.extents), dict[str, tuple[str, ...]]()
    for tensor in graph.tensors:
        if tensor.role == "temp" and tensor.name not in program.outputs:
            continue
        mine = known.get(tensor.name)
        shape = tuple(math.prod(extents[a] for a in dim) for dim in tensor.dims)
        if mine is None or (mine.shape, mine.dtype) != (shape, tensor.dtype):
            raise _refused(graph, f"{tensor.name!r}: {tensor.dtype}{shape}", f"{mine}")
        if tensor.name not in axes.tensors:
            raise _refused(graph, f"{tensor.name!r} in use", "what the program's outputs depend on")
        for whole, dim in zip(axes.tensors[tensor.name], tensor.dims, strict=True):
            for axis, found in _aligned(axes.extents, whole, extents, dim):
                if parts.setdefault(axis, found) != found:
                    what = f"axis {axis!r} is {parts[axis]} and {found}"
                    raise _refused(graph, what, "one division of an axis")
    missing = [axis for axis in axes.extents if axis not in parts]
    if any(extents.get(axis) != axes.extents[axis] for axis in missing):
        raise _refused(graph, f"nothing along {missing}", "all axes of the program's tensors")
    parts |= {axis: (axis,) for axis in missing}  # of a matrix that is read along these too
    return _Match(program, axes, graph, parts)


def _aligned(
    whole: Mapping[str, int], names: Sequence[str], inner: Mapping[str, int], dim: Sequence[str]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """For each of a dim's axes in the program those in the graph, of the same extent in all."""
    left = list(dim)
    for name in names:
        size, taken = 1, list[str]()
        while size < whole[name] and left:
            taken.append(left.pop(0))
            size *= inner[taken[-1]]
        yield name, tuple(taken)


def _divided(graph: UGraph) -> dict[str, set[str]]:
    """Axes that are read as each other, as those of a matrix that is multiplied by itself."""
    tensors = graph.tensor_map()
    groups = {axis: {axis} for axis, _ in graph.extents}
    for kernel in graph.kernels:
        for load in kernel.loads:
            for mine, whole in zip(load.dims, tensors[load.tensor].dims, strict=True):
                for a, b in zip(mine, whole, strict=False):
                    if a in groups and b in groups and groups[a] is not groups[b]:
                        groups[a] |= groups[b]
                        for member in groups[b]:
                            groups[member] = groups[a]
    return groups


def _with_extents(graph: UGraph, extents: Mapping[str, int], parts: Mapping[str, int]) -> UGraph:
    """The graph with other extents of its axes, and other numbers of parts of the divided ones."""

    def changed(axis: str, count: int) -> tuple[str, int]:
        return axis, parts.get(axis, count)

    kernels = tuple(
        replace(
            kernel,
            grid=tuple(changed(*pair) for pair in kernel.grid),
            loop=changed(*kernel.loop) if kernel.loop else None,
        )
        for kernel in graph.kernels
    )
    return replace(graph, extents=tuple((a, extents[a]) for a, _ in graph.extents), kernels=kernels)


def _shrunk(match: _Match, parts: int) -> tuple[UGraph, dict[str, int]]:
    """The graph with that many parts of one element each of a divided axis, and as many elements
    of others; of a reduced and divided one two elements a part.
    """
    graph = match.graph
    divided = {axis for kernel in graph.kernels for axis in kernel.parts}
    looped = {k.loop[0] for k in graph.kernels if k.loop and _reduces(graph, k.loop[0])}
    groups = _divided(graph)
    extents = {}
    for axis, _ in graph.extents:
        wide = bool(groups[axis] & looped) and not _is_outer(match, axis)
        extents[axis] = 2 * parts if wide else parts
    small = _with_extents(graph, extents, dict.fromkeys(divided, parts))
    return verify_graph(small), extents


def _is_outer(match: _Match, axis: str) -> bool:
    """Whether an axis is one part of a divided axis of the program."""
    return any(axis in found and len(found) > 1 for found in match.parts.values())


def _reduces(graph: UGraph, axis: str) -> bool:
    return any(axis in op.reduced for k in graph.kernels for op in k.ops)


def _small_program(match: _Match, small: UGraph) -> Program:
    sizes = dict(small.extents)
    extents = {a: math.prod(sizes[x] for x in found) for a, found in match.parts.items()}
    return shrink_program(match.program, match.axes, extents)


def _inputs(program: Program, graph: UGraph) -> dict[str, tuple[int, ...]]:
    used = {access.tensor for op in program.ops for access in op.reads}
    known = {tensor.name for tensor in graph.tensors}
    return {t.name: t.shape for t in program.tensors if t.role != "temp" and t.name in used | known}


def _bound(match: _Match, small: UGraph, symbols: Collection[float] = ()) -> Bound:
    """What the difference of program and graph is made of, at most."""
    program, counts = _small_program(match, small), Counts(symbols)
    inputs = {name: inputs_of(shape) for name, shape in _inputs(program, small).items()}
    theirs = run_program(program, inputs, counts, match.program)
    ours = run_graph(small, inputs, counts)
    bounds = [bound_of(theirs[name], ours[name]) for name in program.outputs]
    fields = ([getattr(b, name) for b in bounds] for name in Bound.__slots__)
    return Bound(*map(max, fields))


def _test(
    match: _Match,
    small: UGraph,
    wanted: int,
    rng: "np.random.Generator",
    symbols: Collection[float] = (),
) -> set[str]:
    """Runs so many valid tests; the uninterpreted functions. VerifyError on a mismatch."""
    program, valid, sampled, names = _small_program(match, small), 0, 0, set[str]()
    shapes = _inputs(program, small)
    most = min(BATCH, -(-wanted // NUM_SAMPLES)) if symbols else BATCH
    size = min(FEW_TESTS, wanted, most)
    while valid < wanted:
        fields = RandomFields(size, rng, symbols)
        inputs = {name: sample_planes(shape, size, rng) for name, shape in shapes.items()}
        ours = run_graph(small, inputs, fields)
        theirs = run_program(program, inputs, fields, match.program)
        for name in match.program.outputs:
            wrong = (ours[name][0] != theirs[name][0]).reshape(size, -1).any(axis=1)
            if (wrong & ~fields.invalid).any():
                raise _refused(match.graph, f"output {name!r} differs over finite fields",
                               "the program's results")  # fmt: skip
        names |= fields.names
        valid += min(most, int((~fields.invalid).sum()))
        sampled += size
        if sampled > 16 * wanted + 64 * BATCH:
            raise _refused(match.graph, f"{valid} of {sampled} tests say something", f"{wanted}")
        few = valid < sampled // 16  # of a batch of any size at most `most` say something
        size = min(BATCH, 2 * size) if few else min(most, max(wanted - valid, FEW_TESTS))
    return names


def is_as_good(
    program: Program, graph: UGraph, as_program: Callable[[UGraph], Program], seed: int = 0
) -> bool:
    """Whether the graph, as another program, keeps within the first one's rounding in floats.
    as_program makes that program of the graph at any extents.
    """
    match, rng = _match(program, graph), np.random.default_rng(seed)

    def run(small: UGraph, inputs: dict[str, Planes]) -> dict[str, Planes]:
        return run_program(as_program(small), inputs, Rounded())

    try:
        _compare(match, rng, run)
    except VerifyError:
        return False
    return True


def _compare(
    match: _Match,
    rng: "np.random.Generator",
    run: Callable[[UGraph, dict[str, Planes]], dict[str, Planes]],
) -> tuple[int, float]:
    """Compares in floats, along reduced axes at large extents; how many cases said something, and
    the largest share of the allowed error. VerifyError if the graph is not as good as the program.
    """
    graph = _float_graph(match)
    program = _small_program(match, graph)
    dtypes = {tensor.name: tensor.dtype for tensor in program.tensors}
    shapes = _inputs(program, graph)
    cases = [*((size, 0.0, "") for size in INPUT_SIZES), (1.0, OFFSET, "")]
    cases += [(alone, 0.0, name) for name in shapes for alone in (LARGE, -math.inf)]
    compared, worst = 0, 0.0
    elements = max(map(math.prod, shapes.values()), default=1)
    num_samples = max(1, min(MOST_SAMPLES, FLOAT_EXTENT // elements))
    for size, offset, alone in cases:
        values: dict[str, Array] = {}
        for name, shape in shapes.items():
            sampled = rng.standard_normal((num_samples, *shape))
            if not alone or (name == alone and size == LARGE):
                sampled = size * sampled + offset
            elif name == alone:
                sampled[..., shape[-1] // 2 :] = size
            values[name] = round_to(sampled.astype(np.float32), dtypes[name])
        wide: dict[str, Planes] = {n: (x.astype(np.float64),) for n, x in values.items()}
        halves: dict[str, Planes] = {n: (x, np.zeros(x.shape)) for n, x in values.items()}
        with np.errstate(all="ignore"):
            exact = run_program(program, wide, Float(), match.program)
            theirs = run_program(program, halves, Rounded(), match.program)
            ours = run(graph, halves)
        for name in program.outputs:
            share = _share(match.graph, name, exact[name][0], theirs[name], ours[name][0])
            compared += share is not None
            worst = max(worst, share or 0.0)
    if not compared:
        raise _refused(match.graph, "no inputs for which the program itself stays finite", "some")
    return compared, worst


def _run_rounded(graph: UGraph, inputs: dict[str, Planes]) -> dict[str, Planes]:
    return run_graph(graph, inputs, Rounded())


def _share(
    graph: UGraph,
    name: str,
    exact: Array,
    theirs: Planes,
    ours: Array,
) -> float | None:
    """The graph's largest error as a share of the program's bound; None where the program itself
    overflows or has no bound.
    """
    known = np.isfinite(theirs[0]) & np.isfinite(exact)
    if (known & ~np.isfinite(ours)).any():
        raise _refused(graph, f"output {name!r} overflows", "results as finite as the program's")
    known &= np.isfinite(theirs[1])
    if not known.any():
        return None
    error = np.abs(ours[known].astype(np.float64) - exact[known])
    share = float((error / (theirs[1][known] + np.finfo(np.float32).tiny)).max())
    if share > 1.0:
        raise _refused(
            graph, f"output {name!r} is {share:.3g} times as far off as the program can be", "1"
        )
    return share


def _float_graph(match: _Match) -> UGraph:
    """The graph at two elements along axes that are not reduced, at FLOAT_EXTENT or few more along
    those that are, in at most FLOAT_PARTS parts.
    """
    graph, extents, parts = match.graph, dict[str, int](), dict[str, int]()
    groups = _divided(graph)
    full = {a for k in graph.kernels for op in k.ops for a in op.reduced}
    full |= {
        x
        for op in match.program.ops
        for axis in op.axes
        if axis.role == "reduce"
        for a in match.axes.ops[op.name][axis.name]
        for x in match.parts[a]
    }
    inner = {a for k in graph.kernels for axis in k.parts for a in groups[axis]}
    for axis, extent in graph.extents:
        if not groups[axis] & full:
            extents[axis] = parts[axis] = 2
            continue
        count = max([k.parts.get(a, 1) for k in graph.kernels for a in groups[axis]], default=1)
        most = FLOAT_PARTS if count == extent or _is_outer(match, axis) else FLOAT_EXTENT
        extents[axis] = extent
        while extents[axis] > most and extents[axis] % 2 == 0:
            extents[axis] //= 2
        if axis in inner:
            parts[axis] = min(count, FLOAT_PARTS) if extents[axis] % FLOAT_PARTS == 0 else count
            if extents[axis] % parts[axis]:
                extents[axis] = extent
    return _with_extents(graph, extents, parts)
