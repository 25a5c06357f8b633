"""Imports of a door (`__init__.py`) that run when a name of theirs is first used: `import distmega`
takes no torch, and what needs triton, transformers or Ray is loaded only for those who ask for it.

Comes in: a door, whose imports stand under `if TYPE_CHECKING:` as real statements, so that type
checkers and the layering test see where each name lives. Goes out: the door's `__getattr__`, which
runs the statement that has a name.
"""

import re
import sys
from collections.abc import Callable, Iterator
from textwrap import dedent

_BLOCK = re.compile(r"^if TYPE_CHECKING:\n((?:[ \t]+.*\n|\n)+)", re.MULTILINE)
_STATEMENT = re.compile(r"from [\w.]+ import (?:\(([^()]*)\)|(.*))\n+")
_COMMENT = re.compile(r"#.*")


def late_imports(door: str) -> Callable[[str], object]:
    """`__getattr__` of a module: runs the one of its imports for type checkers that has a name."""
    statements: dict[str, str] = {}

    def find(name: str) -> object:
        module = sys.modules[door]
        if not statements:
            statements.update(_imported(_source_of(door)))
        if name not in statements:
            raise AttributeError(f"module {door!r} has no attribute {name!r}")
        # compiled first: Python would kill itself by SIGINT as it exits, had Ctrl-C ended a text
        exec(compile(statements[name], str(module.__file__), "exec"), vars(module))
        return vars(module)[name]

    return find


def _source_of(door: str) -> str:
    spec = sys.modules[door].__spec__
    assert spec is not None
    source: str | None = spec.loader.get_source(door)  # type: ignore[union-attr]
    if source is None:
        raise ImportError(f"module {door!r} has no source; install distmega with its .py files")
    return source


def _imported(source: str) -> Iterator[tuple[str, str]]:
    """Names that a module imports for type checkers, and the statement of each. No syntax tree is
    made, since a thread may be making another (collecting.py).
    """
    for block in _BLOCK.findall(source):
        text, at = dedent(_COMMENT.sub("", block)).lstrip("\n"), 0
        while at < len(text):
            statement = _STATEMENT.match(text, at)
            assert statement, f"no import of names: {text[at:]!r}"
            names = (statement[1] or statement[2]).split(",")
            yield from ((name.split()[-1], statement[0]) for name in names if name.strip())
            at = statement.end()
