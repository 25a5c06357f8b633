"""Public names of a package, looked up when they are first used: `import distmega` takes no torch,
and what needs triton or Ray is loaded only by those who ask for it.
"""

import importlib
import sys
from collections.abc import Callable, Mapping


def names_from(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """A package's `__getattr__`. homes: public name -> the module under `distmega` that has it."""

    def find(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(f"distmega.{homes[name]}"), name)
        setattr(sys.modules[package], name, found)
        return found

    return find
