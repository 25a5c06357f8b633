"""Event graphs that somebody writes: a number that is changed, or an event that is left out, is
named before anything runs, or the graph is another right one of the same program.
"""

import re
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given as given_examples
from hypothesis import strategies as st
from torch import Tensor

from distmega.errors import CheckError, ParseError, ProgramError, VerifyError
from distmega.kernels.events import (
    analyse_events,
    check_queues,
    make_queues,
    parse_events,
    print_events,
    run_queues,
    run_ranks,
)
from distmega.kernels.events.analyse import Tilings
from distmega.kernels.events.fit import fit_coordinate, fit_map, grid_coordinates
from distmega.kernels.events.values import EventCoordinate
from distmega.program.builder import ProgramBuilder
from distmega.program.text import parse_program
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from tests.hostir.programs import run_program
from tests.kernels.events.queues.test_event_queues import E1, TILES, experts, given
from tests.kernels.events.test_events import SCATTERED, chain_of, rows_and_heads, two_products


@dataclass(frozen=True)
class Written:
    """A program, its graph as text, and what it runs on: tensors, a value of symbol B."""

    program: Program
    text: str
    tensors: dict[str, Tensor]
    batch: int | None = None


def written(program: Program, tilings: Tilings, batch: int | None = None) -> Written:
    symbols = {"B": ("x", 0)} if batch is not None else {}
    text = print_events(analyse_events(program, tilings, symbols=symbols))
    ids = E1[0] if any(tensor.name == "ids" for tensor in program.tensors) else []
    return Written(program, text, given(program, ids), batch)


GRAPHS = {
    "symbols": written(rows_and_heads(), {"P": {"i0": 3}, "C": {"m": 2, "h": 2}}, 5),
    "experts": written(experts(4, 2), TILES),
    "uneven tiles": written(chain_of((384,), C="-a0"), {"P": {"i0": 32}, "C": {"i0": 48}}),
    "blocks": written(
        two_products(16),
        {"ab": {"m0": 4, "n": 4}, "P": {"i0": 3, "i1": 4}, "C": {"m0": 6, "n": 4}},
    ),
}


def outcome(case: Written, text: str) -> str:
    """How a text ends: refused by an error's name, or "right"; fails for a wrong result."""
    try:
        queues = make_queues(parse_events(text, case.program), 3)
        check_queues(queues)
    except (ParseError, VerifyError, CheckError) as error:
        return type(error).__name__
    symbols = {} if case.batch is None else {"B": case.batch}
    launch = run_queues(queues, case.tensors, symbols=symbols)
    expected = run_program(case.program, case.tensors)
    for name in case.program.outputs:
        torch.testing.assert_close(launch.tensors[name][: case.batch], expected[name][: case.batch])
    return "right"


@pytest.mark.parametrize("name", GRAPHS)
def test_a_number_that_is_changed(name: str):
    """Tiles of other sizes make another graph of the same events; all else is refused."""
    case = GRAPHS[name]
    assert outcome(case, case.text) == "right"
    found = {}
    for match in re.finditer(r"(?<![\w.])\d+|(?<=[d#:/])\d+", case.text):
        for change in (-1, 1, 2):
            start, stop = match.span()
            if int(match[0]) + change >= 0:
                text = f"{case.text[:start]}{int(match[0]) + change}{case.text[stop:]}"
                found[text] = outcome(case, text), case.text[start - 1] == "/"
    assert {how for how, _ in found.values()} >= {"VerifyError", "CheckError"}
    assert all(is_tile for how, is_tile in found.values() if how == "right")


@pytest.mark.parametrize("name", GRAPHS)
def test_a_line_that_is_left_out(name: str):
    case = GRAPHS[name]
    lines = case.text.splitlines()
    for number, line in enumerate(lines[1:], start=1):
        found = outcome(case, "\n".join(lines[:number] + lines[number + 1 :]))
        assert found == ("CheckError" if line.strip().startswith("event") else "VerifyError")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("active B", "active", "a count by"),
        ("own from P", "all*2 from P", r"triggers of all of 2 ranks for 'C'; expected own of 1"),
        ("[ceil(B/3)<=6]", "[ceil(B/2)<=6]", "extent .* of dim 0"),
        ("tasks P(i0:16/3@B)", "tasks P(i0:16/3@B, i0:16/3@B)", "states axes once|tasks of op 'P'"),
        ("tasks C(m:16/2@B, h:4/2)", "tasks C(k:64/2)", "tiles of 2 along axis 'k'"),
    ],
)
def test_what_a_graph_may_not_say(old: str, new: str, message: str):
    case = written(rows_and_heads(), {"P": {"i0": 3}, "C": {"m": 3, "h": 2}}, 5)
    text = case.text.replace("tasks C(m:16/3@B", "tasks C(m:16/2@B") if "k:" in new else case.text
    assert old in text
    with pytest.raises(VerifyError, match=message):
        parse_events(text.replace(old, new), case.program)


def test_ranks_are_as_many_as_events_are_of():
    program = parse_program(SCATTERED)
    with pytest.raises(VerifyError, match="all of 2 ranks for 'y'; expected all of 4"):
        analyse_events(program, {}, num_ranks=2)
    queues = make_queues(analyse_events(program, {}, num_ranks=4), 1)
    with pytest.raises(ProgramError, match="tensors of 2 ranks, a mesh of 2; expected 4 ranks"):
        run_ranks(queues, [{}, {}], DeviceMesh(tp=2))


def grid_chain(extent: int) -> Program:
    p = ProgramBuilder("grid")
    return p.build(p.input("x", (extent, extent)).map("exp(a0)", name="P").map("-a0", name="C"))


@pytest.mark.parametrize(
    ("event", "triggers"),
    [
        ("E[16] own from P(d0*4+d1) count 1 to C(d0*4+d1)", 16),
        ("E[7] own from P(d0+d1) count [1, 2, 3, 4, 3, 2, 1] to C(d0+d1)", 7),
        ("E[7] own from P(d0-d1+3) count [1, 2, 3, 4, 3, 2, 1] to C(d0-d1+3)", 7),
        ("E[4] own from P(-d0+3) count 4 to C(-d0+3)", 4),
        ("E[10] own from P(d0*3) count [4, 0, 0, 4, 0, 0, 4, 0, 0, 4] to C(d0*3)", 4),
        ("E[4] own from P((d0+d1)%4) count 4 to C((d0+d1)%4)", 4),
        ("E[2, 2] own from P((d0*4+d1)/8, (d1)%2) count 4 to C((d0*4+d1)/8, (d1)%2)", 4),
        ("E[4, 4] own from P(d1, d0) count 1 to C(d1, d0)", 16),
    ],
)
def test_maps_are_affine_in_all_coordinates(event: str, triggers: int):
    """Tasks of a 4 x 4 grid: the diagonal of each, say, signals one event."""
    program = grid_chain(4)
    tasks = "  tasks P(i0:4/1, i1:4/1)\n  tasks C(i0:4/1, i1:4/1)\n"
    text = f"events grid\n{tasks}  event {event}\n"
    graph = parse_events(text, program)
    assert print_events(graph) == text
    queues = make_queues(graph, 3)
    check_queues(queues)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    for seed in range(5):
        launch = run_queues(queues, {"x": x}, seed=seed)
        assert torch.equal(launch.tensors["C"], -x.exp())
        assert len(launch.triggers) == triggers


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("d0d1", ParseError),
        ("(d0)", ParseError),
        ("(d0)%0", ParseError),
        ("d0%4", ParseError),
        ("d0*", ParseError),
        ("(d0)/0", VerifyError),
        ("d0+d2", VerifyError),
        ("d0*4+d1-1", VerifyError),
        ("d0..d0+99999999999", VerifyError),
        ("d0{,}", ParseError),
        ("d0{0,,1,2}", ParseError),
        (f"d0+{'9' * 5000}", ParseError),
    ],
)
def test_places_that_are_none_are_named(place: str, error: type[Exception]):
    tasks = "  tasks P(i0:4/1, i1:4/1)\n  tasks C(i0:4/1, i1:4/1)\n"
    event = f"  event E[16] own from P({place}) count 1 to C(d0*4+d1)\n"
    with pytest.raises(error):
        parse_events(f"events grid\n{tasks}{event}", grid_chain(4))


def test_coordinates_that_cancel_leave_an_offset():
    tasks = "  tasks P(i0:4/1, i1:4/1)\n  tasks C(i0:4/1, i1:4/1)\n"
    event = "  event E[2] own from P((d0-d0+3)/2) count [0, 16] to C({})\n"
    text = f"events grid\n{tasks}{event}"
    with pytest.raises(VerifyError, match=r"waits for \(9,\)"):
        parse_events(text.format("d1*2-d1*2+9"), grid_chain(4))
    graph = parse_events(text.format("(d1*2-d1*2+6)/4%2"), grid_chain(4))
    assert "from P(#1) count [0, 16] to C(#1)" in print_events(graph)
    assert parse_events(print_events(graph), grid_chain(4)) == graph


def test_events_that_nobody_can_trigger_are_refused_before_they_are_counted():
    """A count of each of 16777216 took 22 s."""
    tasks = "  tasks P(i0:4/1, i1:4/1)\n  tasks C(i0:4/1, i1:4/1)\n"
    event = f"  event E[{1 << 24}] own from P(d0*4+d1) count 1 to C(d0*4+d1)\n"
    with pytest.raises(VerifyError, match="16 triggers; expected one for each event"):
        parse_events(f"events grid\n{tasks}{event}", grid_chain(4))


@pytest.mark.parametrize("counter", [16, 1 << 32])
def test_more_events_than_memory_has_counters_for(counter: int):
    tasks = "  tasks P(i0:4/1, i1:4/1)\n  tasks C(i0:4/1, i1:4/1)\n"
    event = f"  event E[{counter}, {1 << 21}] own from P(d0, d1) count 1 to C(d0, d1)\n"
    with pytest.raises(VerifyError, match="events; expected at most 16777216"):
        parse_events(f"events grid\n{tasks}{event}", grid_chain(4))


@pytest.mark.parametrize(
    ("shape", "tile", "form"),
    [
        ((4096,), 1, "from P(d0, d1) count 1 to C((d0)/64, (d0)%64)"),
        ((4096,), 32, "from P(d0, (d1)/32) count 32 to C((d0)/2, (d0)%2)"),
        ((16, 256), 1, "count 1 to C((d0*256+d1)/64, (d1)%64)"),
    ],
)
def test_a_reshape_is_a_formula(shape: tuple[int, ...], tile: int, form: str):
    p = ProgramBuilder("reshaped")
    made = p.input("x", (64, 64)).map("exp(a0)", name="P")
    program = p.build(p.reshape(made, shape, view=True).map("-a0", name="C"))
    tiles = {"i0": tile} if len(shape) == 1 else {"i0": 1, "i1": 1}
    graph = analyse_events(program, {"P": {"i0": 1, "i1": 1}, "C": tiles})
    assert form in print_events(graph)
    assert parse_events(print_events(graph), program) == graph


PLACES = st.builds(
    EventCoordinate,
    terms=st.dictionaries(st.integers(0, 2), st.integers(-3, 20).filter(bool), max_size=3).map(
        lambda scales: tuple(sorted(scales.items()))
    ),
    offset=st.integers(0, 9),
    divisor=st.integers(1, 20),
    modulus=st.sampled_from([0, 0, 2, 5, 7]),
)


@given_examples(PLACES, st.tuples(*[st.integers(1, 5)] * 3))
def test_maps_that_are_found_give_the_events_that_they_were_found_from(
    place: EventCoordinate, grid: tuple[int, int, int]
):
    """Whatever gave them; a place that any sum of coordinates gives is no list."""
    tasks = list(grid_coordinates(grid))
    found = [place.at(task) for task in tasks]
    least = min(found)
    table = [(value - least,) for value in found]
    fitted = fit_map(grid, table, [(n,) for n in range(max(found) - least + 1)])
    for number, (task, events) in enumerate(zip(tasks, table, strict=True)):
        assert fitted.events(number, task) == (events,)
    if place.divisor == 1 and not place.modulus:
        assert not fitted.listed


@given_examples(
    scale=st.integers(-300, 300).filter(bool),
    offset=st.integers(0, 300),
    divisor=st.integers(1, 300),
    extent=st.integers(2, 100),
)
def test_a_formula_of_any_factors_is_found(scale: int, offset: int, divisor: int, extent: int):
    """It has the smallest divisor that gives the places."""
    values = [(scale * n + offset) // divisor for n in range(extent)]
    found = fit_coordinate((extent,), values)
    assert found is not None
    assert not found.values
    assert found.divisor <= divisor
    assert [found.at((n,)) for n in range(extent)] == values
    slope = dict(found.terms).get(0, 0)
    for smaller in range(1, min(found.divisor, 20)):
        nearest = slope * smaller // found.divisor
        for other in (nearest, nearest + 1):
            rest = [smaller * value - other * n for n, value in enumerate(values)]
            assert max(rest) - min(rest) >= smaller


@pytest.mark.parametrize(
    ("extent", "tiles", "form"),
    [
        (680, (20, 34), "from P((d0*10)/17..(d0*10+9)/17)"),
        (680, (17, 20), "from P((d0*17)/20..(d0*17+16)/20)"),
        (102, (3, 17), "from P((d0*3)/17..(d0*3+2)/17)"),
        (340, (1, 17), "from P((d0)/17)"),
    ],
)
def test_tiles_of_any_heights_are_a_formula(extent: int, tiles: tuple[int, int], form: str):
    program = chain_of((extent,), C="-a0")
    symbols = {"B": ("x", 0)}
    tilings = {"P": {"i0": tiles[0]}, "C": {"i0": tiles[1]}}
    graph = analyse_events(program, tilings, symbols=symbols)
    assert form in print_events(graph)
    assert parse_events(print_events(graph), program) == graph
    check_queues(make_queues(graph, 3))
