"""The kernels' results in plain torch: what runs on a CPU, and what tests compare with.

In and out as in api.py. Next: triton_path.py.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from distmega.expr import Expr
from distmega.hostir import library
from distmega.hostir.torch_types import widen
from distmega.kernels.pipelined.views import broadcast_shapes


def pointwise(
    exprs: Sequence[Expr], tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]
) -> tuple[Tensor, ...]:
    """One result an expression, of the operands' common shape."""
    shape = broadcast_shapes([x.shape for x in tensors])
    wide = [widen(x) for x in tensors]
    results = (library.pointwise(tree, wide).to(dtype) for tree, dtype in
               zip(exprs, dtypes, strict=True))  # fmt: skip
    return tuple(torch.broadcast_to(result, shape).contiguous() for result in results)


def normalise(
    op: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Result and the sum x + residual, x itself without a residual. op: rms, layer or softmax."""
    total = x if residual is None else (widen(x) + widen(residual)).to(x.dtype)
    wide = widen(total)
    if op == "rms":
        result = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    elif op == "layer":
        result = F.layer_norm(wide, wide.shape[-1:], eps=eps)
    else:
        result = torch.softmax(wide, -1)
    if weight is not None:
        result = result * widen(weight)
    if bias is not None:
        result = result + widen(bias)
    return result.to(x.dtype), total
