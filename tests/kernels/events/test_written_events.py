"""Event graphs that somebody writes: a number that is changed, or an event that is left out, is
named before anything runs, or the graph is another right one of the same program.
"""

import re
from dataclasses import dataclass

import pytest
import torch
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
