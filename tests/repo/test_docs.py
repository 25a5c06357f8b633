"""Every snippet of README and docs/ runs here or says why not; links and named files exist."""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path
from xml.etree import ElementTree

import pytest
import tyro

import distmega
from distmega.cli.main import Command
from tests.repo import draw_imports
from tests.repo.pages import ALL_PAGES, PAGES, Block, blocks_of, prose
from tests.repo.source import ROOT, python_files

LANGUAGES = {"setup", "python", "sh", "text", "mermaid"}
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
EXAMPLES = {str(path.relative_to(ROOT)): path.read_text() for path in ROOT.glob("examples/*.py")}
UNREAD = "a command that no test reads"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_code_stands_in_blocks_of_a_known_language(page: Path):
    for block in blocks_of(page):
        assert block.language in LANGUAGES, block.where
    assert not re.findall(r"^(?: {4}|\t)\S.*", prose(page), re.MULTILINE), "indented code"
    assert "```" not in prose(page)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_diagrams_name_no_node_by_a_word_of_mermaid(page: Path):
    """Seen in a browser: such a word as a name ends the drawing in a syntax error."""
    words = r"(?:call|class|click|default|end|graph|href|style)"
    for block in blocks_of(page):
        if block.language == "mermaid" and block.text.startswith("flowchart"):
            nodes = re.findall(rf"(?:^\s*|--> ){words}\b(?!$)", block.text, re.MULTILINE)
            assert not nodes, block.where


def is_of_an_example(block: Block) -> bool:
    """Whether a block is a part of a file that test_readme.py runs."""
    return any(block.text.strip("\n") in text for text in EXAMPLES.values())


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_python_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    blocks = [
        block
        for block in blocks_of(page)
        if block.language in ("setup", "python") and not (block.reason or is_of_an_example(block))
    ]
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "docs"}
    for block in blocks:
        # the page's own line numbers in a traceback
        code = compile("\n" * (block.line - 1) + block.text, block.page, "exec")
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            exec(code, names)


def test_examples_on_pages_say_which_they_are():
    for page in PAGES:
        for block in filter(is_of_an_example, blocks_of(page)):
            (path,) = (path for path, text in EXAMPLES.items() if block.text.strip("\n") in text)
            assert f"From `{path}`" in page.read_text(), block.where


def commands_of(page: Path) -> list[tuple[str, str]]:
    """Place and text of each command, in blocks and in the prose's code spans."""
    found = []
    for block in blocks_of(page):
        if block.language == "sh":
            for i, line in enumerate(block.text.splitlines()):
                if not (block.reason and problem(line) == UNREAD):
                    found.append((f"{block.page}:{block.line + i}", line))
    spans = re.findall(r"`((?:distmega|python|pytest|make) [^`]+)`", prose(page))
    return found + [(str(page.name), span.replace("\n", " ")) for span in spans]


def problem(command: str) -> str:
    """What is wrong with a command line, read without running it; empty for nothing."""
    words = shlex.split(command, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words.pop(0)
    match words:
        case [] | ["source", ".venv/bin/activate"]:
            return ""
        case ["make", target]:
            known = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            return "" if target in known else "no such target"
        case ["distmega", *arguments]:
            return problem_of_arguments(arguments)
        case ["torchrun", *arguments]:
            start = next(i for i, word in enumerate(arguments) if word == "-m" or ".py" in word)
            return problem(shlex.join(["python", *arguments[start:]]))
        case ["python" | "python3", "-m", "distmega", *arguments]:
            return problem_of_arguments(arguments)
        case ["python" | "python3", "-m", "pytest", *arguments] | ["pytest", *arguments]:
            paths = [word for word in arguments if word.startswith("tests")]
            return "" if all((ROOT / path).exists() for path in paths) else "no such tests"
        case ["python" | "python3", "-m", module, *arguments] if module.startswith("bench."):
            path = ROOT / (module.replace(".", "/") + ".py")
            sources = [path, ROOT / "bench/cases.py", ROOT / "bench/records.py"]
            text = "".join(source.read_text() for source in sources if path.exists())
            flags = [word for word in arguments if word.startswith("--")]
            return "" if all(f'"{flag}"' in text for flag in flags) and text else "no such option"
        case ["python" | "python3", path, *_]:
            return "" if (ROOT / path).exists() else "no such file"
        case [path, *_] if path.startswith("launch/"):
            return "" if os.access(ROOT / path, os.X_OK) else "no such script"
    return UNREAD


def problem_of_arguments(arguments: list[str]) -> str:
    """Of `distmega` itself; a lone command's name in the prose needs no arguments."""
    if arguments == ["--version"] or arguments[1:] in ([], ["--help"]):
        return ""
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(told):
            tyro.cli(Command, prog="distmega", args=arguments)
    except SystemExit:
        return told.getvalue()
    return ""


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_of_a_page_are_those_that_there_are(page: Path):
    found = [(where, text, problem(text)) for where, text in commands_of(page)]
    assert not [one for one in found if one[2]]


@pytest.mark.parametrize(
    "command",
    [
        "distmega explain x --no-such-flag",
        "make nothing",
        "python -m bench.decode --frob",
        "python examples/gone.py",
        "pytest tests/gone",
        "ray start",
    ],
)
def test_a_wrong_command_is_noticed(command: str):
    assert problem(command)


def anchors(page: Path) -> set[str]:
    """Anchors of headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", title.lower()) for title in titles)
    return {title.strip().replace(" ", "-") for title in plain}


def test_the_docs_list_all_benchmarks():
    """Files of bench/ that are commands, but for the one that writes tables."""
    text = (ROOT / "docs/contributing.md").read_text()
    (listed,) = re.findall(r"one file a benchmark: ([^;]*);", text)
    commands = {
        path.stem for path in (ROOT / "bench").glob("*.py") if "__main__" in path.read_text()
    }
    assert set(re.findall(r"\w+", listed)) == commands - {"tables"}


def test_links_lead_to_files_and_headings():
    wrong = []
    for page in filter(Path.exists, ALL_PAGES):
        for path, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
            target = (page.parent / path) if path else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                wrong.append(f"{page.name}: {path}#{anchor}")
    assert not wrong


def test_every_page_of_docs_is_reached_from_the_front_page():
    front = (ROOT / "README.md").read_text()
    assert not [name for name in NAMES[1:] if f"]({name})" not in front]


def test_the_drawing_of_imports_is_current():
    assert draw_imports.PICTURE.read_text() == draw_imports.draw(), "run `make tables`"
    root = ElementTree.fromstring(draw_imports.PICTURE.read_text())
    texts = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"cli", "launch", "engine", "kernels/tasks", "hostir/run", "sharding/search"} <= texts


def test_lines_that_others_imply_are_left_out():
    graph = {"a": {"b", "c"}, "b": {"c", "d"}, "c": {"d"}, "d": {"e"}, "e": {"d"}}
    assert draw_imports.needed_lines(graph) == [
        ("a", "b"), ("b", "c"), ("c", "d"), ("d", "e"), ("e", "d"),
    ]  # fmt: skip


def test_api_pages_are_built_from_the_built_copy_without_warnings(installed: Path, tmp_path: Path):
    script, out = ROOT / "docs/build_api.py", tmp_path / "api"
    program = f"import sys; sys.path.insert(0, {str(installed)!r}); import runpy; " + (
        f"sys.argv[1:] = [{str(out)!r}]; runpy.run_path({str(script)!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    page = (out / "distmega.html").read_text()
    assert not [name for name in distmega.__all__ if f'id="{name}"' not in page]
    assert "Sequences that are decoded together" in page
    for door in ("errors", "launch", "hostir", "kernels"):
        assert (out / "distmega" / f"{door}.html").exists()


def test_the_changelog_keeps_its_form():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert text.startswith("# Changelog\n")
    releases = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert releases[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", one) for one in releases[1:])
    kinds = set(re.findall(r"^### (.*)$", text, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert f"becomes {distmega.__version__}" in text or f"[{distmega.__version__}]" in text


def test_files_that_pages_name_exist():
    tops = [ROOT / top for top in ("distmega", "sharding", "hostir", "kernels", "launch", "bench")]
    folders = [ROOT, *tops, *(folder for top in tops for folder in top.rglob("*/"))]
    missing = []
    for page in PAGES:
        for name in re.findall(r"`([\w./]+\.(?:py|sh|json|toml|md))[:`]", prose(page)):
            if "/" in name and not any((folder / name).exists() for folder in folders):
                missing.append(f"{page.name}: {name}")
    assert not missing


OF_OTHERS = {"run_NAME", "verb_noun", "max_pool2d_with_indices"}
"""Names on pages that stand for others, or are torch's."""


def test_names_that_pages_set_as_code_exist():
    code = "".join(path.read_text() for path in python_files())
    known = set(re.findall(r"\w+", code)) | OF_OTHERS
    dead = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        set_as_code = " ".join(re.findall(r"`([^`\n]+)`", text))
        without_paths = re.sub(r"[\w.-]*/[\w./-]*", "", set_as_code)
        for name in re.findall(r"[A-Za-z_]\w{3,}", without_paths):
            is_name = "_" in name or not (name.islower() or name.isupper())
            if is_name and name not in known:
                dead.append(f"{page.name}: {name}")
    assert not dead
