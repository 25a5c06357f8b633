"""Imports of a door (`__init__.py`) that run when a name of theirs is first used: `import distmega`
takes no torch, and what needs triton, transformers or Ray is loaded only for those who ask for it.

Comes in: a door, whose imports stand under `if TYPE_CHECKING:` as real statements, so that type
checkers and the layering test see where each name lives. Goes out: the door's `__getattr__`, which
runs the statement that has a name.
"""

import ast
import sys
from collections.abc import Callable, Iterator


def late_imports(door: str) -> Callable[[str], object]:
    """`__getattr__` of a module: runs the one of its imports for type checkers that has a name."""
    statements: dict[str, ast.ImportFrom] = {}

    def find(name: str) -> object:
        module = sys.modules[door]
        if not statements:
            statements.update(_imported(_source_of(door)))
        if name not in statements:
            raise AttributeError(f"module {door!r} has no attribute {name!r}")
        statement = ast.Module(body=[statements[name]], type_ignores=[])
        exec(compile(statement, str(module.__file__), "exec"), vars(module))
        return vars(module)[name]

    return find


def _source_of(door: str) -> str:
    spec = sys.modules[door].__spec__
    assert spec is not None
    source: str | None = spec.loader.get_source(door)  # type: ignore[union-attr]
    if source is None:
        raise ImportError(f"module {door!r} has no source; install distmega with its .py files")
    return source


def _imported(source: str) -> Iterator[tuple[str, ast.ImportFrom]]:
    """Names that a module imports for type checkers, and the statement of each."""
    for block in ast.parse(source).body:
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            for statement in block.body:
                assert isinstance(statement, ast.ImportFrom), ast.unparse(statement)
                yield from ((alias.asname or alias.name, statement) for alias in statement.names)
