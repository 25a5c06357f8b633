"""Expressions and printed programs from outside are read or refused."""

from hypothesis import strategies as st

from distmega.program.builder import ProgramBuilder
from distmega.program.expr import parse
from distmega.program.kinds import collective_kinds, user_kinds
from distmega.program.text import parse_program, print_program
from tests.fuzz import damaged, fuzz_target

WORDS = (
    "a0", "a", "a1", "9" * 30, "1e999", "(", ")", "-", "+", "**", ",", " ", "\n", "exp(", "lambda ",
    "a0 if ", "[", "{", "'", "\0", "²", "é", "\ud800", "0x", "not ", "...", "f'{a0}'", "1_0", "~",
)  # fmt: skip
EXPRESSIONS = ("silu(a0) * a1", "-a0 ** 2 + maximum(a1, 1e-6) / (a2 - 3)", "pow(a0, exp(a1))")


def read_expression(text: str) -> None:
    tree = parse(text)
    assert parse(str(tree)) == tree


test_expressions = fuzz_target(damaged(EXPRESSIONS, WORDS) | st.text(), read_expression)


def _program() -> str:
    p = ProgramBuilder("seed")
    x = p.input("x", (4, 6))
    table = p.weight("w", (9, 6), "bf16")
    cache = p.state("s", (1, 8, 6))
    at = p.input("at", (4,), "i64")
    p.kv_append(cache, p.reshape(x, (4, 1, 6)), at)
    h = p.slice(p.linear(x, table), 1, 0, 6, 2, view=True)
    found = p.argmax(p.softmax(p.transpose(p.concat([h, h], 0), (1, 0))))
    return print_program(p.build(p.rms_norm(x, p.weight("g", (6,)), 1e-5), found))


PROGRAM_WORDS = (
    "program x", "return", "->", ":reduce:sum", ":scatter", ":lookup", "#-1", "#" + "9" * 30, "*0",
    "*2", "+1", "=", " | a=", "((((", "()", "'", "i0", "x(", "view[", "] ", "f32[", "0", "1e999",
    "9" * 5000, ", ", ".", "\n", " temp t: f32[0]\n", "state", "linear", "{[]: 1}", "a=-1 ",
)  # fmt: skip


def read_program(text: str) -> None:
    program = parse_program(text)
    assert parse_program(print_program(program)) == program


axes = st.sampled_from(["i", "j", "k"])
positions = (
    st.builds(".".join, st.lists(axes, min_size=1, max_size=2))
    | st.sampled_from(["i*2", "i+1", "j*3-2", "#0", "#-1", "#2"])
)  # fmt: skip
operands = st.lists(
    st.builds(
        lambda name, dims: f" {name}({', '.join(dims)})",
        st.sampled_from("xyz"),
        st.lists(positions, max_size=3),
    ),
    max_size=3,
).map("".join)
headers = st.lists(
    st.sampled_from(["i:4", "j:2", "k:3:reduce:sum", "j:4:scatter", "i:8:reduce", "k:2:lookup"]),
    max_size=3,
).map(" ".join)
kinds = st.sampled_from([*user_kinds(), *collective_kinds()])
lines = st.builds(
    lambda name, kind, header, reads, writes: f"{name} = {kind}[{header}]{reads} ->{writes}",
    st.sampled_from("abc"), kinds, headers, operands, operands,
)  # fmt: skip
assembled = st.builds(
    lambda shape, ops: "\n".join(
        ["program p", f"input x: f32[{shape}]", f"temp y: f32[{shape}]", *ops, "return y"]
    ),
    st.sampled_from(["", "4", "4, 2", "8, 4, 2"]),
    st.lists(lines, max_size=3),
)
test_programs = fuzz_target(
    damaged((_program(),), PROGRAM_WORDS) | assembled | st.text(), read_program
)


SPECS = ("m k, n k -> m n", "m k, h g d k -> m h g d", "m k, n k, n -> m n", "k, k -> ")


def read_spec(text: str) -> None:
    p = ProgramBuilder("p")
    x, w = p.input("x", (2, 4)), p.weight("w", (3, 4))
    program = p.build(p.linear(x, w, spec=text), p.linear(x, w, p.weight("b", (3,)), spec=text))
    assert parse_program(print_program(program)) == program


spec_words = ("->", ",", "m", " ", "k k", "é", "9")
test_specs = fuzz_target(damaged(SPECS, spec_words) | st.text(), read_spec)
