"""The command, imported as it is run: loading its code takes a second, in which Ctrl-C may come.
See distmega/lazy.py."""

from typing import TYPE_CHECKING

from distmega.lazy import late_imports

if TYPE_CHECKING:
    from distmega.cli.main import main

__all__ = ["main"]

__getattr__ = late_imports(__name__)
