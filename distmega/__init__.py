"""distmega: a tensor program in, a plan over device and stream axes, one persistent megakernel per
GPU out.

In the repository the other packages lie beside this folder. Python started there finds `distmega`
before any installed copy, so this file makes it find them too.
"""

from pathlib import Path

from distmega.builder import ProgramBuilder

__all__ = ["ProgramBuilder", "__version__"]

__version__ = "0.1.0"

_ROOT = Path(__file__).resolve().parent.parent
if (_ROOT / "hostir" / "nodes.py").exists():
    __path__.append(str(_ROOT))
