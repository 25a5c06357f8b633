"""The verifier: right graphs pass, wrong ones are refused, and what it accepts is equal exactly."""

import math
from dataclasses import replace

import numpy as np
import pytest

from distmega.errors import DistmegaError, ProgramError, VerifyError
from distmega.kernels.machines import H200
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Program
from distmega.superopt.graph.arithmetic import Float
from distmega.superopt.graph.interpret import run_graph
from distmega.superopt.graph.text import parse_graph
from distmega.superopt.graph.ugraph import BlockOp, UGraph
from distmega.superopt.graph.verify import verify_graph
from distmega.superopt.proof import equivalence
from distmega.superopt.proof.counting import Bound, num_tests, reject_probability
from distmega.superopt.proof.equivalence import prove
from distmega.superopt.proof.fields import NOTHING, ROOT, P, Q, RandomFields, sample_planes
from distmega.superopt.proof.reference import run_program
from distmega.superopt.proof.rounding import Rounded
from distmega.superopt.search.schedule import SearchLimits
from distmega.superopt.search.search import Search
from tests.superopt import programs
from tests.superopt.exact import Digits, random_fractions, same

QUICK = SearchLimits(num_scheduled=24, num_kept=4, splits=(4,))


def graphs_of(program: Program) -> list[UGraph]:
    search = Search(program, H200, QUICK)
    for _ in search.run():
        pass
    return [candidate.graph for candidate in search.candidates()]


def with_op(graph: UGraph, kernel: int, index: int, op: BlockOp) -> UGraph:
    """The graph with another op in one place."""
    ops = list(graph.kernels[kernel].ops)
    ops[index] = op
    kernels = list(graph.kernels)
    kernels[kernel] = replace(kernels[kernel], ops=tuple(ops))
    return replace(graph, kernels=tuple(kernels))


CHANGES = (
    ("*", "+"), ("+", "*"), ("-", "+"), ("/", "*"), ("rsqrt", "silu"), ("silu", "exp"),
    ("exp", "silu"), ("a0", "a1"), ("a1", "a0"), ("(a0", "(2.0 * a0"), ("a1)", "a1 + 1.0)"),
    ("(a0 ", "((0.0 - a0) "), ("1e-05", "0.5"), ("0.125", "0.25"), ("0.00390625", "0.0078125"),
)  # fmt: skip
"""What a mutation replaces in an expression, once."""


def mutate(graph: UGraph, rng: np.random.Generator) -> UGraph:
    """A graph with one op changed: an expression, an operand, a contraction's operand, a kind."""
    kernel = int(rng.integers(len(graph.kernels)))
    ops = graph.kernels[kernel].ops
    index = int(rng.integers(len(ops)))
    op = ops[index]
    if op.kind == "map" and rng.random() < 0.7:
        old, new = CHANGES[int(rng.integers(len(CHANGES)))]
        places = [n for n in range(len(op.expr)) if op.expr.startswith(old, n)]
        if not places:
            return graph
        place = places[int(rng.integers(len(places)))]
        text = op.expr[:place] + new + op.expr[place + len(old) :]
        return with_op(graph, kernel, index, replace(op, expr=text))
    if op.kind in ("sum", "max") and rng.random() < 0.5:
        kind = {"sum": "max", "max": "sum"}[op.kind]
        return with_op(graph, kernel, index, replace(op, kind=kind))
    args = list(op.args)
    known = [load.name for load in graph.kernels[kernel].loads]
    known += [other.name for other in ops[:index]]
    args[int(rng.integers(len(args)))] = known[int(rng.integers(len(known)))]
    return with_op(graph, kernel, index, replace(op, args=tuple(args)))


def small(program: Program, graph: UGraph) -> tuple[Program, UGraph]:
    match = equivalence._match(program, graph)
    made, _ = equivalence._shrunk(match, 2)
    return equivalence._small_program(match, made), made


def differs(program: Program, graph: UGraph, seed: int) -> bool:
    """Whether they differ on some inputs, in float64."""
    tiny, made = small(program, graph)
    rng = np.random.default_rng(seed)
    inputs = {
        t.name: (rng.standard_normal((8, *t.shape)),) for t in tiny.tensors if t.role != "temp"
    }
    with np.errstate(all="ignore"):
        ours = run_graph(made, inputs, Float())
        theirs = run_program(tiny, inputs, Float(), program)
    return any(
        not np.allclose(ours[n][0], theirs[n][0], rtol=1e-9, atol=1e-9, equal_nan=True)
        for n in program.outputs
    )


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.nightly)])
def test_wrong_graphs_are_refused_every_time(count: int):
    """So many single mistakes in found graphs that are mistakes; not one is accepted."""
    rng = np.random.default_rng(5)
    cases = [
        (program, graph)
        for build in (programs.norm_linear, programs.lora, programs.gated, programs.attention)
        for program in [build()]
        for graph in graphs_of(program)[:3]
    ]
    planted = invalid = 0
    while planted < count:
        program, graph = cases[int(rng.integers(len(cases)))]
        wrong = mutate(graph, rng)
        if wrong == graph:
            continue
        try:
            verify_graph(wrong)
            if not differs(program, wrong, planted):
                continue
        except DistmegaError:
            invalid += 1
            planted += 1
            with pytest.raises(DistmegaError):
                prove(program, wrong)
            continue
        planted += 1
        with pytest.raises(VerifyError):
            prove(program, wrong)
    assert invalid < 0.7 * count


def refusal(program: Program, graph: UGraph) -> str:
    """Why it is not proven; empty if it is."""
    try:
        prove(program, graph)
    except VerifyError as error:
        return str(error)
    return ""


def check_random_program(seed: int) -> tuple[int, int]:
    """A right and a wrong graph of one program: what is proven is equal in exact arithmetic, what
    is not differs there or overflows; how many of each.
    """
    program = programs.random_program(seed)
    rng, proven, refused = np.random.default_rng(seed), 0, 0
    try:
        graphs = graphs_of(program)[:2]
    except ProgramError:
        return 0, 0  # it multiplies a result by itself along other axes
    for graph in graphs:
        for candidate in (graph, mutate(graph, rng), mutate(graph, rng)):
            try:
                tiny, made = small(program, verify_graph(candidate))
            except DistmegaError:
                continue
            inputs = {
                t.name: random_fractions(t.shape, rng) for t in tiny.tensors if t.role != "temp"
            }
            digits = Digits()
            try:
                ours = run_graph(made, inputs, digits)
                theirs = run_program(tiny, inputs, digits, program)
            except ZeroDivisionError:
                continue
            equal = all(same(ours[n], theirs[n]) for n in program.outputs)
            reason = refusal(program, candidate)
            proven, refused = proven + (not reason), refused + bool(reason)
            assert equal or reason, seed
            stated = any(word in reason for word in ("overflows", "far off", "finite", "tests"))
            assert not equal or not reason or stated, (seed, reason)
    return proven, refused


def test_what_is_accepted_is_equal_in_exact_arithmetic():
    counts = [check_random_program(seed) for seed in range(60)]
    assert sum(proven for proven, _ in counts) > 50
    assert sum(refused for _, refused in counts) > 25


def test_an_op_that_no_output_depends_on_is_left_out():
    """It reads y along other axes than the product does, of which extents are then not equal."""
    assert check_random_program(908)[0]


@pytest.mark.nightly
def test_what_is_accepted_is_equal_in_exact_arithmetic_at_length():
    counts = [check_random_program(seed) for seed in range(60, 1100)]
    assert sum(proven for proven, _ in counts) > 1000
    assert sum(refused for _, refused in counts) > 400


def test_primes_are_what_the_theorem_asks():
    def is_prime(n: int) -> bool:
        return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))

    assert is_prime(P)
    assert is_prime(Q)
    assert (P - 1) % Q == 0
    assert P % 4 == Q % 4 == 3
    assert 2**31 - P < 4096
    assert pow(ROOT, Q, P) == 1 != ROOT


def test_fields_keep_the_laws():
    rng = np.random.default_rng(1)
    fields = RandomFields(64, rng)
    a, b, c = (sample_planes((3,), 64, rng) for _ in range(3))

    def equal(x, y) -> bool:
        return (x[0] == y[0]).all()

    both = fields.add(a, b)
    assert equal(fields.exp(both), fields.mul(fields.exp(a), fields.exp(b)))
    assert equal(fields.mul(fields.div(a, b), b), a)
    assert equal(fields.mul(a, fields.add(b, c)), fields.add(fields.mul(a, b), fields.mul(a, c)))
    assert equal(fields.sqrt(fields.mul(a, b)), fields.mul(fields.sqrt(a), fields.sqrt(b)))
    assert not equal(fields.exp(a), fields.exp(b))
    assert (fields.exp(a)[1] == NOTHING).all()
    stacked = tuple(np.stack([x, y, z], axis=1) for x, y, z in zip(a, b, c, strict=True))
    first = tuple(np.stack([x, y], axis=1) for x, y in zip(a, b, strict=True))
    best = fields.extreme(first, (1,), "max")
    rest = tuple(np.stack([x, y], axis=1) for x, y in zip(best, c, strict=True))
    assert equal(fields.extreme(rest, (1,), "max"), fields.extreme(stacked, (1,), "max"))
    assert not fields.invalid.any()
    zero = fields.sub(a, a)
    fields.div(a, zero)
    assert fields.invalid.all()


@pytest.mark.parametrize(
    ("terms", "tests"), [(1.0, 2), (32.0, 874), (2.0, 41)], ids=["polynomial", "softmax", "exp"]
)
def test_number_of_tests_follows_from_the_theorem(terms: float, tests: int):
    bound = Bound(terms=terms, degree=4.0, inner=8.0, squares=0.0, roots=0.0)
    assert num_tests(bound, 40, P, Q) == tests
    chance = reject_probability(bound, P, Q)
    assert (1.0 - chance) ** tests <= 2.0**-40
    assert chance <= 1.0 / terms


def test_roots_and_squares_ask_for_more_tests_and_too_many_for_none():
    plain = Bound(terms=8.0, degree=4.0, inner=8.0, squares=0.0, roots=3.0)
    assert num_tests(replace(plain, squares=1.0), 40, P, Q) > num_tests(plain, 40, P, Q)
    assert num_tests(replace(plain, roots=40.0), 40, P, Q) == 0


def test_exact_but_overflowing_graph_is_refused():
    """Softmax without its largest score is equal in exact arithmetic, and overflows."""
    program = programs.attention()
    refusals = []
    for graph in graphs_of(program):
        if all(op.kind != "max" for kernel in graph.kernels for op in kernel.ops):
            with pytest.raises(VerifyError, match="overflows") as caught:
                prove(program, graph)
            refusals.append(caught)
    assert refusals


@pytest.mark.parametrize("seed", range(6))
def test_a_graph_that_overflows_for_some_elements_alone_is_refused(seed: int):
    """A softmax of one element is 1, whatever that is; without its maximum it is inf / inf for one
    in a hundred x, and half of those of 2^-6.
    """
    p = ProgramBuilder("one")
    program = p.build(p.softmax(p.input("x", (32, 1)).map("rsqrt(a0 * a0 + 1e-06)")))
    near = {"x": (np.full((1, 32, 1), 1e-3, np.float32), np.zeros((1, 32, 1)))}
    for graph in graphs_of(program):
        with np.errstate(all="ignore"):
            (found,) = run_graph(graph, near, Rounded()).values()
        if not np.isfinite(found[0]).all():
            with pytest.raises(VerifyError, match="overflows"):
                prove(program, graph, seed)
            return
    pytest.fail("no graph overflows")


def test_cancelling_graph_is_refused():
    """x w as (x + 4096) w - 4096 w is equal in exact arithmetic, and cancels in f32."""
    p = ProgramBuilder("cancels")
    x, w = (p.input(name, (16, 64), "f32") for name in ("x", "w"))
    program = p.build(x * w + 0.0)
    (graph, *_) = graphs_of(program)
    (op,) = graph.kernels[0].ops
    wrong = replace(op, expr="(((a0 + 4096.0) * a1) - (4096.0 * a1))")
    prove(program, graph)
    with pytest.raises(VerifyError, match="far off"):
        prove(program, with_op(graph, 0, 0, wrong))


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_stored_values_are_within_the_bound_of_their_rounding(dtype: str):
    """Also those half way between two that the type holds, just above a power of two."""
    steps = np.arange(4096, dtype=np.float32)
    exact = np.concatenate([1.0 + steps / 4096, 0.75 + steps / 2**20]).astype(np.float32)
    stored, bound = Rounded().store((exact, np.zeros(exact.shape)), dtype)
    error = np.abs(stored.astype(np.float64) - exact)
    assert (error <= bound).all()
    assert (error > 0.49 * bound).any(), "the bound is not twice what it need be"


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_small_stored_values_are_within_the_bound_too(dtype: str):
    """Below its normal range a type has steps of one size, whatever the value."""
    exact = np.ldexp(np.linspace(1.0, 2.0, 999, dtype=np.float32), np.arange(-60, -3)[:, None])
    stored, bound = Rounded().store((exact, np.zeros(exact.shape)), dtype)
    assert (np.abs(stored.astype(np.float64) - exact) <= bound).all()


def test_a_graph_whose_f16_results_are_small_is_proven():
    """The squares of the smallest inputs are below the normal range of f16."""
    p = ProgramBuilder("squares")
    x, a, b = (p.input(name, (16, 16), "f16") for name in "xab")
    program = p.build(p.linear(x, a).map("a0 * a0 + a1 * a1", p.linear(x, b)))
    assert all(prove(program, graph).worst <= 1.0 for graph in graphs_of(program))


def test_an_output_that_is_only_rounded_is_proven():
    """A residual that leaves beside the norm's linear layer."""
    p = ProgramBuilder("residual")
    x, r = (p.input(name, (2, 256), "bf16") for name in ("x", "r"))
    total = x + r
    h = p.rms_norm(total, p.weight("g", (256,), "bf16"), 1e-6)
    program = p.build(p.linear(h, p.weight("w", (64, 256), "bf16")), total)
    proofs = [prove(program, graph) for graph in graphs_of(program)]
    assert proofs
    assert all(proof.worst <= 1.0 for proof in proofs)


def test_functions_of_constants_alone_are_proven():
    """exp(-1) is another root in each test."""
    p = ProgramBuilder("shifted")
    x = p.input("x", (6, 8))
    program = p.build(p.reduce(x.map("exp(a0 - 1.0)"), 1).map("exp(2.0) * a0", name="y"))
    graph = parse_graph(
        "ugraph shifted\n  axis m:6\n  axis k:8\n  input x: f32[m, k]\n  temp y: f32[m]\n"
        "  kernel k0 grid m:2\n    load x = x(m, k) imap 0 fmap -\n"
        "    before v0 = map[m, k] 'exp(a0)' x\n    before v1 = sum[m] v0 over k\n"
        "    before y = map[m] 'exp((-1.0)) * (exp(2.0) * a0)' v1\n"
        "    store y omap 0 fmap -\n  return y\n"
    )
    assert not refusal(program, graph)
    wrong = replace(graph.kernels[0].ops[-1], expr="exp(1.0) * (exp(2.0) * a0)")
    assert "differs over finite fields" in refusal(program, with_op(graph, 0, 2, wrong))


def test_uninterpreted_functions_are_named():
    p = ProgramBuilder("opaque")
    x = p.input("x", (16, 64), "f32")
    program = p.build(x.map("relu(a0) + 1.0") * 3.0)
    assert prove(program, graphs_of(program)[0]).uninterpreted == ("relu",)


def test_other_shapes_and_outputs_are_refused():
    program = programs.gated()
    graph = graphs_of(program)[0]
    with pytest.raises(VerifyError, match="outputs"):
        prove(programs.lora(), graph)
    tensors = tuple(replace(t, dtype="f16") for t in graph.tensors)
    with pytest.raises(VerifyError, match="f16"):
        prove(program, replace(graph, tensors=tensors))
