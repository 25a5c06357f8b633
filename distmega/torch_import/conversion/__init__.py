"""From an exported graph to a Program: an ExportedProgram (../exported.py) comes in; a Graph goes
out, the program and what its tensors were in torch. Each node becomes ops, a constant, or an op
that torch runs.

Start at converter.py, which walks the nodes; inputs.py goes before it, outputs.py comes after it,
opaque.py has what torch runs, regions.py finds what it has to run together, nodes.py says what a
node is, memory.py which results share memory.
"""

from distmega.torch_import.conversion.converter import convert
from distmega.torch_import.conversion.graph import Continue, Empty, Graph, Late, Output, Shared
from distmega.torch_import.conversion.memory import apply_views, overlap
from distmega.torch_import.conversion.nodes import numbered

__all__ = [
    "Continue",
    "Empty",
    "Graph",
    "Late",
    "Output",
    "Shared",
    "apply_views",
    "convert",
    "numbered",
    "overlap",
]
