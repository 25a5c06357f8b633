"""The repository's Python files and what they import, read without importing them."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

TOPS = {
    "distmega": ROOT / "distmega",
    "distmega.sharding": ROOT / "sharding",
    "distmega.hostir": ROOT / "hostir",
    "distmega.kernels": ROOT / "kernels",
    "distmega.launch": ROOT / "launch",
}
"""Package -> its folder at the root."""

PACKAGES: dict[str, Path] = {
    ".".join((top, *door.parent.relative_to(folder).parts)): door.parent
    for top, folder in TOPS.items()
    for door in sorted(folder.rglob("__init__.py"))
}
"""Package name -> its folder; a folder's own files only."""


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module, as written at `line`; `local` if inside a function, `late` if it is
    loaded when it is first used: by lazy.py, by name, or as the target of a launch.
    """

    target: str
    line: int
    local: bool
    late: bool


def modules() -> dict[str, Path]:
    """Module name -> file, for all that is installed; a package is named without __init__."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.glob("*.py")):
            found[package if path.stem == "__init__" else f"{package}.{path.stem}"] = path
    return found


def python_files() -> list[Path]:
    """Every Python file of the repository: installed ones, tests, bench, examples."""
    folders = (*PACKAGES.values(), *(ROOT / name for name in ("tests", "bench", "examples")))
    return sorted({path for folder in folders for path in folder.rglob("*.py")})


@cache
def parsed(path: Path) -> ast.Module:
    """A file's syntax."""
    return ast.parse(path.read_text(), filename=str(path))


@cache
def imports(path: Path) -> list[Import]:
    """All imports of a file; `from a import b` gives a.b where that is a module of the repository,
    else a.
    """
    return list(_walk(parsed(path), local=False, late=False))


def _walk(node: ast.AST, *, local: bool, late: bool) -> Iterator[Import]:
    match node:
        case ast.Import(names=names):
            yield from (Import(alias.name, node.lineno, local, late) for alias in names)
        case ast.ImportFrom(module=module, level=level, names=names):
            base = "." * level + (module or "")
            full = {f"{base}.{alias.name}" for alias in names}
            inside = full & known_modules()
            targets = {*inside, base} if inside != full else inside
            yield from (Import(target, node.lineno, local, late) for target in sorted(targets))
        case ast.Constant(value=str(text)) if names_module(text):
            yield Import(text.partition(":")[0], node.lineno, local=False, late=True)
        case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]) if ast.unparse(
            function
        ).endswith("import_module"):
            yield Import(name, node.lineno, local, True)
        case _:
            local = local or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            late = late or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
            for child in ast.iter_child_nodes(node):
                yield from _walk(child, local=local, late=late)


def names_module(text: str) -> bool:
    """Whether a string is the name of a module inside a package, or "module:function"."""
    name = text.partition(":")[0]
    return name in known_modules() and name not in TOPS


@cache
def known_modules() -> frozenset[str]:
    """Names of all that is installed."""
    return frozenset(modules())


@cache
def import_graph(*, late: bool = True) -> dict[str, set[str]]:
    """Installed module -> installed modules it imports, with those that doors import late or
    without.
    """
    return {
        name: {
            found.target
            for found in imports(path)
            if found.target in known_modules() and (late or not found.late)
        }
        - {name}
        for name, path in modules().items()
    }
