"""Element types as torch sees them: short names of distmega/program/dtypes.py to torch dtypes and
back.

The bottom half never imports torch, so the mapping lives here, with the first code that runs
tensors.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
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
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
}
"""Element types that programs lack -> one that has all their values; complex numbers get a dim of
two behind the others.
"""

_LEFT_TO_TORCH = Tensor.__torch_dispatch__
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


NO_MEMORY = RuntimeError, ValueError
"""What torch raises for the address or the shape of a tensor that has none: one that is sparse,
nested, of a lazy module, or inside of torch.func.
"""


def fits(found: object, wanted: program.Tensor) -> TypeGuard[Tensor]:
    """Whether something given is a tensor of the shape and type asked for whose values lie in
    memory, by strides.
    """
    try:
        return (
            (type(found) is Tensor or is_plain(found))  # the first is quick
            and found.shape == wanted.shape
            and found.dtype is TORCH_DTYPES[wanted.dtype]
            and (found.data_ptr() != 0 or (found.numel() == 0 and not found.is_meta))
        )
    except NO_MEMORY:
        return False


def is_plain(given: object) -> TypeGuard[Tensor]:
    """Whether something is a tensor that leaves operators to torch. One that does them itself, as
    FakeTensor and DTensor do, may have its values elsewhere than where its address says.
    """
    return isinstance(given, Tensor) and type(given).__torch_dispatch__ is _LEFT_TO_TORCH


def require_real_tensors() -> None:
    """ProgramError where new tensors have no values, as under FakeTensorMode."""
    made = torch.empty(0, device="cpu")
    if not is_plain(made):
        raise ProgramError(
            f"a call where torch makes a {type(made).__name__} of each tensor",
            expected="tensors that hold values",
            remedy="call the program outside of FakeTensorMode, torch.export and the like",
        )


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Around what makes tensors for later calls: torch lets nobody update those that were made
    under torch.inference_mode() outside of it.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def in_stated_types() -> AbstractContextManager[object]:
    """Around what runs a program: in the types that it states, whatever torch.autocast says where
    it is called, and without gradients.
    """
    casts = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    return _without_autocast() if casts else torch.no_grad()


@contextmanager
def _without_autocast() -> Iterator[None]:
    on_cpu, on_gpu = (torch.autocast(kind, enabled=False) for kind in ("cpu", "cuda"))
    with torch.no_grad(), on_cpu, on_gpu:
        yield


def ordinary(x: Tensor) -> Tensor:
    """x, or where it was made under torch.inference_mode() another tensor in its memory, which can
    be updated outside of it too.
    """
    if not x.is_inference():
        return x
    with ordinary_tensors():
        made = torch.empty(0, dtype=x.dtype, device=x.device)
        return made.set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())


def is_dense(x: Tensor) -> bool:
    """Whether a tensor's values lie in memory, by strides."""
    return not _lack(x)


def misfit(
    found: object,
    wanted: program.Tensor,
    expected: str = "",
    remedy: str = "give this rank's part of it in that type",
) -> ProgramError:
    """What to raise for something that doesn't fit. expected: beside its type and shape; remedy:
    for a tensor whose values lie in memory.
    """
    if not isinstance(found, Tensor):
        remedy = "pass every input, weight and state of this rank by name"
    elif not is_dense(found):
        remedy = (
            "give a dense tensor that holds values, outside of torch.func, torch.vmap and "
            "FakeTensorMode"
        )
    return ProgramError(
        f"{describe(found)} for {wanted.role} {wanted.name!r}",
        expected=f"{wanted.dtype}{list(wanted.shape)}{expected}",
        remedy=remedy,
    )


def describe(given: object) -> str:
    """What was given in place of a tensor, for a message."""
    if not isinstance(given, Tensor):
        return f"{type(given).__name__}, no tensor"
    shape = ""
    with suppress(*NO_MEMORY):
        shape = str([*given.shape])
    return f"{_lack(given)}{dtype_name(given.dtype)}{shape}"


def _lack(x: Tensor) -> str:
    """Why a tensor's values don't lie in memory, as a word before its type; empty where they do."""
    if not is_plain(x):
        return f"{type(x).__name__} "
    if x.is_meta:
        return "meta "
    if x.layout is not torch.strided:
        return f"{x.layout} "
    if x.is_nested:
        return "nested "
    try:
        return "" if x.data_ptr() or not x.numel() else "memoryless "
    except NO_MEMORY:
        return "memoryless "


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
