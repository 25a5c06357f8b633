"""Tests of GPUs and benchmarks, which a machine without one does not run, import names that there
are, and take of modules what these have.
"""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.repo.source import ROOT

pytest.importorskip("triton", reason="triton is not installed (pip install 'distmega[gpu]')")

FILES = [
    path
    for folder in ("tests/gpu", "tests/multigpu", "bench")
    for path in sorted((ROOT / folder).glob("*.py"))
]


def imported(tree: ast.AST) -> Iterator[tuple[str, str, str]]:
    """Module, name and name here of what a file imports of this project."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            ("distmega", "tests")
        ):
            for alias in node.names:
                yield str(node.module), alias.name, alias.asname or alias.name


def find(module: str, name: str) -> object:
    """What a module has by a name, a module of its folder too; None if nothing."""
    found = getattr(importlib.import_module(module), name, None)
    if found is None:
        try:
            return importlib.import_module(f"{module}.{name}")
        except ModuleNotFoundError:
            return None
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_names_of_what_needs_gpus_exist(path: Path) -> None:
    tree = ast.parse(path.read_text())
    modules, missing = dict[str, ModuleType](), []
    for module, name, here in imported(tree):
        found = find(module, name)
        if found is None:
            missing.append(f"{module}.{name}")
        if isinstance(found, ModuleType):
            modules[here] = found
    missing += [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in modules
        and not hasattr(modules[node.value.id], node.attr)
    ]
    assert not missing
