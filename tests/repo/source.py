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
    """One imported module, as written at `line`; `local` if inside a function."""

    target: str
    line: int
    local: bool


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
def imports(path: Path) -> list[Import]:
    """All imports of a file; `from a import b` gives both a and a.b, since b may be a module."""
    return list(_walk(ast.parse(path.read_text(), filename=str(path)), local=False))


def _walk(node: ast.AST, *, local: bool) -> Iterator[Import]:
    match node:
        case ast.Import(names=names):
            yield from (Import(alias.name, node.lineno, local) for alias in names)
        case ast.ImportFrom(module=module, level=level, names=names):
            base = "." * level + (module or "")
            yield Import(base, node.lineno, local)
            yield from (Import(f"{base}.{alias.name}", node.lineno, local) for alias in names)
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return  # an __init__'s public names, loaded when they are used
        case _:
            inside = local or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                yield from _walk(child, local=inside)


@cache
def import_graph() -> dict[str, set[str]]:
    """Installed module -> installed modules it imports."""
    known = modules()
    return {
        name: {found.target for found in imports(path) if found.target in known} - {name}
        for name, path in known.items()
    }
