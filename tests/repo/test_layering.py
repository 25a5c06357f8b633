"""Imports point down: launch > models, engine > kernels > hostir > sharding, superopt > program and
ops."""

import ast
import graphlib
import re

from tests.repo.source import PACKAGES, ROOT, import_graph, imports, modules, python_files

BOTTOM = ("distmega.program", "distmega.errors", "distmega.env", "distmega.collecting",
          "distmega.folders", "distmega.json_file", "distmega.lazy",
          "distmega.trace_file")  # fmt: skip
"""What sharding may stand on; the rest of distmega/ is the top half, above kernels."""

COMMANDS = ("distmega.cli", "distmega.__main__", "distmega.generation")
BARE = ("sharding", "hostir", "kernels", "launch")
HOMES = {"triton": "distmega.kernels", "ray": "distmega.launch"}
"""Third-party package -> the only package that may import it."""


def _within(module: str, names: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)


def layer(module: str) -> int:
    """Height of a module; it may import modules of its own height and below."""
    if module == "distmega" or _within(module, BOTTOM):
        return 0
    if _within(module, COMMANDS):
        return 6
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
    # A module imports its package's __init__ first, but that never needs the module back.
    graph = {m: {t for t in ts if not m.startswith(f"{t}.")} for m, ts in import_graph().items()}
    graphlib.TopologicalSorter(graph).prepare()


def test_project_imports_stand_at_the_top_of_a_file_and_are_absolute():
    wrong = [
        f"{path.relative_to(ROOT)}:{found.line} {found.target}"
        for path in python_files()
        for found in imports(path)
        if found.target.startswith(".") or (found.local and found.target.startswith("distmega"))
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


def test_only_an_init_imports_for_type_checkers():
    wrong = [
        str(path.relative_to(ROOT))
        for path in modules().values()
        if path.name != "__init__.py" and "TYPE_CHECKING" in path.read_text()
    ]
    assert not wrong


def test_every_source_folder_is_a_known_package():
    folders = {
        path.parent
        for top in ("distmega", "sharding", "hostir", "kernels", "launch")
        for path in (ROOT / top).rglob("*.py")
    }
    assert folders == set(PACKAGES.values())


def test_docstrings_name_files_that_exist():
    files = [str(path) for path in python_files()]
    docstrings = {path: ast.get_docstring(ast.parse(path.read_text())) for path in python_files()}
    missing = [
        f"{path} names {name}"
        for path, text in docstrings.items()
        for name in re.findall(r"[\w/]+\.py\b", text or "")
        if not any(file.endswith(f"/{name.lstrip('/')}") for file in files)
    ]
    assert not missing


def test_explaining_a_plan_needs_no_torch():
    graph, seen, left = import_graph(), {"distmega"}, ["distmega.cli.main", "distmega.cli.explain"]
    while left:
        module = left.pop()
        if module not in seen:
            seen.add(module)
            left += graph[module]
    heavy = [
        f"{module} imports {found.target}"
        for module in sorted(seen)
        for found in imports(modules()[module])
        if found.target.split(".")[0] in ("torch", "ray", "triton")
    ]
    assert not heavy
