"""The front page, variables, tables and benchmarks agree with the code."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from bench import tables
from bench.cases import Ready, make_parser, measure_cases, read_case
from bench.records import RESULTS, UNKNOWN, Book, Record, open_book, read_records, write_records
from distmega.hostir.comm.communicator import Communicator
from tests.repo.source import ROOT

README = (ROOT / "README.md").read_text()


def test_the_front_page_is_one_page():
    assert len(README.splitlines()) <= 150


def test_the_two_commands_come_first():
    block = re.search(r"```\w*\n(.*?)```", README, re.DOTALL)
    assert block
    assert [line.split("#")[0].strip() for line in block[1].splitlines()] == [
        "make demo",
        "make test",
    ]


def test_the_demo_asks_what_the_front_page_shows():
    (asked,) = re.findall(r"^PROMPT \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert f"```text\n> {asked}\n" in README


def test_the_front_page_has_ten_rows_of_results():
    rows = tables.summary(RESULTS).splitlines()[2:]
    assert len(rows) == len(tables.SUMMARY) == 10


def test_every_environment_variable_is_listed():
    text = (ROOT / "docs/command.md").read_text()
    _, _, section = text.partition("\n## Environment variables\n")
    named = set(re.findall(r"^\| `(DISTMEGA_\w+)`", section, re.MULTILINE))
    read = set(re.findall(r'"(DISTMEGA_[A-Z_]+)"', (ROOT / "distmega/env.py").read_text()))
    assert named == read
    assert len(named) <= 10


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
# one example by day under torchrun, which starts all of them the same way
NIGHTLY = {name: () if name == "mlp.py" else pytest.mark.nightly for name in EXAMPLES}
SMALL = {"generate.py": ("tiny-llama",)}
"""Arguments by day, which spare its three ranks the real model that `make demo` answers with."""
WAYS = [
    *(pytest.param(name, (), SMALL.get(name, ()), id=f"{name}-python") for name in EXAMPLES),
    *(pytest.param(n, TORCHRUN, (), id=f"{n}-torchrun", marks=NIGHTLY[n]) for n in EXAMPLES),
]


@pytest.mark.slow
@pytest.mark.parametrize(("example", "how", "arguments"), WAYS)
def test_an_example_runs(example: str, how: tuple[str, ...], arguments: tuple[str, ...]):
    command = [sys.executable, *how, f"examples/{example}", *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_tables_are_what_the_results_give():
    pages = "".join(page.read_text() for page in tables.PAGES)
    assert tables.fill(pages, tables.RESULTS) == pages, "run `make tables`"
    assert not tables.unused(pages, tables.RESULTS)


def record(case: str, ours_us: float, peers: dict[str, float]) -> Record:
    return Record(
        case=case, device="NVIDIA H200", num_gpus=1, ours_us=ours_us, peers=peers, floor_us=50.0,
        commit="abc",
    )  # fmt: skip


def test_a_table_is_written_from_its_result_file(tmp_path: Path):
    path = tmp_path / "decode.json"
    write_records(path, [record("a", 100.0, {"torch": 200.0}), record("b", 62.5, {"other": 50.0})])
    text = "x\n<!-- table:decode -->\nold\n<!-- end -->\n<!-- table:gone -->\n<!-- end -->\n"
    assert tables.fill(text, tmp_path) == (
        "x\n<!-- table:decode -->\n"
        "| case | distmega us | torch us (x) | other us (x) | floor us | of floor |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
        "| a | 100 | 200 (2.00) | - | 50 | 50% |\n"
        "| b | 62.5 | - | 50 (0.80) | 50 | 80% |\n"
        "\n1 x NVIDIA H200; commit abc.\n<!-- end -->\n"
        "<!-- table:gone -->\nno results yet\n<!-- end -->\n"
    )


def test_a_floor_that_was_not_measured_is_left_out(tmp_path: Path):
    path = tmp_path / "decode.json"
    write_records(path, [replace(record("a", 100.0, {"torch": 200.0}), floor_us=None)])
    assert read_records(path)[0].floor_us is None
    assert "| a | 100 | 200 (2.00) | - | - |\n" in tables.table(path)


def test_a_case_measured_again_replaces_the_old_one(tmp_path: Path):
    path = tmp_path / "decode.json"
    write_records(path, [record("a", 100.0, {}), record("b", 62.5, {})])
    write_records(path, [record("b", 60.0, {})])
    assert [(found.case, found.ours_us) for found in read_records(path)] == [("a", 100), ("b", 60)]


def test_a_record_names_the_commit_of_its_book(tmp_path: Path):
    Book(folder=tmp_path, commit="def").write("decode", record("a", 1.0, {}), by_ranks=True)
    (found,) = read_records(tmp_path / "decode-nvidia-h200-tp1.json")
    assert found.commit == "def"


def test_results_of_the_repository_need_a_commit(tmp_path: Path, monkeypatch, capsys):
    assert not [path for path in RESULTS.glob("*.json") if f'"{UNKNOWN}"' in path.read_text()]
    monkeypatch.setattr("bench.records.current_commit", lambda: UNKNOWN)
    with pytest.raises(SystemExit, match="no commit known; expected git here, or --commit"):
        open_book(RESULTS, None)
    assert open_book(RESULTS, "abc") == Book(folder=RESULTS, commit="abc")
    assert open_book(tmp_path, None) == Book(folder=tmp_path, commit=UNKNOWN)
    assert "records will say 'unknown'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["cases", "overlap", "collectives", "pipelined"])
def test_benchmarks_that_write_take_the_same_options(name: str):
    text = (ROOT / f"bench/{name}.py").read_text()
    assert "add_book_options(parser)" in text
    assert "open_book(" in text
    assert not re.findall(r'"--(?:out|results|commit)"', text)


@dataclass(frozen=True)
class OneRank:
    """A case of one rank."""

    text: str
    num_ranks: int = 1


def test_cases_are_measured_and_written_as_they_come(tmp_path: Path, monkeypatch, capsys):
    asked = []

    def measure(
        case: OneRank, comm: Communicator, rounds: int, with_peer: bool, ready: Ready
    ) -> Record:
        ready()
        asked.append((case.text, comm.mesh.num_ranks, rounds, with_peer))
        return record(case.text, 2.0, {})

    options = ["a", "b", "--no-peer", "--results", str(tmp_path), "--commit", "abc"]
    monkeypatch.setattr("sys.argv", ["bench", *options])
    arguments = make_parser(None, ["c"], 7).parse_args()
    measure_cases("decode", arguments, OneRank, measure)
    assert asked == [("a", 1, 7, False), ("b", 1, 7, False)]
    found = read_records(tmp_path / "decode-nvidia-h200.json")
    assert [(one.case, one.commit) for one in found] == [("a", "abc"), ("b", "abc")]
    assert capsys.readouterr().out.count("Record(case=") == 2


def test_a_case_is_read_from_its_name():
    assert read_case("a-1b batch=2 ctx=30", "batch", "ctx") == ("a-1b", 2, 30, 1)
    assert read_case("a-1b prompt=7 tp=4", "prompt") == ("a-1b", 7, 4)
    with pytest.raises(SystemExit, match="case 'a batch=2'; expected 'MODEL batch=N ctx=N tp=N'"):
        read_case("a batch=2", "batch", "ctx")


def test_an_unnamed_result_file_is_reported(tmp_path: Path):
    (tmp_path / "stray.json").write_text("{}")
    assert tables.unused("no sections", tmp_path) == ["stray"]
