"""Fused pointwise ops, norms and softmax on tensors: the functions of `distmega.kernels`.

In: tensors of any strides on one device. Out: new contiguous tensors. On a CUDA device with float
types the kernels run (norms.py, pointwise.py), else plain torch (torch_path.py); all in fp32.
"""

import importlib.util
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from distmega import expr
from distmega.errors import ProgramError
from distmega.kernels.pipelined import torch_path
from distmega.kernels.pipelined.views import broadcast_shapes

MAX_INPUTS = 8
MAX_OUTPUTS = 4
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def rms_norm(
    x: Tensor, weight: Tensor | None = None, *, residual: Tensor | None = None, eps: float = 1e-6
) -> Tensor | tuple[Tensor, Tensor]:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim; with a residual of x's shape, that of
    x + residual, and the sum as second result. ProgramError if shapes do not fit.
    """
    return _normalise("rms", x, residual, weight, None, eps)


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor | tuple[Tensor, Tensor]:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dim; residual as rms_norm."""
    return _normalise("layer", x, residual, weight, bias, eps)


def softmax(x: Tensor) -> Tensor:
    """Softmax over the last dim."""
    result = _normalise("softmax", x, None, None, None, 0.0)
    assert isinstance(result, Tensor)
    return result


def pointwise(
    exprs: str | expr.Expr | Sequence[str | expr.Expr],
    *tensors: Tensor,
    dtypes: Sequence[torch.dtype] | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Values of 1 to 4 expressions over 1 to 8 tensors that broadcast, in one pass over memory.

    exprs: one, for one result, or a sequence, for a tuple. dtypes: of the results, by default that
    of the first tensor. ProgramError if something does not fit.
    """
    single = isinstance(exprs, str | expr.Arg | expr.Const | expr.Call)
    listed: Sequence[str | expr.Expr] = [exprs] if single else exprs  # type: ignore[list-item,assignment]
    trees = tuple(expr.parse(tree) if isinstance(tree, str) else tree for tree in listed)
    _check_pointwise(trees, tensors, dtypes)
    types = tuple(dtypes) if dtypes else (tensors[0].dtype,) * len(trees)
    shape = broadcast_shapes([x.shape for x in tensors])
    if _on_gpu(*tensors) and set(types) <= set(FLOATS):
        results = tuple(torch.empty(shape, dtype=d, device=tensors[0].device) for d in types)
        with torch.cuda.device(tensors[0].device):
            _kernels("pointwise").launch_pointwise(trees, tensors, results)
    else:
        results = torch_path.pointwise(trees, tensors, types)
    return results[0] if single else results


def _check_pointwise(
    trees: Sequence[expr.Expr], tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype] | None
) -> None:
    if not 1 <= len(trees) <= MAX_OUTPUTS or not 1 <= len(tensors) <= MAX_INPUTS:
        raise ProgramError(
            f"pointwise op with {len(tensors)} tensors and {len(trees)} expressions",
            expected=f"1 to {MAX_INPUTS} tensors and 1 to {MAX_OUTPUTS} expressions",
            remedy="split it into several calls",
        )
    used = max(map(expr.num_args, trees))
    if used > len(tensors):
        raise ProgramError(
            f"expression with argument a{used - 1} over {len(tensors)} tensors",
            expected=f"arguments a0 to a{len(tensors) - 1}",
            remedy="pass a tensor for each argument",
        )
    if dtypes is not None and len(dtypes) != len(trees):
        raise ProgramError(
            f"{len(dtypes)} dtypes for {len(trees)} expressions",
            expected="one an expression",
            remedy="leave dtypes out to get the first tensor's",
        )
    _check_devices(tensors)


def _check_devices(tensors: Sequence[Tensor]) -> None:
    devices = {str(x.device) for x in tensors}
    if len(devices) > 1:
        raise ProgramError(
            f"tensors on {', '.join(sorted(devices))}",
            expected="tensors on one device",
            remedy="move them first",
        )


def _normalise(
    op: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor | tuple[Tensor, Tensor]:
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ProgramError(
            f"rows of a tensor of shape {list(x.shape)}",
            expected="a last dim of at least one element",
            remedy="pass a tensor with rows",
        )
    vectors = [v for v in (weight, bias) if v is not None]
    _check_shape("weight or bias", vectors, x.shape[-1:])
    summands = [] if residual is None else [residual]
    _check_shape("residual", summands, x.shape)
    _check_devices([x, *summands, *vectors])
    if _on_gpu(x, *summands, *vectors):
        norms = _kernels("norms")
        rows = norms.make_rows(op, x, residual, weight, bias, eps)
        with torch.cuda.device(x.device):
            norms.launch_norm(rows)
        result = rows.y.view(x.shape)
        return result if residual is None else (result, rows.total.view(x.shape))
    result, total = torch_path.normalise(op, x, residual, weight, bias, eps)
    return result if residual is None else (result, total)


def _check_shape(name: str, tensors: Sequence[Tensor], shape: torch.Size) -> None:
    for found in tensors:
        if found.shape != shape:
            raise ProgramError(
                f"{name} of shape {list(found.shape)}",
                expected=f"{list(shape)}",
                remedy="reshape or expand it",
            )


def _on_gpu(*tensors: Tensor) -> bool:
    """Whether the kernels take these tensors."""
    return (
        tensors[0].is_cuda
        and all(x.dtype in FLOATS for x in tensors)
        and importlib.util.find_spec("triton") is not None
    )


def _kernels(name: str) -> ModuleType:
    """A module that needs Triton, which a machine without a GPU need not have."""
    return importlib.import_module(f"distmega.kernels.pipelined.{name}")
