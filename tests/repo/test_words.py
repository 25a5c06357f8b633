"""One word for one thing, the field's: no name has a part that HOUSE's table replaced, no two
classes share a name, and VerifyError is a broken rule, never something unsupported."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.repo.source import ROOT, modules, parsed

INSTEAD = {
    "tagged": "flagged",
    "exchange": "symmetric (buffer), communicate",
    "exchanges": "symmetric (buffers), communications",
    "room": "symmetric buffer",
    "rooms": "symmetric buffers",
    "place": "team rank, position",
    "places": "team ranks, positions",
    "draw": "sample",
    "draws": "samples",
    "drawn": "sampled",
    "likeliest": "argmax",
    "blueprint": "decode plan",
    "blueprints": "decode plans",
    "moves": "movements, data movement",
    "lend": "borrow",
    "lends": "borrows",
    "lent": "borrowed",
    "lending": "borrowing",
    "alike": "replicated, same",
    "highs": "row maxima",
    "told": "ready flags, reported",
    "doubt": "min predicted speedup",
    "uncollected": "gc paused",
}
"""Part of a name -> what to say."""

PROSE = re.compile(
    r"\b(likeliest|blueprints?|uncollected|lend(s|ing)?|tagged words?|dra(w|ws|wn|wing))\b", re.I
)
"""Words that pages, comments and docstrings don't say either."""
PICTURES = ("cli/explain", "trace_file", "draw_imports")
"""Parts of the paths of files that draw pictures."""
LAUNCH_FILES = re.compile(r"launch(er|ers|es)?\.py")
PARTS = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")


def parts(name: str) -> set[str]:
    """The words of a name in snake or camel case, in lower case."""
    return {part.lower() for part in PARTS.findall(name)}


def defined(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of all that a module defines: functions, classes, parameters, variables,
    attributes, aliases."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield node.lineno, name
            case ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name):
                yield node.lineno, name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.alias(asname=str(name)):
                yield getattr(node, "lineno", 0), name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield node.lineno, name
            case ast.ExceptHandler(name=str(name)):
                yield node.lineno, name


def faults(path: Path, tree: ast.Module) -> list[str]:
    """Names of a module with words that are not said any more, and what to say."""
    return [
        f"{path}:{line} {name}: say {INSTEAD[word]}"
        for line, name in defined(tree)
        for word in sorted(parts(name) & INSTEAD.keys())
    ]


def test_pages_and_comments_say_them_too():
    files = [*modules().values(), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    found = [
        f"{path}:{number} {line.strip()}"
        for path in files
        if not any(part in path.as_posix() for part in PICTURES)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if PROSE.search(line) and not re.search("drawing|drawn with|draws pictures", line)
    ]
    assert not found


def test_names_say_the_words_of_the_field():
    found = [fault for path in modules().values() for fault in faults(path, parsed(path))]
    assert not found


def test_a_word_is_found_in_every_kind_of_name():
    source = (
        "import numpy as drawing_room\n"
        "class TaggedWord:\n"
        "    def lend(self, placeOf, *, room_bytes): self.highs = 1\n"
        "for MOVES in (): pass\n"
        "match 1:\n"
        "    case told: pass\n"
    )
    found = {fault.split()[1].rstrip(":") for fault in faults(Path("x.py"), ast.parse(source))}
    assert found == {
        "drawing_room", "TaggedWord", "lend", "placeOf", "room_bytes", "highs", "MOVES", "told",
    }  # fmt: skip
    other = ast.parse("placement, replaced, movement, drawing, high = 1, 2, 3, 4, 5")
    assert not faults(Path("x.py"), other)


def test_one_file_is_named_by_launching():
    """The one entrance to the launchers, launch/launchers.py; others say what they do."""
    found = [path for path in modules().values() if LAUNCH_FILES.fullmatch(path.name)]
    assert [str(path.relative_to(ROOT)) for path in found] == ["launch/launchers.py"]


def test_no_file_name_says_a_replaced_word():
    assert not [path for path in modules().values() if parts(path.stem) & INSTEAD.keys()]


def test_no_two_classes_share_a_name():
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in modules().values():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not {name: lines for name, lines in found.items() if len(lines) > 1}


def test_verify_error_is_a_broken_rule():
    """Where something is not supported, UnsupportedError says so: no message of a VerifyError has
    the words of a limit."""
    limits = re.compile(
        r"not (supported|in a? ?kernel)|unsupported|can't (do|take)|only one\b|to resize"
    )
    wrong = []
    for path in modules().values():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "VerifyError":
                texts = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
                if any(isinstance(text, str) and limits.search(text) for text in texts):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong
