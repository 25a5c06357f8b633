"""The task level: a segment of ops in, one persistent kernel a rank out. Starts at task_graph.py.

`rms_norm`, `layer_norm`, `softmax`, `pointwise` and `tuning` are kernels for tensors outside a
segment, of pipelined/api.py; `matmul` and its forms with a collective are of gemm/api.py. They
are looked up when first used, since that imports torch.

Imported as `distmega.kernels`. Python started in the repository root finds this folder under the
bare name `kernels` as well, which is a Hugging Face package that transformers looks for; under
that name this file steps aside for the package.
"""

import importlib
import sys
from importlib.machinery import PathFinder
from pathlib import Path

_HOMES = {
    "rms_norm": "pipelined.api", "layer_norm": "pipelined.api", "softmax": "pipelined.api",
    "pointwise": "pipelined.api", "tuning": "pipelined.tuning", "matmul": "gemm.api",
    "all_gather_matmul": "gemm.api", "matmul_reduce_scatter": "gemm.api",
    "matmul_all_reduce": "gemm.api",
}  # fmt: skip
"""Name -> its module in distmega.kernels."""


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"distmega.kernels.{_HOMES[name]}"), name)


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
