"""The task level: a segment of ops in, one persistent kernel a rank out. Starts at tasks/graph.py.

`rms_norm`, `layer_norm`, `softmax`, `pointwise` and `tuning` are kernels for tensors outside a
segment, of pipelined/api.py; `matmul` and its forms with a collective are of gemm/api.py. They
are looked up when first used, since that imports torch.

Imported as `distmega.kernels`. Python started in the repository root finds this folder under the
bare name `kernels` as well, which is a Hugging Face package that transformers looks for; under
that name this file steps aside for the package.
"""

import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from distmega.lazy import names_from

if TYPE_CHECKING:
    from distmega.kernels.gemm.api import all_gather_matmul as all_gather_matmul
    from distmega.kernels.gemm.api import matmul as matmul
    from distmega.kernels.gemm.api import matmul_all_reduce as matmul_all_reduce
    from distmega.kernels.gemm.api import matmul_reduce_scatter as matmul_reduce_scatter
    from distmega.kernels.pipelined.api import layer_norm as layer_norm
    from distmega.kernels.pipelined.api import pointwise as pointwise
    from distmega.kernels.pipelined.api import rms_norm as rms_norm
    from distmega.kernels.pipelined.api import softmax as softmax
    from distmega.kernels.pipelined.tuning import tuning as tuning

_HOMES = {
    "rms_norm": "kernels.pipelined.api", "layer_norm": "kernels.pipelined.api",
    "softmax": "kernels.pipelined.api", "pointwise": "kernels.pipelined.api",
    "tuning": "kernels.pipelined.tuning", "matmul": "kernels.gemm.api",
    "all_gather_matmul": "kernels.gemm.api", "matmul_reduce_scatter": "kernels.gemm.api",
    "matmul_all_reduce": "kernels.gemm.api",
}  # fmt: skip
"""Public name -> its module."""


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
else:
    __all__ = [*_HOMES]
    __getattr__ = names_from(__name__, _HOMES)
