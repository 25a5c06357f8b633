"""What the search finds: graphs of known structure, each once, in the same order every time."""

from contextlib import nullcontext

import pytest

from distmega.errors import ProgramError, RequestError, VerifyError
from distmega.kernels.machines import H200
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Program
from distmega.superopt.graph.axes import find_axes
from distmega.superopt.graph.cost import graph_us, program_us
from distmega.superopt.graph.text import print_graph
from distmega.superopt.graph.ugraph import BlockOp, Kernel, UGraph, rescalings
from distmega.superopt.programs import read_case
from distmega.superopt.proof.equivalence import prove
from distmega.superopt.search.egraph import EGraph
from distmega.superopt.search.generate import Forms, Generator
from distmega.superopt.search.laws import saturate
from distmega.superopt.search.schedule import SearchLimits
from distmega.superopt.search.search import Candidate, Search
from distmega.superopt.search.terms import output_terms
from tests.calls import num_calls
from tests.superopt import programs

QUICK = SearchLimits(num_scheduled=60, num_kept=40)


def found(program: Program, limits: SearchLimits = QUICK) -> list[Candidate]:
    search = Search(program, H200, limits)
    for _ in search.run():
        pass
    return search.candidates()


def generator(program: Program) -> Generator:
    graph = EGraph()
    terms = output_terms(program, find_axes(program))
    roots = [graph.add_term(term) for term in terms.values()]
    saturate(graph)
    return Generator(graph, tuple(roots))


def kinds(kernel: Kernel) -> list[str]:
    return [op.kind for op in kernel.ops]


def op_of(graph: UGraph, name: str) -> BlockOp:
    return next(op for kernel in graph.kernels for op in kernel.ops if op.name == name)


def test_norm_factor_moves_behind_the_linear_layer():
    program = programs.norm_linear()

    def is_moved(graph: UGraph) -> bool:
        """A contraction with w of what has no norm's factor, then a map that has it."""
        if len(graph.kernels) != 1:
            return False
        ops = graph.kernels[0].ops
        last = ops[-1]
        products = {op.name for op in ops if op.kind == "contract" and "w" in op.args}
        return "rsqrt" in last.expr and bool(products & set(last.args))

    moved = [c for c in found(program) if is_moved(c.graph)]
    assert moved
    prove(program, moved[0].graph)


def test_low_rank_layer_becomes_one_contraction_over_joined_operands():
    program = programs.lora()
    joined = [
        c.graph
        for c in found(program)
        if sum(op.kind == "cat" for kernel in c.graph.kernels for op in kernel.ops) == 2
    ]
    assert joined
    last = joined[0].kernels[-1].ops[-1]
    assert last.kind == "contract"
    assert last.name == program.outputs[0]
    assert all(op_of(joined[0], arg).kind == "cat" for arg in last.args)
    prove(program, joined[0])


def test_attention_is_split_over_its_context_and_rescaled():
    program = programs.attention(ctx=4096, heads=2)
    split = [
        c
        for c in found(program)
        if len(c.graph.kernels) == 2
        and "t_o" in dict(c.graph.kernels[0].grid)
        and {"max", "contract"} <= set(kinds(c.graph.kernels[0]))
        and {"max", "map", "contract"} <= set(kinds(c.graph.kernels[1]))
    ]
    assert split
    assert split[0].time_us < program_us(program, H200)
    prove(program, split[0].graph)


def test_attention_in_one_kernel_keeps_a_running_maximum():
    program = programs.attention(ctx=256, heads=256)
    running = [
        c.graph
        for c in found(program)
        if len(c.graph.kernels) == 1 and rescalings(c.graph.kernels[0])
    ]
    assert running
    prove(program, running[0])


def test_a_tensor_of_the_program_is_stored_in_its_type():
    """With many rows a norm's result comes to tensor cores as the program has it."""
    candidates = found(programs.norm_linear(rows=16, k=4096, n=4096))
    apart = [c.graph for c in candidates if len(c.graph.kernels) == 2]
    read = {
        (tensor.role, tensor.dtype)
        for graph in apart
        for tensor in graph.tensors
        if tensor.name in graph.kernels[1].ops[0].args
        and graph.kernels[1].ops[0].kind == "contract"
    }
    assert ("temp", "bf16") in read
    assert ("temp", "f32") not in read
    alone = [c.time_us for c in candidates if len(c.graph.kernels) == 1]
    assert candidates[0].time_us < min(alone)


def test_gate_and_up_share_a_kernel():
    program = programs.gated()
    best = found(program)[0].graph
    (kernel,) = best.kernels
    assert {load.tensor for load in kernel.loads} == {"x", "gate", "up"}
    assert "silu" in kernel.ops[-1].expr
    assert kinds(kernel).count("contract") == 2
    prove(program, best)


def test_search_gives_the_same_every_time():
    texts = [[print_graph(c.graph) for c in found(programs.norm_linear())] for _ in range(2)]
    assert texts[0] == texts[1]


def test_search_can_be_left_at_any_time():
    search = Search(programs.lora(), H200, QUICK)
    run = search.run()
    for _ in range(3):
        next(run)
    assert search.candidates()


@pytest.mark.parametrize("build", [programs.norm_linear, programs.lora, programs.gated])
def test_recipes_come_once_and_within_the_bound(build):
    made = generator(build())
    least = made.least()
    sizes = {}
    for bound in range(least, least + 3):
        recipes = list(made.recipes(bound))
        assert len({frozenset(r.steps) for r in recipes}) == len(recipes)
        assert all(len(r.steps) <= bound for r in recipes)
        assert all(
            len(set(dict(r.steps))) == len(r.steps) for r in recipes
        )  # a value is computed once
        sizes[bound] = {frozenset(r.steps) for r in recipes}
    assert sizes[least] <= sizes[least + 1] <= sizes[least + 2]
    assert sizes[least + 2]


def test_a_class_that_becomes_another_while_its_users_are_compared():
    """a = b makes f(a) and f(b) one, which is b: the class of f(a) has more users, and stays."""
    graph = EGraph()
    a, b = (graph.add("input", (name, (("m",),))) for name in "ab")
    of_a, of_b = (graph.add("call", "relu(a0)", x) for x in (a, b))
    graph.merge(of_b, b)
    for text in ("sin(a0)", "cos(a0)", "abs(a0)", "erf(a0)"):
        graph.add("call", text, of_a)
    powers = [graph.add("exp", None, x) for x in (a, b)]
    graph.rebuild()
    graph.merge(a, b)
    graph.rebuild()
    assert len({*map(graph.find, (a, b, of_a, of_b))}) == 1
    assert len({*map(graph.find, powers)}) == 1


def test_differences_of_equals_fill_no_graph():
    """x less its mean, along one element: nobody knows that it is 0, but for the laws of 0."""
    p = ProgramBuilder("one")
    x, w, b = p.input("x", (64, 1)), p.weight("w", (1,)), p.weight("b", (1,))
    program = p.build(p.layer_norm(x, w, b, 1e-5))
    graph = EGraph(3000)
    for term in output_terms(program, find_axes(program)).values():
        graph.add_term(term)
    assert num_calls(lambda: saturate(graph)) < 2_000_000
    assert graph.num_nodes < 2 * graph.max_nodes


def test_forms_that_are_not_kept_are_not_made():
    """Of 24 forms of each of two operands few pairs are among the 24 of the fewest functions."""
    program = read_case("ntrans hidden=64 rows=1")
    graph = EGraph(700)
    roots = [graph.add_term(t) for t in output_terms(program, find_axes(program)).values()]
    saturate(graph)
    assert num_calls(lambda: Forms(graph, [graph.find(root) for root in roots])) < 220_000


def test_candidates_are_faster_than_the_program_and_cost_what_is_said():
    program = programs.lora()
    best = found(program)[0]
    assert best.time_us < program_us(program, H200)
    assert graph_us(best.graph, H200) == pytest.approx(best.time_us, rel=1e-6)


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda p, x: p.argmax(x), "argmax_0"),
        (lambda p, x: p.slice(x, 1, 0, 4), "slice_0"),
        (lambda p, x: p.linear(p.linear(x, x, spec="m k, n k -> m n", name="gram"), x,
                               spec="m n, n k -> m k", name="again"), "again"),
    ],
)  # fmt: skip
def test_what_is_outside_the_bounds_is_named(build, named: str):
    p = ProgramBuilder("outside")
    x = p.input("x", (8, 16))
    made = build(p, x)
    program = p.build(made)
    if named == "again":
        found(program)  # a matrix times itself is inside
        return
    with pytest.raises(ProgramError, match=f"op '{named}'"):
        Search(program, H200, QUICK)


def test_states_and_long_programs_are_refused():
    p = ProgramBuilder("long")
    x = p.state("s", (8, 16)) + p.input("x", (8, 16))
    with pytest.raises(ProgramError, match="it uses a state"):
        Search(p.build(x), H200, QUICK)
    p = ProgramBuilder("long")
    x = p.input("x", (8, 16))
    for _ in range(13):
        x = x * 2.0
    with pytest.raises(ProgramError, match="op 'pointwise_12': it is the 13th"):
        Search(p.build(x), H200, QUICK)


@pytest.mark.parametrize("text", ["neg(neg(a0))", "a0 * 0.25 + a0 * 0.75", "a0 * 1.0"])
def test_an_output_that_is_an_input_is_named(text: str):
    """Also where only the laws show it."""
    p = ProgramBuilder("moved")
    x = p.input("x", (4, 8))
    program = p.build(p.softmax(x), x.map(text))
    with pytest.raises(ProgramError, match="'pointwise_1' of program 'moved' only moves data"):
        found(program)


@pytest.mark.parametrize(
    ("text", "kept"),
    [("a0 * 0.1 * 10.0", "0.1"), ("a0 + 0.1 + 0.2", "0.2"),
     ("a0 * 1e-200 * 1e200", "1e-200"), ("a0 / 1e-320 * 1e-320", "1e-320")],
)  # fmt: skip
def test_constants_are_joined_where_that_is_exact(text: str, kept: str):
    """A proof takes them for what they are, so that another one would be refused."""
    p = ProgramBuilder("scaled")
    program = p.build(p.reduce(p.input("x", (4, 64)).map(text), 1))
    for candidate in found(program, SearchLimits(num_scheduled=20, num_kept=4)):
        assert kept in print_graph(candidate.graph)
        with nullcontext() if "1e-" not in kept else pytest.raises(VerifyError, match="finite"):
            prove(program, candidate.graph)


@pytest.mark.parametrize("text", ["a0 * 1e200 * 1e200", "a0 + 1e308 + 1e308", "a0 / 0.0"])
def test_what_is_finite_for_no_input_is_refused(text: str):
    p = ProgramBuilder("infinite")
    program = p.build(p.reduce(p.input("x", (4, 64)).map(text), 1))
    (first, *_) = found(program, SearchLimits(num_scheduled=20, num_kept=4))
    why = "no inputs for which the program itself stays finite|tests say something"
    calls = num_calls(lambda: pytest.raises(VerifyError, prove, program, first.graph).match(why))
    assert calls < 400_000


def test_whole_numbers_are_refused_by_name():
    p = ProgramBuilder("counts")
    program = p.build(p.input("n", (4, 8), "i64").map("a0 + 1"))
    with pytest.raises(
        ProgramError, match=r"'pointwise_0': tensor 'n' of type i64; expected .*f32"
    ):
        found(program)


@pytest.mark.parametrize(
    "limits",
    [
        {"max_kernels": 0}, {"max_kernels": 1.5}, {"slack": -1}, {"num_kept": 0}, {"loops": (1,)},
        {"splits": (0,)}, {"max_recipes": -5}, {"num_scheduled": True}, {"shared_bytes": 0},
    ],
)  # fmt: skip
def test_limits_that_leave_nothing_to_search_are_refused(limits: dict[str, object]):
    (name,) = limits
    with pytest.raises(RequestError, match=f"search limit {name}=.*whole numbers of at least"):
        SearchLimits(**limits)
