"""Runs a warp-specialised Gluon kernel without a GPU: all programs at once, partitions as threads,
mbarriers as conditions.

In: a module of Gluon functions, a kernel of it, arguments as at a launch. What a kernel's results
depend on is what a GPU allows: products are done when they are waited for, not before, from what
shared memory holds then; a wait that nobody ends raises. Layouts are not looked at. Known is what
the kernels that are run so need.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.language.core import constexpr
from triton.runtime.jit import JITFunction

from tests.kernels.at_once import run_at_once

ATOMIC = threading.Lock()
LONGEST_WAIT_S = 8.0
UNWRITTEN = 987_654_321
"""In shared memory that holds whole numbers."""
TYPES = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "int32": torch.int32,
    "int64": torch.int64,
}


class Number(int):
    """A scalar of a kernel; what comparisons give is one too."""

    def to(self, dtype: object) -> "Number":
        return self


for _name in ("lt", "le", "gt", "ge", "and", "add", "radd", "sub", "rsub", "mul", "rmul",
              "floordiv", "mod"):  # fmt: skip

    def _made(self: int, other: object, name: str = f"__{_name}__") -> object:
        found = getattr(int, name)(self, other)
        return found if found is NotImplemented else Number(found)

    setattr(Number, f"__{_name}__", _made)


class Tile(Tensor):
    """A tensor of a kernel."""

    @property
    def type(self) -> SimpleNamespace:  # type: ignore[override]
        return SimpleNamespace(layout=None)


def tile(x: Tensor) -> Tile:
    return x.as_subclass(Tile)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True)
class Pointer:
    """Into a flat tensor, at an offset or many."""

    memory: Tensor
    at: Any = 0

    def __add__(self, offset: object) -> "Pointer":
        return Pointer(self.memory, self.at + offset)


@dataclass(frozen=True)
class Descriptor:
    """Of a matrix that is read in blocks of so many rows."""

    matrix: Tensor
    rows: int
    layout: object = None


@dataclass(frozen=True)
class Buffer:
    """Shared memory."""

    memory: Tensor

    def index(self, number: int) -> "Buffer":
        return Buffer(self.memory[number])

    def slice(self, start: int, length: int) -> "Buffer":
        return Buffer(self.memory[start : start + int(length)])

    def permute(self, order: Sequence[int]) -> "Buffer":
        return Buffer(self.memory.permute(*order))

    def store(self, value: Tensor) -> None:
        self.memory.copy_(value)

    def load(self, layout: object) -> Tile:
        return tile(self.memory.clone())


@dataclass
class Barrier:
    """An mbarrier."""

    count: int
    changed: threading.Condition
    phase: int = 0
    left: int = 0
    num_bytes: int = 0

    def __post_init__(self) -> None:
        self.left = self.count

    def add(self, arrivals: int, num_bytes: int) -> None:
        with self.changed:
            self.left -= arrivals
            self.num_bytes += num_bytes
            assert self.left >= 0, "more arrivals than a phase has"
            if self.left == 0 and self.num_bytes == 0:
                self.phase, self.left = self.phase ^ 1, self.count
            self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            there = self.changed.wait_for(lambda: self.phase != parity, LONGEST_WAIT_S)
        assert there, "a wait that nobody ends"


@dataclass
class Product:
    """Under way: done by the wait for it."""

    a: Any
    b: Buffer
    acc: Tensor
    adds: bool
    done: bool = False

    def run(self) -> None:
        a = self.a.memory if isinstance(self.a, Buffer) else self.a
        found = a.float() @ self.b.memory.float()
        self.acc = tile(self.acc + found if self.adds else found)
        self.done = True


@dataclass
class Program:
    """One program of a launch."""

    number: int
    num_programs: int
    threads: list[Callable[[], object]] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    own: threading.local = field(default_factory=threading.local)

    def language(self) -> SimpleNamespace:
        """What `gl` is to the kernel."""

        def load(pointer: Pointer) -> Number:
            return Number(pointer.memory[int(pointer.at)])

        def atomic_add(pointer: Pointer, value: int, sem: str) -> Number:
            with ATOMIC:
                found = load(pointer)
                pointer.memory[int(pointer.at)] += value
            return found

        def store(pointer: Pointer, value: Tensor, mask: Tensor) -> None:
            mask = mask.expand(value.shape).as_subclass(Tensor)
            pointer.memory[pointer.at.as_subclass(Tensor)[mask]] = value.as_subclass(Tensor)[mask]

        def full(shape: Sequence[int], value: float, dtype: torch.dtype, layout: object) -> Tile:
            return tile(torch.full(tuple(map(int, shape)), value, dtype=dtype))

        def total(x: Tensor, dim: int) -> Tensor | Number:
            found = x.sum(dim)
            return found if found.dim() else Number(found)

        names: dict[str, Any] = {
            **TYPES,
            "program_id": lambda axis: Number(self.number),
            "num_programs": lambda axis: Number(self.num_programs),
            "allocate_shared_memory": lambda dtype, shape, layout: Buffer(
                torch.full(
                    tuple(map(int, shape)),
                    torch.nan if dtype.is_floating_point else UNWRITTEN,
                    dtype=dtype,
                )
            ),
            "warp_specialize": lambda parts, warps, registers: self.threads.extend(
                partial(function, *given) for function, given in parts
            ),
            "static_range": range,
            "arange": lambda first, last, layout: tile(torch.arange(first, int(last))),
            "expand_dims": lambda x, dim: x.unsqueeze(dim),
            "convert_layout": lambda x, layout: x,
            "where": lambda mask, x, y: tile(
                torch.where(
                    mask, x, torch.as_tensor(y).to(x.dtype) if not isinstance(y, Tensor) else y
                )
            )
            if isinstance(x, Tensor)
            else tile(torch.where(mask, torch.tensor(x), y)),
            "max": lambda x, dim: x.max(dim).values,
            "sum": total,
            "maximum": torch.maximum,
            "minimum": lambda x, most: x.clamp(max=most),
            "exp2": torch.exp2,
            "full": full,
            "zeros": lambda shape, dtype, layout: full(shape, 0.0, dtype, layout),
            "load": load,
            "store": store,
            "atomic_add": atomic_add,
            "constexpr": None,
        }
        for layout in (
            "NVMMADistributedLayout",
            "DotOperandLayout",
            "SliceLayout",
            "BlockedLayout",
            "SwizzledSharedLayout",
        ):
            names[layout] = lambda *fields: None
        return SimpleNamespace(**names)

    def make_barriers(self, number: int, arrivals: int) -> SimpleNamespace:
        made = [Barrier(int(arrivals), self.changed) for _ in range(number)]
        return SimpleNamespace(index=lambda n: made[n])

    def tma_load(self, source: Descriptor, at: Sequence[int], bar: Barrier, into: Buffer) -> None:
        top, left = map(int, at)
        width = into.memory.shape[1]
        block = source.matrix[top : top + source.rows, left : left + width]
        assert block.shape[1] == width
        into.memory.zero_()
        into.memory[: len(block)] = block
        bar.add(0, -2 * into.memory.numel())

    def start_product(self, a: Any, b: Buffer, acc: Any, use_acc: Any, is_async: bool) -> Product:
        assert is_async
        acc = acc.acc if isinstance(acc, Product) else acc
        found = Product(a, b, acc, bool(use_acc))
        self.pending.append(found)
        return found

    @property
    def pending(self) -> list[Product]:
        """This thread's products, the oldest first."""
        if not hasattr(self.own, "pending"):
            self.own.pending = []
        found: list[Product] = self.own.pending
        return found

    def wait_products(self, num_outstanding: int, deps: Sequence[Any]) -> Any:
        while len(self.pending) > num_outstanding:
            self.pending.pop(0).run()
        assert all(x.done for x in deps if isinstance(x, Product)), "read too early"
        found = tuple(x.acc if isinstance(x, Product) else x for x in deps)
        return found[0] if len(found) == 1 else found

    def scope(self, module: ModuleType) -> dict[str, Any]:
        """The module's names, its functions bound to what stands in for the GPU."""
        found: dict[str, Any] = {"min": min, "max": max}
        for name, value in vars(module).items():
            if isinstance(value, JITFunction):
                found[name] = FunctionType(value.fn.__code__, found, name)
                found[name].__defaults__ = value.fn.__defaults__
            else:
                found[name] = value.value if isinstance(value, constexpr) else value
        nothing = lambda *given: None  # noqa: E731
        bars = SimpleNamespace(
            wait=lambda bar, parity: bar.wait(int(parity)),
            arrive=lambda bar, count=1: bar.add(count, 0),
            expect=lambda bar, num_bytes: bar.add(1, int(num_bytes)),
        )
        found |= {
            "gl": self.language(),
            "mbarrier": bars,
            "make_barriers": self.make_barriers,
            "tma_load": self.tma_load,
            "warpgroup_mma": self.start_product,
            "warpgroup_mma_wait": self.wait_products,
            "fence_async_shared": nothing,
            "cta_barrier": nothing,
        }
        return found


def run_kernel(
    module: ModuleType, name: str, num_programs: int, arguments: Mapping[str, object]
) -> None:
    """All programs at the same time. arguments: Descriptors, Pointers, numbers, the spec."""
    parts: list[Callable[[], object]] = []
    for number in range(num_programs):
        program = Program(number, num_programs)
        scope = program.scope(module)
        given = {n: Number(x) if type(x) is int else x for n, x in arguments.items()}
        scope[name](**given)
        parts += program.threads
    run_at_once(parts)
