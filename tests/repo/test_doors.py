"""Doors import by text what type checkers see as statements."""

import ast

import pytest

from distmega.lazy import _imported
from tests.repo.source import modules, parsed

DOORS = [
    path
    for path in modules().values()
    if "late_imports(__name__)" in path.read_text().splitlines()[-1]
]


def test_doors_have_all_names_that_type_checkers_see():
    assert len(DOORS) > 15
    for path in DOORS:
        seen = {
            alias.asname or alias.name: ast.unparse(statement)
            for block in parsed(path).body
            if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
            for statement in block.body
            if isinstance(statement, ast.ImportFrom)
            for alias in statement.names
        }
        found = {name: ast.unparse(ast.parse(text)) for name, text in _imported(path.read_text())}
        assert found == seen, path


def test_statements_may_have_any_form():
    source = """
if TYPE_CHECKING:
    from a.b import c, d as e  # why
    from f import (
        g,  # (one)

        h as i,
    )
x = 1
if TYPE_CHECKING:
    from j import k
"""
    assert [name for name, _ in _imported(source)] == ["c", "e", "g", "i", "k"]
    assert dict(_imported(source))["k"] == "from j import k\n"


def test_what_imports_no_names_is_refused():
    with pytest.raises(AssertionError, match="no import of names: 'import a"):
        [*_imported("if TYPE_CHECKING:\n    import a\n")]
