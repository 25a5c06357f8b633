"""Element types as torch sees them: short names of distmega/program/dtypes.py to torch dtypes and
back.

The bottom half never imports torch, so the mapping lives here, with the first code that runs
tensors.
"""

from collections.abc import Mapping
from typing import TypeGuard

import torch
from torch import Tensor

from distmega.errors import ProgramError
from distmega.program import types as program

TORCH_DTYPES: dict[str, torch.dtype] = {
    "f64": torch.float64,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "i64": torch.int64,
    "i32": torch.int32,
    "bool": torch.bool,
}

HOLDERS: dict[torch.dtype, torch.dtype] = {
    torch.uint8: torch.int32,
    torch.int8: torch.int32,
    torch.int16: torch.int32,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
}
"""Element types that programs lack -> one that has all their values; complex numbers get a dim of
two behind the others.
"""

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_HALF = (torch.bfloat16, torch.float16)


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a short name; KeyError is a bug of the caller."""
    return TORCH_DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of a torch dtype, or torch's own name for one that programs cannot hold."""
    return _NAMES.get(dtype, str(dtype))


def empty_tensor(buffer: program.Tensor, device: torch.device) -> Tensor:
    """Uninitialised row-major storage for a buffer."""
    return torch.empty(buffer.shape, dtype=torch_dtype(buffer.dtype), device=device)


def fits(found: object, wanted: program.Tensor) -> TypeGuard[Tensor]:
    """Whether something given is a tensor of the shape and type asked for, and has values at all: a
    meta tensor has none, and a sparse one no strides.
    """
    return (
        isinstance(found, Tensor)
        and found.shape == wanted.shape
        and found.dtype is TORCH_DTYPES[wanted.dtype]
        and found.layout is torch.strided
        and not found.is_meta
    )


def describe(given: object) -> str:
    """What was given in place of a tensor, for a message."""
    if not isinstance(given, Tensor):
        return f"{type(given).__name__}, no tensor"
    kind = "meta " if given.is_meta else ""
    if given.layout is not torch.strided:
        kind += f"{given.layout} "
    return f"{kind}{dtype_name(given.dtype)}{list(given.shape)}"


def check_mapping(tensors: object) -> None:
    """ProgramError unless tensors come by name."""
    if type(tensors) is not dict and not isinstance(tensors, Mapping):  # asking that takes longer
        raise ProgramError(
            f"{type(tensors).__name__} in place of tensors by name",
            expected="a mapping of names to tensors",
            remedy="give inputs, weights and states of the program by name",
        )


def hold(x: Tensor) -> Tensor:
    """x in an element type of programs: HOLDERS; itself where it has one."""
    if x.is_complex():
        return torch.view_as_real(x.resolve_conj())
    return x.to(HOLDERS[x.dtype]) if x.dtype in HOLDERS else x


def unhold(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What `hold` gave for a tensor of `dtype`."""
    return torch.view_as_complex(x.contiguous()) if dtype.is_complex else x.to(dtype)


def widen(x: Tensor) -> Tensor:
    """x in the type its sums are taken in: fp32 for the half types, otherwise x itself."""
    return x.float() if x.dtype in _HALF else x


def operand_dtype(x: Tensor) -> torch.dtype:
    """The type in which products of x are formed so that their sums are taken in fp32 or wider.

    A GPU sums products of half types in fp32 by itself; the CPU does not, so they are widened.
    """
    return x.dtype if x.is_cuda else widen(x).dtype
