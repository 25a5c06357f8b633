"""`distmega superopt`: what it prints and writes, and what it refuses."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from distmega.cli.main import main
from distmega.program.text import print_program
from distmega.superopt.optimize import Optimizer, Refusal
from distmega.superopt.programs import PAPER_CASES, read_case
from distmega.superopt.rules import RewriteRule, read_rules
from distmega.superopt.search.search import Progress
from tests.superopt import programs


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "gated.txt"
    path.write_text(print_program(programs.gated()))
    return path


def test_rules_are_written_and_the_best_graph_printed(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "rules.json"
    assert main(["superopt", str(file), "--out", str(out), "--kept", "3"]) == 0
    rules = read_rules(out)
    printed = capsys.readouterr().out
    assert [rule.name for rule in rules] == ["gated.0", "gated.1", "gated.2"]
    assert rules[0].graph.strip() in printed
    assert "3 proven, 0 refused" in printed
    assert rules[0].graph_us <= rules[1].graph_us < rules[0].program_us


def test_same_seed_gives_the_same_file(file: Path, tmp_path: Path):
    texts = []
    for name in ("a.json", "b.json"):
        out = str(tmp_path / name)
        assert main(["superopt", str(file), "--out", out, "--kept", "2", "--seed", "3"]) == 0
        texts.append((tmp_path / name).read_text())
    assert texts[0] == texts[1]
    assert '"seed": 3' in texts[0]


def test_an_interrupted_search_keeps_what_it_has(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    whole = Optimizer.run

    def interrupted(self: Optimizer) -> Iterator[Progress | RewriteRule | Refusal]:
        for number, event in enumerate(whole(self)):
            if number == 4:
                raise KeyboardInterrupt
            yield event

    monkeypatch.setattr(Optimizer, "run", interrupted)
    out = tmp_path / "rules.json"
    assert main(["superopt", str(file), "--out", str(out)]) == 0
    assert "interrupted" in capsys.readouterr().err
    assert read_rules(out)


def test_a_file_that_can_not_be_written_is_told_before_the_search(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(Optimizer, "run", lambda _self: pytest.fail("it searches"))
    for out in (tmp_path, tmp_path / "missing" / "rules.json"):
        assert main(["superopt", str(file), "--out", str(out)]) == 2
        said = capsys.readouterr().err
        assert "can't be written" in said
        assert said.rstrip().endswith("make the folder, or give another --out")
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize("case", PAPER_CASES)
def test_the_papers_programs_are_known(case: str):
    for rows in (1, 16):
        program = read_case(f"{case} rows={rows}")
        assert program.name == case.split(" ")[0]
        assert all(t.dtype == "bf16" for t in program.tensors)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["lora k=4096 rows=1"], "case 'lora k=4096 rows=1'"),
        (["lora k=0 n=16 rank=16"], "sizes of at least 1"),
        (["lora k=64.5 n=16 rank=16"], "case 'lora k=64.5 n=16 rank=16'"),
        ([f"lora k={'9' * 5000} n=16 rank=16"], "expected one of"),
        (["gqa_decode ctx=8 heads=7 kv=2 dim=4"], "as many heads for each of kv"),
        (["nowhere.txt"], "'nowhere.txt' can't be read"),
        (["lora k=64 n=64 rank=16", "--kept", "0"], "--kept 0"),
    ],
)
def test_wrong_requests_are_named(
    arguments: list[str], found: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["superopt", *arguments]) == 2
    assert found in " ".join(capsys.readouterr().err.split())


def test_an_op_outside_the_bounds_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "program.txt"
    path.write_text(
        "program p\n  input x: f32[4, 8]\n  temp y: f32[4, 8]\n"
        "  y = cumsum[m0:4 d:8 r:8:reduce] x(m0, d) x(m0, r) -> y(m0, d)\n  return y\n"
    )
    assert main(["superopt", str(path)]) == 2
    assert "op 'y': kind 'cumsum'" in " ".join(capsys.readouterr().err.split())
