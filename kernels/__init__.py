"""The task level: a segment of ops in, one persistent kernel a rank out. Starts at task_graph.py.

Imported as `distmega.kernels`. Python started in the repository root finds this folder under the
bare name `kernels` as well, which is a Hugging Face package that transformers looks for; under
that name this file steps aside for the package.
"""

import sys
from importlib.machinery import PathFinder
from pathlib import Path


def _step_aside() -> None:
    """Loads the next `kernels` of sys.path in place of this one, which else stays empty."""
    root = Path(__file__).resolve().parent.parent
    others = [entry for entry in sys.path if Path(entry).resolve() != root]
    spec = PathFinder.find_spec("kernels", others)
    if spec is None or spec.loader is None:
        return
    module = sys.modules[__name__]
    module.__spec__, module.__file__, module.__loader__ = spec, spec.origin, spec.loader
    module.__path__ = spec.submodule_search_locations or []
    spec.loader.exec_module(module)


if __name__ == "kernels":
    _step_aside()
