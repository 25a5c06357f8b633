"""Pointwise ops in torch: one expression, or several fused, over operands that broadcast.

Comes in: an op of kind pointwise, or fused_pointwise as fuse.py makes it. Goes out: a function of
its operands, by torch here or by a kernel that takes the same arguments. Used by ops.py.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from distmega.hostir.library.torch_types import dtype_name, torch_dtype, widen
from distmega.hostir.passes.fused_kinds import op_exprs
from distmega.program import expr
from distmega.program.ops.axis_views import (
    access_axes,
    fold_axes,
    is_plain,
    order_axes,
    unfold_axes,
)
from distmega.program.ops.parts import inexact_integers
from distmega.program.types import Op, accesses

OpFunction = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]
"""An op bound to its attributes: operands in the order of `op_operands`, results in the order of
the op's writes.
"""

Evaluate = Callable[
    [Sequence[expr.Expr], Sequence[Tensor], Sequence[torch.dtype] | None], tuple[Tensor, ...]
]
"""As evaluate_all."""

HOST = torch.device("cpu")


def _silu(x: Tensor) -> Tensor:
    """Of whole numbers too, which torch's refuses."""
    return F.silu(x if x.is_floating_point() else x.float())


def _gelu(x: Tensor) -> Tensor:
    """As _silu."""
    return F.gelu(x if x.is_floating_point() else x.float())


def _power(x: Tensor, y: Tensor) -> Tensor:
    """Whole only of a whole number by a constant that isn't negative: torch gives 0 for 2 to the
    power -1 of whole numbers.
    """
    by_constant = y.dim() == 0 and y.is_cpu
    if x.is_floating_point() or y.is_floating_point() or (by_constant and y >= 0):
        return torch.pow(x, y)
    return torch.pow(x.float(), y)


def _where(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Constants are made where the operands are: torch.where would copy them from the host, which
    waits for that, and no CUDA graph holds it.
    """
    given = condition, x, y
    device = next((each.device for each in given if each.device != HOST), HOST)
    condition, x, y = (each if each.device == device else _made(each, device) for each in given)
    return torch.where(condition != 0, x, y)


def _made(constant: Tensor, device: torch.device) -> Tensor:
    return torch.full((), constant.numpy().item(), dtype=constant.dtype, device=device)


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "exp": torch.exp, "log": torch.log, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt,
    "abs": torch.abs, "neg": torch.neg, "relu": torch.relu, "silu": _silu, "gelu": _gelu,
    "tanh": torch.tanh, "sigmoid": torch.sigmoid, "sin": torch.sin, "cos": torch.cos,
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "pow": _power,
    "maximum": torch.maximum, "minimum": torch.minimum, "erf": torch.erf, "floor": torch.floor,
    "eq": lambda x, y: torch.eq(x, y).to(torch.result_type(x, y)),
    "lt": lambda x, y: torch.lt(x, y).to(torch.result_type(x, y)),
    "le": lambda x, y: torch.le(x, y).to(torch.result_type(x, y)),
    "where": _where, "log2": torch.log2, "log10": torch.log10,
}  # fmt: skip
"""expr.FUNCTIONS on tensors."""


def _lift(value: float | int) -> Tensor:
    """A constant as a scalar tensor; it takes the type of the float tensor it meets."""
    return _scalar(value, math.copysign(1.0, value))


@cache
def _scalar(value: float | int, sign: float) -> Tensor:
    """sign: tells -0.0 from 0.0, which are equal."""
    return torch.tensor(float(value), dtype=torch.float64, device="cpu")


@cache
def _check_integers(tree: expr.Expr, dtypes: tuple[torch.dtype, ...]) -> None:
    if part := expr.inexact_part(tree, [dtype_name(dtype) for dtype in dtypes]):
        raise inexact_integers(str(tree), part, dtype_name(dtypes[0]))


@cache
def _lift_whole(value: float | int) -> Tensor:
    """A constant among integers, which stay integers where it is a whole number."""
    whole = value == int(value) and -(2**63) <= value < 2**63
    return torch.tensor(int(value), device="cpu") if whole else _lift(value)


def pointwise(tree: expr.Expr, args: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Value of an expression over operands that broadcast; computed in fp32 for half types, of
    integers alone in i64 where division and roots allow it. In `dtype` or the type of args[0],
    where ProgramError says what has no exact value in integers.
    """
    if dtype is None and not args[0].is_floating_point():
        _check_integers(tree, tuple([x.dtype for x in args]))
    whole = not any(x.is_floating_point() for x in args)
    wide = [widen(x) if x.is_floating_point() else x.to(torch.int64) for x in args]
    out = expr.evaluate(tree, wide, FUNCTIONS, _lift_whole if whole else _lift)
    out = out.to(dtype or args[0].dtype)
    return out.clone() if any(out is a for a in args) else out


def evaluate_all(
    exprs: Sequence[expr.Expr], args: Sequence[Tensor], dtypes: Sequence[torch.dtype] | None
) -> tuple[Tensor, ...]:
    """New tensors with the value of each expression, of the operands' common shape, in `dtypes` or
    else the type of args[0].
    """
    # torch.broadcast_shapes would import sympy, which takes a rank half a second
    shape = torch.broadcast_tensors(*args)[0].shape  # type: ignore[no-untyped-call]
    if dtypes is None:
        results = [pointwise(tree, args) for tree in exprs]
    else:
        results = [pointwise(tree, args, to) for tree, to in zip(exprs, dtypes, strict=True)]
    return tuple(torch.broadcast_to(y, shape).contiguous() for y in results)


def _op_dtypes(op: Op) -> tuple[torch.dtype, ...] | None:
    names = op.get("dtypes", ())
    assert isinstance(names, tuple), "fuse.py writes a tuple"
    return tuple(torch_dtype(str(name)) for name in names) or None


def compile_pointwise(op: Op, evaluate: Evaluate) -> OpFunction:
    """The op bound to its access maps: `evaluate` sees operands that broadcast from the right."""
    exprs, dtypes, extents = op_exprs(op), _op_dtypes(op), op.extents
    out_axes = access_axes(op.writes[0])
    shape = torch.Size([extents[name] for name in out_axes])
    aligned = all(is_plain(a) and access_axes(a) == out_axes for a in accesses(op))

    def run(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if aligned and all(x.shape == shape for x in operands):
            return evaluate(exprs, operands, dtypes)
        xs = [
            order_axes(unfold_axes(x, read, extents), access_axes(read), out_axes)
            for x, read in zip(operands, op.reads, strict=True)
        ]
        return tuple(
            fold_axes(out.expand(shape), out_axes, write, extents).contiguous()
            for out, write in zip(evaluate(exprs, xs, dtypes), op.writes, strict=True)
        )

    return run
