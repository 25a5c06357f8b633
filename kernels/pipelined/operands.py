"""What the functions on tensors take as operands; anything else is named before it is used.

In: arguments of `distmega.kernels` by name. Out: nothing, or ProgramError. Used by api.py, and by
../gemm/api.py.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from distmega.arguments import is_list, shown
from distmega.errors import ProgramError
from distmega.hostir.library.torch_types import describe
from distmega.program import expr

FLOATS = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
WHOLE = frozenset({torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64})
REALS = FLOATS | WHOLE | {torch.bool, torch.uint16, torch.uint32}


EXPRS = (str, expr.Arg, expr.Const, expr.Call)


def require_tensor(
    name: str, given: object, dtypes: Collection[torch.dtype] = (), expected: str = ""
) -> None:
    """ProgramError for what is no dense tensor, or of none of these types, if there are any.
    expected: what these are.
    """
    if not isinstance(given, Tensor):
        raise ProgramError(
            f"{name}: {describe(given)}",
            expected="a torch.Tensor",
            remedy="convert it, as torch.as_tensor does",
        )
    if given.layout is not torch.strided or given.is_nested:
        kind = "nested" if given.is_nested else str(given.layout).removeprefix("torch.")
        raise ProgramError(
            f"{name}: a {kind} tensor",
            expected="a dense one",
            remedy="use to_dense(), or pad what is nested",
        )
    if dtypes and given.dtype not in dtypes:
        raise ProgramError(f"{name} of {given.dtype}", expected=expected, remedy="convert it")


def require_exprs(given: object) -> None:
    """ProgramError for what is no sequence of expressions."""
    if not is_list(given) or not all(isinstance(each, EXPRS) for each in given):
        raise ProgramError(
            f"expressions {shown(given)}",
            expected="an expression of a0, a1, ... as text, or a sequence of these",
            remedy='write "silu(a0) * a1"',
        )


def require_dtypes(given: object) -> None:
    """ProgramError for what are no types of results."""
    if not is_list(given) or not REALS.issuperset(given):
        raise ProgramError(
            f"dtypes {shown(given)}",
            expected="a sequence of torch's types of real numbers, one a result",
            remedy="write dtypes=[torch.float32]",
        )
