"""Fused pointwise ops, norms and softmax on tensors: the functions of `distmega.kernels`.

In: tensors of any strides on one device. Out: new contiguous tensors. On a CUDA device with float
types the kernels run (norms.py, pointwise.py), else plain torch (hostir/library/norms.py and
pointwise.py); all in fp32.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from distmega.arguments import require_number
from distmega.errors import ProgramError
from distmega.hostir.library.norms import normalise
from distmega.hostir.library.pointwise import evaluate_all
from distmega.hostir.passes.fused_kinds import MAX_READS, MAX_WRITES
from distmega.kernels.pipelined import late
from distmega.kernels.pipelined.operands import (
    EXPRS,
    FLOATS,
    REALS,
    require_dtypes,
    require_exprs,
    require_tensor,
)
from distmega.kernels.pipelined.pointwise.exprs import Formula, formula_of
from distmega.kernels.pipelined.pointwise.views import broadcast_shapes
from distmega.kernels.runtime.compilations import has_triton
from distmega.kernels.runtime.gpus import made_current
from distmega.program import expr

KERNEL_TYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})
"""Types that kernels take."""
MOST_EPS = 1e30


def rms_norm(
    x: Tensor, weight: Tensor | None = None, *, residual: Tensor | None = None, eps: float = 1e-6
) -> Tensor | tuple[Tensor, Tensor]:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim of x [..., d]; weight [d]. With a
    residual of x's shape, that of x + residual, and the sum as second result. Results are of x's
    shape and type. ProgramError if shapes do not fit, and for whole numbers.
    """
    _require_rows(eps, x, residual=residual, weight=weight)
    y, total = normalise_rows("rms_norm", x, residual, weight, None, eps)
    return y if residual is None else (y, total)


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor | tuple[Tensor, Tensor]:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dim of x [..., d]; weight and
    bias [d]; residual and ProgramError as rms_norm.
    """
    _require_rows(eps, x, residual=residual, weight=weight, bias=bias)
    y, total = normalise_rows("layer_norm", x, residual, weight, bias, eps)
    return y if residual is None else (y, total)


def softmax(x: Tensor) -> Tensor:
    """exp(x) over its sum along the last dim of x [..., d], of x's type. ProgramError for a tensor
    without rows, or of whole numbers.
    """
    _require_rows(0.0, x)
    return normalise_rows("softmax", x, None, None, None, 0.0)[0]


def pointwise(
    exprs: str | expr.Expr | Sequence[str | expr.Expr],
    *tensors: Tensor,
    dtypes: Sequence[torch.dtype] | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Values of 1 to 4 expressions over 1 to 8 tensors that broadcast, in one pass over memory.

    exprs: one, for one result, or a sequence, for a tuple. dtypes: of the results, by default that
    of the first tensor. ProgramError if something does not fit.
    """
    single = isinstance(exprs, EXPRS)
    listed: Sequence[str | expr.Expr] = [exprs] if single else exprs  # type: ignore[list-item,assignment]
    require_exprs(listed)
    if dtypes is not None:
        require_dtypes(dtypes)
    for number, x in enumerate(tensors):
        require_tensor(f"operand a{number}", x, REALS, "real numbers")
    results = pointwise_results(listed, tensors, dtypes)
    return results[0] if single else results


def pointwise_results(
    exprs: Sequence[str | expr.Expr],
    tensors: Sequence[Tensor],
    dtypes: Sequence[torch.dtype] | None = None,
) -> tuple[Tensor, ...]:
    """As pointwise, one result an expression."""
    formula = formula_of(tuple(exprs))
    num_dtypes = len(exprs if dtypes is None else dtypes)
    shape = _check_pointwise(formula, tuple([x.shape for x in tensors]), num_dtypes)
    device = _common_device(tensors)
    types = tuple(dtypes) if dtypes else (tensors[0].dtype,) * len(exprs)
    if not (_on_gpu(tensors) and KERNEL_TYPES.issuperset(types)):
        return evaluate_all(formula.exprs, tensors, dtypes)
    results = tuple([tensors[0].new_empty(shape, dtype=dtype) for dtype in types])
    with made_current(device):
        late.run_pointwise(formula, tensors, results)
    return results


@lru_cache(maxsize=4096)
def _check_pointwise(
    formula: Formula, shapes: tuple[torch.Size, ...], num_dtypes: int
) -> tuple[int, ...]:
    """The results' shape."""
    num_exprs = len(formula.exprs)
    if not 1 <= num_exprs <= MAX_WRITES or not 1 <= len(shapes) <= MAX_READS:
        raise ProgramError(
            f"pointwise op with {len(shapes)} tensors and {num_exprs} expressions",
            expected=f"1 to {MAX_READS} tensors and 1 to {MAX_WRITES} expressions",
            remedy="split it into several calls",
        )
    used = max(map(expr.num_args, formula.exprs))
    if used > len(shapes):
        raise ProgramError(
            f"expression with argument a{used - 1} over {len(shapes)} tensors",
            expected=f"arguments a0 to a{len(shapes) - 1}",
            remedy="pass a tensor for each argument",
        )
    if num_dtypes != num_exprs:
        raise ProgramError(
            f"{num_dtypes} dtypes for {num_exprs} expressions",
            expected="one an expression",
            remedy="leave dtypes out to get the first tensor's",
        )
    return broadcast_shapes(shapes)


def _require_rows(eps: object, x: object, **others: object) -> None:
    """ProgramError for what is no tensor of rows to normalise, nor goes with them, by name."""
    require_number("eps", eps, MOST_EPS, zero=True, error=ProgramError)
    require_tensor("x", x)
    for name, each in others.items():
        if each is not None:
            require_tensor(name, each, REALS, "real numbers")


def _common_device(tensors: Sequence[Tensor]) -> torch.device:
    device = tensors[0].device
    if any(x.device != device for x in tensors):
        devices = {str(x.device) for x in tensors}
        raise ProgramError(
            f"tensors on {', '.join(sorted(devices))}",
            expected="tensors on one device",
            remedy="move them first",
        )
    return device


def normalise_rows(
    op: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """As hostir/library/norms.py's normalise, by a kernel where there is one. ProgramError for
    shapes or a type that do not fit.
    """
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ProgramError(
            f"rows of a tensor of shape {list(x.shape)}",
            expected="a last dim of at least one element",
            remedy="pass a tensor with rows",
        )
    if x.dtype not in FLOATS:
        raise ProgramError(
            f"rows of {x.dtype}",
            expected="floating-point numbers of 16 to 64 bits",
            remedy="convert them",
        )
    for vector in (weight, bias):
        _check_shape("weight or bias", vector, x.shape[-1:])
    _check_shape("residual", residual, x.shape)
    given = [t for t in (x, residual, weight, bias) if t is not None]
    device = _common_device(given)
    if _on_gpu(given):
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        total = None if residual is None else torch.empty_like(y)
        with made_current(device):
            late.run_norm(op, eps, (x, residual, weight, bias, y, total))
        return y, x if total is None else total
    return normalise(op, x, residual, weight, bias, eps)


def _check_shape(name: str, found: Tensor | None, shape: torch.Size) -> None:
    if found is not None and found.shape != shape:
        raise ProgramError(
            f"{name} of shape {list(found.shape)}",
            expected=f"{list(shape)}",
            remedy="reshape or expand it",
        )


def _on_gpu(tensors: Sequence[Tensor]) -> bool:
    """Whether the kernels take these tensors."""
    return (
        tensors[0].is_cuda and KERNEL_TYPES.issuperset([x.dtype for x in tensors]) and has_triton()
    )
