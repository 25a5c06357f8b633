"""Kernels: a segment of ops comes in, and one persistent kernel a rank goes out. The kernels of
library ops are here too.

Persistent kernels: tasks/ cuts a segment into tasks or fused ops, isa/ encodes tasks as words, cpu/
interprets these, records/ runs the same words on a GPU; hopper/ has the fast kernels of few rows,
events/ what waits for what where data decide. Kernels of library ops: library/ for products and
attention, pipelined/ for pointwise ops and norms, gemm/ for matmuls with a collective, ugraphs/ for
rules of the superoptimizer. runtime/ is what all of them run on. Start at megakernel.py and
tasks/graph.py; whole.py and runners.py choose the kernel of a GPU.

`rms_norm`, `layer_norm`, `softmax`, `pointwise` and `tuning` are for tensors, of pipelined/api.py;
`matmul` and its forms with a collective are of gemm/api.py. They are looked up when first used,
since that imports torch.

Imported as `distmega.kernels`. Python started in the repository root finds this folder under the
bare name `kernels` as well, which is a Hugging Face package that transformers looks for; under
that name this file steps aside for the package.
"""

import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from distmega.lazy import late_imports

if TYPE_CHECKING:
    from distmega.kernels.gemm.api import (
        all_gather_matmul,
        matmul,
        matmul_all_reduce,
        matmul_reduce_scatter,
    )
    from distmega.kernels.pipelined.api import layer_norm, pointwise, rms_norm, softmax
    from distmega.kernels.pipelined.tuning import tuning


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
    __all__ = [
        "all_gather_matmul",
        "layer_norm",
        "matmul",
        "matmul_all_reduce",
        "matmul_reduce_scatter",
        "pointwise",
        "rms_norm",
        "softmax",
        "tuning",
    ]
    __getattr__ = late_imports(__name__)
