"""Writes the API pages from docstrings: `python docs/build_api.py [FOLDER]`, build/api by default.

The pages are of the names that others may use: those that distmega, distmega.launch,
distmega.hostir and distmega.kernels export, and all errors. Warnings end it.
"""

import re
import sys
import warnings
from pathlib import Path

import pdoc
import pdoc.render

DOORS = ("distmega", "distmega.launch", "distmega.hostir", "distmega.kernels")
WHOLE = ("distmega.errors",)


def build_pages(folder: Path) -> None:
    """One page a module; raises what pdoc warns of."""
    specs = []
    for door in DOORS:
        specs += [door, rf"!{re.escape(door)}\..*"]
    pdoc.render.configure(docformat="google", footer_text="distmega")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pdoc.pdoc(*specs, *WHOLE, output_directory=folder)


if __name__ == "__main__":
    build_pages(Path(sys.argv[1] if sys.argv[1:] else "build/api"))
