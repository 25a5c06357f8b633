"""docs/walk.md names the functions that examples/mlp.py calls, in the order in which it does."""

import ast
import re
from itertools import pairwise

import torch

from distmega.launch import LauncherOptions, Result, launch
from examples.mlp import build_mlp
from tests.repo.source import ROOT
from tests.repo.walking import following, run_followed

WALK = (ROOT / "docs/walk.md").read_text()


def steps() -> list[str]:
    """The functions of the numbered lists."""
    found = re.findall(r"^(\d+)\. `([\w/]+\.py:[\w.]+)`", WALK, re.MULTILINE)
    assert [int(number) for number, _ in found] == list(range(1, len(found) + 1))
    return [name for _, name in found]


def test_the_walk_follows_the_calls_of_the_example():
    values = {t.name: torch.randn(t.shape) for t in build_mlp().tensors if t.role != "temp"}
    options = LauncherOptions(num_ranks=2, device="cpu")
    with following() as caller:
        events = list(launch(run_followed, values, options))
    assert isinstance(events[-1], Result)
    calls = [name for part in ([*caller], *events[-1].value) for name in part]
    at = 0
    for step in steps():
        assert step in calls, f"the example does not call {step}"
        assert step in calls[at:], f"{step} is called before the step that stands above it"
        at = calls.index(step, at)


def test_a_docstring_of_the_walk_names_the_next_file():
    _, _, text = WALK.partition("Docstrings lead the same way")
    files = re.findall(r"`([\w/]+\.py)`", text.partition("\n\n")[0])
    assert files[0] == "examples/mlp.py"
    assert files[-1] == "launch/worker.py"
    assert len(files) >= 9
    for path, following_one in pairwise(files):
        docstring = ast.get_docstring(ast.parse((ROOT / path).read_text())) or ""
        assert following_one.rpartition("/")[2] in docstring, f"{path} names no {following_one}"


def functions_of(path: str) -> set[str]:
    """Names of functions, methods and classes of a file, as "Class.method"."""
    found = set()

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                found.add(f"{prefix}{child.name}")
                visit(child, f"{prefix}{child.name}.")

    visit(ast.parse((ROOT / path).read_text()), "")
    return found


def test_functions_that_pages_name_exist():
    named = {
        name
        for page in (ROOT / "docs").glob("*.md")
        for name in re.findall(r"`([\w/]+\.py):([\w.]+)`", page.read_text())
    }
    assert len(named) > 40
    missing = [f"{path}:{name}" for path, name in sorted(named) if name not in functions_of(path)]
    assert not missing


def test_questions_of_newcomers_are_answered_by_files():
    _, _, table = WALK.partition("## Questions and where the answers are\n")
    rows = re.findall(r"^\| ([^|]*\?) \| (.*) \|$", table, re.MULTILINE)
    asked = " ".join(question for question, _ in rows)
    for words in (
        "an op's cost", "add a launcher", "two tasks must wait", "weights get cut", "batch of 8",
    ):  # fmt: skip
        assert words in asked
    assert not [
        question for question, answer in rows if not re.search(r"`[\w/]+(?:\.py|/)", answer)
    ]


def test_the_walk_goes_through_every_layer():
    tops = [step.split("/")[0] for step in steps()]
    order = [top for i, top in enumerate(tops) if top not in tops[:i]]
    assert order == ["launch", "examples", "distmega", "sharding", "hostir", "kernels"]
