"""Norms and softmax over rows in torch, with the sum of two tensors as their input where fused.

Comes in: an op of a kind that is a norm. Goes out: a function of its operands, by torch here or by
a kernel that takes the same arguments. Used by ops.py.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from distmega.hostir.library.pointwise import OpFunction
from distmega.hostir.library.torch_types import widen
from distmega.program.types import Op

Normalise = Callable[
    [str, Tensor, Tensor | None, Tensor | None, Tensor | None, float], tuple[Tensor, Tensor]
]
"""As normalise."""


def normalise(
    op: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Result and the sum x + residual, x itself without a residual; in fp32 or wider. op: rms_norm,
    layer_norm or softmax.
    """
    total = x if residual is None else (widen(x) + widen(residual)).to(x.dtype)
    wide = widen(total)
    if op == "rms_norm":
        result = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    elif op == "layer_norm":
        result = F.layer_norm(wide, wide.shape[-1:], eps=eps)
    else:
        result = torch.softmax(wide, -1)
    if weight is not None:
        result = result * widen(weight)
    if bias is not None:
        result = result + widen(bias)
    return result.to(x.dtype), total


def compile_norm(op: Op, run: Normalise) -> OpFunction:
    """The op bound to its attributes; `run` does the work."""
    eps = op.get("eps", 0.0)
    assert isinstance(eps, int | float), f"eps={eps!r} of a verified norm"
    if norm := str(op.get("norm", "")):
        return lambda xs: run(norm, xs[0], xs[2], *_vectors(xs[4:]), eps)
    kind = op.kind
    return lambda xs: run(kind, xs[0], None, *_vectors(xs[2:]), eps)[:1]


def _vectors(given: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """The weight and the bias of those that an op reads."""
    weight, bias = (*given, None, None)[:2]
    return weight, bias
