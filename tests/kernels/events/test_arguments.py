"""Arguments of other types than event tensors take are named, whatever is wrong with them."""

from collections.abc import Callable

import pytest
import torch

from distmega.errors import ProgramError
from distmega.kernels import events
from distmega.kernels.events import RunTime
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Program


def linear() -> Program:
    p = ProgramBuilder("p")
    return p.build(p.linear(p.input("x", (4, 8)), p.weight("w", (8, 8)), name="c"))


PROGRAM = linear()
GRAPH = events.analyse_events(PROGRAM, {}, symbols={"B": ("x", 0)})
QUEUES = events.make_queues(GRAPH, 2)
TENSORS = {"x": torch.zeros(4, 8), "w": torch.zeros(8, 8)}
B = {"B": 2}

CALLS: dict[str, Callable[[object], object]] = {
    "program": lambda bad: events.analyse_events(bad, {}),
    "tilings": lambda bad: events.analyse_events(PROGRAM, bad),
    "tilings of 'c'": lambda bad: events.analyse_events(PROGRAM, {"c": bad}),
    "symbol 'B'": lambda bad: events.analyse_events(PROGRAM, {}, symbols={"B": bad}),
    "symbol": lambda bad: events.analyse_events(PROGRAM, {}, symbols={bad: ("x", 9)}),
    "num_ranks": lambda bad: events.analyse_events(PROGRAM, {}, num_ranks=bad),
    "num_sms": lambda bad: events.choose_tilings(PROGRAM, bad),
    "rows": lambda bad: events.choose_tilings(PROGRAM, 4, rows=bad),
    "num_sms ": lambda bad: events.make_queues(GRAPH, bad),
    "event": lambda bad: GRAPH.count(bad, RunTime(symbols=B)),
    "graph": lambda bad: events.make_queues(bad, 2),
    "graph ": events.print_events,
    "queues": events.check_queues,
    "queues ": lambda bad: events.run_queues(bad, {}),
    "given": lambda bad: events.run_queues(QUEUES, bad, symbols=B),
    "seed": lambda bad: events.run_queues(QUEUES, TENSORS, symbols=B, seed=bad),
    "mesh": lambda bad: events.run_ranks(QUEUES, [TENSORS], bad, symbols=B),
    "program ": lambda bad: events.parse_events(events.print_events(GRAPH), bad),
    "known": lambda bad: GRAPH.running(bad),
    "symbols": lambda bad: RunTime(symbols=bad),
    "starts": lambda bad: RunTime(starts=bad),
    "at": lambda bad: RunTime(at=bad),
}


@pytest.mark.parametrize("bad", [None, "x", 1.5, (1, 2, 3)])
@pytest.mark.parametrize("argument", CALLS)
def test_what_an_argument_can_not_be_is_named(argument: str, bad: object) -> None:
    with pytest.raises(ProgramError) as refusal:
        CALLS[argument](bad)
    if argument != "symbol":  # a name of letters is one
        assert str(refusal.value).startswith(argument.strip())
        assert f"{bad!r}" in str(refusal.value)


def test_more_sms_than_any_machine_has_are_refused():
    with pytest.raises(ProgramError, match=r"num_sms 1000000000; .* at least 1, at most 1024"):
        events.make_queues(GRAPH, 10**9)


@pytest.mark.parametrize("place", [(99,), (0, 0), [0]])
def test_a_count_is_of_an_event_of_the_graph(place: object):
    p = ProgramBuilder("p")
    made = p.input("x", (4,)).map("exp(a0)", name="P")
    graph = events.analyse_events(p.build(made.map("-a0", name="C")), {})
    assert graph.count(("P.0", ()), RunTime()) == 1
    for bad in ("P.0", place), ("Q.0", ()):
        with pytest.raises(ProgramError, match=r"^event \(.*; expected events of P\.0, each with"):
            graph.count(bad, RunTime())  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", ["x", "", 3, 0, [], [("B", "x", 0)], torch.zeros(2)])
def test_symbols_are_by_name(bad: object) -> None:
    with pytest.raises(ProgramError, match=r"symbols .*; expected \(tensor, dim\) by name"):
        events.analyse_events(PROGRAM, {}, symbols=bad)  # type: ignore[arg-type]
    with pytest.raises(ProgramError, match=r"symbols .*; expected values by name"):
        events.run_queues(QUEUES, TENSORS, symbols=bad)  # type: ignore[arg-type]


def test_a_text_and_an_op_are_names() -> None:
    with pytest.raises(ProgramError, match="text 3, of type int; expected what print_events gives"):
        events.parse_events(3, PROGRAM)  # type: ignore[arg-type]
    with pytest.raises(ProgramError, match="tasks of None"):
        GRAPH.running(RunTime(symbols=B), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [None, "d", [], {"c"}, 3])
def test_what_is_asked_of_an_op_names_one_that_there_is_not(bad: object) -> None:
    asked: tuple[Callable[[], object], ...] = (
        lambda: GRAPH.running(RunTime(symbols=B), bad),  # type: ignore[arg-type]
        lambda: GRAPH.tiles(RunTime(symbols=B), bad),  # type: ignore[arg-type]
        lambda: GRAPH.own_first(bad, 0),  # type: ignore[arg-type]
    )
    for ask in asked:
        with pytest.raises(ProgramError, match=r"^tasks of .*; expected ops of program 'p' that"):
            ask()


@pytest.mark.parametrize("bad", [None, -1, 1024, "0", True, 0.0])
def test_a_rank_is_one_that_there_may_be(bad: object) -> None:
    assert GRAPH.own_first("c", 1023) == [(("c", 0), ())]
    with pytest.raises(ProgramError, match=r"^rank .*; expected a whole number of at least 0, at"):
        GRAPH.own_first("c", bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [None, "x", (1, 2)])
def test_a_routing_is_what_route_gives(bad: object) -> None:
    p = ProgramBuilder("p")
    x, w = p.input("x", (4, 8)), p.weight("w", (4, 8, 8))
    calls: tuple[Callable[[], object], ...] = (
        lambda: p.gather_rows(x, bad),
        lambda: p.grouped_linear(x, w, bad),
        lambda: p.grouped_pointwise("silu(a0)", x, routing=bad),
        lambda: p.scatter_add(x, x, bad),
    )
    for call in calls:
        with pytest.raises(ProgramError, match=r"^routing .*; expected what route gives"):
            call()
