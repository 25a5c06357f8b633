"""A search that stops when its time is over: what it keeps, what it says."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest

from distmega.cli.main import main
from distmega.errors import RequestError
from distmega.kernels.machines import H200
from distmega.program.builder import ProgramBuilder
from distmega.program.text import print_program
from distmega.program.types import Program
from distmega.superopt.optimize import Optimizer
from distmega.superopt.rules import read_rules
from distmega.superopt.search import budget
from distmega.superopt.search.schedule import SearchLimits
from distmega.superopt.search.search import Search
from tests.superopt import programs


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock takes a second."""
    seconds = itertools.count()
    fake = SimpleNamespace(monotonic=lambda: float(next(seconds)))
    monkeypatch.setattr(budget, "time", fake)


def chain(num: int) -> Program:
    """Linear layers, one after the other: few recipes, many ways to cut one into kernels."""
    p = ProgramBuilder("chain")
    y = p.input("x", (16, 64), "bf16")
    for number in range(num):
        y = p.linear(y, p.weight(f"w{number}", (64, 64), "bf16"))
    return p.build(y)


def search(program: Program, budget_s: int) -> Search:
    found = Search(program, H200, SearchLimits(num_scheduled=24, budget_s=budget_s))
    for _ in found.run():
        pass
    return found


@pytest.mark.usefixtures("clock")
def test_a_search_within_its_budget_is_the_whole_one() -> None:
    whole, bounded = (search(programs.gated(), seconds) for seconds in (0, 10**9))
    assert not whole.budget.was_short
    assert not bounded.budget.was_short
    assert whole.candidates() == bounded.candidates()
    assert whole.num_states == bounded.num_states


@pytest.mark.usefixtures("clock")
def test_a_longer_search_finds_nothing_slower() -> None:
    best = []
    for seconds in (20, 60, 100, 0):
        found = search(programs.gated(), seconds)
        assert found.budget.was_short == bool(seconds), seconds
        best.append(found.candidates()[0].time_us)
    assert best == sorted(best, reverse=True)


@pytest.mark.usefixtures("clock")
def test_a_recipe_of_many_kernels_is_left_when_the_time_is_over() -> None:
    found = search(chain(6), 200)
    assert found.budget.was_short
    assert found.candidates()


@pytest.mark.usefixtures("clock")
def test_one_graph_is_proven_when_the_time_is_over() -> None:
    run = Optimizer(programs.gated(), H200, SearchLimits(num_scheduled=24, budget_s=60))
    for _ in run.run():
        pass
    assert run.search.budget.was_short
    assert len(run.rules) == 1


@pytest.mark.usefixtures("clock")
def test_the_report_says_that_it_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "gated.txt", tmp_path / "rules.json"
    path.write_text(print_program(programs.gated()))
    assert main(["superopt", str(path), "--out", str(out), "--budget", "60"]) == 0
    assert "stopped at its budget of 60 s" in capsys.readouterr().out
    assert len(read_rules(out)) == 1
    assert main(["superopt", str(path), "--out", str(out), "--budget", "0", "--kept", "1"]) == 0
    assert "stopped" not in capsys.readouterr().out
    out.unlink()
    assert main(["superopt", str(path), "--out", str(out), "--budget", "1"]) == 2
    assert "allow more by --budget" in capsys.readouterr().err
    assert not out.exists()


def test_a_budget_is_a_number_of_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["superopt", "lora k=64 n=64 rank=16", "--budget", "-1"]) == 2
    assert "--budget -1" in capsys.readouterr().err
    with pytest.raises(RequestError, match=r"search limit budget_s=0\.5"):
        SearchLimits(budget_s=0.5)  # type: ignore[arg-type]
