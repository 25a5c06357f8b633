"""What kernels say of themselves: each argument of one that is launched, why PTX stands there."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.repo.source import modules, parsed

KERNELS = {name: path for name, path in modules().items() if name.startswith("distmega.kernels.")}


def compiled(path: Path) -> dict[str, ast.FunctionDef]:
    """Functions of a file that Triton compiles."""
    return {
        node.name: node
        for node in parsed(path).body
        if isinstance(node, ast.FunctionDef)
        and any("jit" in ast.unparse(each) for each in node.decorator_list)
    }


@cache
def functions() -> dict[str, ast.FunctionDef]:
    """All that Triton compiles, by name; processes that only collect tests read none."""
    return {name: node for path in KERNELS.values() for name, node in compiled(path).items()}


def launched() -> set[str]:
    """Kernels that some file launches, `kernel[grid](...)`, or hands to a launcher."""
    found: set[str] = set()
    for path in KERNELS.values():
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.Call):
                continue
            given = [each.value for each in node.keywords if each.arg == "kernel"]
            if isinstance(node.func, ast.Subscript):
                given.append(node.func.value)
            called = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if called.endswith("Launcher"):
                given += node.args[:1]
            names = [each for one in given for each in ast.walk(one)]
            found |= {each.id for each in names if isinstance(each, ast.Name)}
            found |= {each.attr for each in names if isinstance(each, ast.Attribute)}
    named = {
        name
        for name, node in functions().items()
        if any("do_not_specialize" in ast.unparse(each) for each in node.decorator_list)
    }
    return found & set(functions()) | named


def unsaid(name: str) -> list[str]:
    """Arguments of which a kernel's docstring, or the one it refers to, says nothing."""
    node = functions()[name]
    text = ast.get_docstring(node) or ""
    other = re.match(r"As (\w+)", text)
    if other and other[1] in functions():
        text += ast.get_docstring(functions()[other[1]]) or ""
    for prefix, first, last in re.findall(r"\b([a-z]+)(\d) to [a-z]*(\d)\b", text):
        text += " ".join(f" {prefix}{n}" for n in range(int(first), int(last) + 1))
    arguments = [each.arg for each in node.args.args]
    return [each for each in arguments if not re.search(rf"(?<!\w){each}(?!\w)", text)]


def test_kernels_that_are_launched_are_found():
    assert {
        "run_row_steps",
        "run_batch_steps",
        "matmul_kernel",
        "norm_plain",
        "await_signal",
    } <= launched()


def test_kernels_state_each_argument():
    assert {name: missing for name in sorted(launched()) if (missing := unsaid(name))} == {}


@pytest.mark.parametrize(
    "name", sorted(name for name, path in KERNELS.items() if "inline_asm" in path.read_text())
)
def test_inline_ptx_says_why(name: str):
    """A comment in the function that holds it, or right above the constant that has its text."""
    lines = KERNELS[name].read_text().splitlines()
    silent = []
    for node in ast.walk(parsed(KERNELS[name])):
        if not isinstance(node, ast.FunctionDef) or "inline_asm" not in ast.unparse(node):
            continue
        said = lines[node.lineno - 1 : node.end_lineno]
        used = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        for each in parsed(KERNELS[name]).body:
            if isinstance(each, ast.Assign) and used & {ast.unparse(one) for one in each.targets}:
                said.append(lines[each.lineno - 2])
        if not any(line.strip().startswith("#") for line in said):
            silent.append(node.name)
    assert not silent
