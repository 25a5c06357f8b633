"""Imports point down: launch > models, engine > kernels > hostir > sharding, superopt > program and
ops."""

import ast
import graphlib
import importlib
import re
from functools import cache
from pathlib import Path

import pytest

from tests.repo.source import (
    PACKAGES,
    ROOT,
    import_graph,
    imports,
    modules,
    names_module,
    parsed,
    python_files,
)

BOTTOM = ("distmega.program", "distmega.arguments", "distmega.errors", "distmega.env",
          "distmega.collecting", "distmega.folders", "distmega.json_file", "distmega.lazy",
          "distmega.trace_file", "distmega.whole_file")  # fmt: skip
"""What sharding may stand on; the rest of distmega/ is the top half, above kernels."""

OURS = ("distmega", "tests", "bench", "examples")
LOADERS = ("import_module", "__import__", "exec", "exec_module", "run_module", "run_path")
PROCESSES = re.compile(r"distmega\.launch\.local_rank|[\w.]+:\w+")
"""Strings that may name a module: what another process starts with. The ranks of a launch begin
with a function, "module:function", which the process that launches need not load; launch/local.py
starts its ranks as `python -m`.
"""

LOADED_BY_NAME = {
    "distmega/lazy.py": "runs a module's own import statements, late",
    "launch/contract.py": "loads what a user has the ranks run",
    "distmega/cli/findings.py": "looks which packages there are",
    "kernels/__init__.py": "steps aside for another package of the bare name",
    "kernels/ugraphs/runner.py": "runs the source of kernels that it writes",
}
"""File -> why it loads what is not written down in it."""

COMMANDS = ("distmega.cli", "distmega.__main__", "distmega.generation")
BARE = ("sharding", "hostir", "kernels", "launch")
HOMES = {"triton": "distmega.kernels", "ray": "distmega.launch"}
"""Third-party package -> the only package that may import it."""


def _within(module: str, names: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)


def layer(module: str) -> int:
    """Height of a module; it may import modules of its own height and below."""
    if module == "distmega" or _within(module, COMMANDS):
        return 6
    if _within(module, BOTTOM):
        return 0
    if _within(module, ("distmega.superopt",)):
        return 1
    for height, package in enumerate(("sharding", "hostir", "kernels"), start=1):
        if module == f"distmega.{package}" or module.startswith(f"distmega.{package}."):
            return height
    return 5 if module.startswith("distmega.launch") else 4


def test_imports_point_down_the_layers():
    upward = [
        f"{module} imports {target}"
        for module, targets in import_graph().items()
        for target in sorted(targets)
        if layer(target) > layer(module)
    ]
    assert not upward


def test_modules_import_each_other_without_cycles():
    graphlib.TopologicalSorter(import_graph()).prepare()


def test_project_imports_stand_at_the_top_of_a_file_and_are_absolute():
    wrong = [
        f"{path.relative_to(ROOT)}:{found.line} {found.target}"
        for path in python_files()
        for found in imports(path)
        if found.target.startswith(".")
        or (found.local and not found.late and found.target.startswith("distmega"))
    ]
    assert not wrong


def test_no_folder_is_imported_by_its_bare_name():
    wrong = [
        f"{path.relative_to(ROOT)}:{found.line} {found.target}"
        for path in python_files()
        for found in imports(path)
        if found.target.split(".")[0] in BARE
    ]
    assert not wrong


def test_triton_and_ray_are_imported_only_in_their_layer():
    wrong = [
        f"{module} imports {found.target}"
        for module, path in modules().items()
        for found in imports(path)
        if (home := HOMES.get(found.target.split(".")[0])) and not module.startswith(home)
    ]
    assert not wrong


def test_torch_is_not_imported_below_the_host_ir():
    wrong = [
        f"{module} imports {found.target}"
        for module, path in modules().items()
        for found in imports(path)
        if layer(module) <= 1 and found.target.split(".")[0] == "torch"
    ]
    assert not wrong


def test_late_imports_stand_in_doors_and_files_of_that_name():
    wrong = [
        str(path.relative_to(ROOT))
        for path in modules().values()
        if "TYPE_CHECKING" in path.read_text()
        and path.name not in ("__init__.py", "late.py", "lazy.py")
    ]
    assert not wrong


@pytest.mark.parametrize("name", [m for m in modules() if m.endswith(".late")])
def test_what_is_imported_late_is_there(name: str):
    pytest.importorskip("triton")
    module = importlib.import_module(name)
    listed = {
        alias.asname or alias.name
        for node in ast.walk(parsed(modules()[name]))
        if isinstance(node, ast.If)
        for statement in node.body
        for alias in statement.names
    }
    assert listed == set(module.__all__)
    for each in listed:
        assert getattr(module, each) is not None


def test_no_module_is_loaded_by_a_string():
    """Names of modules stand in import statements; a package that may be missing is looked up under
    a name that stands in the call."""
    wrong = []
    for path in modules().values():
        place = str(path.relative_to(ROOT))
        for node in ast.walk(parsed(path)):
            match node:
                case ast.Constant(value=str(text)) if names_module(text):
                    if not PROCESSES.fullmatch(text):
                        wrong.append(f"{place}:{node.lineno} names {text}")
                case ast.Call(func=function, args=args):
                    called = ast.unparse(function).rpartition(".")[2]
                    loads = called in LOADERS and not isinstance(args[0], ast.Constant)
                    if loads and place not in LOADED_BY_NAME:
                        wrong.append(f"{place}:{node.lineno} calls {called}")
    assert not wrong
    assert not [place for place in LOADED_BY_NAME if not (ROOT / place).exists()]


def test_a_hidden_import_is_found(tmp_path: Path):
    """However a module is reached, the graph has the edge."""
    source = (
        "import importlib\n"
        "from typing import TYPE_CHECKING\n"
        "from distmega.kernels import late\n"
        "from distmega.errors import argument\n"
        "if TYPE_CHECKING:\n"
        "    from distmega.kernels.runners import open_hopper\n"
        "def f():\n"
        "    from distmega.engine import engine\n"
        "    importlib.import_module('triton.knobs')\n"
        "    launch('distmega.engine.ranks.jobs:generate')\n"
        "NAME = 'distmega.cli.main'\n"
    )
    path = tmp_path / "x.py"
    path.write_text(source)
    found = {each.target: (each.local, each.late) for each in imports(path)}
    assert found == {
        "importlib": (False, False), "typing": (False, False), "triton.knobs": (True, True),
        "distmega.kernels.late": (False, False), "distmega.errors": (False, False),
        "distmega.kernels.runners": (False, True), "distmega.engine.engine": (True, False),
        "distmega.engine.ranks.jobs": (False, True), "distmega.cli.main": (False, True),
    }  # fmt: skip


def test_every_imported_name_is_there():
    """Also in files that run on GPUs alone: what they import of the repository is defined."""
    found = dict(modules())
    for folder in ("tests", "bench", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    missing = []
    for path in python_files():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OURS:
                known = defined_names(found[node.module]) if node.module in found else None
                missing += [
                    f"{path.relative_to(ROOT)}:{node.lineno} {node.module}.{alias.name}"
                    for alias in node.names
                    if f"{node.module}.{alias.name}" not in found
                    and (known is None or alias.name not in known)
                ]
    assert not missing


@cache
def defined_names(path: Path) -> set[str]:
    """All that a module binds outside of functions and classes."""
    names = set[str]()
    left: list[ast.AST] = [parsed(path)]
    while left:
        node = left.pop()
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.ClassDef(name=name):
                names.add(name)
            case ast.Import(names=imported) | ast.ImportFrom(names=imported):
                names |= {alias.asname or alias.name for alias in imported}
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case _:
                left += ast.iter_child_nodes(node)
    return names


def test_what_ranks_begin_with_is_there():
    missing = []
    for path in modules().values():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Constant) and names_module(str(node.value)):
                module, _, function = str(node.value).partition(":")
                tree = parsed(modules()[module])
                names = {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}
                if function and function not in names:
                    missing.append(node.value)
    assert not missing


def test_every_source_folder_is_a_known_package():
    folders = {
        path.parent
        for top in ("distmega", "sharding", "hostir", "kernels", "launch")
        for path in (ROOT / top).rglob("*.py")
    }
    assert folders == set(PACKAGES.values())


def test_docstrings_name_files_that_exist():
    files = [str(path) for path in python_files()]
    docstrings = {path: ast.get_docstring(parsed(path)) for path in python_files()}
    missing = [
        f"{path} names {name}"
        for path, text in docstrings.items()
        for name in re.findall(r"[\w/]+\.py\b", text or "")
        if not any(file.endswith(f"/{name.lstrip('/')}") for file in files)
    ]
    assert not missing


def loaded_with(*names: str) -> set[str]:
    """Modules that are imported with these, but for those that are late."""
    graph, seen = import_graph(late=False), set[str]()
    left = [*names]
    while left:
        module = left.pop()
        if module not in seen:
            seen.add(module)
            left += graph[module]
    return seen


NOT_AT_START = (
    "distmega.engine.decode_planner", "distmega.engine.prefill_planner", "distmega.hostir.check",
    "distmega.hostir.library.opaque", "distmega.hostir.lower.join_products",
    "distmega.hostir.lower.lower", "distmega.hostir.lower.pipeline",
    "distmega.hostir.passes.passes", "distmega.hostir.passes.resize", "distmega.kernels.cpu.peer",
    "distmega.kernels.cpu.runner", "distmega.kernels.gemm.host", "distmega.kernels.gemm.workspace",
    "distmega.kernels.hopper.batch_plan.queues", "distmega.kernels.hopper.row_plan",
    "distmega.kernels.isa", "distmega.kernels.megakernel", "distmega.kernels.records",
    "distmega.kernels.runtime.streams.signals", "distmega.kernels.tasks.cost",
    "distmega.kernels.tasks.fuse.segment", "distmega.kernels.tasks.graph",
    "distmega.kernels.ugraphs", "distmega.models.gguf", "distmega.sharding.explain",
    "distmega.sharding.localize", "distmega.sharding.plan", "distmega.sharding.planner",
    "distmega.sharding.resolve", "distmega.sharding.search.search", "distmega.sharding.streams",
    "distmega.superopt.graph", "distmega.superopt.matching", "distmega.superopt.proof",
    "distmega.superopt.rules",
)  # fmt: skip
"""What a rank that is to generate loads when it is asked for, if at all: a GPU whose plans are kept
answers without.
"""


def is_not_at_start(module: str) -> bool:
    """Whether a module is one of those."""
    return _within(module, NOT_AT_START)


def test_a_rank_starts_without_what_it_may_not_need():
    started = loaded_with("distmega.engine.ranks.jobs", "distmega.launch.local_rank")
    assert not [*filter(is_not_at_start, sorted(started))]


def test_explaining_a_plan_needs_no_torch():
    seen = loaded_with("distmega.cli.main", "distmega.cli.explain")
    heavy = [
        f"{module} imports {found.target}"
        for module in sorted(seen)
        for found in imports(modules()[module])
        if found.target.split(".")[0] in ("torch", "ray", "triton") and not found.late
    ]
    assert not heavy
