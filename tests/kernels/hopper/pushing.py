"""Kernels that push to other ranks, run by threads that stand for these: what a program loads,
stores and waits for, on tensors of the host.
"""

import threading
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.language.core import constexpr
from triton.runtime.jit import JITFunction

MOST_POLLS = 8000


class Pointer:
    """Into a flat tensor, from one offset or several on."""

    def __init__(self, memory: Tensor, at: Any = 0) -> None:
        self.memory, self.at = memory, at

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.memory, self.at + offset)


class Scalar(int):
    """A number of a kernel."""

    def __add__(self, other: Any) -> Any:
        return Scalar(int(self) + other) if isinstance(other, int) else NotImplemented

    def __mul__(self, other: Any) -> Any:
        return Scalar(int(self) * other) if isinstance(other, int) else NotImplemented

    __rmul__ = __mul__

    def __le__(self, other: Any) -> Any:
        return Scalar(int(self) <= int(other))

    def to(self, dtype: object) -> "Scalar":
        return self


class Program:
    """One program of a kernel's module: what stands in for Gluon and PTX. changed: notified of what
    any rank stores.
    """

    def __init__(self, module: ModuleType, number: int, changed: threading.Condition) -> None:
        self.module, self.number, self.changed, self.num_polls = module, number, changed, 0

    def load(self, pointer: Pointer, mask: Any = None, other: int = 0, **options: object) -> Any:
        if mask is None:
            return Scalar(pointer.memory[int(pointer.at)])
        found = torch.full((len(pointer.at),), other, dtype=pointer.memory.dtype)
        found[mask] = pointer.memory[pointer.at[mask]]
        return found

    def store(self, pointer: Pointer, value: Any, mask: Any = None, **options: object) -> None:
        with self.changed:
            if mask is None:
                pointer.memory[int(pointer.at)] = int(value)
            else:
                pointer.memory[pointer.at[mask]] = value[mask].to(pointer.memory.dtype)
            self.changed.notify_all()

    def read(self, pointer: Pointer, value: int, **options: object) -> Scalar:
        """Gives others time to store."""
        self.num_polls += 1
        assert self.num_polls < MOST_POLLS, "a wait that nobody ends"
        with self.changed:
            self.changed.wait(0.001)
            return Scalar(pointer.memory[int(pointer.at)])

    def spin_ranks(
        self,
        report: object,
        words: Pointer,
        stride_bytes: int,
        flag: int,
        wanted: Tensor,
        ranks: int,
    ) -> list[Tensor]:
        """See ptx/spins.py."""
        found = []
        for rank in range(ranks):
            for more in range(2):
                payload = torch.zeros(len(wanted), dtype=torch.int32)
                for lane in wanted.nonzero()[:, 0].tolist():
                    at = int(words.at[lane]) + rank * stride_bytes // 8 + more
                    while int(words.memory[at]) >> 32 != flag:
                        self.read(Pointer(words.memory, at), 0)
                    payload[lane] = words.memory[at : at + 1].view(torch.int32)[0]
                found.append(payload)
        return found

    def scope(self) -> dict[str, Any]:
        """The module's names, as this program sees them."""
        found: dict[str, Any] = {}
        for name, value in vars(self.module).items():
            if isinstance(value, JITFunction):
                found[name] = FunctionType(value.fn.__code__, found, name)
            else:
                found[name] = value.value if isinstance(value, constexpr) else value
        found |= {
            "gl": SimpleNamespace(
                program_id=lambda axis: Scalar(self.number),
                static_range=range,
                arange=lambda first, last, layout: torch.arange(first, last),
                load=self.load,
                store=self.store,
                zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
                where=choose,
                sum=lambda x, dim: x.sum(dim),
                rsqrt=torch.rsqrt,
                atomic_xchg=self.store,
                atomic_add=self.read,
                int32=torch.int32,
                int64=torch.int64,
                float32=torch.float32,
                constexpr=None,
            ),
            "cta_barrier": lambda: None,
            "as_float": lambda bits: bits.view(torch.float32),
            "bits_of": lambda value: value.view(torch.int32),
            "low_half": lambda bits: half_of(bits, 0),
            "high_half": lambda bits: half_of(bits, 1),
            "bf16_pair": lambda low, high: pair_of(low, high),
            "spin_ranks": self.spin_ranks,
        }
        return found


def half_of(bits: Tensor, number: int) -> Tensor:
    return bits.contiguous().view(torch.bfloat16).view(-1, 2)[:, number].float()


def pair_of(low: Tensor, high: Tensor) -> Tensor:
    return torch.stack([low, high], -1).bfloat16().view(torch.int32).flatten()


def choose(mask: Any, x: Any, y: Any) -> Tensor:
    """Each may be a number, but not both of those to choose from."""
    dtype = (x if isinstance(x, Tensor) else y).dtype
    return torch.where(
        torch.as_tensor(mask), *(torch.as_tensor(each, dtype=dtype) for each in (x, y))
    )
