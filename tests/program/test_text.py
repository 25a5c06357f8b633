"""Programs print readably and parse back; what is no program is refused by the line."""

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmega.errors import DistmegaError, ParseError, ProgramError
from distmega.program.builder import ProgramBuilder
from distmega.program.text import (
    parse_attrs,
    parse_op,
    parse_program,
    print_attrs,
    print_op,
    print_program,
)
from distmega.program.types import Access, Attr, Axis, Index, Op, Program
from tests.program.programs import programs

MLP = """\
program mlp
  input x: f32[8, 64]
  weight w: f32[32, 64]
  weight b: f32[32]
  temp h: f32[8, 32]
  temp y: f32[8, 32]
  h = linear[m0:8 n:32 k:64:reduce:sum] x(m0, k) w(n, k) b(n) -> h(m0, n)
  y = pointwise[i0:8 i1:32] h(i0, i1) -> y(i0, i1) | expr='silu(a0)'
  return y
"""


def mlp() -> Program:
    p = ProgramBuilder("mlp")
    x = p.input("x", (8, 64))
    h = p.linear(x, p.weight("w", (32, 64)), p.weight("b", (32,)), name="h")
    return p.build(h.map("silu(a0)", name="y"))


def test_a_program_prints_readably():
    assert print_program(mlp()) == MLP


@given(programs())
def test_programs_parse_back(program: Program):
    assert parse_program(print_program(program)) == program


attrs: st.SearchStrategy[Attr] = st.recursive(
    st.text(max_size=8)
    | st.text(alphabet="ab= '\"|\\\n", max_size=12)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.booleans(),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)
names = st.text(alphabet=string.ascii_lowercase, min_size=1, max_size=3)


@given(st.dictionaries(names, attrs, max_size=4).map(lambda d: tuple(sorted(d.items()))))
def test_attributes_of_any_value_parse_back(values: tuple[tuple[str, Attr], ...]):
    assert parse_attrs(print_attrs(values).removeprefix(" |")) == values


indices = st.builds(Index, offset=st.integers(-9, 9)) | st.builds(
    Index,
    axes=st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True).map(tuple),
    offset=st.integers(-9, 9),
    stride=st.integers(1, 9),
)


@given(st.lists(indices, max_size=4).map(tuple))
def test_every_index_parses_back(dims: tuple[Index, ...]):
    axes = (Axis(name="a", extent=2), Axis(name="b", extent=3, role="reduce", combine="max"))
    lookup = Axis(name="c", extent=4, role="scatter", lookup=True)
    op = Op(
        name="op.1",
        kind="set",
        axes=(*axes, lookup),
        reads=(Access(tensor="layers.0.x", dims=dims),),
        writes=(Access(tensor="y", dims=()),),
    )
    assert parse_op(print_op(op)) == op


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("program mlp", "programme mlp"),
        ("program mlp\n", ""),
        ("input x: f32[8, 64]", "input x f32[8, 64]"),
        ("input x: f32[8, 64]", "input x: f32[8, y]"),
        ("m0:8", "m0:eight"),
        ("m0:8", "m0"),
        ("k:64:reduce:sum", "k:64:reduced:sum"),
        ("k:64:reduce:sum", "k:64:reduce:product"),
        ("x(m0, k) w(n, k)", "x(m0, k w(n, k)"),
        ("x(m0, k)", "x(m0*, k)"),
        (" -> y(i0, i1)", " y(i0, i1)"),
        ("expr='silu(a0)'", "expr='silu(a0)"),
        ("expr='silu(a0)'", "expr=silu(a0)"),
        ("expr='silu(a0)'", "expr={}"),
        ("expr='silu(a0)'", "silu(a0)"),
        ("return y", "returns y"),
    ],
)
def test_a_line_that_is_none_is_named(old: str, new: str):
    assert old in MLP
    with pytest.raises(ParseError, match="cannot read"):
        parse_program(MLP.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("[8, 64]", f"[{'9' * 5000}]", "a number of 5000 digits"),
        ("m0:8", "m0:" + "9" * 20, "a number of 20 digits"),
        ("'silu(a0)'", "(" * 3000 + ")" * 3000, "cannot read"),
        ("'silu(a0)'", "-" * 3000 + "1", "cannot read"),
        ("'silu(a0)'", "(" * 40 + "1," + "),"* 39 + ")", "cannot read"),
        ("'silu(a0)'", "1" * 300_000, "an attribute of 300000 characters"),
        ("'silu(a0)'", "{[]: 1}", "cannot read"),
        ("'silu(a0)'", "1e999", "cannot read"),
        ("return y", "return y" + ", y" * 400_000, "characters; expected at most 1000000"),
    ],
)  # fmt: skip
def test_what_is_too_large_is_refused(old: str, new: str, named: str):
    assert old in MLP
    with pytest.raises(ParseError, match=named) as caught:
        parse_program(MLP.replace(old, new))
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("expr='silu(a0)'", "expr='silu(a1)'", "of 1 operand; expected 2"),
        ("expr='silu(a0)'", "expr='silver(a0)'", "expected expr: an expression of a0, a1"),
        ("expr='silu(a0)'", "dtypes=('i128',) expr='silu(a0)'", "expected dtypes: one of f64"),
        ("temp h: f32[8, 32]", "temp h: f32[8, 33]", "op 'h' writes a part of 'h' of [8, 33]"),
        ("n:32", "n:31", "op 'h' reads a part of 'w' of [32, 64]"),
        ("x(m0, k)", "x(m0, m0)", "op 'h' indexes 'x' by one axis twice"),
    ],
)
def test_an_op_that_no_builder_states_is_refused(old: str, new: str, named: str):
    assert old in MLP
    with pytest.raises(ProgramError, match=re.escape(named)):
        parse_program(MLP.replace(old, new, 1))


@pytest.mark.parametrize(
    "line",
    [
        "v = view[i:8] -> v(i)",
        "v = view[i:8] v(i) ->",
        "v = view[i:8 j:8] v(i) -> v(j)",
        "v = view[i:8] v(#0) -> v(i)",
    ],
)
def test_a_view_of_nothing_is_refused(line: str):
    with pytest.raises(ProgramError, match="view 'v' of other operands or axes"):
        parse_program(f"program p\n  state v: f32[8]\n  {line}\n  return v\n")


def test_nothing_is_no_program():
    with pytest.raises(ParseError):
        parse_program("")


def test_a_parsed_program_is_verified():
    with pytest.raises(ProgramError, match="reads 'h' before it is written"):
        parse_program(MLP.replace("-> h(m0, n)", "-> y(m0, n)"))


@given(st.data())
def test_damaged_text_gives_a_program_or_our_error(data: st.DataObject):
    start = data.draw(st.integers(0, len(MLP) - 1))
    stop = data.draw(st.integers(start, min(len(MLP), start + 6)))
    middle = data.draw(st.text(alphabet=" :[](),.*+-#|='=abk0\n", max_size=4))
    try:
        program = parse_program(MLP[:start] + middle + MLP[stop:])
    except DistmegaError:
        return
    assert parse_program(print_program(program)) == program


@pytest.mark.parametrize("name", ["return", "program", "a b", "a(b", "a,b", "", "a\nb", "->"])
def test_a_name_that_would_not_print_is_refused(name: str):
    p = ProgramBuilder("p")
    x = p.input(name, (2,))
    with pytest.raises(ProgramError, match="name"):
        p.build(x)
