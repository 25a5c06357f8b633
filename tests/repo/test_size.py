"""A reader can hold a file and a function in the head: 400 lines, 60 lines, 120 for a kernel."""

import ast

from tests.repo.source import ROOT, python_files

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 120


def test_files_are_short():
    lengths = {path: len(path.read_text().splitlines()) for path in python_files()}
    assert not {str(p.relative_to(ROOT)): n for p, n in lengths.items() if n > MAX_FILE_LINES}


def test_functions_are_short():
    long = []
    for path in python_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                kernel = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > (MAX_KERNEL_LINES if kernel else MAX_FUNCTION_LINES):
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name} {lines} lines")
    assert not long
