"""Runs the kernel of step_attention.py without a GPU, a program after another, in torch.

Layouts and barriers of threads are not looked at; blocks that TMA loads are there at once, and a
wait for one that nobody asked for raises. Known is what the kernel needs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.language.core import constexpr
from triton.runtime.jit import JITFunction

from distmega.kernels.library import step_attention


@dataclass(frozen=True)
class Pointer:
    """Into a contiguous tensor or, of any strides, its memory; at an offset or many."""

    memory: Tensor
    at: Any = 0

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=self.memory.dtype)

    def __add__(self, offset: object) -> "Pointer":
        return Pointer(self.memory, self.at + offset)


def pointer(x: Tensor) -> Pointer:
    whole = x.new_empty(0).set_(x.untyped_storage())
    return Pointer(whole, x.storage_offset())


@dataclass(frozen=True)
class Descriptor:
    """Of rows [n, dim], read in blocks of so many."""

    rows: Tensor
    num: int
    layout: object = None


@dataclass(frozen=True)
class Buffer:
    """Shared memory."""

    memory: Tensor

    def index(self, number: Any) -> "Buffer":
        return Buffer(self.memory[int(number)])

    def permute(self, order: Sequence[int]) -> "Buffer":
        return Buffer(self.memory.permute(*order))

    def load(self, layout: object) -> Tensor:
        return self.memory.clone()


@dataclass
class Barrier:
    """An mbarrier of one arrival: phases done, and bytes that the present one still awaits."""

    done: int = 0
    num_bytes: int = 0


def expect(bar: Barrier, num_bytes: int, pred: Any) -> None:
    assert bar.num_bytes == 0, "a phase is under way"
    bar.num_bytes = int(num_bytes) if pred else 0


def wait(bar: Barrier, parity: Any) -> None:
    assert bar.num_bytes == 0, "a wait that nobody ends"
    assert bar.done % 2 != int(parity), "a wait that nobody ends"


def tma_load(source: Descriptor, at: Sequence[Any], bar: Barrier, into: Buffer, pred: Any) -> None:
    if not pred:
        return
    top, left = map(int, at)
    assert left == 0 <= top
    block = source.rows[top : top + source.num]
    into.memory.zero_()
    into.memory[: len(block)] = block
    bar.num_bytes -= into.memory.numel() * into.memory.element_size()
    bar.done += bar.num_bytes == 0


def load(at: Pointer, mask: Any = None, other: float = 0.0, cache_modifier: str = "") -> Tensor:
    if mask is None:
        return at.memory[at.at].clone()
    places, mask = torch.broadcast_tensors(torch.as_tensor(at.at), mask)
    found = torch.full(places.shape, other, dtype=at.memory.dtype)
    found[mask] = at.memory[places[mask]]
    return found


def store(at: Pointer, value: Tensor, mask: Tensor) -> None:
    places, value, mask = torch.broadcast_tensors(torch.as_tensor(at.at), value, mask)
    at.memory[places[mask]] = value[mask].to(at.memory.dtype)


def language(ids: Sequence[int], grid: Sequence[int]) -> SimpleNamespace:
    """What `gl` is to a program."""
    scalar = lambda n: torch.tensor(n, dtype=torch.int32)  # noqa: E731
    given = lambda *fields: None  # noqa: E731
    return SimpleNamespace(
        program_id=lambda axis: scalar(ids[axis]),
        num_programs=lambda axis: scalar(grid[axis]),
        int32=torch.int32,
        int64=torch.int64,
        float32=torch.float32,
        arange=lambda first, last, layout: torch.arange(first, last),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        allocate_shared_memory=lambda dtype, shape, layout: Buffer(
            torch.full(shape, torch.nan, dtype=dtype)
        ),
        static_range=range,
        minimum=lambda x, y: torch.minimum(*map(torch.as_tensor, (x, y))),
        maximum=lambda x, y: torch.maximum(*map(torch.as_tensor, (x, y))),
        max=lambda x, dim: x.amax(dim),
        sum=lambda x, dim: x.sum(dim),
        exp2=torch.exp2,
        rsqrt=torch.rsqrt,
        where=torch.where,
        join=lambda x, y: torch.stack((x, y), -1),
        expand_dims=lambda x, dim: x.unsqueeze(dim),
        convert_layout=lambda x, layout: x,
        load=load,
        store=store,
        SliceLayout=given,
        DotOperandLayout=given,
        NVMMADistributedLayout=given,
    )


def scope_of(gl: SimpleNamespace) -> dict[str, Any]:
    """The module's names, its functions bound to what stands in for the GPU."""
    found: dict[str, Any] = {}
    for name, value in vars(step_attention).items():
        if isinstance(value, JITFunction):
            found[name] = FunctionType(value.fn.__code__, found, name)
        else:
            found[name] = value.value if isinstance(value, constexpr) else value
    nothing = lambda *given: None  # noqa: E731
    bars: Callable[[int], SimpleNamespace] = lambda number: SimpleNamespace(  # noqa: E731
        index=[Barrier() for _ in range(number)].__getitem__
    )
    found |= {
        "gl": gl,
        "tl": SimpleNamespace(exp2=torch.exp2),
        "mbarrier": SimpleNamespace(expect=expect, wait=wait),
        "make_barriers": bars,
        "tma_load": tma_load,
        "mma_v2": lambda a, b, acc: a.float() @ b.float() + acc,
        "cta_barrier": nothing,
        "fence_async_shared": nothing,
        "gdc_launch_dependents": nothing,
        "gdc_wait": nothing,
        "head_layout": nothing,
    }
    return found


def add_parts(parts: Tensor, maxima: Tensor, sums: Tensor, out: Tensor) -> None:
    """As row_attention.add_parts, in torch."""
    shares = torch.exp2(maxima - maxima.amax(0).clamp(min=-1e30))
    total = (sums * shares).sum(0)[:, None]
    joined = (parts * shares[..., None]).sum(0) / torch.where(total == 0, 1.0, total)
    out.view(joined.shape).copy_(joined)


def launch(kernel: Any, grid: Sequence[int], *arguments: Any, **options: Any) -> None:
    """As ahead.launch, of the kernel."""
    arguments = tuple(pointer(x) if isinstance(x, Tensor) else x for x in arguments)
    for ids in product(*map(range, grid)):
        scope = scope_of(language(ids, grid))
        scope[kernel.fn.__name__](*arguments, options["spec"])
