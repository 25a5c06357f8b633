"""Expressions print and parse back, and a claimed zero is zero."""

import math
import re
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from distmega.errors import ProgramError
from distmega.program.expr import (
    FUNCTIONS,
    Arg,
    Call,
    Const,
    Expr,
    evaluate,
    is_sum,
    is_zero,
    num_args,
    num_flops,
    parse,
)

MATH = {
    "exp": math.exp, "log": math.log, "log2": math.log2, "log10": math.log10, "sqrt": math.sqrt,
    "abs": abs, "tanh": math.tanh,
    "sin": math.sin, "cos": math.cos, "pow": math.pow, "maximum": max, "minimum": min,
    "rsqrt": lambda x: 1 / math.sqrt(x),
    "neg": lambda x: -x,
    "relu": lambda x: max(x, 0.0),
    "sigmoid": lambda x: 0.5 + 0.5 * math.tanh(x / 2),
    "silu": lambda x: x * (0.5 + 0.5 * math.tanh(x / 2)),
    "gelu": lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2))),
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "erf": math.erf,
    "floor": math.floor,
    "eq": lambda x, y: float(x == y),
    "lt": lambda x, y: float(x < y),
    "le": lambda x, y: float(x <= y),
    "where": lambda c, x, y: x if c else y,
}  # fmt: skip

leaves = st.builds(Arg, st.integers(0, 3)) | st.builds(
    Const, st.floats(allow_nan=False, allow_infinity=False)
)


def calls(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    one = st.sampled_from([fn for fn, n in FUNCTIONS.items() if n == 1])
    two = st.sampled_from([fn for fn, n in FUNCTIONS.items() if n == 2])
    three = st.builds(Call, st.just("where"), st.tuples(inner, inner, inner))
    few = st.builds(Call, one, st.tuples(inner)) | st.builds(Call, two, st.tuples(inner, inner))
    return few | three


exprs = st.recursive(leaves, calls, max_leaves=8)


def value(expr: Expr, args: list[float]) -> float:
    return evaluate(expr, args, MATH, lambda constant: constant)


def test_every_function_has_a_meaning_here():
    assert MATH.keys() == FUNCTIONS.keys()


@given(exprs)
def test_printed_expressions_parse_back(expr: Expr):
    assert parse(str(expr)) == expr


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("silu(a0) * a1", "(silu(a0) * a1)"),
        ("a0 + a1 * 2", "(a0 + (a1 * 2.0))"),
        ("-a0 ** 2", "neg((a0 ** 2.0))"),
        ("(-1) ** a0", "((-1.0) ** a0)"),
        ("a0 - -1", "(a0 - (-1.0))"),
        ("maximum(a0, 1e-6)", "maximum(a0, 1e-06)"),
    ],
)
def test_python_precedence_holds(text: str, expected: str):
    assert str(parse(text)) == expected


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a0 +", "'a0 +'"),
        ("", "''"),
        ("x0", "'x0'"),
        ("foo(a0)", "'foo(a0)'"),
        ("exp(a0, a1)", "'exp(a0, a1)'"),
        ("exp(a0, x=1)", "'exp(a0, x=1)'"),
        ("exp(*a0)", "'*a0'"),
        ("a0 % a1", "'a0 % a1'"),
        ("a0 if a1 else a2", "'a0 if a1 else a2'"),
        ("True", "'True'"),
        ("1j * a0", "'1j'"),
        ("a0 * 1e999", "'1e309'"),
        ("a0 * " + "9" * 400, "'" + "9" * 400),
        ("a0\0", "'a0\\x00'"),
    ],
)
def test_what_is_no_expression_is_named(text: str, part: str):
    with pytest.raises(ProgramError) as caught:
        parse(text)
    assert part in caught.value.found
    assert "a0, a1" in caught.value.expected


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (" + ".join(["a0"] * 20_000), "99997 characters at character 50000$"),
        (" + ".join(["a0"] * 9_000), "too many parts at character 10001$"),
        (" + ".join(["a0"] * 201), "functions 201 deep at character 1$"),
        ("(" * 3000 + "a0" + ")" * 3000, "too many nested parentheses at character"),
        ("exp(" * 300 + "a0" + ")" * 300, "too many nested parentheses at character"),
        ("-" * 49_000 + "a0", "too many parts at character 4001$"),
        ("-" * 3000 + "a0", "too many signs at character 1$"),
        ("a0 + " + "9" * 5000, "a word of too many characters at character 6$"),
        ("a0 + 0x" + "f" * 6000, "at character 6$"),
        ("(a0 +\n a" + "1" * 5000 + ")", "at character 8$"),
        ("a0 if " + "a0." * 900 + "b else a1", "at character 1$"),
    ],
)
def test_what_is_too_large_is_refused_with_its_place(text: str, named: str):
    with pytest.raises(ProgramError) as caught:
        parse(text)
    assert re.search(named, caught.value.found)
    assert len(str(caught.value)) < 2000


def test_the_largest_expressions_print_and_parse_back():
    for text in (" + ".join(["a0"] * 200), "exp(" * 199 + "a0" + ")" * 199):
        tree = parse(text)
        assert parse(str(tree)) == tree
        assert num_flops(tree) == 199
    balanced = "a0"
    for _ in range(8):
        balanced = f"({balanced} * {balanced})"
    assert num_flops(parse(balanced)) == 255
    with pytest.raises(ProgramError, match=r"1001 parts at character .*; expected at most 1000"):
        parse(f"({balanced} + {balanced}) / {balanced}")


@pytest.mark.parametrize("number", [2**53 + 1, -(2**63), 2**63 - 1, 10**30 + 1])
def test_a_whole_constant_stays_exact(number: int):
    tree = parse(f"a0 + {number}")
    assert parse(str(tree)) == tree
    assert isinstance(tree, Call)
    assert tree.args[1] == Const(number)


def test_zeros_of_both_signs_are_told_apart():
    """What is kept for one expression would otherwise be taken for the other."""
    assert parse("a0 / 0.0") != parse("a0 / -0.0")
    assert len({parse("a0 / 0.0"), parse("a0 / -0.0"), parse("a0 / 0.0")}) == 2
    assert Const(2**53) == Const(2.0**53)


def test_counts():
    expr = parse("silu(a0) * a2 + 1")
    assert num_args(expr) == 3
    assert num_flops(expr) == 3
    assert num_args(parse("1.5")) == 0
    assert num_flops(parse("a0")) == 0


def test_evaluate_applies_the_given_functions():
    assert value(parse("maximum(a0, a1) / 4 - 1"), [6.0, 8.0]) == 1.0


@pytest.mark.parametrize(
    "text", ["a0", "silu(a0) * a1", "a1 * gelu(a0)", "a0 + a0 * a1", "a0 / 8", "0 * a1", "tanh(a0)"]
)
def test_padding_stays_zero_through(text: str):
    assert is_zero(parse(text), frozenset({0}))


@pytest.mark.parametrize(
    "text",
    [
        *("a1", "a0 + a1", "a0 + 1", "exp(a0)", "cos(a0)", "sigmoid(a0)", "a0 / a0", "a0 / 0"),
        *("a0 * rsqrt(a0)", "a0 * (1 / a1)", "a0 * log(a1)"),
    ],
)
def test_padding_is_not_taken_for_zero_through(text: str):
    assert not is_zero(parse(text), frozenset({0}))


small = st.integers(-100, 100).map(float)


def or_nan(function: Callable[..., float]) -> Callable[..., float]:
    """A number, as a tensor's element would be, where Python's function raises."""

    def run(*args: float) -> float:
        try:
            return function(*args)
        except (ValueError, ArithmeticError):
            return math.nan

    return run


@given(st.recursive(st.builds(Arg, st.integers(0, 3)) | st.builds(Const, small), calls), small)
@example(parse("where(log(a0), a0, a0)"), 1.0)
def test_a_claimed_zero_is_zero(expr: Expr, other: float):
    functions = {name: or_nan(function) for name, function in MATH.items()}
    if is_zero(expr, frozenset({0, 1})):
        found = evaluate(expr, [0.0, 0.0, other, -other], functions, lambda constant: constant)
        assert found == 0.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a0 + a1 - a2", True), ("-(a0 - a1)", True), ("a0 + 1", False), ("a0 * a1", False),
        ("relu(a0 + a1)", False),
    ],
)  # fmt: skip
def test_what_only_adds_arguments(text: str, expected: bool):
    assert is_sum(parse(text)) is expected
