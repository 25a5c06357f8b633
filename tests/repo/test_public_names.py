"""What `import distmega` offers: every name is there, documented, and costs nothing until used."""

import ast
import dataclasses
import importlib
import pydoc
import re
import subprocess
import sys

import pytest

from tests.repo.source import PACKAGES, ROOT

PUBLIC = ("distmega", "distmega.launch", "distmega.hostir", "distmega.kernels")
OPTIONAL = ("triton", "ray")


def names_for_types(package: str) -> list[str]:
    """Names that the package's __init__ imports for type checkers alone."""
    tree = ast.parse((PACKAGES[package] / "__init__.py").read_text())
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    (block,) = [b for b in blocks if ast.unparse(b.test) == "TYPE_CHECKING"]
    imported = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return [alias.asname or alias.name for node in imported for alias in node.names]


@pytest.mark.parametrize("package", PUBLIC)
def test_type_checkers_see_the_public_names(package: str):
    public = set(importlib.import_module(package).__all__) - {"__version__"}
    assert sorted(names_for_types(package)) == sorted(public)


@pytest.mark.parametrize("package", PUBLIC)
def test_public_names_are_found_and_documented(package: str):
    module = importlib.import_module(package)
    undocumented = []
    for name in set(module.__all__) - {"__version__", "CPU", "H100", "H200", "Emit"}:
        if not (getattr(module, name).__doc__ or "").strip():
            undocumented.append(name)
    assert not undocumented


@pytest.mark.parametrize("package", PUBLIC)
def test_help_explains_every_field(package: str):
    module, unexplained = importlib.import_module(package), []
    for name in set(module.__all__) - {"__version__"}:
        found = getattr(module, name)
        if isinstance(found, type) and dataclasses.is_dataclass(found):
            text = pydoc.plain(pydoc.render_doc(found))
            _, _, told = text.partition("Attributes:\n")
            fields = [field.name for field in dataclasses.fields(found)]
            unexplained += [
                f"{name}.{field}"
                for field in fields
                if not re.search(rf"^ \|\s+{field}: \S", told, re.MULTILINE)
            ]
    assert not unexplained


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'distmega' has no attribute 'Mesh'"):
        importlib.import_module("distmega").Mesh  # noqa: B018


def test_importing_loads_nothing_heavy():
    code = (
        "import sys, distmega, distmega.launch, distmega.hostir, distmega.kernels\n"
        "distmega.plan_program, distmega.GenerateRequest, distmega.generate\n"
        "from distmega.launch import launch\n"
        "assert not {'torch', 'triton', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_public_name_works_without_triton_and_ray():
    names = {package: importlib.import_module(package).__all__ for package in PUBLIC}
    code = (
        "import sys, importlib\n"
        f"sys.modules.update(dict.fromkeys({OPTIONAL!r}))\n"
        f"for package, names in {names!r}.items():\n"
        "    for name in names: getattr(importlib.import_module(package), name)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_docs_list_the_public_names():
    text, _, _ = (ROOT / "docs/library.md").read_text().partition("\n## ")
    listed = set(re.findall(r"`(?:distmega\.)?(\w+)`", text))
    module = importlib.import_module("distmega")
    assert not set(module.__all__) - {"__version__"} - listed


def test_an_engine_starts_without_what_it_may_not_need():
    """Packages for files of one format, torch's peer memory, and what formulas of torch import."""
    program = (
        "import sys, torch, distmega.engine.engine\n"
        "from distmega.hostir.library.pointwise import evaluate_all\n"
        "from distmega.program.expr import parse\n"
        "evaluate_all([parse('silu(a0) * a1')], [torch.ones(2, 1), torch.ones(3)], None)\n"
        "late = {'gguf', 'yaml', 'sympy', 'torch.distributed._symmetric_memory'}\n"
        "assert not late & set(sys.modules), late & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
